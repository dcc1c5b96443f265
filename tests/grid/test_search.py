"""A search: real workers, queue and MLflow store; each point is drawn once, finished once, and pruned when hopeless."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from mistakes import expect_refusal
from mlflow.tracking import MlflowClient

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.command.main import main
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import load_experiment
from lit_lazy.grid.queue.liveness import Membership
from lit_lazy.grid.queue.queue import CellLostError, Task
from lit_lazy.grid.search.definition import Definition, Real, Search, define, load_search
from lit_lazy.grid.search.queue import SearchQueue
from lit_lazy.grid.search.worker import PrunedError, Pruning, SearchWorker
from lit_lazy.report.search import SearchReport
from lit_lazy.support.named_files import find
from lit_lazy.table.search_points import Point
from lit_lazy.tracking.store import default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.trainer import MissedValidation

TAU, LR, BASE = "model.attention.normaliser.tau_init", "train.lr", "model.position.base"
SEARCH = '''
"""Learning rates from hopeless to good; none is pruned before two points are complete."""
from lit_lazy.attention import Elastic
from lit_lazy.grid.search.definition import Real, Search

search = Search(
    name="rates",
    base="backcopy_tiny",
    common={"model.attention.normaliser": Elastic()},
    axes={"train.lr": Real(1e-6, 0.1, log=True), "model.attention.normaliser.tau_init": Real(0.0, 2.0)},
    trials=5,
    startup=2,
)
'''
ID = "search-rates-backcopy_tiny"


@pytest.fixture
def rates(tmp_path: Path) -> str:
    path = tmp_path / "rates.py"
    path.write_text(SEARCH)
    return str(path)


def base(**changes: object) -> RunConfig:
    return replace_at(
        load_experiment(find("experiments", "backcopy_tiny")), {TAU.rpartition(".")[0]: Elastic()} | changes
    )


def search(**changes: object) -> Search:
    axes = {LR: Real(1e-4, 1e-1, log=True), TAU: Real(0, 2)}
    return Search(**{"name": "s", "base": "backcopy_tiny", "axes": axes, "startup": 2, **changes})


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Real(2, 1), r"Real\(2, 1\): needs two finite numbers, the lower one first"),
        (lambda: Real(1, 1), "the lower one first"),
        (lambda: Real(0, float("inf")), "two finite numbers"),
        (lambda: Real(0.0, 1.0, log=True), "the lower end must be above 0"),
        (lambda: search(axes={}), "needs at least one"),
        (lambda: search(trials=0), "search 's': trials=0: must be a whole number of at least 1"),
        (lambda: search(objective="loss"), "choose loss/val or loss/excess"),
        (lambda: search(prune_from=1.5), r"must be in \[0, 1\]"),
        (lambda: define(search(axes={"train.rate": Real(0, 1)}), base()), "axis 'train.rate' is no field"),
        (lambda: define(search(axes={"train.steps": Real(5, 9)}), base()), "axis 'train.steps' is 6 here"),
        (lambda: define(search(axes={"model.position": Real(5, 9)}), base()), "is 'Rope' here, and must be a real"),
        (lambda: define(search(axes={LR: Real(-1, 1)}), base()), "no training at train.lr=-1: train.lr=-1"),
        (lambda: define(search(), base(), [LR]), "--train.lr: is an axis of search 's'"),
        (lambda: define(search(), base(**{TAU.rpartition(".")[0]: Softmax()})), "tau_init' is no field"),
        (
            lambda: define(search(objective="loss/excess"), load_experiment(find("experiments", "stdlib_tiny"))),
            "search 's'",
        ),
    ],
)
def test_a_malformed_search_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_an_objective_that_the_data_does_not_know_is_refused() -> None:
    made = search(objective="loss/excess", axes={LR: Real(1e-3, 1e-2)})
    with pytest.raises(ValueError, match="the data 'stdlib' has no known optimum; take loss/val"):
        define(made, load_experiment(find("experiments", "stdlib_tiny")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["search", "nothing"], "ablation 'nothing': unknown"),
        (["search", "table2"], "defines an ablation, not a search; `lit-lazy ablate run table2` runs it"),
        (["run", "lazy_search"], "defines a search, not an ablation; `lit-lazy ablate search lazy_search` runs it"),
        (["search", "lazy_search", "--base", "backcopy_tiny", "--train.lr=0.1"], "is an axis of search"),
        (["search", "lazy_search", "--base", "backcopy_tiny", "--model.position=NoPosition"], "base' is no field"),
    ],
)
def test_a_wrong_command_is_one_line_and_creates_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in expect_refusal(["ablate", *words], capsys)
    assert list(tmp_path.iterdir()) == []


def test_the_list_tells_searches_from_ablations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "list"]) == 0
    ablations, _, searches = capsys.readouterr().out.partition("searches:\n")
    assert "table2_grid" in ablations
    assert searches.startswith("  lazy_search ")


def test_a_dry_run_creates_nothing(rates: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.iterdir())
    runs = str(tmp_path / "none")
    assert main(["ablate", "search", rates, "--dry-run", "--runs", runs, "--trials", "7", "--workers", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "7 points of search-rates-backcopy_tiny" in out
    assert "Pruning from step 2 on: after 3 of 6 steps." in out
    assert sorted(tmp_path.iterdir()) == before


# The queue


def begun(place: Path | str, points: int, changes: Mapping[str, object] | None = None, **parts: object) -> SearchQueue:
    """The queue of a search, as its parent process leaves it; changes: made to the experiment."""
    queue = SearchQueue(place if isinstance(place, str) else f"sqlite:///{place / 'queue.db'}", "search-s")
    definition = define(search(**parts), base(**changes or {}))
    queue.facts = {"parent": "p", "tracking": "t", "definition": definition.to_json()}
    queue.add_missing([definition.make_placeholder(number) for number in range(points)])
    return queue


def loss(task: Task) -> float:
    """A made-up objective of a point."""
    return (
        abs(task.cell.config["train"]["lr"] - 0.01) + task.cell.config["model"]["attention"]["normaliser"]["tau_init"]
    )


def take(queue: SearchQueue, member: Membership) -> Task:
    task = queue.claim(member.identity)
    assert task is not None
    return task


def drawn(tmp_path: Path, points: int, interrupted_at: int = -1, seed: int = 0) -> list[dict[str, float]]:
    tmp_path.mkdir()
    queue = begun(tmp_path, points, seed=seed)
    with Membership(tmp_path / "workers") as member:
        for number in range(points):
            task = take(queue, member)
            if number == interrupted_at:
                queue.requeue(task, "interrupted")
                queue = SearchQueue(queue.url, queue.name)
                again = take(queue, member)
                assert again.cell == task.cell
                task = again
            queue.complete(task, loss(task))
    return [point.params for point in queue.points()]


def test_one_worker_draws_the_same_points_again_also_when_interrupted(tmp_path: Path) -> None:
    first = drawn(tmp_path / "a", 4)
    assert drawn(tmp_path / "b", 5, interrupted_at=3)[:4] == first
    assert drawn(tmp_path / "c", 1, seed=1)[0] != first[0]
    assert len({point[LR] for point in first}) == 4
    assert all(1e-4 <= point[LR] <= 1e-1 and 0 <= point[TAU] <= 2 for point in first)


@pytest.mark.long
def test_tpe_looks_where_the_good_points_are(tmp_path: Path) -> None:
    queue = begun(tmp_path, 20, startup=5)
    with Membership(tmp_path / "workers") as member:
        for _ in range(20):
            task = take(queue, member)
            queue.complete(task, loss(task))
    values = [point.value for point in queue.points()]
    assert sum(values[5:]) / 15 < 0.66  # of random points: mean 1.03, standard deviation 0.15
    best = queue.best()
    assert best is not None
    assert best.value == min(values)
    assert max(queue.importances(), key=queue.importances().__getitem__) == TAU


@pytest.mark.parametrize("storage", ["sqlite", "postgresql"])
def test_a_hopeless_point_is_told_at_the_step_where_others_are_known(
    storage: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = tmp_path if storage == "sqlite" else request.getfixturevalue("postgres_storage")
    queue = begun(place, 4, prune_from=0.5)  # of 6 steps
    with Membership(tmp_path / "workers") as member:
        for curve in ({3: 2.0, 6: 1.0}, {3: 3.0, 6: 2.0}):
            task = take(queue, member)
            assert not any(queue.should_prune(task, step, value) for step, value in curve.items())
            queue.complete(task, curve[6])
        good, bad = take(queue, member), take(queue, member)
        assert not queue.should_prune(good, 2, 99.0)  # before half of the steps
        assert not queue.should_prune(good, 3, 2.4)
        assert not queue.should_prune(bad, 2, 99.0)
        assert queue.should_prune(bad, 3, 2.6)  # the median of 2 and 3 is 2.5
        # A resumed run repeats the step: it is judged again, and the earlier report stays.
        assert queue.should_prune(bad, 3, 1.0)
        queue.prune(bad, "worse", diverged=False)
        points = queue.points()
        assert points[3].reports == {2: 99.0, 3: 2.6}
        assert (points[3].state, points[3].value) == ("pruned", None)
        with pytest.raises(CellLostError):
            queue.should_prune(bad, 6, 1.0)
        with pytest.raises(CellLostError):
            queue.prune(bad, "worse again", diverged=False)
    assert queue.add_missing([queue.definition.make_placeholder(number) for number in range(4)]) == 0


def test_a_failed_point_is_drawn_anew(tmp_path: Path) -> None:
    queue = begun(tmp_path, 1)
    with Membership(tmp_path / "workers") as member:
        first = take(queue, member)
        queue.fail(first, "out of memory")
        assert queue.add_missing([queue.definition.make_placeholder(0)]) == 1
        assert take(queue, member).cell.key != first.cell.key
    assert [point.state for point in queue.points()] == ["running"]


# From the command line to MLflow


def points_of(runs: Path) -> list[dict[str, str]]:
    with (runs / ID / "table.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_search_from_start_to_table_and_on(runs: Path, rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ablate", "search", rates, "--runs", str(runs), "--workers", "2"]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "5 points, 0 already finished, 5 to train" in out
    assert "5/5 cells done" in out
    assert "best " in out
    first = {row["point"]: row for row in points_of(runs)}
    assert sorted(first) == list("01234")
    results = {path.parent.name: path.stat().st_mtime_ns for path in runs.glob(f"{ID}/cells/*/result.json")}

    assert main([*command[:-1], "1", "--trials", "8"]) == 0
    assert "8 points, 5 already finished, 3 to train" in capsys.readouterr().out
    rows = {row["point"]: row for row in points_of(runs)}
    assert sorted(rows) == list("01234567")
    assert {number: rows[number] for number in first} == first
    after = {path.parent.name: path.stat().st_mtime_ns for path in runs.glob(f"{ID}/cells/*/result.json")}
    assert {run: after[run] for run in results} == results

    states = [row["state"] for row in rows.values()]
    assert states.count("complete") + states.count("pruned") == 8
    assert states.count("pruned") >= 1, "rates that learn nothing are worse than the median"
    for row in rows.values():
        folder = runs / ID / "cells" / row["run"]
        assert not (folder / "checkpoints").exists()
        assert (folder / "result.json").exists() == (row["state"] == "complete")
        if row["state"] == "complete":
            result = json.loads((folder / "result.json").read_text())
            assert float(row["loss/val"]) == result["metrics"]["loss/val"]
            assert float(row["train.lr"]) == result["config"]["train"]["lr"]
            assert (row["steps"], row["n"]) == ("6", "1")
        else:
            assert (row["loss/val"], row["steps"], row["n"]) == ("", "3", "0")
            assert "worse than the median" in row["reason"]
    complete = [float(row["loss/val"]) for row in points_of(runs) if row["state"] == "complete"]
    assert complete == sorted(complete)

    started = time.monotonic()
    assert main(command) == 0
    assert "5 points, all finished: nothing to do" in capsys.readouterr().out
    assert time.monotonic() - started < 10
    check_mlflow(runs, rows)

    (kept,) = (runs / "mlartifacts").rglob("search.json")
    whole = kept.read_text()
    kept.write_text(whole[:100])
    assert main(command) == 0
    assert "the old one is now search.json.damaged" in " ".join(capsys.readouterr().out.split())
    assert (kept.read_text(), kept.with_name("search.json.damaged").read_text()) == (whole, whole[:100])

    text = Path(rates).read_text()
    other = Path(rates).parent / "other" / "rates.py"
    other.parent.mkdir()
    other.write_text(text.replace("0.1, log", "0.2, log").replace("startup=2", "startup=3"))
    assert main(["ablate", "search", str(other), "--runs", str(runs), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert "axes, startup changed since this search was started; --fresh moves the former results away" in error
    assert error.count("\n") == 1


def check_mlflow(runs: Path, rows: dict[str, dict[str, str]]) -> None:
    """One parent with table and figures, one child per point with axes and the right status."""
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    number = client.get_experiment_by_name(ID).experiment_id
    found = client.search_runs([number])
    (parent,) = [run for run in found if run.data.tags["kind"] == "search"]
    children = [run for run in found if run.data.tags["kind"] == "cell"]
    artifacts = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    tables = {f"table.{ending}" for ending in ("md", "csv", "json", "html")}
    figures = {f"{name}.{ending}" for name in ("history", "slices") for ending in ("png", "svg")}
    assert tables | figures | {"search.json", "config.yaml"} <= artifacts
    assert parent.info.status == "FINISHED"
    assert parent.data.params["axis.lr"] == "1e-06 to 0.1, log"
    by_run = {row["run"]: row for row in rows.values()}
    assert sorted(run.data.tags["cell"] for run in children) == sorted(by_run)
    for run in children:
        row, tags = by_run[run.data.tags["cell"]], run.data.tags
        assert tags["mlflow.parentRunId"] == parent.info.run_id
        assert tags["variant"] == f"point {row['point']}"
        assert {"lr", "tau_init"} <= run.data.params.keys()
        assert float(run.data.params["lr"]) == float(row["train.lr"])
        if row["state"] == "complete":
            assert (run.info.status, tags["state"]) == ("FINISHED", "complete")
            assert run.data.metrics["loss/val"] == pytest.approx(float(row["loss/val"]))
        else:
            assert (run.info.status, tags["state"], tags["optuna.state"]) == ("KILLED", "pruned", "PRUNED")
            assert run.data.metrics["val/loss"] == pytest.approx(float(row["last_validation"]))


LONG = (
    *("--train.steps=600", "--train.checkpoint_every=20", "--train.val_every=100", "--train.log_every=100"),
    *("--trials", "2", "--workers", "1"),
)
"""Points that train for a few seconds, long enough to be killed in training."""


def start(runs: Path, rates: str) -> "subprocess.Popen[str]":
    return forked.Popen(
        [sys.executable, "-m", "lit_lazy.command", "ablate", "search", rates, "--runs", str(runs), *LONG],
        stdout=forked.PIPE,
        stderr=forked.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_reports(runs: Path, process: "subprocess.Popen[str]") -> SearchQueue:
    """Wait until a point in training has a validation and a checkpoint; returns the queue."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        for checkpoint in runs.glob(f"{ID}-*/cells/*/checkpoints/last.ckpt"):
            queue = SearchQueue(f"sqlite:///{runs / 'queue.db'}", checkpoint.relative_to(runs).parts[0])
            if any(point.state == "running" and point.reports for point in queue.points()):
                return queue
        time.sleep(0.1)
    raise AssertionError("no point began to train")


@pytest.mark.long
def test_a_killed_worker_costs_nothing_and_is_counted_once(runs: Path, rates: str) -> None:
    """A point whose worker is killed in training resumes from its checkpoint in another worker."""
    process = start(runs, rates)
    queue = wait_for_reports(runs, process)
    (victim, *_) = [entry for entry in queue.entries("running") if entry.worker]
    before = {point.number: point for point in queue.points()}
    os.kill(int(victim.worker["pid"]), signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert f"{victim.variant} seed 0: its worker (process {victim.worker['pid']}" in out
    points = queue.points()
    assert [point.number for point in points] == [0, 1]
    assert {point.state for point in points} <= {"complete", "pruned"}
    killed = int(victim.key.removeprefix("point "))
    assert (points[killed].params, points[killed].run) == (before[killed].params, before[killed].run)
    for point in points:
        assert set(point.reports) <= set(range(100, 601, 100)), "validations of a resumed run fall on the same steps"
        assert before[point.number].reports.items() <= point.reports.items()
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    number = client.get_experiment_by_name(queue.name).experiment_id
    children = client.search_runs([number], "tags.kind = 'cell'")
    assert len(children) == 2
    assert {run.info.status for run in children} <= {"FINISHED", "KILLED"}


def test_a_validation_that_a_kill_cut_off_is_reported_when_it_is_repeated() -> None:
    missed, reported = MissedValidation(None, {}), []
    trainer = SimpleNamespace(callbacks=[missed], global_step=3, max_steps=6)
    pruning = Pruning("val/loss", lambda step, value: reported.append((step, value)) or value > 2)
    pruning.on_start(trainer, None)
    assert not reported, "no validation was cut off"
    missed.repeated = {"val/loss": 2.0, "val/excess": 1.0}
    pruning.on_start(trainer, None)
    assert reported == [(3, 2.0)]
    missed.repeated = {"val/loss": 3.0}
    with pytest.raises(PrunedError):
        pruning.on_start(trainer, None)


@pytest.mark.long
def test_interrupt_and_resume(runs: Path, rates: str) -> None:
    process = start(runs, rates)
    queue = wait_for_reports(runs, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 130, out
    assert "the same command resumes" in out
    stopped = {point.number: point.params for point in queue.points() if point.params}
    assert "running" not in {point.state for point in queue.points()}
    assert main(["ablate", "search", rates, "--runs", str(runs), *LONG]) == 0
    points = queue.points()
    assert {point.state for point in points} <= {"complete", "pruned"}
    assert len(points) == 2
    assert {number: points[number].params for number in stopped} == stopped


def test_a_point_that_diverges_is_finished_and_says_so(runs: Path) -> None:
    """Otherwise the sampler would ignore it and retry it forever."""
    queue = begun(runs, 1, axes={LR: Real(1e18, 1e20)}, changes={"train.log_every": 1})
    tracker = Tracker(default_uri(runs), runs, queue.name)
    SearchWorker(queue, tracker, tracker.start_run("parent", {"kind": "search"}, {}, {}), runs / queue.name).work()
    (point,) = queue.points()
    assert (point.state, point.value) == ("diverged", None)
    assert "diverged: training loss is" in point.reason
    (child,) = tracker.find({"kind": "cell"})
    assert child.tags["optuna.state"] == "PRUNED"
    assert child.tags["reason"] == point.reason


# Table and figures


def report(importances: dict[str, float]) -> SearchReport:
    points = [
        Point(0, "a", {LR: 0.001, TAU: 0.5}, "complete", 1.25, {3: 1.5, 6: 1.25}, ""),
        Point(1, "b", {LR: 0.002, TAU: 1.5}, "pruned", None, {3: 1.75}, "worse"),
        Point(2, "c", {LR: 0.003, TAU: 1.0}, "complete", 1.125, {3: 1.25, 6: 1.125}, ""),
        Point(3, "d", {LR: 0.09, TAU: 1.0}, "diverged", None, {}, "diverged: training loss is nan"),
        Point(4, "", {}, "waiting", None, {}, ""),
    ]
    return SearchReport("search-s", define(search(), base()), points, importances, ["abc"], "lit-lazy ablate search s")


def test_the_table_ranks_complete_points_and_says_what_it_is_not() -> None:
    text = report({LR: 0.75, TAU: 0.25}).markdown()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == ["Point", "lr", "tau_init", "validation loss (nats) ↓", "steps", "last", "state", "n"]
    assert rows[2:] == [
        ["2", "0.003", "1", "1.12500", "6", "1.12500", "complete", "1"],
        ["0", "0.001", "0.5", "1.25000", "6", "1.25000", "complete", "1"],
        ["1", "0.002", "1.5", "–", "3", "1.75000", "pruned", "0"],
        ["3", "0.09", "1", "–", "0", "–", "diverged", "0"],
        ["4", "–", "–", "–", "0", "–", "waiting", "0"],
    ]
    for said in (
        "One seed per point",
        "The best of 2 noisy values",
        "A diverged point",
        "A pruned point has no final value",
        "lr 75 %",
    ):
        assert said in text
    assert "No importances" in report({}).markdown()


def test_figures_show_every_measured_point() -> None:
    made = report({LR: 0.75, TAU: 0.25})
    figures = made.draw_figures()
    assert list(figures) == ["history", "slices", "importance"]
    (history,) = figures["history"].axes
    dots = [line for line in history.lines if len(line.get_xdata()) == 1]
    shown = {line.get_xdata()[0]: (line.get_ydata()[0], line.get_marker()) for line in dots}
    # The pruned point is an outlier, so it is drawn at the edge.
    assert shown == {0: (1.25, "o"), 1: (1.25 + 1.5 * 0.125, "^"), 2: (1.125, "D")}
    assert list(history.lines[0].get_ydata()) == [1.25, 1.125]
    assert [axes.get_xscale() for axes in figures["slices"].axes] == ["log", "linear"]
    assert [bar.get_width() for bar in figures["importance"].axes[0].patches] == [75, 25]
    assert replace(made, points=made.points[4:], importances={}).draw_figures() == {}


def test_the_shipped_search_fits_its_experiment() -> None:
    shipped = load_search(find("ablations", "lazy_search"))
    experiment = replace_at(load_experiment(find("experiments", shipped.base)), shipped.common)
    definition = define(shipped, experiment)
    assert list(definition.names.values()) == ["tau_init", "lr", "base"]
    assert Definition.from_json(definition.to_json()) == definition
    old = json.loads(definition.to_json())
    del old["code"], old["base"]["model"]["embedding_init_std"]  # from an earlier version
    assert definition.find_differences(Definition.from_json(json.dumps(old))) == ["base"]
