"""Progress of a training: steps, tokens per second, time left and loss, on a terminal and in a log."""

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from test_run import config

from lit_lazy.training import callbacks_and_loggers
from lit_lazy.training.callbacks_and_loggers import StepProgress
from lit_lazy.training.execution import Execution
from lit_lazy.training.trainer import build_module, fit

LINE = re.compile(r"step (\d+) of 12, ([\d,]+) tokens/s, (\d+:\d\d) left(?:, loss (\d\.\d+))?")


def shown(folder: Path, terminal: bool, notebook: bool = False) -> str:
    """Output of a training of 12 steps with two micro-batches each, which logs its loss at steps 5 and 10."""
    file = io.StringIO()
    cfg, halves = config(steps=12), Execution(micro_batch=4)
    source = cfg.data.load()
    watched = StepProgress(Console(file=file, force_terminal=terminal, force_jupyter=notebook, width=200))
    fit(build_module(cfg, source, halves), source, folder, callbacks=[watched])
    return file.getvalue()


def test_a_log_gets_a_line_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of a training that is soon over."""
    assert shown(tmp_path / "short", terminal=False) == ""
    monkeypatch.setattr(callbacks_and_loggers, "PLAIN_EVERY_SECONDS", 0.0)
    found = [LINE.fullmatch(line) for line in shown(tmp_path / "whole", terminal=False).splitlines()]
    assert [line and int(line[1]) for line in found] == list(range(1, 13))
    assert [line and bool(line[4]) for line in found] == [False] * 4 + [True] * 8
    assert found[-1][3] == "0:00"


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    screen = shown(tmp_path, terminal=True)
    assert LINE.search(screen)
    assert "━" in screen
    assert "Epoch" not in screen


def test_a_notebook_gets_a_line_that_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_speed_and_rest_are_of_the_steps_since_it_began(
    steps: int, first: int, step: int, seconds: float, expected: str
) -> None:
    """With 128 tokens per step."""
    cfg, trainer = config(steps=steps), SimpleNamespace(global_step=step, callback_metrics={})
    watched = StepProgress()
    watched._first, watched._started = first, 100.0
    line = watched.format_line(trainer, build_module(cfg, cfg.data.load(), Execution()), 100.0 + seconds)
    assert line == f"step {step} of {steps}, {expected}"
