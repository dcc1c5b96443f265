"""Kills a grid at random moments, and at chosen ones, until it has had enough; then checks that nothing was lost.

`python tests/grid/chaos.py --kills 100 --out docs/results/random-kills.md` writes what it found.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import optuna
import psutil
from mlflow.tracking import MlflowClient

from lit_lazy.grid.queue.queue import Queue
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.support.provenance import git_sha

GRID = "chaos-chaos_base"
CELLS = 24
LOG_EVERY, VAL_EVERY, CHECKPOINT_EVERY = 50, 100, 20
POINTS = ("training", "checkpoint write", "result write", "between result and MLflow", "between MLflow and queue")
"""Moments at which a worker kills itself, each asked for by a file of that name in the trap folder."""

BASE = '''
"""Cells that train, validate and checkpoint for a second or two."""
from dataclasses import replace

from lit_lazy.config.files import find, load_experiment


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
    import lit_lazy.training.checkpoints
    import lit_lazy.training.run
    from lit_lazy.grid.queue.queue import Queue
    from lit_lazy.training.module import LitLM
    from lit_lazy.tracking.spool import Spool

    def half_written(write, point):
        def write_and_die(path, content):
            if sprung(point):
                path.with_name(f".{path.name}.{os.getpid()}").write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, content)

        return write_and_die

    def before(cls, name, point, when=lambda *_: True):
        method = getattr(cls, name)

        def die_first(self, *args, **kwargs):
            if when(self):
                die_at(point)
            return method(self, *args, **kwargs)

        setattr(cls, name, die_first)

    checkpoints, run = lit_lazy.training.checkpoints, lit_lazy.training.run
    checkpoints.write_atomically = half_written(checkpoints.write_atomically, "checkpoint write")
    run.write_text = half_written(run.write_text, "result write")
    before(LitLM, "training_step", "training", lambda module: module.global_step == 37)
    before(Spool, "finish", "between result and MLflow")
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
class Outcome:
    """What happened to a grid on its way to the end."""

    kills: Counter[str] = field(default_factory=Counter)
    commands: int = 0
    seconds: float = 0.0


class Chaos:
    """One grid in one folder, with the ablation and the experiment that it runs on."""

    def __init__(self, folder: Path, steps: int, store: Path | None = None) -> None:
        self.folder, self.runs, self.steps = folder, folder / "runs", steps
        self.runs.mkdir(parents=True)
        if store:
            shutil.copy(store, self.runs / "mlflow.db")
        (folder / "traps").mkdir()
        every = f"val_every={VAL_EVERY}, checkpoint_every={CHECKPOINT_EVERY}, log_every={LOG_EVERY}"
        (folder / "chaos_base.py").write_text(BASE.format(options=f"steps={steps}, {every}, warmup_steps=2"))
        (folder / "chaos.py").write_text(ABLATION)
        self.log = folder / "commands.log"

    def command(self, workers: int) -> "subprocess.Popen[bytes]":
        """The same command every time, as its user would give it."""
        files = str(self.folder / "chaos.py"), "--base", str(self.folder / "chaos_base.py")
        options = "--runs", str(self.runs), "--workers", str(workers)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lit_lazy.command", "ablate", "run", *files, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def workers(self) -> list[psutil.Process]:
        """The grid's worker processes, whoever started them."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "lit_lazy.grid.work.worker" in words and str(self.runs) in words:
                found.append(process)
        return found

    def run(self, workers: int, kills: int, seed: int = 0, between: tuple[float, float] = (0.5, 4.0)) -> Outcome:
        """Run to the end, killing workers and, one time in six, the command itself on the way."""
        chance, outcome, started = random.Random(seed), Outcome(), time.monotonic()
        folder = self.folder / "traps"
        traps = [folder / point for point in POINTS] if kills else []
        chance.shuffle(traps)
        parent = self.command(workers)
        outcome.commands = 1
        while True:
            sprung = [path.name.partition(" by ")[0] for path in folder.glob("* by *")]
            if traps and len(sprung) == len(POINTS) - len(traps):  # the one before has caught its worker
                traps.pop().touch()
            if parent.poll() is not None:
                if parent.returncode == 0 and set(self.states().values()) == {"complete"}:
                    break
                parent = self.command(workers)
                outcome.commands += 1
            more = sum(outcome.kills.values()) + len(sprung) < kills
            time.sleep(chance.uniform(*between) if more else 0.2)
            if more:
                self._kill_one(chance, parent, outcome)
        outcome.kills += Counter(sprung)
        outcome.seconds = time.monotonic() - started
        return outcome

    def _kill_one(self, chance: random.Random, parent: "subprocess.Popen[bytes]", outcome: Outcome) -> None:
        if chance.random() < 1 / 6 and parent.poll() is None:
            parent.kill()
            parent.wait()
            outcome.kills["the command, at random"] += 1
        elif victims := self._victims(chance):
            try:
                chance.choice(victims).send_signal(signal.SIGKILL)
                outcome.kills["a worker, at random"] += 1
            except psutil.NoSuchProcess:
                pass

    def _victims(self, chance: random.Random) -> list[psutil.Process]:
        """Workers that hold a cell, four times in five; else any, most of which are starting."""
        workers = self.workers()
        if chance.random() < 4 / 5 and (self.runs / "queue.db").exists():
            holders = {entry.worker["pid"] for entry in Queue(default_storage(self.runs), GRID).entries("running")}
            return [worker for worker in workers if str(worker.pid) in holders]
        return workers

    def states(self) -> dict[str, str]:
        """State of each cell in the queue."""
        return dict(Queue(default_storage(self.runs), GRID).states())

    def table(self) -> str:
        """The finished table's numbers."""
        return (self.runs / GRID / "table.csv").read_text()

    def metrics(self) -> dict[str, dict[str, float]]:
        """What each cell measured, by key."""
        results = {path.parent.name: json.loads(path.read_text()) for path in self.results()}
        return {key: result["metrics"] for key, result in results.items()}

    def results(self) -> list[Path]:
        """The cells' result files."""
        return sorted((self.runs / GRID / "cells").glob("*/result.json"))

    def check(self) -> None:
        """Every cell complete exactly once in the queue and in MLflow, nothing left over, no metric twice."""
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


def report(kills: int, seed: int, workers: int, steps: int) -> str:
    """Run a grid undisturbed and the same one in chaos, check and compare them, and tell."""
    with tempfile.TemporaryDirectory(prefix="lit-lazy-chaos-") as folder:
        peace, chaos = Chaos(Path(folder, "peace"), steps), Chaos(Path(folder, "chaos"), steps)
        undisturbed = peace.run(workers, kills=0)
        peace.check()
        disturbed = chaos.run(workers, kills, seed, between=(1.0, 8.0))
        chaos.check()
        assert sum(disturbed.kills.values()) >= kills, "the grid was done before its kills: give it more steps"
        assert chaos.metrics() == peace.metrics()
        assert chaos.table() == peace.table()
    rows = "\n".join(f"| {where} | {n} |" for where, n in sorted(disturbed.kills.items()))
    return f"""# What a grid survives

{CELLS} cells that train, validate and checkpoint (every {CHECKPOINT_EVERY} of {steps} steps), run by {workers}
worker(s); SIGKILL, without warning, {sum(disturbed.kills.values())} times:

| killed | times |
| --- | --: |
{rows}

The command was given {disturbed.commands} times in all, again whenever it had been killed or had ended early. In the
end every cell was complete exactly once, in the queue and in MLflow; no metric was missing or logged twice; all {CELLS}
results are bit-equal to those of the same grid undisturbed, and so is its table. That took {disturbed.seconds:.0f} s,
undisturbed {undisturbed.seconds:.0f} s.

Made by `python tests/grid/chaos.py --kills {kills} --seed {seed} --workers {workers} --steps {steps}`
at commit {git_sha()} on {time.strftime("%Y-%m-%d")}: Python {platform.python_version()}, {platform.system()}
{platform.machine()}, {os.cpu_count()} CPU cores.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000, help="of a cell (default 5000: ten seconds and more)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = report(options.kills, options.seed, options.workers, options.steps)
    print(text)
    if options.out:
        options.out.write_text(text)
