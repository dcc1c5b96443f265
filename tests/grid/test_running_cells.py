"""What the display of a running grid tells of each cell, from the cell's metric file."""

import json
from pathlib import Path

import pytest

from lit_lazy.grid.jobs.progress import describe_training
from lit_lazy.tracking.metric_records import TAIL_BYTES, read_last_lines, read_lines


def write(folder: Path, steps: int, *, seconds_per_step: float = 2.0, torn: bool = False) -> Path:
    path = folder / "metrics.jsonl"
    lines = [
        json.dumps(
            {
                "step": step,
                "milliseconds": int(1000 * seconds_per_step * step),
                "metrics": {"train/loss": 4 - step / 10},
            }
        )
        for step in range(steps + 1)
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
    write(tmp_path, steps)
    assert describe_training(tmp_path, whole) == said


def test_a_cell_on_another_machine_has_no_step_here(tmp_path: Path) -> None:
    assert describe_training(tmp_path / "elsewhere", 64) == ""


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, 10, torn=True)
    assert describe_training(tmp_path, 64).startswith("step 10 of 64, ")


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 5000)
    assert path.stat().st_size > 3 * TAIL_BYTES
    last, every = read_last_lines(path), read_lines(path)
    assert 100 < len(last) < 1500
    assert last == every[-len(last) :]
