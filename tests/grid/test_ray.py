"""Cells as Ray tasks, on a real cluster of two nodes on this machine."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_lazy.cli import main
from lit_lazy.grid.queue import Queue

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'lit-lazy[ray]'")

from lit_lazy.grid import ray_pool  # noqa: E402

pytestmark = pytest.mark.xdist_group("ray")

ABLATION = '''
"""Two rows and one that diverges."""
from lit_lazy.attention import Elastic, LearnedBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.columns import COLUMNS

ablation = Ablation(
    name="pair",
    baseline="softmax",
    seeds=(0, 1),
    columns=COLUMNS,
    base="backcopy_tiny",
    rows=(
        Row("softmax", {"model.attention.normaliser": Softmax()}, "ours"),
        Row("lazy", {"model.attention.normaliser": Elastic(), "model.attention.bias": LearnedBias()}, "ours"),
        Row("wild", {"train.lr": 1e20, "train.log_every": 1}, "ours", seeds=(0,)),
    ),
)
'''
LONG = (
    *("--rows", "softmax,lazy", "--seeds", "0", "--train.steps=3000", "--train.checkpoint_every=20"),
    *("--train.val_every=1000", "--train.log_every=100"),
)
"""Two cells that train for a few seconds, so that there is a middle to be ended in."""
NODE = {"object_store_memory": ray_pool.OBJECT_STORE_BYTES, "include_dashboard": False}


@pytest.fixture(scope="module")
def home() -> Iterator[None]:
    """Folders of Ray's own, with short paths: its sockets' names have to be short."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("HOME", folder)
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def address(home: None) -> Iterator[str]:
    """Two nodes, one of them with two GPUs, as Ray believes."""
    from ray.cluster_utils import Cluster as TestCluster

    cluster = TestCluster(initialize_head=True, head_node_args={"num_cpus": 2, **NODE})
    cluster.add_node(num_cpus=4, num_gpus=2, **NODE)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def pair(tmp_path: Path) -> str:
    path = tmp_path / "pair.py"
    path.write_text(ABLATION)
    return str(path)


def command(runs: Path, pair: str, *more: str) -> list[str]:
    return ["ablate", "run", pair, "--runs", str(runs), "--workers", "2", *more]


def log_of(folder: Path) -> list[str]:
    (path,) = folder.glob("worker-*-ray.log")
    return [line.partition("lit_lazy.worker ")[2] for line in path.read_text().splitlines()]


def test_the_table_is_that_of_local_workers(
    runs: Path, pair: str, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell is executed once, and one that diverges fails alone."""
    assert main(command(runs, pair)) == 1
    local = json.loads((runs / "pair-backcopy_tiny" / "table.json").read_text())
    again = runs / "ray"
    again.mkdir()
    (again / "mlflow.db").write_bytes((runs / "empty.db").read_bytes())
    monkeypatch.setenv("RAY_ADDRESS", address)
    capsys.readouterr()
    assert main(command(again, pair, "--launcher", "ray", "--gpus", "0")) == 1
    out = capsys.readouterr().out
    assert "4/5 cells done, 0 running, 1 failed" in out
    folder = again / "pair-backcopy_tiny"
    table = json.loads((folder / "table.json").read_text())
    assert table["rows"] == local["rows"]
    assert [row["n"] for row in table["rows"]] == [2, 2, 0]
    started = [line for line in log_of(folder) if line.startswith("start ")]
    assert len(started) == len(set(started)) == 5
    assert not list((folder / "workers").glob("*.lock"))


def test_interrupted_and_killed_cells_go_on(
    runs: Path, pair: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in a Ray of the command's own; then the same command on a cluster, where a task is killed in training."""
    process = start(command(runs, pair, "--launcher", "ray", *LONG))
    queue = wait_for_training(runs, time.time())
    # As a terminal does: to everything that the command started in its own group.
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130, out + err
    assert err == "interrupted; the same command goes on from here\n"
    assert "ray" not in out.lower()
    assert "running" not in queue.states().values()
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
        [sys.executable, "-m", "lit_lazy.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        # A shell without job control starts background jobs, and so these tests, with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_training(runs: Path, since: float) -> Queue:
    """Return the grid's queue when a cell has written a checkpoint."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for checkpoint in runs.glob("pair-*/cells/*/checkpoints/last.ckpt"):
            if checkpoint.stat().st_mtime > since:
                return Queue(f"sqlite:///{runs / 'queue.db'}", checkpoint.relative_to(runs).parts[0])
        time.sleep(0.1)
    raise AssertionError("no cell began to train")


def kill_one(runs: Path, since: float) -> int:
    """SIGKILL a task in training; its process."""
    queue = wait_for_training(runs, since)
    pid = int(queue.entries("running")[0].worker["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


WRONG = [
    (["--gpus", "1"], "--gpus 1.0: has a meaning with --launcher ray only"),
    (["--ray-address", "auto"], "--ray-address auto: has a meaning with --launcher ray only"),
    (["--launcher", "ray", "--ray-address", "ray://head:10001"], "must be HOST:PORT of the cluster's head"),
    (["--launcher", "ray", "--ray-address", "head:0"], "must be HOST:PORT of the cluster's head"),
    (["--launcher", "ray", "--ray-address", "127.0.0.1:CLOSED"], "does not answer (", "refused"),
    (["--launcher", "ray", "--ray-address", "auto"], "cannot be joined (Could not find any running Ray instance"),
    *(
        (["--launcher", "ray", "--gpus", share], "fraction of one GPU")
        for share in ("-1", "1.5", "nan", "inf", "a", "1e-5")
    ),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_a_mistake_creates_nothing(
    options: list[str],
    said: str,
    tmp_path: Path,
    pair: str,
    home: None,
    closed_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pass
