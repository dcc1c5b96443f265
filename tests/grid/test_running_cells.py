"""What the display of a running grid tells of each cell, from the cell's metric file."""

import json
import time
from pathlib import Path

import pytest

from lit_lazy.grid.progress import Progress, describe_training
from lit_lazy.support.console import plain_console
from lit_lazy.training.run_folder import TAIL_BYTES, read_lines


def write(folder: Path, steps: int, *, torn: bool = False, ago: float = 0.0) -> Path:
    """Two seconds a step, the last one `ago` seconds ago."""
    path = folder / "metrics.jsonl"
    started = time.time() - ago - 2 * steps
    times = [round(1000 * (started + 2 * step)) for step in range(steps + 1)]
    lines = [
        json.dumps({"step": step, "milliseconds": at, "metrics": {"train/loss": 4 - step / 10}})
        for step, at in enumerate(times)
    ]
    path.write_text("\n".join(lines) + ("\n" if not torn else '\n{"step": 99, "mill'))
    return path


@pytest.mark.parametrize(
    ("steps", "whole", "said"),
    [
        (10, 64, "step 10 of 64, loss 3.000, about 1:48 left"),
        (10, None, "step 10, loss 3.000"),
        (10, 10, "step 10 of 10, loss 3.000"),
        (1200, 2400, "step 1,200 of 2,400, loss -116.000, about 40:00 left"),
        (0, 64, ""),
    ],
)
def test_step_loss_and_rest(steps: int, whole: int | None, said: str, tmp_path: Path) -> None:
    assert describe_training(tmp_path, whole) == "", "a cell on another machine has no metrics here"
    write(tmp_path, steps)
    assert describe_training(tmp_path, whole) == said


TEN = "step 10 of 64, loss 3.000, about 1:48 left"


def test_records_that_are_torn_late_or_of_two_processes(tmp_path: Path) -> None:
    """A line that is being written; step 9's after step 10's; a training that was killed and resumed an hour later."""
    path = write(tmp_path, 10, torn=True)
    assert describe_training(tmp_path, 64) == TEN
    lines = path.read_text().splitlines()[:11]
    path.write_text("\n".join([*lines[:9], lines[10], lines[9]]) + "\n")
    assert describe_training(tmp_path, 64).startswith("step 10 of 64, ")
    before = write(tmp_path, 5, ago=3600).read_text()
    after = write(tmp_path, 10).read_text().splitlines(keepends=True)[6:]
    path.write_text(before + "".join(after))
    assert describe_training(tmp_path, 64) == TEN
    write(tmp_path, 10, ago=90)
    assert describe_training(tmp_path, 64) == f"{TEN}, reported 1:30 ago"


def test_a_log_says_each_minute_what_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A file as output: without it nothing is said until a cell ends, which takes hours at scale."""
    states = {"key": "running"}
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = Progress(lambda: states, plain_console(), list)
    progress.show_running(["lazy [/x] seed 0: step 3 of 9"])
    for clock[0] in (1.0, 20.0, 59.0, 62.0, 90.0, 130.0):
        progress.update(states)
    printed = capsys.readouterr().out.splitlines()
    summary = "0/1 cells done, 1 running, {} elapsed, estimating the rest"
    running = "  lazy [/x] seed 0: step 3 of 9"
    assert printed == [summary.format("0:01"), summary.format("1:02"), running, summary.format("2:10"), running]


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 5000)
    assert path.stat().st_size > 3 * TAIL_BYTES
    last, every = read_lines(path, TAIL_BYTES), read_lines(path)
    assert 100 < len(last) < 1500
    assert last == every[-len(last) :]
