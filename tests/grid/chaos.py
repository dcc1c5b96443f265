"""Kills the commands, workers and ranks of grids at random; then checks that nothing was lost.

`PYTHONPATH=tests:tests/grid python tests/grid/chaos.py --kills 1000 --folder FOLDER --out PAGE` writes a report, and
resumes what a former call began. Commands are forks with all imports done, so that a killed one is replaced quickly.
"""

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import forked
import instant
import psutil
from asked_grid import ask_for_grid
from instant import Lab
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from two_rows import two_rows

from lit_lazy.grid.cells import Holder, read_state
from lit_lazy.support.disk import write_text
from lit_lazy.support.provenance import git_sha
from lit_lazy.tracking.store import default_uri
from lit_lazy.training.run_folder import METRICS, RunResult, read_lines

SEEDS = 12
BETWEEN = 0.5, 3.0
"""Range of seconds between kills."""
EVERY = {"train/loss": 50, "val/loss": 100}
"""Steps between the points of each curve."""


class RealCommand:
    """A command as users give it; interface of `instant.Command`."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = forked.Popen(
                [sys.executable, "-P", "-m", "lit_lazy", *words],
                stdout=file,
                stderr=file,
                stdin=forked.DEVNULL,
                cwd=log.parent,
                start_new_session=True,
            )

        self.wait, self.send = self.process.wait, self.process.send_signal

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


@dataclass
class RealLab(Lab):
    """A grid of real trainings that MLflow shows."""

    words: tuple[str, ...] = ()
    """Of its command, without folder and workers."""

    def start(self, workers: int = 1, **_: Any) -> Any:
        where = ["--runs", str(self.runs), "--workers", str(workers)]
        return RealCommand([*self.words, *where], self.training.log.with_name("command.log"))


def make_real_lab(folder: Path, steps: int, devices: int, seeds: int) -> RealLab:
    """Two rows with so many seeds, that validate and checkpoint; each training has so many processes."""
    (folder / "pair.py").write_text(two_rows("pair"))
    options = ("ablate", "run", str(folder / "pair.py"), "--seeds", ",".join(map(str, range(seeds))))
    every = f"--train.log_every={EVERY['train/loss']}", f"--train.val_every={EVERY['val/loss']}"
    overrides = [f"--train.steps={steps}", "--train.checkpoint_every=20", "--train.warmup_steps=2", *every]
    work = ask_for_grid([*options, "--runs", str(folder / "runs")], overrides)
    training = instant.Training(folder / "steps.log")
    return RealLab(folder / "runs", training, work, words=(*options, "--devices", str(devices), *overrides))


def kill_one(lab: Lab, command: Any, chance: random.Random) -> str:
    """Kill a worker in training, one of its ranks or, one time in six, the command; returns which."""
    if chance.random() < 1 / 6:
        command.send(signal.SIGKILL)
        command.wait()
        return "the command, at random"
    running = [lab.cell(key) for key in lab.keys if read_state(lab.cell(key)) == "running"]
    holders = [holder for folder in running if (holder := Holder.read(folder))]
    if not holders:
        return ""
    with suppress(psutil.NoSuchProcess):
        worker = psutil.Process(chance.choice(holders).pid)
        ranks = worker.children() if chance.random() < 1 / 3 else []
        (chance.choice(ranks) if ranks else worker).kill()
        return "a rank, at random" if ranks else "a worker, at random"
    return ""


def run_killed(lab: Lab, kills: int, workers: int, chance: random.Random, between: tuple[float, float]) -> Counter[str]:
    """Give the command until the grid is complete, with so many kills at most; returns what was killed."""
    done = Counter[str]()
    for n in range(1, 2 * kills + 10):
        command = lab.start(workers)
        while done.total() < kills and command.is_alive:
            time.sleep(chance.uniform(*between))
            done.update(filter(None, [kill_one(lab, command, chance)]))
        status = command.wait()
        if status == 0:
            return done + Counter({"commands": n})
        assert status in (-signal.SIGKILL, 1), command.said  # 1: a cell whose workers died too often
    raise AssertionError(f"the grid does not end: {command.said}")


def read_metrics(lab: Lab) -> dict[str, dict[str, float]]:
    """The metrics of each cell that has some."""
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


def check_mlflow(lab: Lab, steps: int) -> None:
    """MLflow shows every cell once, ended well, with every point of every curve once and the metrics of its result."""
    client = MlflowClient(default_uri(lab.runs))
    number = client.get_experiment_by_name(lab.work.id).experiment_id
    runs: list[Run] = client.search_runs([number], "tags.kind = 'cell'", max_results=1000)
    assert sorted(run.data.tags["cell"] for run in runs) == sorted(lab.keys)
    assert {(run.info.status, run.data.tags["state"]) for run in runs} == {("FINISHED", "complete")}
    results = read_metrics(lab)
    for run in runs:
        for name, every in EVERY.items():
            points = [point.step for point in client.get_metric_history(run.info.run_id, name)]
            assert points == list(range(every - 1, steps, every)), (name, points)
        assert results[run.data.tags["cell"]].items() <= run.data.metrics.items()


def check_no_process_is_left(before: Set[int]) -> None:
    """Workers of killed commands have ended their cells, and no rank outlives its worker. before: other processes."""
    spared = {*before, forked.start_fork_server(), resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    every = [child for child in psutil.Process().children(recursive=True) if child.pid not in spared]
    _, left = psutil.wait_procs(every, timeout=30)
    assert not left


@dataclass(frozen=True)
class Soak:
    """What is killed how often."""

    kills: int
    seed: int = 0
    workers: int = 2
    steps: int = 5000
    devices: int = 1
    seeds: int = SEEDS

    def run(self, folder: Path) -> Counter[str]:
        """Kill grids until there were enough kills; returns what was killed. Resumes."""
        folder.mkdir(parents=True, exist_ok=True)
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        lab = make_real_lab(folder, self.steps, self.devices, self.seeds)
        peace, kept = lab.move(folder / "peace"), folder / "outcome.json"
        peace.run(self.workers)
        outcome = Counter(json.loads(kept.read_text())) if kept.exists() else Counter[str]()
        while (left := self.kills - count_kills(outcome)) > 0:
            here = lab.move(folder / f"grid-{outcome['grids'] + 1}")
            here.runs.mkdir(exist_ok=True)
            started = time.monotonic()
            chance = random.Random(f"{self.seed} {outcome['grids']}")
            killed = run_killed(here, left, self.workers, chance, BETWEEN)
            check(here, peace)
            forked.run_in_fork(lambda: check_mlflow(here, self.steps))  # noqa: B023
            check_no_process_is_left(before)
            outcome += killed + Counter({"grids": 1, "seconds": round(time.monotonic() - started)})
            write_text(kept, json.dumps(outcome))
            print(dict(outcome), flush=True)
        return outcome

    def report(self, outcome: Counter[str]) -> str:
        """A page on what was killed."""
        killed = sorted((what, n) for what, n in outcome.items() if what not in COUNTS)
        rows = "\n".join(f"| {what} | {n} |" for what, n in killed)
        asked = " ".join(f"--{name} {number}" for name, number in vars(self).items())
        return f"""# What a grid survives

{self.workers} worker(s) ran a grid of {2 * self.seeds} cells from scratch, {outcome["grids"]} time(s). A cell
trains {self.steps} steps on {self.devices} device(s), validates, and writes a checkpoint every 20 steps. SIGKILL ended
{count_kills(outcome)} processes:

| killed | times |
| --- | --: |
{rows}

Whenever the command was killed or ended early, it was repeated: {outcome["commands"]} commands in all. Each grid ended
with exactly one complete run per cell, in its folder and MLflow. Every curve in MLflow had each point once. All results
and the table were bit-equal to an undisturbed grid's. No process was left over. All grids took {outcome["seconds"]} s
together.

Made by `python tests/grid/chaos.py {asked}` (`make soak`) at {git_sha()} on {time.strftime("%Y-%m-%d")}: Python
{platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores.
"""


COUNTS = ("grids", "commands", "seconds")


def count_kills(outcome: Counter[str]) -> int:
    return outcome.total() - sum(outcome[name] for name in COUNTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000, help="of a cell (default 5000: some seconds)")
    parser.add_argument("--devices", type=int, default=1, help="processes of a cell (default 1)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of each of two rows (default {SEEDS})")
    parser.add_argument("--folder", type=Path, required=True, help="keeps the grids, and what happened to them so far")
    parser.add_argument("--out", type=Path)
    options = vars(parser.parse_args())
    folder, out = options.pop("folder"), options.pop("out")
    forked.make_cheap()
    asked = Soak(**options)
    found = asked.report(asked.run(folder.resolve()))
    print(found)
    if out:
        out.write_text(found)
