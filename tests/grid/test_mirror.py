"""MLflow shows what a grid's folder says, whatever it had, lacked or missed, and nothing reads it again."""

import json
import math
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from instant import wait_until
from made_grid import MadeGrid
from mlflow.entities import Run, ViewType
from mlflow.tracking import MlflowClient
from rich.console import Console
from stores import forget_databases, make_runs
from two_rows import WILD, two_rows

from lit_lazy import results
from lit_lazy.command.main import main
from lit_lazy.grid import mlflow_mirror
from lit_lazy.grid.grid_folder import ASIDE, read_grid
from lit_lazy.grid.mlflow_mirror import GridMirror, collect_outcomes, follow
from lit_lazy.support.locks import is_held
from lit_lazy.table.finding_text import describe_findings
from lit_lazy.table.render import FILES
from lit_lazy.tracking.store_address import TrackingError, default_uri
from lit_lazy.tracking.tracker import Tracker, join_note, list_artifacts
from lit_lazy.training.run_folder import DIAGNOSTICS, GRID_ID, METRICS, RESULT, make_lock, read_failure, read_lines

ID = "pair-backcopy_tiny"
VOLATILE = ("mlflow.parentRunId", "mlflow.user", "grid", "git_sha", "mlflow.source.git.commit", "mlflow.note.content")
"""Tags that name a run, or the commit of the process that created it."""


def find_runs(uri: str, name: str = ID, kind: str = "") -> list[Run]:
    client = MlflowClient(uri)
    number = client.get_experiment_by_name(name).experiment_id
    return client.search_runs([number], f"tags.kind = '{kind}'" if kind else "")


def read_curve(client: MlflowClient, run: Run, metric: str) -> list[tuple[int, str]]:
    """Steps and values; the last value of a parent run, whose table changes."""
    points = client.get_metric_history(run.info.run_id, metric)
    found = sorted((point.step, repr(point.value)) for point in points)
    return found if "cell" in run.data.tags else [(0, repr(run.data.metrics[metric]))]


def describe(uri: str, name: str = ID) -> dict[str, tuple[Any, ...]]:
    """What a store shows of a grid, by run name, without ids and times: status, tags, params, curves, artifacts."""
    client, shown = MlflowClient(uri), {}
    for run in find_runs(uri, name):
        tags = {name: text for name, text in run.data.tags.items() if name not in VOLATILE}
        curves = {metric: read_curve(client, run, metric) for metric in run.data.metrics}
        shown[run.info.run_name] = run.info.status, tags, run.data.params, curves, list_artifacts(client, run)
    return shown


def dump(runs: Path) -> tuple[list[str], dict[Path, bytes]]:
    with closing(sqlite3.connect(runs / "mlflow.db")) as database:
        lines = list(database.iterdump())
    return lines, {path: path.read_bytes() for path in (runs / "mlartifacts").rglob("*") if path.is_file()}


def command(runs: Path, *more: str) -> list[str]:
    return ["ablate", "run", str(runs.with_name("pair.py")), "--runs", str(runs), "--workers", "2", "--brief", *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """The runs folder of a grid of two rows, and one that fails; `seed-0.db` is MLflow's store before seed 1."""
    runs = make_runs(tmp_path_factory.mktemp("mirror"), empty_store)
    runs.with_name("pair.py").write_text(two_rows("pair", more=WILD))
    assert main(command(runs, "--rows", "softmax,lazy", "--seeds", "0")) == 0
    shutil.copy(runs / "mlflow.db", runs / "seed-0.db")
    assert main(command(runs)) == 1
    return runs


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    shutil.copy(trained.with_name("pair.py"), tmp_path)
    return shutil.copytree(trained, tmp_path / "runs")


def test_runs_are_what_the_folders_hold(copied: Path) -> None:
    client = MlflowClient(default_uri(copied))
    runs = {run.info.run_name: run for run in find_runs(default_uri(copied))}
    parent = runs.pop(ID)
    assert set(runs) == {"softmax seed 0", "softmax seed 1", "lazy seed 0", "lazy seed 1", "wild seed 0"}
    for name, run in runs.items():
        folder, tags = copied / ID / "cells" / run.data.tags["cell"], run.data.tags
        assert (folder / "mlflow_run_id").read_text() == f"{run.info.run_id} {run.info.experiment_id}"
        assert tags["mlflow.parentRunId"] == parent.info.run_id
        for line in read_lines(folder / METRICS):
            for metric, value in line.metrics.items():
                curve = read_curve(client, run, metric)
                assert (line.step, repr(value)) in curve
                assert len(curve) == len({step for step, _ in curve})
        if name == "wild seed 0":
            assert (run.info.status, tags["state"], tags["reason"]) == ("FAILED", "failed", read_failure(folder))
            continue
        result = json.loads((folder / RESULT).read_text())
        times = {f"time/{name}": value for name, value in result["timings"].items()}
        assert (result["metrics"] | times).items() <= run.data.metrics.items()
        assert (run.info.status, run.data.tags["state"]) == ("FINISHED", "complete")
        assert run.data.params["train.steps"] == str(result["config"]["train"]["steps"])
        assert {"normaliser", "lr"} <= run.data.params.keys()
        assert {"ablation", "variant", "seed", "source", "git_sha", "environment", "backend"} <= tags.keys()
        assert "reason" not in tags
        artifacts = copied / "mlartifacts" / ID / run.info.run_id / "artifacts"
        assert (artifacts / DIAGNOSTICS).read_bytes() == (folder / DIAGNOSTICS).read_bytes()
    assert parent.info.status == "FAILED"
    artifacts = copied / "mlartifacts" / ID / parent.info.run_id / "artifacts"
    for name in (*FILES, "report.html", "plan.json"):
        assert (artifacts / name).read_bytes() == (copied / ID / name).read_bytes()
    assert "backcopy" in (artifacts / "config.yaml").read_text().lower()


def lose(runs: Path) -> None:
    (runs / "mlflow.db").unlink()
    shutil.rmtree(runs / "mlartifacts")
    forget_databases()


def test_it_is_made_right_and_what_is_right_stays_as_it_is(copied, empty_store, monkeypatch, capsys) -> None:
    """Unchanged, lost while it is out of reach, an older copy, another's."""
    mirror, whole = ["mirror", "pair", "--runs", str(copied)], describe(default_uri(copied))
    before = dump(copied)
    assert main(mirror) == 0
    assert capsys.readouterr().out.endswith(f"/mlflow.db shows {ID}\n")
    assert dump(copied) == before

    lose(copied)
    with monkeypatch.context() as patch:
        patch.setattr(GridMirror, "_open_parent", Mock(side_effect=TrackingError("no answer")))
        assert main(command(copied, "--rows", "softmax,lazy")) == 0
    assert f"MLflow lacks results (no answer); `lit-lazy mirror {ID}` sends what it lacks" in capsys.readouterr().out
    assert main(mirror) == 0
    assert describe(default_uri(copied)) == whole, "lost"
    shutil.copy(copied / "seed-0.db", copied / "mlflow.db")
    forget_databases()
    assert main(mirror) == 0
    assert describe(default_uri(copied)) == whole, "older"
    another = shutil.copy(empty_store, copied.with_name("another.db"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{another}")
    assert main(mirror) == 0
    assert describe(default_uri(copied)) == whole, "another's"


def test_nothing_but_people_reads_it(copied, closed_port, monkeypatch, capsys) -> None:
    table = (copied / ID / "table.csv").read_bytes()
    before = results("pair", runs=copied)
    lose(copied)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    for words in (["ablate", "table", "pair"], ["report", "pair"], ["ablate", "pack", "pair"]):
        assert main([*words, "--runs", str(copied)]) == 0
    assert main(["ablate", "compare", ID, ID, "--runs", str(copied)]) == 0
    assert main([*command(copied), "--dry-run"]) == 0
    assert "4 of 5 cells are finished already" in capsys.readouterr().out
    assert (copied / ID / "table.csv").read_bytes() == table
    found = results("pair", runs=copied)
    assert found.table == before.table
    assert found.cells.equals(before.cells)
    assert not (copied / "mlflow.db").exists()


@pytest.mark.long
def test_a_server_that_dies_during_a_grid_is_sent_the_rest(mlflow_server, copied, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
    monkeypatch.setattr(mlflow_mirror, "SYNC_SECONDS", 0.2)
    sync = GridMirror._open_parent

    def open_and_stop(self: GridMirror, final: bool) -> str:
        parent = sync(self, final)
        mlflow_server.stop()
        return parent

    with monkeypatch.context() as patch:
        patch.setattr(GridMirror, "_open_parent", open_and_stop)
        assert main(command(copied, "--rows", "softmax,lazy", "--seeds", "0,1,2")) == 0
    assert f"`lit-lazy mirror {ID}` sends what it lacks" in capsys.readouterr().out
    mlflow_server.start()
    assert main(["mirror", ID, "--runs", str(copied)]) == 0
    on_server = describe(mlflow_server.url)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert main(["mirror", ID, "--runs", str(copied)]) == 0
    assert on_server == describe(default_uri(copied))


def test_fresh_deletes_the_former_runs_whatever_changed(copied: Path) -> None:
    former = {run.info.run_id for run in find_runs(default_uri(copied))}
    copied.with_name("pair.py").write_text(two_rows("pair").replace("Elastic()", "Elastic(tau_init=0.5)"))
    assert main(command(copied)) == 2, "the row changed"
    assert main(command(copied, "--fresh", "--seeds", "0")) == 0
    assert sorted(run.info.run_name for run in find_runs(default_uri(copied))) == ["lazy seed 0", ID, "softmax seed 0"]
    client = MlflowClient(default_uri(copied))
    number = client.get_experiment_by_name(ID).experiment_id
    assert {run.info.run_id for run in client.search_runs([number], run_view_type=ViewType.DELETED_ONLY)} == former


def test_runs_are_in_the_rows_of_the_table_after_a_change(copied: Path) -> None:
    edited = two_rows("pair", more=WILD.replace("1e20", "1e21")).replace("Elastic()", "Elastic(tau_init=0.5)")
    copied.with_name("pair.py").write_text(edited)
    assert main(command(copied, "--changed", "--rows", "lazy", "--seeds", "0")) == 0
    rows = {cell.key: cell.variant for cell in read_grid(copied / ID).cells}
    tags = [run.data.tags for run in find_runs(default_uri(copied), kind="cell")]
    failed = [tag["cell"] for tag in tags if tag["state"] == "failed"]
    assert {tag["cell"]: tag["variant"] for tag in tags} == rows | dict.fromkeys(failed, "not in the table")


def test_what_the_table_no_longer_has_is_undefined_and_its_files_are_those_of_the_cells(copied: Path) -> None:
    client = MlflowClient(uri := default_uri(copied))
    (parent,) = find_runs(uri, kind="ablation")
    client.log_metric(parent.info.run_id, "loss/excess/former", 1.0)
    table = (copied / ID / "table.json").read_bytes()
    (copied / ID / "table.json").write_text("of before an interrupt")
    for _ in range(2):
        assert main(["mirror", "pair", "--runs", str(copied)]) == 0
    metrics = client.get_run(parent.info.run_id).data.metrics
    assert math.isnan(metrics.pop("loss/excess/former"))
    assert metrics == parent.data.metrics
    assert len(client.get_metric_history(parent.info.run_id, "loss/excess/former")) == 2, "undefined, once"
    sent = copied / "mlartifacts" / ID / parent.info.run_id / "artifacts" / "table.json"
    assert sent.read_bytes() == (copied / ID / "table.json").read_bytes() == table


# One cell, step by step


@pytest.fixture
def made(runs: Path) -> MadeGrid:
    return MadeGrid(runs)


@pytest.mark.parametrize("anew", [False, True], ids=["one mirror", "a mirror for each step"])
def test_a_run_follows_its_cell(anew: bool, runs: Path, made: MadeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live curves, a failure with its reason, an interrupt, and all in one run, each point once."""
    uri, kept, ids = default_uri(runs), GridMirror(made.folder), set()

    def look() -> tuple[str, str, str, list[int]]:
        """Status, tags `state` and `reason`, and the steps of the curve."""
        (run,) = find_runs(uri, "made", "cell")
        ids.add(run.info.run_id)
        steps = [step for step, _ in read_curve(MlflowClient(uri), run, "train/loss")]
        return run.info.status, run.data.tags.get("state", ""), run.data.tags.get("reason", ""), steps

    def sync(final: bool = False) -> tuple[str, str, str, list[int]]:
        (GridMirror(made.folder) if anew else kept).sync(final)
        return look()

    folder = made.train("softmax", 0, range(1, 3))
    assert sync() == ("RUNNING", "", "", [1, 2])
    made.train("softmax", 0, range(1, 4))
    assert sync() == ("RUNNING", "", "", [1, 2, 3])
    with make_lock(folder).acquire():
        assert sync(final=True) == ("RUNNING", "", "", [1, 2, 3]), "another command trains it"
    made.fail("softmax", 0, "the loss is nan")
    for _ in range(2):
        assert sync() == ("FAILED", "failed", "the loss is nan", [1, 2, 3])
    made.train("softmax", 0, range(3, 5))
    assert sync()[::3] == ("RUNNING", [1, 2, 3, 4])
    assert sync(final=True) == ("KILLED", "failed", "interrupted", [1, 2, 3, 4])
    made.train("softmax", 0, range(5, 6))
    assert sync()[::3] == ("RUNNING", [1, 2, 3, 4, 5])
    made.finish("softmax", 0)
    with monkeypatch.context() as patch:  # killed between MLflow's tag and its status
        patch.setattr(MlflowClient, "set_terminated", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sync()
    assert look()[:2] == ("RUNNING", "complete")
    for final in (False, True):
        assert sync(final) == ("FINISHED", "complete", "", [1, 2, 3, 4, 5])
    assert len(ids) == 1
    whole = describe(uri, "made")
    (parent,) = find_runs(uri, "made", "ablation")
    Tracker(uri, "made").delete_run(parent.info.run_id)
    sync(final=True)
    assert describe(uri, "made") == whole, "MLflow lost it meanwhile"


def test_a_damaged_result_is_not_shown_as_an_end(runs: Path, made: MadeGrid) -> None:
    (made.train("softmax", 0, range(1, 3)) / RESULT).write_text("{")
    GridMirror(made.folder).sync()
    assert find_runs(default_uri(runs), "made")[0].data.tags["kind"] == "ablation"


def test_a_parent_ends_as_its_cells_did(runs: Path, made: MadeGrid) -> None:
    def end() -> str:
        GridMirror(made.folder).sync(final=True)
        (parent,) = find_runs(default_uri(runs), "made", "ablation")
        return parent.info.status

    assert end() == "KILLED"
    for variant, seed in (("softmax", 0), ("softmax", 1), ("lazy", 0)):
        made.finish(variant, seed)
    with make_lock(made.train("lazy", 1, range(1, 2))).acquire():
        GridMirror(made.folder).sync()
        assert end() == "RUNNING"
    assert end() == "KILLED"
    made.fail("lazy", 1, "out of memory")
    assert end() == "FAILED"
    made.finish("lazy", 1)
    assert end() == "FINISHED"


def test_no_error_of_the_mirror_ends_a_grid(made, monkeypatch, caplog, capsys) -> None:
    """Nor one that nobody foresaw. It is said once, and the next sync is tried."""
    monkeypatch.setattr(mlflow_mirror, "SYNC_SECONDS", 0.01)
    failing = Mock(side_effect=KeyError("x"))
    monkeypatch.setattr(GridMirror, "_open_parent", failing)
    with follow(GridMirror(made.folder), Console(width=1000)):
        wait_until(lambda: failing.call_count > 2)
    assert "MLflow lacks results (KeyError: 'x'); `lit-lazy mirror made` sends" in capsys.readouterr().out
    assert caplog.text.count("MLflow lacks the newest results") == 1


def test_a_server_that_hangs_holds_no_end(made, monkeypatch, capsys) -> None:
    """Neither of the command that sends to it nor of another on the same grid."""
    monkeypatch.setattr(mlflow_mirror, "SYNC_SECONDS", 0.01)
    monkeypatch.setattr(mlflow_mirror, "BUSY_SECONDS", 0.2)
    monkeypatch.setattr(mlflow_mirror, "HANG_SECONDS", 0.5)
    hangs, answers, begun = threading.Event(), threading.Event(), time.monotonic()

    def hang(*_: object) -> str:
        hangs.set()
        answers.wait(30)
        raise TrackingError("it has answered")

    monkeypatch.setattr(GridMirror, "_open_parent", hang)
    with follow(GridMirror(made.folder), Console(width=1000)):
        assert hangs.wait(5)
    assert "MLflow lacks results (no answer); `lit-lazy mirror made`" in capsys.readouterr().out
    with follow(GridMirror(made.folder), Console(width=1000)):
        pass
    busy = "MLflow lacks results (another process has been sending made to MLflow for 0.2 s); `lit-lazy mirror made`"
    assert busy in capsys.readouterr().out
    assert time.monotonic() - begun < 5
    answers.set()
    wait_until(lambda: not is_held(made.folder / "mirror.lock"))


def test_one_who_ran_the_same_grid_with_the_same_mlflow_keeps_their_runs(runs: Path, made: MadeGrid) -> None:
    made.finish("softmax", 0)
    GridMirror(made.folder).sync(final=True)
    theirs = MadeGrid(runs.with_name("theirs"))
    theirs.finish("softmax", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", default_uri(runs))
        GridMirror(theirs.folder).sync(final=True)
        aside = theirs.folder.rename(theirs.folder.with_name(f"made{ASIDE}20260101-000000"))
        MadeGrid(runs.with_name("theirs"))
        GridMirror(theirs.folder).sync(final=True)
    kept = {run.data.tags["grid"] for run in find_runs(default_uri(runs), "made") if "grid" in run.data.tags}
    assert kept == {(folder / GRID_ID).read_text() for folder in (made.folder, theirs.folder)}
    assert (aside / GRID_ID).read_text() not in kept


# The parent run's page


def test_it_describes_a_grid_and_shows_its_primary_outcome(copied: Path, tmp_path: Path) -> None:
    table = results(ID, runs=copied).table
    client = MlflowClient(default_uri(copied))
    experiment = client.get_experiment_by_name(ID)
    described = []
    for page in ("report.html", "table.html"):
        GridMirror(copied / ID).sync(final=True)
        (run,) = find_runs(default_uri(copied), kind="ablation")
        described.append(run.data.tags["mlflow.note.content"])
        assert client.get_experiment_by_name(ID).tags["mlflow.note.content"] == described[-1]
        link = f"#/experiments/{experiment.experiment_id}/runs/{run.info.run_id}/artifacts/{page}"
        assert f"\n[{page}]({link}?workflowType=machine_learning)\n" in described[-1], page
        (copied / ID / "report.html").unlink(missing_ok=True)
    assert described[0].startswith(describe_findings(table)[0])
    key = table.main_columns[0].key
    shown = {name.removeprefix(f"{key}/"): value for name, value in run.data.metrics.items()}
    means = {name: measure.mean for name, measure in table.measures[key].items()}
    assert shown == {name: float(f"{mean:.4g}") for name, mean in means.items() if mean is not None}
    assert run.data.tags["mlflow.source.git.commit"] == run.data.tags["git_sha"]
    rows = ", ".join(f"lr={index / 7:.12g} tau_init=1.0" for index in range(900))
    note = join_note([f"Not separated: {rows}.", f"Undecided: {rows}.", "lit-lazy"], "table.md")
    assert 7900 < len(note) <= 8000, "MLflow would cut it"
    assert note.endswith(" ... (shortened; the whole is in table.md)\n\nlit-lazy")
    made = MadeGrid(tmp_path, rows=("a+b", "a*b"))  # which MLflow cannot tell apart
    for variant in ("a+b", "a*b"):
        made.finish(variant, 0, {"loss/excess": 0.5})
    assert set(collect_outcomes(made.read().build_table())) == {"loss/excess/a_b", "loss/excess/a_b_"}


def test_a_run_names_the_user_of_the_environment(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    tracker = Tracker(default_uri(runs), "probe")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("USER", "bob")
    for gone, shown in (("", "ada"), ("LOGNAME", "bob"), ("USER", None)):
        monkeypatch.delenv(gone, raising=False)
        tags = tracker.client.get_run(tracker.create_run("probe", {"kind": "probe"})).data.tags
        assert (tags.get("mlflow.user"), tags["mlflow.source.name"]) == (shown, "lit-lazy")
