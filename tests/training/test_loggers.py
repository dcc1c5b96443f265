"""Other loggers hold each metric once, also after interruptions."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers.logger import DummyLogger
from test_run import logged

from lit_lazy.command.main import main
from lit_lazy.training import callbacks_and_loggers, logger_kinds
from lit_lazy.training.callbacks_and_loggers import MetricFile, open_loggers
from lit_lazy.training.logger_kinds import check_logger_kinds

CONFIG = {"seed": 3, "model": {"position": {"class": "Rope", "base": 500.0}}}


def of_csv(folder: Path) -> list[tuple[tuple[str, int], float]]:
    with (folder / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [((n, int(row["step"])), float(x)) for row in rows for n, x in row.items() if n != "step" and x]


def of_tensorboard(folder: Path) -> list[tuple[tuple[str, int], float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [((name, e.step), e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name)]


def train(folder: Path, kinds: tuple[str, ...], steps: range) -> None:
    """Log metrics from a step on, like Lightning, and end the run."""
    with open_loggers(kinds, folder, "train-x", "x seed 3", CONFIG) as others:
        logger = MetricFile(folder, others)
        for step in steps:
            logger.log_metrics({"train/loss": 1 / (1 + step), "epoch": 0}, step)
            if step % 2 == 0:
                logger.log_metrics({"val/loss": math.sqrt(step)}, step)
        if steps.stop < 8:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("kind", "read"), [("csv", of_csv), ("tensorboard", of_tensorboard)])
def test_a_resumed_run_is_logged_once_and_whole(kind: str, read, tmp_path: Path) -> None:
    """Interrupted at step 5, resumed at 3; one run had the logger from the start, one only after resuming."""
    for folder, first in ((tmp_path / "always", (kind,)), (tmp_path / "later", ())):
        with pytest.raises(KeyboardInterrupt):
            train(folder, first, range(6))
        train(folder, (kind,), range(3, 8))
        points, found = logged(folder), read(folder)
        assert len(points) == 12
        assert len(found) == len({point for point, _ in found}) == len(points)
        assert dict(found) == pytest.approx(points)
        assert "model.position.base: 500.0" in (folder / kind / "hparams.yaml").read_text()


COMMANDS = {
    "table2-backcopy_tiny": ["ablate", "run", "table2", "--rows", "lazy", "--seeds", "0", "--brief"],
    "search-lazy_search-backcopy_tiny": ["ablate", "search", "lazy_search", "--trials", "1"],
}
"""Commands with one cell each, by folder in the runs folder."""


@pytest.mark.long
@pytest.mark.usefixtures("_cheap_grids")
@pytest.mark.parametrize("grid", COMMANDS)
def test_each_cell_of_a_grid_is_logged_below_its_run_folder(grid: str, runs: Path) -> None:
    kinds = ["--logger", "csv", "--logger", "tensorboard"]
    where = ["--base", "backcopy_tiny", "--runs", str(runs), "--workers", "1"]
    assert main([*COMMANDS[grid], *where, *kinds]) == 0
    (cell,) = (runs / grid / "cells").iterdir()
    result = json.loads((cell / "result.json").read_text())
    last = result["config"]["train"]["steps"]
    points = logged(cell) | {(name, last): value for name, value in result["metrics"].items()}
    for read in (of_csv, of_tensorboard):
        found = read(cell)
        assert len(found) == len(points)
        assert dict(found) == pytest.approx(points)


def test_wandb_resumes_the_run_of_the_folder_and_is_told_its_end(tmp_path, monkeypatch) -> None:
    made = []

    class Recorded(DummyLogger):
        """Stands in for the Weights and Biases logger, whose package tests do not install."""

        def __init__(self, **given: object) -> None:
            super().__init__()
            self.given, self.heard = given, []
            self._experiment = SimpleNamespace(finish=lambda: self.heard.append("finish"))
            made.append(self)

        def log_hyperparams(self, params: object) -> None:
            self.heard.append(params)

        def log_metrics(self, metrics: object, step: int | None = None) -> None:
            self.heard.append((step, metrics))

        def finalize(self, status: str) -> None:
            self.heard.append(status)

    monkeypatch.setattr(callbacks_and_loggers, "WandbLogger", Recorded)
    folder = tmp_path / "0123456789ab"
    with pytest.raises(KeyboardInterrupt):
        train(folder, ("wandb",), range(6))
    train(folder, ("wandb",), range(3, 8))
    first, second = made
    assert first.given == second.given
    assert {name: first.given[name] for name in ("project", "name", "id", "resume")} == {
        "project": "train-x", "name": "x seed 3", "id": "0123456789ab", "resume": "allow",
    }  # fmt: skip
    assert first.heard[0] == {"seed": 3, "model.position": "Rope", "model.position.base": 500.0}
    assert (first.heard[-2:], second.heard[-2:]) == (["failed", "finish"], ["success", "finish"])
    assert [step for step, _ in second.heard[1:-2]] == [6, 6, 7]


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (("neptune",), "--logger neptune: unknown; there are csv, tensorboard, wandb"),
        (("csv", "csv"), "--logger csv: is given twice; leave one out"),
        (("csv", "wandb"), r"--logger wandb: needs the package wandb; pip install 'lit-lazy\[wandb\]'"),
    ],
)
def test_a_logger_that_cannot_be_is_named(kinds, message, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(logger_kinds, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=message):
        check_logger_kinds(kinds)

    def refuse(**_: object) -> None:
        raise RuntimeError("no API key\nconfigured")

    monkeypatch.setattr(callbacks_and_loggers, "WandbLogger", refuse)
    message = r"--logger wandb: cannot start \(RuntimeError: no API key configured\); leave it out, or set it up"
    with pytest.raises(ValueError, match=message):
        train(tmp_path, ("wandb",), range(8))
