"""Commands, workers and ranks of grids are killed at random moments, and nothing is lost."""

import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
from instant import Command, Lab, Training, make_lab

from lit_lazy.grid.cell_state import Holder
from lit_lazy.training.run_folder import METRICS, RunResult, read_lines

KILLS = 12
OVERRIDES = (
    *("--train.steps=1000", "--train.checkpoint_every=20", "--train.warmup_steps=2"),
    *("--train.log_every=50", "--train.val_every=100"),
)


class RealCommand(Command):
    """A command as users give it."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.out = folder / f"said-{time.monotonic_ns()}"
        command = [sys.executable, "-P", "-m", "lit_lazy", *words]
        with self.out.open("wb") as file:
            self.process = forked.Popen(command, stdout=file, stderr=file, cwd=folder, start_new_session=True)
        self.wait = self.process.wait

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


class RealLab(Lab):
    """A grid of real trainings, each in two processes. What MLflow shows after kills: tests/crash."""

    def start(self, workers: int = 1, **_: Any) -> Command:
        words = ["ablate", "run", str(self.work.files[0]), "--devices", "2", *OVERRIDES, "--runs", str(self.runs)]
        self.commands.append(command := RealCommand([*words, "--workers", str(workers)], self.training.log.parent))
        return command


def kill_one(lab: Lab, command: Command, chance: random.Random) -> bool:
    """Kill a worker, one of its ranks or, one time in six, the command; returns whether there was one."""
    if chance.random() < 1 / 6:
        command.send(signal.SIGKILL)
        command.wait()
        return True
    if holders := [holder for folder in lab.find("running") if (holder := Holder.read(folder))]:
        with suppress(psutil.NoSuchProcess):
            worker = psutil.Process(chance.choice(holders).pid)
            ranks = worker.children() if chance.random() < 1 / 3 else []
            chance.choice(ranks or [worker]).kill()
            return True
    return False


def run_killed(lab: Lab, kills: int, chance: random.Random) -> int:
    """Give the command until the grid is complete, with so many kills at most; returns how many there were."""
    killed = 0
    for _ in range(2 * kills + 10):
        command = lab.start(workers=2)
        while killed < kills and command.is_alive:
            time.sleep(chance.uniform(0.5, 3.0))
            killed += kill_one(lab, command, chance)
        if (status := command.wait()) == 0:
            return killed
        assert status in (-signal.SIGKILL, 1), command.said  # 1: a cell whose workers died too often
    raise AssertionError(f"the grid does not end: {command.said}")


def read_metrics(lab: Lab) -> dict[str, dict[str, float]]:
    return {key: result.metrics for key in lab.keys if (result := RunResult.peek(lab.cell(key)))}


def check(lab: Lab, peace: Lab) -> None:
    """The grid is complete, like the undisturbed one bit for bit, and nothing is left over."""
    assert set(lab.states().values()) == {"complete"}
    assert read_metrics(lab) == read_metrics(peace)
    assert lab.table() == peace.table()
    assert not [*lab.folder.rglob("holder.json"), *lab.folder.rglob("checkpoints")]
    for key in lab.keys:
        steps = [line.step for line in read_lines(lab.cell(key) / METRICS) if "val/loss" in line.metrics]
        assert len(set(steps)) == len(steps), "a validation was logged twice"


@pytest.mark.long
@pytest.mark.usefixtures("_cheap_grids")
def test_kills_of_real_trainings_lose_nothing(tmp_path: Path) -> None:
    """Workers of killed commands end their cells, and no process is left."""
    before, chance = psutil.Process().children(recursive=True), random.Random(0)
    lab = RealLab(**vars(make_lab(tmp_path, Training(tmp_path / "steps.log"), overrides=OVERRIDES)))
    peace, killed = lab.move(tmp_path / "peace"), 0
    peace.run(workers=2)
    while killed < KILLS:
        here = lab.move(tmp_path / f"grid-{killed}")
        here.runs.mkdir()
        killed += run_killed(here, KILLS - killed, chance)
        check(here, peace)
    every = [child for child in psutil.Process().children(recursive=True) if child not in before]
    _, left = psutil.wait_procs(every, timeout=30)
    assert not left
