"""Other loggers hold each metric once, also after interruptions; a terminal and a log show the progress."""

import csv
import io
import json
import math
import re
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers.logger import DummyLogger
from rich.console import Console
from test_run import config, logged

from lit_lazy.command.main import main
from lit_lazy.training import callbacks_and_loggers
from lit_lazy.training.callbacks_and_loggers import MetricFile, StepProgress, open_loggers
from lit_lazy.training.execution_settings import Execution
from lit_lazy.training.trainer import build_module, fit

CONFIG = {"seed": 3, "model": {"position": {"class": "Rope", "base": 500.0}}}


def of_csv(folder):
    with (folder / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [((n, int(row["step"])), float(x)) for row in rows for n, x in row.items() if n != "step" and x]


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [((name, e.step), e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name)]


def train(folder, kinds, steps):
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
def test_a_resumed_run_is_logged_once_and_whole(kind, read, tmp_path):
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


@pytest.mark.long
@pytest.mark.usefixtures("_cheap_grids")
def test_a_cell_is_logged_below_its_run_folder(runs):
    """Of a search, as of a grid."""
    kinds = ["--logger", "csv", "--logger", "tensorboard"]
    where = ["--base", "backcopy_tiny", "--runs", str(runs), "--workers", "1"]
    assert main(["ablate", "search", "lazy_search", "--trials", "1", *where, *kinds]) == 0
    (cell,) = (runs / "search-lazy_search-backcopy_tiny" / "cells").iterdir()
    result = json.loads((cell / "result.json").read_text())
    last = result["config"]["train"]["steps"]
    points = logged(cell) | {(name, last): value for name, value in result["metrics"].items()}
    for read in (of_csv, of_tensorboard):
        found = read(cell)
        assert len(found) == len(points)
        assert dict(found) == pytest.approx(points)


def test_wandb_resumes_the_run_of_the_folder_and_is_told_its_end(tmp_path, monkeypatch):
    made = []

    class Recorded(DummyLogger):
        """Stands in for the Weights and Biases logger, whose package tests do not install."""

        def __init__(self, **given):
            super().__init__()
            self.given, self.heard = given, []
            self._experiment = SimpleNamespace(finish=lambda: self.heard.append("finish"))
            made.append(self)

        def log_hyperparams(self, params):
            self.heard.append(params)

        def log_metrics(self, metrics, step=None):
            self.heard.append((step, metrics))

        def finalize(self, status):
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


def test_a_logger_that_cannot_start_is_named(monkeypatch, tmp_path):
    def refuse(**_):
        raise RuntimeError("no API key\nconfigured")

    monkeypatch.setattr(callbacks_and_loggers, "WandbLogger", refuse)
    message = r"--logger wandb: cannot start \(RuntimeError: no API key configured\); leave it out, or set it up"
    with pytest.raises(ValueError, match=message):
        train(tmp_path, ("wandb",), range(8))


LINE = re.compile(r"step (\d+) of 12, ([\d,]+) tokens/s, (\d+:\d\d) left(?:, loss (\d\.\d+))?")


def shown(folder, terminal, notebook=False):
    """Output of a training of 12 steps with two micro-batches each, which logs its loss at steps 5 and 10."""
    file = io.StringIO()
    cfg, halves = config(steps=12), Execution(micro_batch=4)
    source = cfg.data.load()
    watched = StepProgress(Console(file=file, force_terminal=terminal, force_jupyter=notebook, width=200))
    fit(build_module(cfg, source, halves), source, folder, callbacks=[watched])
    return file.getvalue()


def test_a_log_gets_a_line_now_and_then(tmp_path, monkeypatch):
    """And none of a training that is soon over."""
    assert shown(tmp_path / "short", terminal=False) == ""
    monkeypatch.setattr(callbacks_and_loggers, "PLAIN_EVERY_SECONDS", 0.0)
    found = [LINE.fullmatch(line) for line in shown(tmp_path / "whole", terminal=False).splitlines()]
    assert [line and int(line[1]) for line in found] == list(range(1, 13))
    assert [line and bool(line[4]) for line in found] == [False] * 4 + [True] * 8
    assert found[-1][3] == "0:00"


def test_a_terminal_gets_a_bar(tmp_path):
    screen = shown(tmp_path, terminal=True)
    assert LINE.search(screen)
    assert "━" in screen
    assert "Epoch" not in screen


def test_a_notebook_gets_a_line_that_changes(tmp_path, capsys):
    """The last step is shown however soon it comes."""
    assert shown(tmp_path, terminal=False, notebook=True) == ""
    *_, last = capsys.readouterr().out.split("\r")
    line = LINE.fullmatch(last.strip())
    assert last.endswith("\n")
    assert line
    assert line[1] == "12"


@pytest.mark.parametrize(
    ("steps", "first", "step", "seconds", "expected"),
    [(12, 0, 3, 6.0, "64 tokens/s, 0:18 left"), (1200, 400, 600, 10.0, "2,560 tokens/s, 0:30 left")],
)
def test_speed_and_rest_are_of_the_steps_since_it_began(steps, first, step, seconds, expected):
    """With 128 tokens per step."""
    cfg, trainer = config(steps=steps), SimpleNamespace(global_step=step, callback_metrics={})
    watched = StepProgress()
    watched._first, watched._started = first, 100.0
    line = watched.format_line(trainer, build_module(cfg, cfg.data.load(), Execution()), 100.0 + seconds)
    assert line == f"step {step} of {steps}, {expected}"
