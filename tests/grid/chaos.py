"""Kills a grid at random and at chosen moments; then checks that nothing was lost.

`PYTHONPATH=tests python tests/grid/chaos.py --kills 1000 --folder FOLDER --out PAGE` writes a report. The same
command resumes it after a kill. The grid's processes are forks with all imports done, so that a killed process is
replaced quickly and the CPU time goes to the cells.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import forked
import optuna
import psutil
from mlflow.tracking import MlflowClient

from lit_lazy.grid.queue.queue import Queue
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.support.disk import write_text
from lit_lazy.support.provenance import git_sha

GRID = "chaos-chaos_base"
CELLS = 24
BETWEEN = 0.5, 3.0
"""Range of seconds between kills."""
LOG_EVERY, VAL_EVERY, CHECKPOINT_EVERY = 50, 100, 20
TELL_SECONDS = 30.0
MOST_FAILURES = 10
"""Commands beyond the number of kills after which the grid counts as broken."""
END_SECONDS = 30.0
"""Timeout for the processes of a finished grid."""
MODULES = {
    "the command": "lit_lazy.command",
    "a worker": "lit_lazy.grid.jobs.worker",
    "a rank": "lit_lazy.training.distributed.rank_process",
}
"""Modules that the processes of a grid run."""
POINTS = ("training", "checkpoint write", "result write", "between result and MLflow", "between MLflow and queue")
"""Moments at which a worker kills itself, each triggered by a file of that name in the trap folder."""

BASE = '''
"""Cells that train, validate and checkpoint for a second or two."""
from dataclasses import replace

from lit_lazy.config.user_files import load_experiment
from lit_lazy.support.named_files import find


def config():
    base = load_experiment(find("experiments", "backcopy_tiny"))
    return replace(base, train=replace(base.train, {options}))
'''

ABLATION = '''
"""24 cells, and in worker processes the traps."""
import os
import signal
import sys
from pathlib import Path

from lit_lazy.attention import Elastic, LearnedBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS

TRAPS = Path(__file__).parent / "traps"


def sprung(point):
    """Whether this process is the one that the trap catches."""
    try:
        (TRAPS / point).rename(TRAPS / f"{point} by {os.getpid()}")
    except FileNotFoundError:
        return False
    return True


def die_at(point):
    if sprung(point):
        os.kill(os.getpid(), signal.SIGKILL)


def set_traps():
    from lit_lazy.grid.queue.queue import Queue
    from lit_lazy.support.disk import write_atomically
    from lit_lazy.training import checkpoints, result
    from lit_lazy.training.module import LitLM
    from lit_lazy.tracking.tracked_run import ActiveRun

    def die_midway(file):
        file.write(b"half of it")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def half_written(write, point):
        def write_and_die(path, content):
            if sprung(point):
                write_atomically(path, die_midway)
            write(path, content)

        return write_and_die

    def before(cls, name, point, when=lambda *_: True):
        method = getattr(cls, name)

        def die_first(self, *args, **kwargs):
            if when(self):
                die_at(point)
            return method(self, *args, **kwargs)

        setattr(cls, name, die_first)

    checkpoints.write_atomically = half_written(checkpoints.write_atomically, "checkpoint write")
    result.write_text = half_written(result.write_text, "result write")
    before(LitLM, "training_step", "training", lambda module: module.global_step == 37)
    before(ActiveRun, "finish", "between result and MLflow")
    before(Queue, "complete", "between MLflow and queue")


if Path(sys.argv[0]).stem == "worker":
    set_traps()

ablation = Ablation(
    name="chaos",
    baseline="softmax",
    seeds=(0, 1, 2, 3),
    columns=COLUMNS,
    rows=(
        Row("softmax", {"model.attention.normaliser": Softmax()}, "ours"),
        *(
            Row(
                f"lazy {tau}",
                {"model.attention.normaliser": Elastic(tau_init=tau), "model.attention.bias": LearnedBias()},
                "ours",
            )
            for tau in (0.0, 0.25, 0.5, 1.0, 1.5)
        ),
    ),
)
'''


@dataclass
class SoakOutcome:
    """Statistics of the kills of one or several grids."""

    kills: Counter[str] = field(default_factory=Counter)
    commands: int = 0
    seconds: float = 0.0
    ended: bool = False
    """Whether every cell is complete and all checks passed."""
    commits: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "SoakOutcome":
        """Read from a file; empty if it does not exist."""
        if not path.exists():
            return cls()
        kept = json.loads(path.read_text())
        return cls(Counter(kept["kills"]), kept["commands"], kept["seconds"], kept["ended"], kept["commits"])

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(vars(self)))

    def __add__(self, other: "SoakOutcome") -> "SoakOutcome":
        return SoakOutcome(
            self.kills + other.kills,
            self.commands + other.commands,
            self.seconds + other.seconds,
            commits=list(dict.fromkeys(self.commits + other.commits)),
        )


class Chaos:
    """One grid in one folder, with its ablation and experiment."""

    def __init__(self, folder: Path, steps: int, store: Path | None = None, devices: int = 1) -> None:
        self.folder, self.runs, self.steps, self.devices = folder.resolve(), folder / "runs", steps, devices
        self.kept = folder / "outcome.json"
        self.runs.mkdir(parents=True, exist_ok=True)
        if store:
            shutil.copy(store, self.runs / "mlflow.db")
        (folder / "traps").mkdir(exist_ok=True)
        every = f"val_every={VAL_EVERY}, checkpoint_every={CHECKPOINT_EVERY}, log_every={LOG_EVERY}"
        (folder / "chaos_base.py").write_text(BASE.format(options=f"steps={steps}, {every}, warmup_steps=2"))
        (folder / "chaos.py").write_text(ABLATION)
        self.log = folder / "commands.log"

    def command(self, workers: int) -> forked.Process:
        """Start the command; it is the same every time."""
        files = str(self.folder / "chaos.py"), "--base", str(self.folder / "chaos_base.py")
        options = "--runs", str(self.runs), "--workers", str(workers), "--devices", str(self.devices)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        with self.log.open("ab") as log:
            return forked.Popen(
                [sys.executable, "-m", MODULES["the command"], "ablate", "run", *files, *options],
                stdout=log,
                stderr=forked.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def processes(self, *roles: str) -> list[psutil.Process]:
        """The grid's processes in some roles, found by their working folder."""
        modules = {MODULES[role] for role in roles}
        names = {module.rpartition(".")[2] for module in modules}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended
                here = process.cwd() == str(self.folder)
                if here and (process.name() in names or modules & set(process.cmdline())):
                    found.append(process)
        return found

    def run(
        self,
        workers: int,
        kills: int,
        seed: int = 0,
        between: tuple[float, float] = (0.5, 4.0),
        tell: Callable[[SoakOutcome], None] = lambda _: None,
    ) -> SoakOutcome:
        """Run to the end, killing workers and, one time in six, the command itself on the way.

        Resumes its own counts after a kill. tell: called about every second with the outcome so far.
        """
        outcome, folder = SoakOutcome.read(self.kept), self.folder / "traps"
        for left in self.processes(*MODULES):  # from a call that was killed
            with suppress(psutil.NoSuchProcess):
                left.kill()
                left.wait()
        before, started = outcome.seconds, time.monotonic()
        at_random = outcome.kills - Counter(self._read_sprung_traps())
        chance = random.Random(f"{seed} {outcome.commands}")
        traps = [folder / point for point in POINTS if not list(folder.glob(f"{point}*"))] if kills else []
        chance.shuffle(traps)
        outcome.commits = list(dict.fromkeys([*outcome.commits, git_sha()]))
        parent = self.command(workers)
        outcome.commands += 1
        while True:
            sprung = self._read_sprung_traps()
            outcome.kills = at_random + Counter(sprung)
            outcome.seconds = before + time.monotonic() - started
            outcome.write(self.kept)
            tell(outcome)
            if traps and len(sprung) == len(POINTS) - len(traps):  # the previous trap has caught its worker
                traps.pop().touch()
            if parent.poll() is not None:
                if parent.returncode == 0 and set(self.states().values()) == {"complete"}:
                    break
                assert outcome.commands < outcome.kills.total() + MOST_FAILURES, f"{self.log}: it ends unharmed"
                parent = self.command(workers)
                outcome.commands += 1
            more = outcome.kills.total() < kills
            time.sleep(chance.uniform(*between) if more else 0.2)
            if more:
                self._kill_one(chance, parent, at_random)
        return outcome

    def _read_sprung_traps(self) -> list[str]:
        """Points at which a trap has caught a worker."""
        return [path.name.partition(" by ")[0] for path in (self.folder / "traps").glob("* by *")]

    def _kill_one(self, chance: random.Random, parent: forked.Process, kills: Counter[str]) -> None:
        # Not during startup: if that takes longer than the pauses here, no worker would ever start.
        if chance.random() < 1 / 6 and parent.poll() is None and self.processes("a worker"):
            parent.kill()
            parent.wait()
            kills["the command, at random"] += 1
            return
        role = "a rank" if self.devices > 1 and chance.random() < 1 / 3 else "a worker"
        if victims := self.processes("a rank") if role == "a rank" else self._workers(chance):
            with suppress(psutil.NoSuchProcess):
                chance.choice(victims).send_signal(signal.SIGKILL)
                kills[f"{role}, at random"] += 1

    def _workers(self, chance: random.Random) -> list[psutil.Process]:
        """With probability 4/5 workers that hold a cell, else all workers, including starting ones."""
        workers = self.processes("a worker")
        if chance.random() < 4 / 5 and (self.runs / "queue.db").exists():
            holders = forked.run_in_fork(lambda: {entry.worker["pid"] for entry in self._queue().entries("running")})
            return [worker for worker in workers if str(worker.pid) in holders]
        return workers

    def _queue(self) -> Queue:
        return Queue(default_storage(self.runs), GRID)

    def states(self) -> dict[str, str]:
        """State of each cell in the queue."""
        return forked.run_in_fork(lambda: dict(self._queue().states()))

    def table(self) -> str:
        """The finished table's numbers."""
        return (self.runs / GRID / "table.csv").read_text()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Metrics of each cell by key."""
        results = {path.parent.name: json.loads(path.read_text()) for path in self.results()}
        return {key: result["metrics"] for key, result in results.items()}

    def results(self) -> list[Path]:
        """The cells' result files."""
        return sorted((self.runs / GRID / "cells").glob("*/result.json"))

    def check(self) -> None:
        """Every cell complete exactly once in the queue and in MLflow, nothing left over, no metric twice."""
        forked.run_in_fork(self._check)
        end = time.monotonic() + END_SECONDS
        while left := self.processes(*MODULES):
            assert time.monotonic() < end, left
            time.sleep(0.2)

    def _check(self) -> None:
        assert Counter(self.states().values()) == {"complete": CELLS}
        study = optuna.load_study(study_name=GRID, storage=default_storage(self.runs))
        completed = Counter(trial.user_attrs["key"] for trial in study.trials if trial.state.name == "COMPLETE")
        assert set(completed.values()) == {1}
        assert len(completed) == len(self.results()) == CELLS
        assert not list((self.runs / GRID / "cells").glob("*/checkpoints"))
        client = MlflowClient(f"sqlite:///{self.runs / 'mlflow.db'}")
        number = client.get_experiment_by_name(GRID).experiment_id
        cells = client.search_runs([number], "tags.kind = 'cell'", max_results=1000)
        assert Counter(run.data.tags["cell"] for run in cells) == completed
        assert {(run.info.status, run.data.tags["state"]) for run in cells} == {("FINISHED", "complete")}
        measured = self.metrics()
        for run in cells:
            for name, every in (("train/loss", LOG_EVERY), ("val/loss", VAL_EVERY)):
                steps = [point.step for point in client.get_metric_history(run.info.run_id, name)]
                assert steps == list(range(every - 1, self.steps, every)), (name, steps)
            final = measured[run.data.tags["cell"]]
            assert {name: run.data.metrics[name] for name in final} == final


@dataclass(frozen=True)
class Soak:
    """Parameters of a soak."""

    kills: int
    seed: int
    workers: int
    steps: int
    devices: int = 1


def soak(folder: Path, asked: Soak) -> tuple[SoakOutcome, SoakOutcome, int]:
    """Run a grid undisturbed, then repeatedly under kills until there were enough; check and compare each.

    Returns the outcome of the first, the summed outcome of the others, and their number. All is kept in `folder`.
    """
    peace = Chaos(folder / "peace", asked.steps, devices=asked.devices)
    undisturbed = _run_once(peace, lambda: peace.run(asked.workers, kills=0))
    all_kept, n = SoakOutcome(), 0
    while all_kept.kills.total() < asked.kills:
        n += 1
        chaos = Chaos(folder / f"grid-{n}", asked.steps, devices=asked.devices)
        more, teller = asked.kills - all_kept.kills.total(), ProgressPrinter(all_kept, asked.kills, n)
        all_kept += _run_once(chaos, lambda: chaos.run(asked.workers, more, asked.seed + n, BETWEEN, teller), peace)  # noqa: B023
    return undisturbed, all_kept, n


def _run_once(grid: Chaos, run: Callable[[], SoakOutcome], peace: Chaos | None = None) -> SoakOutcome:
    """Outcome of a grid, which is checked at its end and never run again."""
    kept = SoakOutcome.read(grid.kept)
    if kept.ended:
        return kept
    outcome = run()
    grid.check()
    if peace:
        assert grid.metrics() == peace.metrics()
        assert grid.table() == peace.table()
    outcome.ended = True
    outcome.write(grid.kept)
    return outcome


class ProgressPrinter:
    """Prints the progress occasionally."""

    def __init__(self, before: SoakOutcome, kills: int, grid: int) -> None:
        self._before, self._kills, self._grid, self._told = before, kills, grid, 0.0

    def __call__(self, outcome: SoakOutcome) -> None:
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            so_far = self._before + outcome
            print(
                f"{so_far.kills.total()}/{self._kills} kills in {so_far.seconds:.0f} s, grid {self._grid}", flush=True
            )


def report(folder: Path, asked: Soak) -> str:
    """Report of a soak."""
    undisturbed, disturbed, n = soak(folder, asked)
    rows = "\n".join(f"| {where} | {n} |" for where, n in sorted(disturbed.kills.items()))
    return f"""# What a grid survives

{CELLS} cells that train on {asked.devices} device(s), validate and checkpoint (every {CHECKPOINT_EVERY} of
{asked.steps} steps), run by {asked.workers} worker(s), {n} time(s) from the beginning; SIGKILL, without warning,
{disturbed.kills.total()} times:

| killed | times |
| --- | --: |
{rows}

The command was given {disturbed.commands} times in all, again whenever it had been killed or had ended early. In the
end of each grid every cell was complete exactly once, in the queue and in MLflow; no metric was missing or logged
twice; all {CELLS} results were bit-equal to those of the same grid undisturbed, and so was its table. That took
{disturbed.seconds:.0f} s; undisturbed, a grid took {undisturbed.seconds:.0f} s.

Made by `PYTHONPATH=tests python tests/grid/chaos.py {" ".join(f"--{name} {n}" for name, n in vars(asked).items())}`
at commit {", ".join(disturbed.commits)} on {time.strftime("%Y-%m-%d")}: Python {platform.python_version()},
{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000, help="of a cell (default 5000: ten seconds and more)")
    parser.add_argument("--devices", type=int, default=1, help="processes of a cell (default 1)")
    parser.add_argument("--folder", type=Path, required=True, help="keeps the grids, and what happened to them so far")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    forked.make_cheap()
    asked = Soak(options.kills, options.seed, options.workers, options.steps, options.devices)
    found = report(options.folder.resolve(), asked)
    print(found)
    if options.out:
        options.out.write_text(found)
