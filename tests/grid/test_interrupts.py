"""A worker that is interrupted at any moment, also repeatedly, leaves no cell running."""

import io
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from optuna.storages import RDBStorage

from lit_lazy.config.key import cell_key
from lit_lazy.config.serialisation import replace_at, to_dict
from lit_lazy.config.user_files import load_experiment
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.jobs import ray_pool, worker
from lit_lazy.grid.jobs.job import Job
from lit_lazy.grid.jobs.worker import Worker
from lit_lazy.grid.queue.liveness import Heartbeat
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.grid.search.definition import Real, Search, define
from lit_lazy.grid.search.queue import SearchQueue
from lit_lazy.grid.search.worker import SearchWorker
from lit_lazy.support.named_files import find
from lit_lazy.tracking.store import default_uri
from lit_lazy.tracking.tracked_run import ActiveRun
from lit_lazy.training.module import LitLM

STUDY = "study"
Moment = tuple[type, str, str]
CLAIM: dict[str, Moment] = {
    "signed, not taken": (RDBStorage, "set_trial_state_values", "before"),
    "taken in the database": (RDBStorage, "set_trial_state_values", "after"),
    "claimed": (Queue, "claim", "after"),
    "not held yet": (Heartbeat, "hold", "before"),
    "held": (Heartbeat, "hold", "after"),
    "about to start": (Worker, "make_run", "before"),
    "starting": (Worker, "_train", "before"),
    "in training": (LitLM, "training_step", "before"),
}
REQUEUEING: dict[str, Moment] = {
    "about to requeue": (Queue, "requeue", "before"),
    "requeueing": (RDBStorage, "set_trial_state_values", "before"),
    "requeued": (Queue, "requeue", "after"),
    "reporting": (ActiveRun, "fail", "before"),
}


def interrupt_at(moment: Moment, number: signal.Signals) -> None:
    """Send this process a signal once, at a moment."""
    owner, name, when = moment
    method = getattr(owner, name)

    def interrupt(*args: object, **kwargs: object) -> object:
        setattr(owner, name, method)
        if when == "before":
            os.kill(os.getpid(), number)
        result = method(*args, **kwargs)
        if when == "after":
            os.kill(os.getpid(), number)
        return result

    setattr(owner, name, interrupt)


def local(job: Job, module: Callable[[], int]) -> int:
    """Start a worker like `LocalPool`."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(pickle.dumps((job, 0))))
    return module()


KINDS: dict[str, tuple[Callable[[Job], int], signal.Signals]] = {
    "local": (lambda job: local(job, worker.main), signal.SIGTERM),
    "search": (lambda job: local(job, lambda: worker.main(SearchQueue, SearchWorker)), signal.SIGTERM),
    "ray": (lambda job: ray_pool.execute(job, os.getcwd()), signal.SIGINT),
}


def two_cells(kind: str, storage: str) -> Queue:
    """A queue of two cells or points."""
    base = load_experiment(find("experiments", "backcopy_tiny"))
    if kind != "search":
        queue = Queue(storage, STUDY)
        seeds = [(seed, replace_at(base, {"seed": seed})) for seed in range(2)]
        data = base.data.load().fingerprint
        queue.add_missing([Cell(cell_key(cfg, data), "v", "ours", seed, to_dict(cfg), {}) for seed, cfg in seeds])
        return queue
    search = SearchQueue(storage, STUDY)
    definition = define(Search("s", {"train.lr": Real(1e-4, 1e-1, log=True)}, "backcopy_tiny", startup=2), base)
    search.facts = {"definition": definition.to_json()}
    search.add_missing([definition.make_placeholder(number) for number in range(2)])
    return search


def end_of(work: Callable[[], None]) -> int | None:
    """Exit status of a process that runs `work`."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(timeout=60)
    assert process.exitcode is not None
    return process.exitcode


def interrupted(kind: str, runs: Path, *moments: Moment) -> Queue:
    """The queue after a worker of this kind was interrupted at these moments in turn."""
    storage = default_storage(runs)
    queue = two_cells(kind, storage)
    job = Job(storage, STUDY, runs, default_uri(runs), "parent", None, 1, False, None, ())
    execute, number = KINDS[kind]

    def work() -> None:
        for moment in moments:
            interrupt_at(moment, number)
        try:
            sys.exit(execute(job))
        except KeyboardInterrupt:
            sys.exit(130)

    assert end_of(work) == 130
    return queue


def check(queue: Queue) -> None:
    assert set(queue.states().values()) == {"waiting"}
    assert [entry.reason for entry in queue.entries("waiting")] == ["interrupted", ""]


# Combinations in `make test`; `make test-all` tries all others.
SHORT = {
    ("local", "taken in the database"),
    ("local", "not held yet"),
    ("ray", "claimed"),
    ("local", "about to requeue"),
    ("ray", "reporting"),
}


def every(moments: Iterable[str]) -> list[object]:
    """Each moment with each kind of worker."""
    return [
        pytest.param(kind, moment, marks=() if (kind, moment) in SHORT else pytest.mark.long)
        for kind in KINDS
        for moment in moments
    ]


@pytest.mark.parametrize(("kind", "moment"), every(CLAIM))
def test_a_cell_is_requeued_whenever_its_worker_is_interrupted(kind: str, moment: str, runs: Path) -> None:
    check(interrupted(kind, runs, CLAIM[moment]))


def test_a_point_is_requeued_when_it_is_being_drawn(runs: Path) -> None:
    check(interrupted("search", runs, (SearchQueue, "_draw_parameters", "after")))


@pytest.mark.parametrize(("kind", "moment"), every(REQUEUEING))
def test_a_second_interrupt_does_not_cut_the_requeueing_short(kind: str, moment: str, runs: Path) -> None:
    check(interrupted(kind, runs, CLAIM["in training"], REQUEUEING[moment]))
