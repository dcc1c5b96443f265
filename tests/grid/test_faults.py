"""Faults of long runs: full disks, lost servers, lost machines, jumping clocks."""

import errno
import io
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import sqlalchemy
from mlflow.tracking import MlflowClient
from mlflow_server import MlflowServer
from rich.console import Console
from two_rows import two_rows

from lit_lazy.command.ablate_run import make_grid
from lit_lazy.command.main import main, make_parser
from lit_lazy.grid.jobs import launch
from lit_lazy.grid.jobs.job import DISK_FULL, FILE_TOO_LONG
from lit_lazy.grid.jobs.pool import ReapResult
from lit_lazy.grid.jobs.progress import Progress
from lit_lazy.grid.jobs.worker import find_write_status
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.support import disk
from lit_lazy.support.disk import describe_failed_write, describe_shortage
from lit_lazy.tracking.spool import read_lines
from lit_lazy.tracking.store import TrackingError
from lit_lazy.tracking.tracker import Tracker

pytestmark = pytest.mark.xdist_group("faults")

ID = "faults-backcopy_tiny"
IN_WORKERS = 'if Path(sys.argv[0]).stem == "worker":'


def write(tmp_path: Path, extra: str = "", name: str = "faults") -> str:
    path = tmp_path / f"{name}.py"
    path.write_text(two_rows(name, code=extra))
    return str(path)


def start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return forked.Popen(
        [sys.executable, "-m", "lit_lazy.command", "ablate", "run", *arguments],
        stdout=forked.PIPE,
        stderr=forked.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        start_new_session=True,
    )


def wait_until(holds, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def in_mlflow(uri: str, name: str) -> Counter[tuple[str, str]]:
    """Cells by status and state."""
    client = MlflowClient(uri)
    number = client.get_experiment_by_name(name).experiment_id
    found = client.search_runs([number], "tags.kind = 'cell'")
    assert len({run.data.tags["cell"] for run in found}) == len(found)
    return Counter((run.info.status, run.data.tags.get("state", "")) for run in found)


@pytest.mark.long
def test_out_of_memory_fails_one_cell_with_its_reason_and_can_be_tried_again(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails twice; with three attempts the grid is complete in one command."""
    extra = f"""
{IN_WORKERS}
    from lit_lazy.training.module import LitLM
    step = LitLM.training_step

    def hungry(self, *args):
        tries = Path(__file__).parent / "tries"
        if self.cfg.seed == 1 and "Softmax" in str(self.cfg) and len(list(tries.iterdir())) < 2:
            (tries / str(len(list(tries.iterdir())))).touch()
            raise MemoryError("cannot allocate 3 TB")
        return step(self, *args)

    LitLM.training_step = hungry
"""
    (tmp_path / "tries").mkdir()
    command = ["ablate", "run", write(tmp_path, extra), "--runs", str(runs), "--workers", "1"]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "out of memory: cannot allocate 3 TB" in out
    assert "3/4 cells done, 0 running, 1 failed" in out
    assert main(["ablate", "status", ID, "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "3/4 cells complete" in out
    assert "out of memory: cannot allocate 3 TB" in " ".join(out.split())
    assert main([*command, "--retry-failed", "2"]) == 0
    out = capsys.readouterr().out
    assert "softmax seed 1 failed (out of memory: cannot allocate 3 TB); retry 1/2" in out
    assert "4/4 cells done, 0 running" in out
    assert in_mlflow(f"sqlite:///{runs / 'mlflow.db'}", ID) == {("FINISHED", "complete"): 4}


@pytest.mark.long
def test_a_second_interrupt_ends_at_once(runs: Path, tmp_path: Path) -> None:
    """The first waits until the cell is requeued, which never finishes here."""
    extra = f"""
{IN_WORKERS}
    import time
    from lit_lazy.grid.queue.queue import Queue
    from lit_lazy.training.module import LitLM

    def linger(*_):
        (Path(__file__).parent / "lingers").touch()
        time.sleep(600)

    step = LitLM.training_step

    def dawdle(*arguments):
        (Path(__file__).parent / "trains").touch()
        time.sleep(1)
        return step(*arguments)

    Queue.requeue = linger
    LitLM.training_step = dawdle
"""
    process = start(write(tmp_path, extra), "--runs", str(runs), "--workers", "1")
    wait_until((tmp_path / "trains").exists)
    process.send_signal(signal.SIGINT)
    wait_until((tmp_path / "lingers").exists)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130, out
    queue = Queue(default_storage(runs), ID)
    assert Counter(queue.states().values()) == {"running": 1, "waiting": 3}
    again = start(write(tmp_path), "--runs", str(runs), "--workers", "1")
    out, _ = again.communicate(timeout=200)
    assert again.returncode == 0, out
    assert "died; it waits again" in out


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A separate file system in memory, limited by mount options."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs to mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


BYTES = """
            with ballast.open("wb", buffering=0) as file:
                while file.write(bytes(1024)):
                    pass
"""
FILES = """
            for number in range(10**6):
                (ballast / str(number)).touch()
"""


def filling(disk: Path, fill: str) -> str:
    """Code of an ablation that fills a disk when the first worker trains."""
    return f'''
{IN_WORKERS}
    import lit_lazy.training.run

    train = lit_lazy.training.run.fit

    def fill_up_once(*args):
        ballast, once = Path("{disk}") / "ballast", Path(__file__).parent / "filled"
        if not once.exists():
            once.touch()
            try:
{textwrap.indent(fill, "    ")}
            except OSError:
                pass
        return train(*args)

    lit_lazy.training.run.fit = fill_up_once
'''


def waits_for_space(command: Sequence[str], frees: Callable[[], None], names: str, **environment: str) -> None:
    """A grid on a full disk waits, reports the missing space, and then completes."""
    process = start(*command, **environment)
    said: list[str] = []

    def listen() -> None:
        assert process.stdout is not None
        said.extend(process.stdout)

    listener = threading.Thread(target=listen)
    listener.start()
    wait_until(lambda: any("no space left" in line for line in said) or process.poll() is not None)
    assert process.poll() is None, "".join(said)
    time.sleep(3)
    frees()
    assert process.wait(timeout=200) == 0, "".join(said)
    listener.join()
    told = "".join("".join(said).split())  # paths are wrapped at the end of a line
    assert "".join(names.split()) in told
    assert told.count("waitinguntil") == 1
    assert "thereisspaceagain:resuming" in told


@pytest.mark.long
def test_a_full_disk_is_waited_for(tmp_path: Path, empty_store: Path) -> None:
    """Results, checkpoints and both databases on a small disk that fills up when training starts."""
    with small_disk(tmp_path / "small", "size=64m") as runs:
        (runs / "mlflow.db").write_bytes(empty_store.read_bytes())
        command = (write(tmp_path, filling(runs, BYTES)), "--runs", str(runs), "--workers", "2")
        waits_for_space(command, (runs / "ballast").unlink, f"room for 17 MB in {runs / ID};")
        assert Counter(Queue(default_storage(runs), ID).states().values()) == {"complete": 4}
        assert in_mlflow(f"sqlite:///{runs / 'mlflow.db'}", ID) == {("FINISHED", "complete"): 4}


@pytest.mark.long
def test_a_disk_without_inodes_is_waited_for(tmp_path: Path, empty_store: Path) -> None:
    with small_disk(tmp_path / "small", "size=256m,nr_inodes=400") as runs:
        (runs / "mlflow.db").write_bytes(empty_store.read_bytes())
        (runs / "ballast").mkdir()
        command = (write(tmp_path, filling(runs, FILES)), "--runs", str(runs), "--workers", "2")
        frees = partial(shutil.rmtree, runs / "ballast")
        waits_for_space(command, frees, f"room for inodes for 32 files in {runs / ID};")
        assert Counter(Queue(default_storage(runs), ID).states().values()) == {"complete": 4}


@pytest.mark.long
@pytest.mark.parametrize("which", ["queue", "MLflow"])
def test_a_database_s_own_disk_is_waited_for(which: str, runs: Path, tmp_path: Path, empty_store: Path) -> None:
    """The results have enough space."""
    with small_disk(tmp_path / "small", "size=16m") as disk:
        url = f"sqlite:///{disk / 'own.db'}"
        variable = "LIT_LAZY_STORAGE" if which == "queue" else "MLFLOW_TRACKING_URI"
        if which == "MLflow":
            (disk / "own.db").write_bytes(empty_store.read_bytes())
        command = (write(tmp_path, filling(disk, BYTES)), "--runs", str(runs), "--workers", "2")
        waits_for_space(command, (disk / "ballast").unlink, f"room for 1 MB in {disk};", **{variable: url})
        assert Counter(Queue(url if which == "queue" else default_storage(runs), ID).states().values()) == {
            "complete": 4
        }


@pytest.mark.long
def test_a_disk_of_the_cells_alone_is_waited_for(runs: Path, tmp_path: Path) -> None:
    cells = runs / ID / "cells"
    cells.parent.mkdir()
    with small_disk(cells, "size=64m"):
        command = (write(tmp_path, filling(cells, BYTES)), "--runs", str(runs), "--workers", "2")
        waits_for_space(command, (cells / "ballast").unlink, f"room for 17 MB in {cells}")
        assert Counter(Queue(default_storage(runs), ID).states().values()) == {"complete": 4}


NO_SPACE = f"""
{IN_WORKERS}
    import errno
    from lit_lazy.tracking.spool import MetricFile

    log_metrics = MetricFile.log_metrics

    def refuse(self, *args, **kwargs):
        tries = Path(__file__).parent / "tries"
        tries.touch()
        if (size := tries.stat().st_size) < 5:
            tries.write_text("x" * (size + 1))
            raise OSError(errno.ENOSPC, "No space left on device")
        return log_metrics(self, *args, **kwargs)

    MetricFile.log_metrics = refuse
"""


@pytest.mark.long
def test_a_worker_that_ends_for_lack_of_space_has_not_died(runs: Path, tmp_path: Path) -> None:
    """Whatever file had no space, and although every disk seems to have some."""
    process = start(write(tmp_path, NO_SPACE), "--runs", str(runs), "--workers", "1")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "died" not in said
    assert said.count("retrying") == 4


@pytest.mark.parametrize(
    ("options", "size", "what"),
    [
        ("size=8m", 2**24, "17 MB"),
        ("size=64m,nr_inodes=20", 2**20, "inodes for 32 files"),
        ("size=64m,nr_inodes=100", 2**24, ""),
    ],
)
def test_what_a_disk_lacks(options: str, size: int, what: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", options) as folder:
        assert describe_shortage(folder, size) == what
        assert list(folder.iterdir()) == []


def test_a_quota_shows_when_something_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(disk, "TemporaryFile", refuse)
    assert describe_shortage(tmp_path, 1) == "1 MB (Disk quota exceeded)"


class Full:
    """Workers that find no space left on some disk."""

    started = 0

    def __len__(self) -> int:
        return 0

    def reap(self) -> ReapResult:
        return ReapResult(disk_full=1)

    def start(self, most: int) -> None:
        self.started += most > 0

    def stop(self) -> None:
        """No workers run."""

    def describe_last_failure(self) -> str:
        return ""


class Limited(Full):
    """Workers that met a limit on the size of files."""

    def reap(self) -> ReapResult:
        return ReapResult(file_too_long=1)


class Idle(Full):
    """Like `Full`, but no disk is full."""

    def reap(self) -> ReapResult:
        return ReapResult()


def test_a_disk_that_is_full_and_does_not_look_it_is_tried_ever_less(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = make_grid(make_parser().parse_args(["ablate", "run", write(tmp_path), "--runs", str(runs)]), [])
    grid.folder.mkdir()
    queue, shown = Queue(default_storage(runs), ID), io.StringIO()
    queue.add_missing(grid.cells)
    console = Console(file=shown, width=1000)
    supervisor = launch.Supervisor(grid, launch.LaunchOptions(workers=1, threads=1), queue, console)
    slept: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    pool = Full()
    progress = Progress(queue, [cell.key for cell in grid.cells], console)
    for _ in range(8):
        assert supervisor._step(pool, progress)
    assert slept == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6], "from POLL_SECONDS on"
    assert pool.started == 8
    assert shown.getvalue().count(f"a write failed for lack of space, but there is some in {grid.folder}") == 7


def test_the_last_cell_is_tried_again_by_a_worker_that_is_started_for_it(runs: Path, tmp_path: Path) -> None:
    """Its former worker has exited, because no other cell was waiting."""
    command = ["ablate", "run", write(tmp_path), "--runs", str(runs), "--rows", "softmax", "--seeds", "0"]
    grid = make_grid(make_parser().parse_args(command), [])
    grid.folder.mkdir()
    queue, console = Queue(default_storage(runs), ID), Console(file=io.StringIO())
    queue.add_missing(grid.cells)
    task = queue.claim({"host": "here", "pid": "0", "lock": "none"})
    assert task is not None
    queue.fail(task, "out of memory")
    supervisor = launch.Supervisor(grid, launch.LaunchOptions(workers=1, threads=1, retry_failed=1), queue, console)
    pool = Idle()
    assert supervisor._step(pool, Progress(queue, [cell.key for cell in grid.cells], console))
    assert pool.started == 1


def test_a_running_point_whose_settings_its_worker_draws_is_shown(runs: Path, tmp_path: Path) -> None:
    grid = make_grid(make_parser().parse_args(["ablate", "run", write(tmp_path), "--runs", str(runs)]), [])
    grid = replace(grid, cells=[replace(cell, config={}) for cell in grid.cells])
    grid.folder.mkdir()
    queue, shown = Queue(default_storage(runs), ID), io.StringIO()
    queue.add_missing(grid.cells)
    queue.claim({"host": "here", "pid": "0", "lock": "none"})
    (entry,) = queue.entries("running")
    supervisor = launch.Supervisor(grid, launch.LaunchOptions(workers=1, threads=1), queue, Console(file=shown))
    (folder := grid.folder / "cells" / entry.run).mkdir(parents=True)
    now = round(1000 * time.time())
    records = [{"step": step, "milliseconds": now, "metrics": {"train/loss": 2.0}} for step in range(4)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert supervisor._describe_running(entry).endswith(": step 3, loss 2.000")


def test_a_limit_that_a_worker_meets_ends_the_grid_with_its_fix(runs: Path, tmp_path: Path) -> None:
    grid = make_grid(make_parser().parse_args(["ablate", "run", write(tmp_path), "--runs", str(runs)]), [])
    grid.folder.mkdir()
    queue, console = Queue(default_storage(runs), ID), Console(file=io.StringIO())
    queue.add_missing(grid.cells)
    supervisor = launch.Supervisor(grid, launch.LaunchOptions(workers=1, threads=1), queue, console)
    pool = Limited()
    with pytest.raises(launch.GridError, match="`ulimit -f`"):
        supervisor.work(pool, Progress(queue, [cell.key for cell in grid.cells], console))
    assert not pool.started


@pytest.mark.long
def test_a_cell_of_a_machine_that_vanished_is_taken_over(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Detected by its worker's last beat, the only information about another machine."""
    command = ["ablate", "run", write(tmp_path), "--runs", str(runs), "--workers", "1"]
    assert main([*command, "--rows", "softmax", "--seeds", "0"]) == 0
    queue = Queue(default_storage(runs), ID)
    grid = make_grid(make_parser().parse_args(command), [])
    queue.add_missing(grid.cells)
    task = queue.claim({"host": "vanished", "pid": "7", "lock": "/nowhere"})
    assert task is not None
    queue.beat(task)
    monkeypatch.setattr(launch, "STALE_SECONDS", 4.0)
    monkeypatch.setattr(launch, "LOOK_SECONDS", 0.5)
    capsys.readouterr()
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "its worker (process 7 on vanished) died; it waits again" in out
    assert set(queue.states().values()) == {"complete"}


@pytest.mark.long
def test_an_mlflow_server_that_goes_away_loses_nothing(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    """It stops when the first cell trains and returns when all are trained; then they are recorded."""
    extra = f"""
{IN_WORKERS}
    import time
    import lit_lazy.training.run

    train = lit_lazy.training.run.fit

    def wait_for_outage(*args):
        (Path(__file__).parent / "training").touch()
        while not (Path(__file__).parent / "away").exists():
            time.sleep(0.1)
        return train(*args)

    lit_lazy.training.run.fit = wait_for_outage
"""
    runs = tmp_path / "runs"
    process = start(
        write(tmp_path, extra, "outage"), "--runs", str(runs), "--workers", "2", MLFLOW_TRACKING_URI=mlflow_server.url
    )
    name = "outage-backcopy_tiny"
    wait_until((tmp_path / "training").exists)
    mlflow_server.stop()
    (tmp_path / "away").touch()
    wait_until(lambda: len(list(runs.glob(f"{name}/cells/*/result.json"))) == 4)
    queue = Queue(default_storage(runs), name)
    assert "complete" not in queue.states().values()
    assert process.poll() is None
    mlflow_server.start()
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    assert set(queue.states().values()) == {"complete"}
    assert in_mlflow(mlflow_server.url, name) == {("FINISHED", "complete"): 4}
    client = MlflowClient(mlflow_server.url)
    number = client.get_experiment_by_name(name).experiment_id
    for run in client.search_runs([number], "tags.kind = 'cell'"):
        folder = runs / name / "cells" / run.data.tags["cell"]
        kept = [
            (line.step, line.metrics["train/loss"])
            for line in read_lines(folder / "metrics.jsonl")
            if "train/loss" in line.metrics
        ]
        assert [step for step, _ in kept] == [1, 3, 5]
        assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")] == kept
        assert json.loads((folder / "result.json").read_text())["metrics"].items() <= run.data.metrics.items()


@pytest.mark.long
def test_two_machines_share_a_grid(mlflow_server: MlflowServer, postgres_storage: str, tmp_path: Path) -> None:
    """Separate folders and process groups that share only the queue in PostgreSQL and MLflow's server.

    The workers' clocks jump by a day at every call.
    """
    extra = f"""
{IN_WORKERS}
    import itertools
    import time

    true_time, jumps = time.time, itertools.cycle((86_400.0, -86_400.0))
    time.time = lambda: true_time() + next(jumps)
"""
    path = write(tmp_path, extra, "shared")
    environment = {"MLFLOW_TRACKING_URI": mlflow_server.url, "LIT_LAZY_STORAGE": postgres_storage}
    machines = [tmp_path / "one", tmp_path / "two"]
    seeds = ",".join(map(str, range(6)))
    commands = [
        start(path, "--seeds", seeds, "--runs", str(runs), "--workers", "1", **environment) for runs in machines
    ]
    outs = [command.communicate(timeout=300)[0] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], outs
    assert "died" not in "".join(outs)
    name = "shared-backcopy_tiny"
    trained = [{path.parent.name for path in runs.glob(f"{name}/cells/*/result.json")} for runs in machines]
    assert len(trained[0] | trained[1]) == 12
    assert not trained[0] & trained[1]
    assert min(map(len, trained)) > 0
    assert in_mlflow(mlflow_server.url, name) == {("FINISHED", "complete"): 12}
    client = MlflowClient(mlflow_server.url)
    number = client.get_experiment_by_name(name).experiment_id
    assert len(client.search_runs([number], "tags.kind = 'ablation'")) == 1
    tables = [(runs / name / "table.csv").read_text() for runs in machines]
    assert tables[0] == tables[1]
    assert all("12/12 cells done" in out for out in outs)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """A limit on the size of files that this process and its children write."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_a_limit_on_file_sizes_is_one_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file_limit(2**16):  # the queue's tables take more
        status = main(["ablate", "run", "table2", "--base", "backcopy_tiny", "--seeds", "0", "--runs", str(runs)])
    assert status == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "`ulimit -f`" in said


def test_a_limit_at_the_size_of_mlflow_s_database_names_its_fix(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["train", "backcopy_tiny", "--runs", str(runs), "--train.steps=4"]
    with file_limit((runs / "mlflow.db").stat().st_size):
        assert main(command) == 1
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "`ulimit -f`" in said.splitlines()[-1]
    assert "the same command sends it" in said.splitlines()[-1]
    assert main(command) == 0
    assert "nothing was done" in capfd.readouterr().out


@pytest.mark.long
def test_a_grid_ends_at_a_limit_on_file_sizes(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In one line; no cell has failed, and the same command without the limit finishes."""
    command = ["ablate", "run", write(tmp_path), "--runs", str(runs), "--workers", "1"]
    database = runs / "mlflow.db"
    Tracker(f"sqlite:///{database}", runs, ID).create_run("room for the parent run", {})
    with file_limit(database.stat().st_size + 2**16):
        assert main(command) == 1
    said = capfd.readouterr()
    assert "`ulimit -f`" in said.err.splitlines()[-1]
    assert "Traceback" not in said.err
    assert "failed" not in Queue(default_storage(runs), ID).states().values()
    assert main(command) == 0


def test_a_refused_write_is_told_from_one_that_may_pass() -> None:
    """Also inside the error of MLflow that wraps it."""
    refused = sqlalchemy.exc.OperationalError("INSERT", {}, sqlite3.OperationalError("disk I/O error"))
    wrapped = TrackingError("rejected", reachable=True)
    wrapped.__cause__ = refused
    assert find_write_status(wrapped) is None  # as from a network's disk
    with file_limit(2**30):
        assert find_write_status(wrapped) == FILE_TOO_LONG
    assert find_write_status(OSError(errno.EFBIG, "File too large")) == FILE_TOO_LONG
    for broken in (OSError(errno.EIO, os.strerror(errno.EIO), "a/b.json"), wrapped):  # of reading or of writing
        assert "ulimit" not in describe_failed_write(broken)
        assert "Input/output error" in describe_failed_write(broken)
    assert find_write_status(OSError(errno.ENOSPC, "No space left on device")) == DISK_FULL


@pytest.mark.long
def test_a_database_whose_creation_was_killed_is_created_anew(tmp_path: Path) -> None:
    """Killed between two of MLflow's migrations, which leaves an unusable database."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    child = os.fork()
    if not child:

        def die(*arguments: Any) -> None:
            if arguments[2].startswith("ALTER TABLE metrics ADD COLUMN step"):
                os.kill(os.getpid(), signal.SIGKILL)

        sqlalchemy.event.listen(sqlalchemy.Engine, "after_cursor_execute", die)
        Tracker(uri, tmp_path, "x").find({"kind": "cell"})
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert Tracker(uri, tmp_path, "x").find({"kind": "cell"}) == []
    assert {path.name for path in tmp_path.iterdir()} == {"mlartifacts", "mlflow.db", "mlflow.db.lock"}


def test_an_unreachable_store_is_told_from_one_that_refuses(closed_port: int, runs: Path) -> None:
    with pytest.raises(TrackingError) as away:
        Tracker(f"http://127.0.0.1:{closed_port}", runs, "x").find({"kind": "cell"})
    assert not away.value.reachable
    with pytest.raises(TrackingError) as refused:
        Tracker(f"sqlite:///{runs / 'mlflow.db'}", runs, "x").fail("no-such-run", "reason")
    assert refused.value.reachable
