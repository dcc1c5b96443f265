"""A search: each point is drawn once, finished once, and pruned when hopeless, whatever ends its commands."""

import csv
import errno
import json
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from instant import SEARCH, STEPS, Lab, Training, hold, wait_until
from mlflow.tracking import MlflowClient

from lit_lazy.attention import Elastic
from lit_lazy.command.main import main
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.user_files import experiment
from lit_lazy.grid.ablation import Cell, load_defined
from lit_lazy.grid.cell_state import HOLDER, claim, read_state
from lit_lazy.grid.grid_folder import ASIDE
from lit_lazy.grid.search.definition import Definition, Real, Search, define
from lit_lazy.grid.search.run import SearchDriver, SearchWork
from lit_lazy.grid.study import JOURNAL
from lit_lazy.grid.work_records import Ending, Job
from lit_lazy.grid.worker import PrunedError, Pruning, execute
from lit_lazy.report.index_and_search_pages import SearchReport
from lit_lazy.support.names_to_paths import find
from lit_lazy.table.records import Point
from lit_lazy.training.callbacks_and_loggers import MissedValidation
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.module import DivergedError
from lit_lazy.training.run_folder import RunResult, locate_cell, write_failure

TAU, LR = "model.attention.normaliser.tau_init", "train.lr"
ID = "search-rates-backcopy_tiny"


def base(**changes: object) -> RunConfig:
    return experiment("backcopy_tiny", {TAU.rpartition(".")[0]: Elastic()} | changes)


def search(**changes: object) -> Search:
    axes = {LR: Real(1e-4, 1e-1, log=True), TAU: Real(0, 2)}
    return Search(**{"name": "s", "base": "backcopy_tiny", "axes": axes, "startup": 2, **changes})


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Real(2, 1), r"Real\(2, 1\): low=2: must be below high=1"),
        (lambda: define(search(axes={"train.rate": Real(0, 1)}), base()), "corner 0.: TrainConfig has no field"),
        (lambda: define(search(axes={"train.steps": Real(5, 9)}), base()), r"train.steps=5\.0: must be a whole number"),
        (lambda: define(search(axes={LR: Real(-1, 1)}), base()), "search 's': row 'corner 0': train.lr=-1"),
        (lambda: define(search(), base(), [LR]), "--train.lr: is an axis of search 's'"),
        (
            lambda: define(search(objective="loss/excess", axes={LR: Real(1e-3, 1e-2)}), experiment("stdlib_tiny")),
            "search 's'.*the data 'stdlib' has no known optimum; take loss/val",
        ),
    ],
)
def test_a_malformed_search_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


# Drawing


def begun(folder: Path, points: int, **parts: object) -> SearchDriver:
    """The driver of a search in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "search-s").mkdir(exist_ok=True)
    definition = define(search(**parts), base())
    cells = [definition.make_placeholder(number) for number in range(points)]
    return SearchDriver(SearchWork("search-s", cells, folder, (), definition), None)


def take(driver: SearchDriver) -> Cell:
    cell = driver.choose()
    assert cell is not None
    return cell


def complete(driver: SearchDriver, cell: Cell, loss: float | None = None) -> None:
    """loss: None for a made-up objective of the point."""
    if loss is None:
        loss = abs(cell.config["train"]["lr"] - 0.01) + cell.config["model"]["attention"]["normaliser"]["tau_init"]
    folder = locate_cell(driver.work.folder, cell.key)
    folder.mkdir(parents=True, exist_ok=True)
    fields = {}, {"loss/val": loss}, {}, {}, {"git_sha": "x"}, "data", {}, cell.key, {}
    RunResult(cell.key, cell.config, *fields).write(folder)
    driver.record(Ending(cell.key, "done"))


def fail(driver: SearchDriver, cell: Cell, reason: str, final: bool = False) -> None:
    """As a worker does."""
    write_failure(locate_cell(driver.work.folder, cell.key), reason, final)
    driver.record(Ending(cell.key, "failed", reason, final))


def drawn(folder: Path, points: int, interrupted_at: int = -1, seed: int = 0) -> list[dict[str, float]]:
    driver = begun(folder, points, seed=seed)
    for number in range(points):
        cell = take(driver)
        if number == interrupted_at:
            driver.record(Ending(cell.key, "interrupted"))
            driver = SearchDriver(driver.work, None)
            again = take(driver)
            assert again == cell
        complete(driver, cell)
    assert driver.choose() is None
    return [point.params for point in driver.points()]


def test_one_worker_draws_the_same_points_again_also_when_interrupted(tmp_path: Path) -> None:
    first = drawn(tmp_path / "a", 4)
    assert drawn(tmp_path / "b", 5, interrupted_at=3)[:4] == first
    assert drawn(tmp_path / "c", 1, seed=1)[0] != first[0]
    assert len({point[LR] for point in first}) == 4
    assert all(1e-4 <= point[LR] <= 1e-1 and 0 <= point[TAU] <= 2 for point in first)
    (tmp_path / "a" / "search-s" / JOURNAL).unlink()  # the folders say what was drawn
    driver = begun(tmp_path / "a", 4)
    for _ in range(4):
        cell = take(driver)
        assert (locate_cell(driver.work.folder, cell.key) / "result.json").exists()
        driver.record(Ending(cell.key, "done"))
    assert [point.params for point in driver.points()] == first


def test_tpe_looks_where_the_good_points_are(tmp_path: Path) -> None:
    values: list[float] = []
    for seed in range(4):
        driver = begun(tmp_path / str(seed), 20, startup=5, seed=seed)
        for _ in range(20):
            complete(driver, take(driver))
        values += [point.value or 0.0 for point in driver.points()[5:]]
    assert mean(values) < 0.66  # of so many random points: mean 1.03, standard deviation 0.075
    importances = driver.importances()
    assert max(importances, key=importances.__getitem__) == TAU
    (best,) = driver.describe_best()
    assert best.startswith(f"best {min(point.value or 0.0 for point in driver.points()):.4f} at point ")


def test_a_hopeless_point_is_told_at_the_step_where_others_are_known(tmp_path: Path) -> None:
    driver = begun(tmp_path, 4, prune_from=0.5)  # of 6 steps
    for curve in ({3: 2.0, 6: 1.0}, {3: 3.0, 6: 2.0}):
        cell = take(driver)
        assert not any(driver.judge(cell.key, step, value) for step, value in curve.items())
        complete(driver, cell, curve[6])
    good, bad = take(driver), take(driver)
    assert not driver.judge(good.key, 2, 99.0)  # before half of the steps
    assert not driver.judge(good.key, 3, 2.4)
    assert not driver.judge(bad.key, 2, 99.0)
    worse = "val/loss 2.6 at step 3 is worse than the median of the points there"  # of 2 and 3
    assert driver.judge(bad.key, 3, 2.6) == worse
    # A resumed run repeats the step: it is judged again, and the earlier report stays.
    assert driver.judge(bad.key, 3, 2.6) == worse
    fail(driver, bad, worse, final=True)
    (*_, point) = driver.points()
    assert (point.state, point.value, point.reports, point.reason) == ("pruned", None, {2: 99.0, 3: 2.6}, worse)
    assert not driver.judge(good.key, 6, 99.0), "after the last step there is nothing to save"


def begin_with_two_losses(folder: Path) -> SearchDriver:
    """At step 3, from which points are judged."""
    driver = begun(folder, 3, prune_from=0.5)
    for loss in (2.0, 3.0):
        cell = take(driver)
        driver.judge(cell.key, 3, loss)
        complete(driver, cell, loss)
    return driver


def test_a_point_that_lost_its_finite_loss_diverged(tmp_path: Path) -> None:
    """Although its training is ended as hopeless ones are."""
    driver = begin_with_two_losses(tmp_path)
    cell = take(driver)
    fail(driver, cell, driver.judge(cell.key, 3, math.nan), final=True)
    (*_, point) = driver.points()
    assert (point.state, point.reason) == ("diverged", "diverged: val/loss nan at step 3")


def test_a_hopeless_point_whose_command_died_is_not_trained_on(tmp_path: Path) -> None:
    driver = begin_with_two_losses(tmp_path)
    cell = take(driver)
    lock = claim(folder := locate_cell(driver.work.folder, cell.key))
    reason = driver.judge(cell.key, 3, 9.0)
    lock.release(force=True)  # its worker died too
    again = begun(tmp_path, 3, prune_from=0.5)
    assert again.choose() is None
    assert (again.points()[2].state, again.points()[2].reason) == ("pruned", reason)
    assert not (folder / HOLDER).exists()


def test_a_failed_point_is_drawn_anew_by_the_next_command(tmp_path: Path) -> None:
    driver = begun(tmp_path, 1)
    first = take(driver)
    fail(driver, first, "out of memory")
    assert driver.choose() is None
    assert driver.states() == {"point 0": "failed"}
    again = begun(tmp_path, 1)
    assert take(again).key != first.key
    assert [point.state for point in again.points()] == ["running"]


def test_an_ending_for_which_the_disk_had_no_room_is_recorded_later(tmp_path: Path, monkeypatch: Any) -> None:
    driver = begun(tmp_path, 1)
    cell = take(driver)
    with monkeypatch.context() as patch:
        patch.setattr(driver.study, "tell", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            complete(driver, cell, 0.5)
    assert driver.states() == {"point 0": "running"}
    driver.record(Ending(cell.key, "done"))
    assert driver.states() == {"point 0": "complete"}


def test_a_point_that_another_command_told_is_left_as_it_is(tmp_path: Path) -> None:
    """Both gave it to a worker; the second one found it done, or lost."""
    one = begun(tmp_path, 1)
    cell = take(one)
    two = SearchDriver(one.work, None)
    assert take(two) == cell
    complete(one, cell, 0.5)
    assert two.judge(cell.key, 2, 0.7) == "another command has ended it"
    two.record(Ending(cell.key, "failed", "why"))
    (point,) = SearchDriver(one.work, None).points()
    assert (point.state, point.value, point.reason) == ("complete", 0.5, "")


def test_a_pruned_point_that_two_commands_gave_to_workers_is_trained_once(tmp_path: Path, training: Training) -> None:
    """The second worker may begin when the first one has ended, and its command has not told yet."""
    one = begun(tmp_path, 3, prune_from=0.5)
    for loss in (-2.0, -3.0):
        cell = take(one)
        one.judge(cell.key, 4, loss)
        complete(one, cell, loss)
    cell, two = take(one), begun(tmp_path, 3, prune_from=0.5)
    assert take(two) == cell
    job = Job(one.work.folder, "", 1, (), monitored="val/loss")
    endings = [execute(cell, job, Interrupts(), partial(driver.judge, cell.key)) for driver in (one, two)]
    assert [ending.kind for ending in endings] == ["pruned", "busy"]
    assert training.log.read_text().splitlines() == [f"{cell.key} 2", f"{cell.key} 4"]
    for driver, ending in zip((two, one), reversed(endings), strict=True):
        driver.record(ending)
        assert driver.choose() is None
        assert (driver.points()[2].state, driver.points()[2].reason) == ("pruned", endings[0].reason)


# Commands with workers, and trainings of an instant


def points_in(lab: Lab) -> dict[int, Point]:
    return {point.number: point for point in SearchDriver(lab.work, None).points()}


@pytest.mark.parametrize("storage", [None, "sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_commands_that_share_a_search_draw_each_point_once(storage, search_lab, tmp_path, request) -> None:
    """In whatever storage; after --fresh they draw new ones."""
    urls = {None: str, "sqlite": lambda: f"sqlite:///{tmp_path / 'studies.db'}"}
    url = urls.get(storage, lambda: request.getfixturevalue("postgres_storage"))() or None
    commands = [search_lab.start(storage=url) for _ in range(3)]
    assert [command.wait() for command in commands] == [0] * 3, "".join(command.said for command in commands)
    points = SearchDriver(search_lab.work, url).points()
    assert [point.number for point in points] == list(range(6))
    assert {path.name for path in (search_lab.folder / "cells").iterdir()} == {point.run for point in points}
    assert set(search_lab.count_steps().values()) == {1}
    search_lab.training.log.unlink()
    assert "6 points, 0 already finished, 6 to train" in search_lab.run(fresh=True, storage=url)
    (aside,) = search_lab.runs.glob(f"{ID}{ASIDE}*")
    results = {path.parent.name for path in aside.glob("cells/*/result.json")}
    assert results == {point.run for point in points if point.state == "complete"}
    assert set(search_lab.count_steps().values()) == {1}


def test_a_damaged_definition_is_one_line(search_lab: Lab) -> None:
    """Whether this search is the one that began is not known any more."""
    search_lab.run()
    file = search_lab.folder / "search.json"
    for content in (b"", b"{", b"[]", b'{"axes": 3}'):
        file.write_bytes(content)
        said = search_lab.run(status=2)
        assert said.startswith(f"lit-lazy: '{file}': is damaged (no definition of a search")
        assert said.count("\n") == 1
    search_lab.run(fresh=True)


def test_a_worker_ends_with_its_command_and_the_point_goes_on_from_its_checkpoint(search_lab: Lab) -> None:
    """Nobody would judge the point, which has not failed."""
    with hold(search_lab):
        command = search_lab.start()
        wait_until(lambda: list(search_lab.folder.glob("cells/*/checkpoints/last.ckpt")))
        before = points_in(search_lab)[0]
        command.send(signal.SIGKILL)
        command.wait()
    cell = search_lab.folder / "cells" / before.run
    wait_until(lambda: read_state(cell) == "waiting")
    assert not (cell / "holder.json").exists()
    search_lab.run()
    after = points_in(search_lab)[0]
    assert (after.params, after.run, after.state) == (before.params, before.run, "complete")
    counts = search_lab.count_steps()
    assert counts[f"{cell.name} {STEPS[0]}"] == 1
    assert max(counts.values()) <= 2, "the worker may have taken a step that is in no checkpoint"


def test_a_point_that_diverges_is_finished_and_says_so(search_lab: Lab) -> None:
    """Otherwise the sampler would ignore it and retry it forever."""

    def diverge(cfg: RunConfig, _step: int, _folder: Path) -> None:
        if cfg.train.lr > 1e-3:
            raise DivergedError("training loss is nan")

    search_lab.training.at_step = diverge
    search_lab.run()
    diverged = [point for point in points_in(search_lab).values() if point.params[LR] > 1e-3]
    assert diverged
    for point in diverged:
        assert (point.state, point.value) == ("diverged", None)
        assert point.reason == "diverged: DivergedError: training loss is nan"
    assert "nothing to do" in search_lab.run()


def test_a_validation_that_a_kill_cut_off_is_reported_when_it_is_repeated() -> None:
    missed, reported = MissedValidation(None, {}), []
    trainer = SimpleNamespace(callbacks=[missed], global_step=3, max_steps=6)
    pruning = Pruning("val/loss", lambda step, value: reported.append((step, value)) or "worse" * (value > 2))
    pruning.on_start(trainer, None)
    assert not reported, "no validation was cut off"
    missed.repeated = {"val/loss": 2.0, "val/excess": 1.0}
    pruning.on_start(trainer, None)
    assert reported == [(3, 2.0)]
    missed.repeated = {"val/loss": 3.0}
    with pytest.raises(PrunedError, match="worse"):
        pruning.on_start(trainer, None)


# From the command line to MLflow, with real trainings


def read_points(runs: Path) -> dict[str, dict[str, str]]:
    with (runs / ID / "table.csv").open() as file:
        return {row["point"]: row for row in csv.DictReader(file)}


def test_a_search_from_start_to_table_and_on(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rates := tmp_path / "rates.py").write_text(SEARCH.replace("trials=6", "trials=5"))

    def run(*more: str, file: Path = rates, status: int = 0) -> str:
        assert main(["ablate", "search", str(file), "--runs", str(runs), "--workers", "2", *more]) == status
        printed = capsys.readouterr()
        return " ".join((printed.err if status else printed.out).split())

    def find_results() -> dict[str, int]:
        """When each result was written, by its cell."""
        return {path.parent.name: path.stat().st_mtime_ns for path in runs.glob(f"{ID}/cells/*/result.json")}

    said = run("--dry-run")
    assert "5 points of search-rates-backcopy_tiny" in said
    assert "Pruning from step 2 on: after 3 of 6 steps." in said
    assert [path.name for path in runs.iterdir()] == ["mlflow.db"]
    said = run()
    assert "5 points, 0 already finished, 5 to train" in said
    assert "5/5 cells done" in said
    first, results = read_points(runs), find_results()
    assert sorted(first) == list("01234")
    assert "8 points, 5 already finished, 3 to train" in run("--trials", "8")
    rows = read_points(runs)
    assert sorted(rows) == list("01234567")
    assert first.items() <= rows.items()
    assert results.items() <= find_results().items()

    complete = [row for row in rows.values() if row["state"] == "complete"]
    pruned = [row for row in rows.values() if row["state"] == "pruned"]
    assert (len(complete) + len(pruned), bool(pruned)) == (8, True), "rates that learn nothing are below the median"
    assert not list(runs.glob(f"{ID}/cells/*/checkpoints"))
    assert find_results().keys() == {row["run"] for row in complete}
    for row in complete:
        result = json.loads((runs / ID / "cells" / row["run"] / "result.json").read_text())
        assert float(row["loss/val"]) == result["metrics"]["loss/val"]
        assert float(row["train.lr"]) == result["config"]["train"]["lr"]
        assert (row["steps"], row["n"]) == ("6", "1")
    for row in pruned:
        assert (row["loss/val"], row["steps"], row["n"]) == ("", "3", "0")
        assert "worse than the median" in row["reason"]
    losses = [float(row["loss/val"]) for row in complete]
    assert losses == sorted(losses)
    assert "5 points, all finished: nothing to do" in run()
    check_mlflow(runs, {row["run"]: row for row in rows.values()})
    (other := tmp_path / "other").mkdir()
    (other := other / "rates.py").write_text(SEARCH.replace("0.1, log", "0.2, log").replace("startup=2", "startup=3"))
    said = run(file=other, status=2)
    assert "axes, startup changed since this search was started; --fresh moves the former results away" in said


def check_mlflow(runs: Path, rows: Mapping[str, Mapping[str, str]]) -> None:
    """One parent with table and figures, one child for each row of the table, with its axes and its status."""
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name(ID).experiment_id])
    (parent,) = [run for run in found if run.data.tags["kind"] == "search"]
    children = {run.data.tags["cell"]: run for run in found if run.data.tags["kind"] == "cell"}
    artifacts = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert {"table.json", "search.json", "config.yaml", "history.png", "slices.svg"} <= artifacts
    assert (parent.info.status, parent.data.params["axis.lr"]) == ("FINISHED", "1e-06 to 0.1, log")
    assert children.keys() == rows.keys()
    for key, run in children.items():
        row, tags = rows[key], run.data.tags
        assert (tags["mlflow.parentRunId"], tags["variant"]) == (parent.info.run_id, f"point {row['point']}")
        assert float(run.data.params["lr"]) == float(row["train.lr"])
        assert "tau_init" in run.data.params
        if row["state"] == "complete":
            assert (run.info.status, tags["state"]) == ("FINISHED", "complete")
            assert run.data.metrics["loss/val"] == pytest.approx(float(row["loss/val"]))
        else:
            assert (run.info.status, tags["state"], tags["optuna.state"]) == ("KILLED", "pruned", "PRUNED")
            assert run.data.metrics["val/loss"] == pytest.approx(float(row["last_validation"]))


# Table and figures


def report(importances: dict[str, float]) -> SearchReport:
    points = [
        Point(0, "a", {LR: 0.001, TAU: 0.5}, "complete", 1.25, {3: 1.5, 6: 1.25}, ""),
        Point(1, "b", {LR: 0.002, TAU: 1.5}, "pruned", None, {3: 1.75}, "worse"),
        Point(2, "c", {LR: 0.003, TAU: 1.0}, "complete", 1.125, {3: 1.25, 6: 1.125}, ""),
        Point(3, "d", {LR: 0.09, TAU: 1.0}, "diverged", None, {}, "diverged: training loss is nan"),
        Point(4, "e", {LR: 0.004, TAU: 0.5}, "running", None, {}, ""),
    ]
    return SearchReport("search-s", define(search(), base()), points, importances, ["abc"], "lit-lazy ablate search s")


def test_the_table_and_figures_show_every_measured_point_and_what_they_are_not() -> None:
    text = report({LR: 0.75, TAU: 0.25}).markdown()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == ["Point", "lr", "tau_init", "validation loss (nats) ↓", "steps", "last", "state", "n"]
    assert rows[2:] == [
        ["2", "0.003", "1", "1.12500", "6", "1.12500", "complete", "1"],
        ["0", "0.001", "0.5", "1.25000", "6", "1.25000", "complete", "1"],
        ["1", "0.002", "1.5", "–", "3", "1.75000", "pruned", "0"],
        ["3", "0.09", "1", "–", "0", "–", "diverged", "0"],
        ["4", "0.004", "0.5", "–", "0", "–", "running", "0"],
    ]
    said = ("One seed per point", "The best of 2 noisy values", "A diverged point", "A pruned point has no", "lr 75 %")
    assert all(text.count(words) for words in said)
    assert "No importances" in report({}).markdown()
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
    shipped = load_defined(find("ablations", "lazy_search"), "search", Search)
    definition = define(shipped, experiment(shipped.base, shipped.common))
    assert list(definition.names.values()) == ["tau_init", "lr", "base"]
    assert Definition.from_json(definition.to_json()) == definition
    old = json.loads(definition.to_json())
    del old["code"], old["base"]["model"]["embedding_init_std"]  # from an earlier version
    assert definition.find_differences(Definition.from_json(json.dumps(old))) == ["base"]
