"""Recovery of a grid after one of its parts was lost or its command was killed."""

import errno
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import forked
import mlflow.tracking
import pytest
import sqlalchemy
from mlflow.entities import ViewType
from test_interrupts import STUDY, two_cells
from two_rows import two_rows

from lit_lazy.command.main import main
from lit_lazy.grid.jobs.job import INTERRUPTED, Job
from lit_lazy.grid.jobs.pool import LocalPool
from lit_lazy.grid.jobs.worker import Worker
from lit_lazy.grid.queue.liveness import Membership
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.report import publish
from lit_lazy.table.stored import read_table
from lit_lazy.tracking.spool import METRICS, MetricFile, read_lines
from lit_lazy.tracking.store import TrackingError, default_uri
from lit_lazy.tracking.tracked_run import ActiveRun
from lit_lazy.tracking.tracker import Tracker

ID = "pair-backcopy_tiny"
pytestmark = pytest.mark.xdist_group("recovery")


def forget_databases() -> None:
    """Close connections to a replaced database file."""
    for engine in gc.get_objects():
        if type(engine) is sqlalchemy.Engine:
            engine.dispose()


BACKED_UP = """
older = Path(__file__).with_name("older")
if Path(sys.argv[0]).stem == "worker" and not older.exists():
    import shutil
    older.mkdir()
    for name in ("mlflow.db", "queue.db"):
        shutil.copy(older.with_name("runs") / name, older)
"""
"""Code by which the first worker copies both databases before it claims a cell."""


class Made:
    """A grid of one cell in a runs folder, created once and restored by copying."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.runs, self.whole, self.older = folder / "runs", folder / "whole", folder / "older"
        self.runs.mkdir()
        shutil.copy(store, self.runs / "mlflow.db")
        (folder / "pair.py").write_text(two_rows("pair", code=BACKED_UP))
        self.command = ["ablate", "run", str(folder / "pair.py"), "--runs", str(self.runs), "--workers", "1"]
        assert main([*self.command, "--rows", "softmax", "--seeds", "0"]) == 0
        shutil.copytree(self.runs, self.whole)

    def restore(self) -> "Made":
        shutil.rmtree(self.runs)
        shutil.copytree(self.whole, self.runs)
        forget_databases()
        return self

    def run(self, *more: str) -> int:
        return main([*self.command, "--rows", "softmax", "--seeds", "0", *more])

    @property
    def client(self) -> mlflow.tracking.MlflowClient:
        return mlflow.tracking.MlflowClient(f"sqlite:///{self.runs / 'mlflow.db'}")

    def tracked(self, kind: str, view: int = ViewType.ACTIVE_ONLY) -> list[Any]:
        number = self.client.get_experiment_by_name(ID).experiment_id
        return list(self.client.search_runs([number], f"tags.kind = '{kind}'", view))

    def counts(self) -> dict[str, int]:
        """Number of cells of each row of the table."""
        return {row.variant: row.n for row in read_table(self.runs / ID / "table.json").rows}

    def results(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (self.runs / ID / "cells").glob("*/result.json")}

    def put_back(self, *databases: str) -> None:
        for name in databases:
            shutil.copy(self.older / name, self.runs)
        forget_databases()

    def lose_queue(self) -> None:
        for path in self.runs.glob("queue.db*"):
            path.unlink()
        forget_databases()


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return Made(tmp_path_factory.mktemp("recovery"), empty_store)


@pytest.fixture
def made(_made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return _made.restore()


def test_a_lost_queue_loses_nothing(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    results, written = made.results(), (made.runs / ID / "table.csv").read_text()
    made.lose_queue()
    assert made.run() == 0
    assert "1 cells, all finished: nothing to do" in capsys.readouterr().out
    assert made.results() == results
    assert (made.runs / ID / "table.csv").read_text() == written
    assert len(made.tracked("ablation")) == len(made.tracked("cell")) == 1
    assert main(["ablate", "table", ID, "--runs", str(made.runs)]) == 0
    assert made.counts()["softmax"] == 1


@pytest.mark.long
def test_a_queue_that_is_lost_midway_is_filled_again(made: Made) -> None:
    """Cells that are complete in MLflow stay complete; other cells with a result file are recorded from it."""
    results = made.results()
    cell = made.tracked("cell")[0]
    made.client.delete_run(cell.info.run_id)
    made.lose_queue()
    assert main([*made.command, "--seeds", "0"]) == 0
    assert made.counts() == {"softmax": 1, "lazy": 1}
    assert results.items() <= made.results().items()
    assert [run.info.status for run in made.tracked("ablation")] == ["FINISHED"]
    again = next(run for run in made.tracked("cell") if run.data.tags["cell"] == cell.data.tags["cell"])
    assert again.data.metrics == cell.data.metrics
    assert again.data.params.items() >= cell.data.params.items()


@pytest.mark.long
def test_fresh_starts_again_where_mlflow_was_lost(made: Made, empty_store: Path, capsys: Any) -> None:
    shutil.copy(empty_store, made.runs / "mlflow.db")
    forget_databases()
    assert made.run() == 2
    assert "no longer holds this grid's parent run" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
    assert "--fresh" in said
    assert made.run("--fresh") == 0
    assert made.counts()["softmax"] == 1
    assert len(made.tracked("ablation")) == 1


def test_a_command_that_died_at_its_report_is_finished_by_the_next(made: Made) -> None:
    parent = made.tracked("ablation")[0].info.run_id
    made.client.update_run(parent, status="RUNNING")
    (made.runs / ID / "report.html").unlink()
    assert made.run() == 0
    assert [run.info.status for run in made.tracked("ablation")] == ["FINISHED"]
    assert (made.runs / ID / "report.html").exists()


@pytest.mark.long
def test_a_runs_folder_that_was_copied_or_moved_has_files_of_its_own(made: Made, tmp_path: Path) -> None:
    """MLflow's database stores absolute paths: a copy's commands would write into the original."""
    for parent in made.tracked("ablation"):
        made.client.update_run(parent.info.run_id, status="RUNNING")  # so that everything is written again
    copied, moved = tmp_path / "a copy", tmp_path / "moved"
    shutil.copytree(made.runs, copied)
    before = {path: path.read_bytes() for path in made.runs.rglob("*") if path.is_file()}
    again = ["ablate", "run", made.command[2], "--workers", "1", "--rows", "softmax", "--seeds", "0", "--runs"]
    assert main([*again, str(copied)]) == 0
    assert {path: path.read_bytes() for path in made.runs.rglob("*") if path.is_file()} == before

    made.runs.rename(moved)
    made.runs.touch()  # nothing can be created there
    assert main([*again, str(moved)]) == 0
    sizes = [(folder / ID / "report.html").stat().st_size for folder in (copied, moved)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    made.runs.unlink()
    shutil.copytree(made.whole, made.runs)
    forget_databases()
    assert made.run() == 0
    assert (made.runs / ID / "report.html").stat().st_size == pytest.approx(sizes[0], rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("databases", [("mlflow.db",), ("queue.db",), ("mlflow.db", "queue.db")])
def test_an_older_database_that_is_put_back_loses_nothing(databases: tuple[str, ...], made: Made, capsys: Any) -> None:
    """A grid's own message advises it; what a cell left in its folder is sent again, and nothing is trained."""
    results, table = made.results(), (made.runs / ID / "table.csv").read_text()
    cell = made.tracked("cell")[0]
    made.put_back(*databases)
    (made.runs / ID / "table.csv").unlink()
    capsys.readouterr()
    assert made.run() == 0
    said = (
        "MLflow lacks 1 of 1 complete cells (an older database?): 1 sent again from result.json, 0 trained again"
        in capsys.readouterr().out
    )
    assert said == (databases == ("mlflow.db",))
    assert made.results() == results
    assert (made.runs / ID / "table.csv").read_text() == table
    (again,) = made.tracked("cell")
    assert again.data.metrics == cell.data.metrics
    assert again.data.params == cell.data.params
    kept = next((made.runs / ID / "cells").glob("*/diagnostics.npz"))
    assert Tracker(default_uri(made.runs), made.runs, ID).read_bytes(again.info.run_id, kept.name) == kept.read_bytes()


def test_a_cell_that_mlflow_and_its_folder_have_lost_is_trained_again(made: Made, capsys: Any) -> None:
    results, table = made.results(), (made.runs / ID / "table.csv").read_text()
    made.put_back("mlflow.db")
    (lost,) = results
    shutil.rmtree(lost.parent)
    capsys.readouterr()
    assert made.run() == 0
    assert "(an older database?): 0 sent again from result.json, 1 trained again" in capsys.readouterr().out
    assert results.keys() == made.results().keys()
    assert results != made.results()
    assert (made.runs / ID / "table.csv").read_text() == table


@pytest.mark.parametrize("is_made", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_database_that_was_lost_is_said_to_be(is_made: bool, made: Made, empty_store: Path, capsys: Any) -> None:
    (made.runs / "mlflow.db").write_bytes(empty_store.read_bytes() if is_made else b"")
    forget_databases()
    assert made.run() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no longer holds this grid's parent run; restore a backup, or start again with --fresh" in line
    assert main(["ablate", "table", ID, "--runs", str(made.runs)]) == 2
    assert "holds no grids" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"ablation": "pair", "rows',
        *(pytest.param(x, marks=pytest.mark.long) for x in (b"\xff\xfe", b"[1]", bytes(30))),
    ],
)
def test_a_damaged_plan_is_written_anew(content: bytes, made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    table, parent = (made.runs / ID / "table.csv").read_text(), made.tracked("ablation")[0].info
    plan = Path(urlsplit(parent.artifact_uri).path) / "plan.json"
    whole = plan.read_text()
    plan.write_bytes(content)
    assert main(["ablate", "table", ID, "--runs", str(made.runs)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lit-lazy: plan.json, stored with the MLflow run, is damaged (")
    assert line.endswith("); run the grid's command again to rewrite it")
    assert made.run() == 0
    assert "the old one is now plan.json.damaged" in " ".join(capsys.readouterr().out.split())
    assert plan.with_name("plan.json.damaged").exists()
    assert plan.read_text() == whole
    assert (made.runs / ID / "table.csv").read_text() == table


def _in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size or 10)),
    "another text": lambda path: path.write_text("{another text\n"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x80"),
    "removed": Path.unlink,
    "a folder in its place": _in_its_place,
}


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES)
def test_whichever_file_is_damaged_the_table_is_as_it_was_or_one_line_says_why_not(
    damage: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [path for path in made.runs.rglob("*") if path.is_file() and path.suffix not in (".png", ".svg", ".log")]
    files, table = sorted(path.relative_to(made.runs) for path in paths), (made.runs / ID / "table.csv").read_text()
    assert len(files) > 20
    for file in files:
        made.restore()
        DAMAGES[damage](made.runs / file)
        status, said = made.run(), capsys.readouterr()
        assert status in (0, 1, 2), file
        assert "Traceback" not in said.out + said.err, file
        if status:
            assert [line for line in said.err.splitlines() if line.startswith("lit-lazy: ")][1:] == [], (file, said.err)
        else:
            assert (made.runs / ID / "table.csv").read_text() == table, file


@pytest.mark.parametrize(
    ("error", "status"),
    [pytest.param(KeyboardInterrupt(), 130, marks=pytest.mark.long), (OSError(errno.ENOSPC, "full"), 1)],
)
def test_a_report_that_was_cut_off_is_written_by_the_next(
    error: BaseException, status: int, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.client.update_run(made.tracked("ablation")[0].info.run_id, status="RUNNING")

    def cut_off(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(publish, "write_report", cut_off)
        assert made.run() == status
    assert [run.info.status for run in made.tracked("ablation")] == ["KILLED"]
    assert made.run() == 0
    assert [run.info.status for run in made.tracked("ablation")] == ["FINISHED"]


KILLED_BEFORE = {
    "the id is in the queue": "Queue.facts = ",
    "the parent run": "Tracker.create_run",
    "its params": "Tracker.log_config",
    "its plan": "Tracker.log_text",
    "its views": "Tracker.save_views",
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("moment", KILLED_BEFORE)
@pytest.mark.long
def test_a_parent_that_was_killed_is_resumed(moment: str, fresh: bool, made: Made, empty_store: Path) -> None:
    shutil.rmtree(made.runs)
    made.runs.mkdir()
    shutil.copy(empty_store, made.runs / "mlflow.db")
    if fresh:
        made.restore()
    killed = forked.Popen([*_killing(made, moment), *(["--fresh"] if fresh else [])])
    assert killed.wait(timeout=60) == -signal.SIGKILL
    assert made.run(*(["--fresh"] if fresh else [])) == 0
    assert [run.info.status for run in made.tracked("ablation")] == ["FINISHED"]
    assert made.tracked("ablation")[0].data.params
    assert made.counts()["softmax"] == 1


def _killing(made: Made, moment: str) -> list[str]:
    """A command that kills itself before its first call of a method."""
    script = made.runs.parent / "killing.py"
    owner, _, method = KILLED_BEFORE[moment].partition(".")
    setter = method.endswith(" = ")
    target = f"{owner}.facts.fset" if setter else f"{owner}.{method}"
    patched = "Queue.facts = property(Queue.facts.fget, die)" if setter else f"{target} = die"
    script.write_text(f"""
import os, signal, sys
from lit_lazy.command.main import main
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.tracking.tracker import Tracker

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

{patched}
sys.exit(main(sys.argv[1:]))
""")
    return [sys.executable, str(script), *made.command, "--rows", "softmax", "--seeds", "0"]


def active(runs: Path, folder: str) -> ActiveRun:
    (runs / folder).mkdir(exist_ok=True)
    tracker, tags = Tracker(default_uri(runs), runs, "active"), {"cell": "abc", "kind": "cell"}
    return ActiveRun(tracker, runs / folder, "v seed 0", tags, {"axis": "1"}, {"train": {"steps": 2}}, "parent")


def test_a_cell_that_another_machine_takes_over_has_its_curves_once(runs: Path) -> None:
    """The former holder may be alive and still send to a deleted run."""
    first, second = active(runs, "here"), active(runs, "there")
    for of, steps in ((first, (1, 2)), (second, (1, 2, 3))):
        for step in steps:
            MetricFile(of.folder).log_metrics({"train/loss": 1.0 / step}, step)
            time.sleep(0.002)
        of.send()
    MetricFile(first.folder).log_metrics({"train/loss": 0.25}, 4)
    with pytest.raises(TrackingError):
        first.send()
    (run,) = first.tracker.find({"cell": "abc"})
    assert run.run_id == second.get_run_id()
    assert first.tracker.read_history(run.run_id, ["train/loss"]) == {"train/loss": [(1, 1.0), (2, 0.5), (3, 1 / 3)]}


def test_a_run_that_was_cut_off_before_its_params_gets_them(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "log_config", killed)
        with pytest.raises(SystemExit):
            active(runs, "here").get_run_id()
    again = active(runs, "here")
    run = again.tracker.client.get_run(again.get_run_id())
    assert run.data.params == {"axis": "1", "train.steps": "2"}
    assert len(again.tracker.find({"cell": "abc"})) == 1


DAMAGE = {
    "NULs after a power cut": b"\0" * 40 + b"\n",
    "NULs at the end": b"\0" * 40,
    "half of a line": b'{"step": 1}\n',
    "something else": b"[1, 2]\n",
    "no text": b"\xff\xfe\n",
}


def test_why_an_attempt_ended_is_not_said_of_the_one_that_finished(runs: Path) -> None:
    of = active(runs, "here")
    of.fail("interrupted", "KILLED")
    of.tracker.finish(of.get_run_id(), {"loss/val": 1.0}, {"git_sha": "abc"}, 2)
    (run,) = of.tracker.find({"cell": "abc"})
    assert run.state == "complete"
    assert "reason" not in run.tags


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_line_of_metrics_costs_itself(damage: bytes, tmp_path: Path) -> None:
    MetricFile(tmp_path).log_metrics({"train/loss": 1.0}, 1)
    path = tmp_path / METRICS
    path.write_bytes(path.read_bytes() + damage)
    MetricFile(tmp_path).log_metrics({"train/loss": 0.5}, 2)
    assert {line.step: line.metrics for line in read_lines(path)} == {1: {"train/loss": 1.0}, 2: {"train/loss": 0.5}}
    assert (tmp_path / f"{METRICS}.damaged").exists() == damage.endswith(b"\n")


def hold(folder: Path, command: str, slot: int) -> None:
    with Membership(folder, command, slot):
        time.sleep(600)


def job(runs: Path, command: str) -> Job:
    return Job(default_storage(runs), "grid", runs, default_uri(runs), "parent", command, 1, False, None, ())


def test_a_command_leaves_the_workers_of_a_dead_one_their_slots(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two of them would share a GPU. Workers of a living command occupy no slots."""
    started: list[int] = []
    folder = runs / "grid" / "workers"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=hold, args=(folder, "0000dead", 0))]
    with Membership(folder) as living:
        workers.append(context.Process(target=hold, args=(folder, living.token, 1)))
        for worker in workers:
            worker.start()
        while len(list(folder.glob("*.lock"))) < 3:
            time.sleep(0.02)
        pool = LocalPool(job(runs, "0000abcd"), 3)
        monkeypatch.setattr(pool, "_start_worker", lambda slot: started.append(slot) or Sleeping())
        pool.start(most=5)
        for worker in workers:
            worker.kill()
            worker.join()
    assert started == [1, 2]
    pool.start(most=5)
    assert started == [1, 2, 0]


class Sleeping:
    """A worker that keeps running."""

    def poll(self) -> None:
        return None


def test_a_worker_does_not_begin_without_its_command(runs: Path) -> None:
    queue = Queue(default_storage(runs), "grid")
    tracker = Tracker(default_uri(runs), runs, "grid")

    def claim(*_: object) -> None:
        raise AssertionError

    queue.claim = claim  # type: ignore[method-assign]
    Worker(queue, tracker, "parent", runs / "grid", command="0000dead").work()


def test_a_worker_that_was_preempted_has_not_crashed(runs: Path) -> None:
    pool = LocalPool(job(runs, "0000abcd"), 2)
    for slot, status in enumerate((INTERRUPTED, 1)):
        pool._workers[slot] = forked.Popen([sys.executable, str(_exits(runs, status))])
    for worker in pool._workers.values():
        worker.wait()
    assert pool.reap().crashed == 1


def _exits(runs: Path, status: int) -> Path:
    script = runs / f"exits_{status}.py"
    script.write_text(f"raise SystemExit({status})")
    return script


@pytest.mark.long
def test_whatever_goes_wrong_in_reporting_does_not_end_a_worker(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = two_cells("local", default_storage(runs))

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(ActiveRun, "fail", broken)
    monkeypatch.setattr(Worker, "_train", broken)
    Worker(queue, Tracker(default_uri(runs), runs, STUDY), "parent", runs / STUDY).work()
    assert set(queue.states().values()) == {"failed"}
    assert [entry.reason for entry in queue.entries("failed")] == ["RuntimeError: broken"] * 2
    assert os.listdir(runs / STUDY / "workers") == []
