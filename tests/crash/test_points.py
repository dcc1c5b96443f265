"""A sample of grids ended at a disk effect; `make crash-points` tries every one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from points import AttemptOutcome, fill_report

POINTS = Path(__file__).with_name("points.py")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "reliability.md"
REQUIRED = "LIT_LAZY_REQUIRE_CC"


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "effects"),
    [
        ("SIGKILL of the process", (r"^rename .*/\.result\.json",)),
        ("SIGKILL of the process", (r"^create .*/\.table\.csv",)),
        ("SIGKILL of all", (r"^rename .*/\.plan\.json", r"^mkdir .*/checkpoints")),
        ("SIGTERM twice", (r"^rename .*/\.last\.ckpt", r"^rename .*/\.report")),
    ],
)
def test_the_same_command_finishes_what_was_ended(way: str, effects: tuple[str, ...], tmp_path: Path) -> None:
    if sys.platform != "linux" or not shutil.which("cc"):
        assert not os.environ.get(REQUIRED), f"{REQUIRED} is set, and there is no C compiler, or no Linux"
        pytest.skip("needs Linux and a C compiler")
    command = [sys.executable, str(POINTS), "--out", str(tmp_path), "--scenario", "one cell", "--way", way]
    matching = [word for effect in effects for word in ("--match", effect)]
    done = subprocess.run(
        [*command, *matching], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert len(outcomes) == len(effects)
    assert all(outcome["where"] and not outcome["violations"] for outcome in outcomes)


def test_a_report_fills_its_part_of_the_page_alone(tmp_path: Path) -> None:
    page, text = tmp_path / "page.md", PAGE.read_text()
    page.write_text(text)
    for number in (1, 2):
        fill_report(page, [AttemptOutcome("one cell", "SIGTERM", number, "mkdir x", "abc", 1.0, [])])
    before, after = text.partition("<!-- attempts -->")[0], text.partition("<!-- end -->")[2]
    filled = page.read_text()
    assert filled.startswith(before)
    assert filled.endswith(after)
    assert filled.removeprefix(before).removesuffix(after).count("\n| one cell | SIGTERM | 1 |") == 1
    page.write_text(before)
    with pytest.raises(SystemExit, match="lacks <!-- attempts -->"):
        fill_report(page, [])
