"""Kills the commands and workers of grids at random; then checks that nothing was lost.

`PYTHONPATH=tests:tests/grid python tests/grid/chaos.py --kills 1000 --folder FOLDER --out PAGE` writes a report, and
resumes what a former call began. Workers are forks with all imports done, so that a killed one is replaced quickly.
"""

import argparse
import json
import os
import platform
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import instant
import pytest
from instant import Command, Lab

from lit_lazy.grid.cells import Holder, read_state
from lit_lazy.support.disk import write_text
from lit_lazy.support.provenance import git_sha
from lit_lazy.tracking.metric_records import read_lines
from lit_lazy.training.result import METRICS, RunResult

SEEDS = 12
BETWEEN = 0.2, 3.0
"""Range of seconds between kills."""


def kill_one(lab: Lab, command: Command, chance: random.Random) -> str:
    """Kill a worker in training or, one time in six, the command; returns which."""
    if chance.random() < 1 / 6:
        command.send(signal.SIGKILL)
        command.wait()
        return "the command"
    running = [lab.cell(key) for key in lab.keys if read_state(lab.cell(key)) == "running"]
    holders = [holder for folder in running if (holder := Holder.read(folder))]
    if not holders:
        return ""
    with suppress(ProcessLookupError):
        os.kill(chance.choice(holders).pid, signal.SIGKILL)
    return "a worker"


def run_killed(lab: Lab, kills: int, workers: int, chance: random.Random, between: tuple[float, float]) -> Counter[str]:
    """Give the command until the grid is complete, with so many kills at most; returns what was killed."""
    done = Counter[str]()
    while True:
        command = lab.start(workers)
        while done.total() < kills and command.is_alive:
            time.sleep(chance.uniform(*between))
            done.update(filter(None, [kill_one(lab, command, chance)]))
        status = command.wait()
        done["commands"] += 1
        if status == 0:
            break
        assert status in (-signal.SIGKILL, 1), command.said  # 1: a cell whose workers died too often
    done["commands"], commands = 0, done["commands"]
    return +done + Counter({"commands given": commands})


def read_metrics(lab: Lab) -> dict[str, object]:
    """The metrics of each cell; all must be there."""
    results = {key: RunResult.peek(lab.cell(key)) for key in lab.keys}
    return {key: result.metrics for key, result in results.items() if result is not None}


def check(lab: Lab, peace: Lab) -> None:
    """The grid is complete, like the undisturbed one bit for bit, and nothing is left over."""
    assert set(lab.states().values()) == {"complete"}
    assert read_metrics(lab) == read_metrics(peace)
    assert lab.table() == peace.table()
    assert not [*lab.folder.rglob("holder.json"), *lab.folder.rglob("checkpoints")]
    for key in lab.keys:
        steps = [line.step for line in read_lines(lab.cell(key) / METRICS) if "val/loss" in line.metrics]
        assert len(set(steps)) == len(steps), "a validation was logged twice"


def soak(folder: Path, kills: int, workers: int, steps: int, seed: int) -> str:
    """Kill grids of real trainings until there were enough kills; returns a report. Resumes."""
    training = instant.Training(folder / "steps.log")
    settings = [f"--train.steps={steps}", "--train.checkpoint_every=20", "--train.val_every=100"]
    lab = instant.make_lab(folder, training, "--seeds", ",".join(map(str, range(SEEDS))), overrides=settings)
    peace, kept, started = lab.move(folder / "peace"), folder / "outcome.json", time.monotonic()
    peace.run(workers)
    outcome = Counter(json.loads(kept.read_text())) if kept.exists() else Counter[str]()
    while outcome["a worker"] + outcome["the command"] < kills:
        chance = random.Random(f"{seed} {outcome['grids']}")
        here = lab.move(folder / f"grid-{outcome['grids'] + 1}")
        left = kills - outcome["a worker"] - outcome["the command"]
        outcome += run_killed(here, left, workers, chance, BETWEEN)
        check(here, peace)
        outcome["grids"] += 1
        write_text(kept, json.dumps(outcome))
        print(dict(outcome), f"{time.monotonic() - started:.0f} s", flush=True)
    return f"""# What a grid survives

{len(lab.keys)} cells that train, validate and checkpoint (every 20 of {steps} steps), run by {workers} worker(s),
{outcome["grids"]} time(s) from the beginning. SIGKILL ended a worker in training {outcome["a worker"]} times and the
command {outcome["the command"]} times, at random. It was given {outcome["commands given"]} times in all. In the
end of each grid every cell was complete once, its results bit-equal to those of the same grid undisturbed, and so was
the table.

Made by `make soak` at {git_sha()} on {time.strftime("%Y-%m-%d")}: Python {platform.python_version()},
{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000, help="of a cell (default 5000: some seconds)")
    parser.add_argument("--folder", type=Path, required=True, help="keeps the grids, and what happened to them so far")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        instant.use_forks(patch)
        patch.setattr(instant, "MOST_SECONDS", 3600.0)
        found = soak(folder, options.kills, options.workers, options.steps, options.seed)
    print(found)
    if options.out:
        options.out.write_text(found)
