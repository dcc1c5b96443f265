"""A sample of grids ended at a disk effect; `make crash-points` tries every one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

POINTS = Path(__file__).with_name("points.py")
REQUIRED = "LIT_LAZY_REQUIRE_CC"


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "effects"),
    [
        ("SIGKILL of the process", (r"^rename .*/\.result\.json", r"^create .*/\.table\.csv")),
        ("SIGKILL of all", (r"^rename .*/\.plan\.json", r"^mkdir .*/checkpoints")),
        ("SIGTERM twice", (r"^rename .*/\.last\.ckpt", r"^rename .*/\.report")),
    ],
)
def test_the_same_command_finishes_what_was_ended(way: str, effects: tuple[str, ...], tmp_path: Path) -> None:
    if sys.platform != "linux" or not shutil.which("cc"):
        assert not os.environ.get(REQUIRED), f"{REQUIRED} is set, and there is no C compiler, or no Linux"
        pytest.skip("needs Linux and a C compiler")
    command = [sys.executable, str(POINTS), "--out", str(tmp_path), "--scenario", "one cell", "--way", way]
    command += [word for effect in effects for word in ("--match", effect)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert len(outcomes) == len(effects)
    assert all(outcome["where"] and not outcome["violations"] for outcome in outcomes)
