"""A sample of the states that a disk can be left in; `make crash-points` tries every one."""

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
    ("disk", "effects"),
    [
        ("kill of all processes", (r"^rename .*/\.result\.json", r"^create .*/\.table\.csv")),
        ("loss of power, names at once", (r"^rename .*/\.plan\.json", r"^mkdir .*/checkpoints")),
        ("loss of power, names with the next fsync", (r"^fsync .*/\.last\.ckpt", r"^fsync .*/\.report")),
    ],
)
def test_the_same_command_finishes_what_was_left(disk: str, effects: tuple[str, ...], tmp_path: Path) -> None:
    if sys.platform != "linux" or not shutil.which("cc"):
        assert not os.environ.get(REQUIRED), f"{REQUIRED} is set, and there is no C compiler, or no Linux"
        pytest.skip("needs Linux and a C compiler")
    command = [sys.executable, str(POINTS), "--out", str(tmp_path), "--scenario", "one cell", "--disk", disk]
    command += [word for effect in effects for word in ("--match", effect)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert len(outcomes) == len(effects)
    assert not any(outcome["violations"] for outcome in outcomes)
