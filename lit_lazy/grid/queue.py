"""The durable queue of an ablation's cells: an Optuna study whose trials are enqueued in advance.

A trial carries its cell in user attributes. WAITING trials are what is left to do; `ask` hands each to one worker.
"""

import json
import os
import socket
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Literal

import optuna
import psutil
from filelock import FileLock
from optuna.trial import FrozenTrial, TrialState

from lit_lazy.grid.ablation import Cell

optuna.logging.set_verbosity(optuna.logging.WARNING)

UNSIGNED_FOR = timedelta(minutes=1)

State = Literal["waiting", "running", "complete", "failed"]
STATES: dict[TrialState, State] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class Task:
    """A cell in the hands of this process."""

    cell: Cell
    trial: optuna.Trial


class Queue:
    """Cells waiting, running, complete or failed, in a database that outlives every process."""

    def __init__(self, storage: str, name: str) -> None:
        """Open the study `name`, created if it is not there."""
        self.storage_url, self.name = storage, name
        wait = {"connect_args": {"timeout": 60}} if storage.startswith("sqlite") else {}
        self._storage = optuna.storages.RDBStorage(storage, engine_kwargs=wait)
        self._study = self._open()
        # Optuna hands out a trial by reading its state and then writing it, under a row lock that sqlite does not have:
        # two workers can be given the same one. Everyone who shares a sqlite file can share a file lock.
        path = storage.removeprefix("sqlite:///")
        self._handing_out = FileLock(f"{path}.lock") if storage.startswith("sqlite") else nullcontext()

    def _open(self) -> optuna.Study:
        return optuna.create_study(
            storage=self._storage,
            study_name=self.name,
            load_if_exists=True,
            # Every trial is enqueued with its cell: nothing is ever sampled.
            sampler=optuna.samplers.RandomSampler(),
        )

    def clear(self) -> None:
        """Forget all cells."""
        optuna.delete_study(study_name=self.name, storage=self._storage)
        self._study = self._open()

    @property
    def facts(self) -> dict[str, str]:
        """What the workers have to know beside the cells."""
        return self._study.user_attrs.get("facts", {})

    @facts.setter
    def facts(self, facts: dict[str, str]) -> None:
        self._study.set_user_attr("facts", facts)

    def states(self) -> dict[str, State]:
        """State of every cell by key: complete if it ever completed, else that of its newest trial."""
        return {key: STATES[trial.state] for key, trial in self._trials().items()}

    def reasons(self) -> dict[str, str]:
        """Why each failed cell failed, by key."""
        return {
            key: trial.user_attrs.get("reason", "unknown")
            for key, trial in self._trials().items()
            if trial.state == TrialState.FAIL
        }

    def running(self) -> dict[str, str]:
        """Each running cell by key: variant and seed, on which machine, since when."""
        trials = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return {t.user_attrs["cell"]["key"]: _held(t) for t in trials if "cell" in t.user_attrs}

    def _trials(self) -> dict[str, FrozenTrial]:
        newest: dict[str, FrozenTrial] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if "cell" in trial.user_attrs:
                key = trial.user_attrs["cell"]["key"]
                if key not in newest or newest[key].state != TrialState.COMPLETE:
                    newest[key] = trial
        return newest

    def add_missing(self, cells: Iterable[Cell]) -> int:
        """Enqueue the cells that are neither complete nor waiting nor running; how many those were."""
        states = self.states()
        missing = [cell for cell in cells if states.get(cell.key) in (None, "failed")]
        for cell in missing:
            self._study.enqueue_trial({}, user_attrs={"cell": asdict(cell)})
        return len(missing)

    def claim(self) -> Task | None:
        """Take a waiting cell, or None when there is none."""
        with self._handing_out:
            while self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                trial = self._study.ask()
                if "cell" in trial.user_attrs:
                    trial.set_user_attr("worker", worker_identity())
                    return Task(Cell(**trial.user_attrs["cell"]), trial)
                # Another worker was quicker to the last waiting cell, and `ask` made a trial without one.
                self._study.tell(trial, state=TrialState.FAIL)
            return None

    def complete(self, task: Task, value: float) -> None:
        """Record that a cell is done; `value` is its validation loss."""
        self._study.tell(task.trial, value)

    def fail(self, task: Task, reason: str) -> None:
        """Record that a cell failed, and why."""
        task.trial.set_user_attr("reason", reason)
        self._study.tell(task.trial, state=TrialState.FAIL)

    def recover(self) -> list[tuple[Cell, str]]:
        """Fail the running cells of this machine's dead workers; which, and the reason given."""
        recovered = []
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "cell" in trial.user_attrs and _is_dead(trial):
                reason = "its worker was killed"
                self._storage.set_trial_user_attr(trial._trial_id, "reason", reason)
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
                recovered.append((Cell(**trial.user_attrs["cell"]), reason))
        return recovered


def _held(trial: FrozenTrial) -> str:
    cell, worker = trial.user_attrs["cell"], json.loads(trial.user_attrs.get("worker", "{}"))
    since = f" since {trial.datetime_start:%H:%M:%S}" if trial.datetime_start else ""
    return f"{cell['variant']} seed {cell['seed']} on {worker.get('host', 'a starting worker')}{since}"


def worker_identity() -> str:
    """Host, process id and start time of this process."""
    process = psutil.Process()
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": process.create_time()})


def _is_dead(trial: FrozenTrial) -> bool:
    """Whether the worker of a running trial no longer runs; one of another host is not judged."""
    if "worker" not in trial.user_attrs:
        # Killed between taking the trial and signing it, unless it is just about to sign.
        return trial.datetime_start is not None and datetime.now() - trial.datetime_start > UNSIGNED_FOR
    worker = json.loads(trial.user_attrs["worker"])
    if worker["host"] != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(worker["pid"]).create_time() - worker["started"]) > 1.0
    except psutil.NoSuchProcess:
        return True
