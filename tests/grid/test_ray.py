"""Cells as Ray tasks on a cluster of two nodes on this machine."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from two_rows import WILD, two_rows

from lit_lazy.command.main import main
from lit_lazy.grid.jobs.job import DISK_FULL, Job
from lit_lazy.grid.jobs.pool import ReapResult
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.table.stored import read_table

pytest.importorskip("ray", reason="needs Ray: pip install 'lit-lazy[ray]'")

from lit_lazy.grid.jobs import ray_pool
from lit_lazy.grid.jobs.ray_pool import Cluster, RayPool, Share, join_cluster

pytestmark = pytest.mark.xdist_group("ray")

LONG = (
    *("--rows", "softmax,lazy", "--seeds", "0", "--train.steps=6000", "--train.checkpoint_every=20"),
    *("--train.val_every=1000", "--train.log_every=100"),
)
"""Two cells that train for a few seconds, long enough to be stopped in training."""
NODE = {"object_store_memory": ray_pool.OBJECT_STORE_BYTES, "include_dashboard": False}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes, one of them with two (nominal) GPUs."""
    from ray.cluster_utils import Cluster as TestCluster

    with (
        # A short path for Ray's socket names, and not the user's home, which has a token.
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("HOME", folder)
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = TestCluster(initialize_head=True, head_node_args={"num_cpus": 2, **NODE})
        cluster.add_node(num_cpus=4, num_gpus=2, **NODE)
        yield cluster.address
        cluster.shutdown()


@pytest.fixture
def pair(tmp_path: Path) -> str:
    path = tmp_path / "pair.py"
    path.write_text(two_rows("pair", more=WILD))
    return str(path)


def command(runs: Path, pair: str, *more: str) -> list[str]:
    return ["ablate", "run", pair, "--runs", str(runs), "--workers", "2", *more]


def log_of(folder: Path) -> list[str]:
    (path,) = folder.glob("worker-*-ray.log")
    return [line.partition("lit_lazy.worker ")[2] for line in path.read_text().splitlines()]


@pytest.mark.long
def test_the_table_is_that_of_local_workers(
    runs: Path,
    empty_store: Path,
    pair: str,
    address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every cell is executed once; a diverging cell does not affect others."""
    assert main(command(runs, pair)) == 1
    local = read_table(runs / "pair-backcopy_tiny" / "table.json")
    again = runs / "ray"
    again.mkdir()
    shutil.copy(empty_store, again / "mlflow.db")
    monkeypatch.setenv("RAY_ADDRESS", address)
    capsys.readouterr()
    assert main(command(again, pair, "--launcher", "ray", "--gpus", "0")) == 1
    out = capsys.readouterr().out
    assert "4/5 cells done, 0 running, 1 failed" in out
    folder = again / "pair-backcopy_tiny"
    rows, theirs = (
        [replace(row, git_shas=()) for row in of.rows]  # a commit may happen in between
        for of in (read_table(folder / "table.json"), local)
    )
    assert rows == theirs
    assert [row.n for row in rows] == [2, 2, 0]
    started = [line for line in log_of(folder) if line.startswith("start ")]
    assert len(started) == len(set(started)) == 5
    assert not list((folder / "workers").glob("*.lock"))


@pytest.mark.long
def test_interrupted_and_killed_cells_go_on(
    runs: Path, pair: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C with a local Ray; then the same command on a cluster, where a task is killed in training."""
    process = start(command(runs, pair, "--launcher", "ray", *LONG))
    grid = wait_for_training(runs, time.time())
    # Like a terminal: to the command's process group.
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=90)
    queue = queue_of(runs, grid)
    assert process.returncode == 130, out + err
    assert err == "interrupted; the same command resumes\n"
    assert "ray" not in out.lower()
    assert set(queue.states().values()) == {"waiting"}
    assert "interrupted" in [entry.reason for entry in queue.entries("waiting")]

    killed: list[int] = []
    begun = time.time()
    killer = threading.Thread(target=lambda: killed.append(kill_one(runs, begun)))
    killer.start()
    on_cluster = ["--launcher", "ray", "--ray-address", address, "--gpus", "0"]
    assert main(command(runs, pair, *on_cluster, *LONG)) == 0
    killer.join()
    assert f"its worker (process {killed[0]} on" in capsys.readouterr().out
    assert set(queue.states().values()) == {"complete"}
    lines = log_of(runs / queue.name)
    for variant in ("softmax", "lazy"):
        assert lines.count(f"done {variant} seed 0") == 1


def start(arguments: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "lit_lazy.command", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def queue_of(runs: Path, grid: str) -> Queue:
    return Queue(f"sqlite:///{runs / 'queue.db'}", grid)


def wait_for_training(runs: Path, since: float) -> str:
    """Wait until a cell has written a checkpoint; returns the grid's id, which includes a hash of the overrides."""
    end = time.monotonic() + 180
    while time.monotonic() < end:
        for checkpoint in runs.glob("pair-*/cells/*/checkpoints/last.ckpt"):
            if checkpoint.stat().st_mtime > since:
                return checkpoint.relative_to(runs).parts[0]
        time.sleep(0.1)
    raise AssertionError("no cell began to train")


def kill_one(runs: Path, since: float) -> int:
    """SIGKILL a task in training; returns its process."""
    queue = queue_of(runs, wait_for_training(runs, since))
    pid = int(queue.entries("running")[0].worker["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


WRONG = [
    (["--gpus", "1"], "--gpus 1.0: needs --launcher ray"),
    (["--ray-address", "auto"], "--ray-address auto: needs --launcher ray"),
    (["--launcher", "ray", "--ray-address", "ray://head:10001"], "must be HOST:PORT of the cluster's head"),
    (["--launcher", "ray", "--ray-address", "head:0"], "must be HOST:PORT of the cluster's head"),
    (["--launcher", "ray", "--ray-address", "127.0.0.1:{closed}"], "does not answer ([Errno 111] Connection refused)"),
    (["--launcher", "ray", "--ray-address", "127.0.0.1:{silent}"], "answers, but not as a Ray cluster"),
    *(
        pytest.param(["--launcher", "ray", "--ray-address", "{cluster}", *share], said, marks=pytest.mark.long)
        for share, said in (
            (["--gpus", "3"], "asks for 1 CPU and 3 GPUs, which no machine"),
            (["--threads", "5"], "asks for 5 CPUs and 1 GPU, which no"),
        )
    ),
    *((["--launcher", "ray", "--gpus", share], "a fraction of one GPU") for share in ("-1", "1.5", "nan", "1e-5")),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_a_mistake_is_one_line_and_creates_nothing(
    options: list[str],
    said: str,
    pair: str,
    request: pytest.FixtureRequest,
    closed_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = request.getfixturevalue("address") if "{cluster}" in options else ""
    monkeypatch.setattr(ray_pool, "JOIN_SECONDS", 5.0 if cluster else 1.0)
    before = sorted(tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = {"closed": closed_port, "silent": silent.getsockname()[1], "cluster": cluster}
        try:
            status = main(
                ["ablate", "run", pair, "--runs", str(tmp_path / "runs"), *(o.format(**ports) for o in options)]
            )
        except SystemExit as stop:  # argparse exits
            status = stop.code
    assert status == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before


def test_without_ray_the_mend_is_told(
    pair: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["ablate", "run", pair, "--launcher", "ray"]) == 2
    assert "pip install 'lit-lazy[ray]'" in capsys.readouterr().err


def test_other_machines_need_stores_that_they_can_reach() -> None:
    here = {"NodeManagerHostname": socket.gethostname(), "Resources": {"CPU": 2.0}}
    there = {"NodeManagerHostname": "elsewhere", "Resources": {"CPU": 2.0}}
    Cluster([here, here]).check_stores(queue=None, tracking="sqlite:////runs/mlflow.db")
    both = Cluster([here, there])
    both.check_stores(queue="postgresql://host/queue", tracking="http://host:5000")
    with pytest.raises(ValueError, match=r"other machines \(elsewhere\).*here for queue and tracking\)"):
        both.check_stores(queue=None, tracking="sqlite:////runs/mlflow.db")
    with pytest.raises(ValueError, match=r"here for tracking\)"):
        both.check_stores(queue="postgresql://host/queue", tracking="sqlite:////runs/mlflow.db")


@pytest.mark.parametrize(
    ("share", "times"),
    [
        (Share(1, 0), 8 + 2),
        (Share(3, 0), 2),
        (Share(1, 1), 2),
        (Share(1, 2), 1),
        (Share(1, 0.5), 4),
        (Share(1, 0.4), 4),  # a share lies within one GPU
        (Share(1, 0.1), 8),
    ],
)
def test_as_many_cells_run_at_once_as_machines_carry(share: Share, times: int) -> None:
    sizes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 2.0}]
    assert Cluster([{"Resources": resources} for resources in sizes]).count_cells(share) == times


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "grid").mkdir()
    return Job("sqlite:///none", "grid", tmp_path, "sqlite:///none", "parent", None, 1, False, None, ())


def test_a_full_disk_is_told_by_the_result(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process outlives its task, so its exit status reports nothing."""

    def no_room(_job: Job) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ray_pool, "make_worker", no_room)
    assert ray_pool.execute(job, os.getcwd()) == DISK_FULL


@pytest.mark.long
def test_every_end_of_a_task_is_counted(job: Job, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Success, full disk, exception, signal, second interrupt, and kill."""

    def execute(_job: Job, folder: str) -> int:
        turn = Path(folder, "turn").read_text()
        Path(folder, "pid").write_text(str(os.getpid()))
        if turn == "raises":
            raise ImportError("no module named here")
        if turn == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if turn == "hangs":
            subprocess.Popen(["sleep", "300"]).wait()
        if turn == "swallows":
            for attempt in ("swallowed", "obeyed"):
                try:
                    while True:
                        time.sleep(0.05)
                except KeyboardInterrupt:
                    Path(folder, attempt).touch()
        return {"full disk": DISK_FULL}.get(turn, 0)

    monkeypatch.chdir(job.runs)
    monkeypatch.setattr(ray_pool, "execute", execute)
    monkeypatch.setattr(ray_pool, "AGAIN_SECONDS", 2.0)
    pid = job.runs / "pid"

    def begin(turn: str) -> None:
        Path("turn").write_text(turn)
        pid.unlink(missing_ok=True)
        pool.start(most=9)
        assert len(pool) == 1
        while not pid.exists() or not pid.read_text():
            time.sleep(0.1)

    def after(turn: str) -> ReapResult:
        begin(turn)
        while (ended := pool.reap()) == ReapResult() and len(pool):
            time.sleep(0.1)
        return ended

    with join_cluster(address):
        pool = RayPool(job, 1, 0.0)
        assert after("well") == ReapResult()
        assert after("full disk") == ReapResult(disk_full=1)
        assert after("raises") == ReapResult(crashed=1)
        assert "ImportError: no module named here" in pool.describe_last_failure()

        begin("swallows")
        pool.stop()
        assert len(pool) == 0
        assert Path("swallowed").exists()
        assert Path("obeyed").exists()

        assert after("dies") == ReapResult(crashed=1)
        assert "WorkerCrashedError" in pool.describe_last_failure()

        monkeypatch.setattr(ray_pool, "ORDERLY_SECONDS", 1.0)
        begin("hangs")
        process = psutil.Process(int(pid.read_text()))
        pool.stop()
        process.wait(timeout=20)
        assert pool.reap() == ReapResult(crashed=1)
