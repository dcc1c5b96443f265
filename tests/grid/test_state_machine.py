"""Model-based test of the queue and its observers with any sequence of actions on two machines."""

import io
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from rich.console import Console

from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.jobs import launch
from lit_lazy.grid.jobs.job import LaunchOptions, Work
from lit_lazy.grid.jobs.launch import MOST_DEATHS, STALE_SECONDS, Supervisor
from lit_lazy.grid.queue import liveness
from lit_lazy.grid.queue.liveness import Membership, remove_dead_locks
from lit_lazy.grid.queue.queue import STATES, CellLostError, Queue, Task

CELLS = {key: Cell(key, "v", "ours", seed, {}, {}) for seed, key in enumerate(("a", "b", "c"))}
HOSTS = ("one", "two")
KEYS = st.sets(st.sampled_from(sorted(CELLS)), min_size=1)
A_WORKER = st.runner().flatmap(lambda machine: st.sampled_from(machine.workers))


@dataclass(eq=False)
class Trial:
    """The model's state of one attempt at a cell."""

    key: str
    state: str = "waiting"
    holder: "Worker | None" = None
    signed: str | None = None
    """Token of the last holder."""
    beats: int = 0
    deaths: tuple[int, str] | None = None
    """Number of deaths, and the cell's progress at them."""
    reason: str = ""
    final: bool = False


@dataclass(eq=False)
class Worker:
    """A worker that has claimed a cell and neither ended it nor noticed its loss."""

    host: "Host"
    queue: Queue
    task: Task
    trial: Trial
    member: Membership
    stalled: bool = False
    dead: bool = False


@dataclass(eq=False)
class Host:
    """A machine with one command, which observes."""

    name: str
    queue: Queue
    watcher: Supervisor
    looks: list[tuple[float, dict[Trial, tuple[str | None, int]]]] = field(default_factory=list)
    """Time of its last check, and the beats it saw."""


class Machine(RuleBasedStateMachine):
    """Each rule acts on the queue and on the model, which must then agree."""

    def __init__(self, storage: str, folder: Path, numbers: Iterator[int]) -> None:
        super().__init__()
        self.storage, self.name = storage, f"study-{next(numbers)}"
        self.folder = folder / self.name
        self.now, self.host_name, self.ticks = 1000.0, "", itertools.count()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.patch.setattr(liveness, "socket", SimpleNamespace(gethostname=lambda: self.host_name))
        work = Work(self.name, (), {}, folder, ())
        queues = [self.opened() for _ in HOSTS]
        self.hosts = {
            name: Host(name, queue, Supervisor(work, LaunchOptions(1, 1), queue, Console(file=io.StringIO())))
            for name, queue in zip(HOSTS, queues, strict=True)
        }
        self.trials: list[Trial] = []
        self.workers: list[Worker] = []
        self.members: list[Membership] = []
        self.progress: dict[str, str] = {}
        self.once_complete: set[str] = set()

    def opened(self) -> Queue:
        """The queue with this machine's clock in the database: sqlite's clock has a resolution of seconds."""
        queue = Queue(self.storage, self.name)
        record = queue._storage.record_heartbeat

        def record_now(trial_id: int) -> None:
            record(trial_id)
            at = datetime(2000, 1, 1) + timedelta(seconds=self.now, microseconds=next(self.ticks))
            with queue._engine.begin() as connection:
                update = "UPDATE trial_heartbeats SET heartbeat = :at WHERE trial_id = :trial"
                connection.execute(sqlalchemy.text(update), {"at": str(at), "trial": trial_id})

        queue._storage.record_heartbeat = record_now  # type: ignore[method-assign]
        return queue

    def teardown(self) -> None:
        for member in self.members:
            member.__exit__(None)
        for queue in [host.queue for host in self.hosts.values()] + [worker.queue for worker in self.workers]:
            queue._engine.dispose()
            queue._storage.engine.dispose()
        self.patch.undo()

    @contextmanager
    def at(self, host: str) -> Iterator[Host]:
        """Switch to that machine."""
        self.host_name = host
        yield self.hosts[host]

    def newest(self) -> dict[str, Trial]:
        return {trial.key: trial for trial in self.trials}

    @rule(host=st.sampled_from(HOSTS), keys=KEYS, recorded=st.sets(st.sampled_from(sorted(CELLS)), max_size=1))
    def add_missing(self, host: str, keys: set[str], recorded: set[str]) -> None:
        newest = self.newest()
        missing = [key for key in sorted(keys) if key not in newest or newest[key].state == "failed"]
        added = self.hosts[host].queue.add_missing([CELLS[key] for key in sorted(keys)], dict.fromkeys(recorded, 1.0))
        self.trials += [Trial(key, "complete" if key in recorded else "waiting") for key in missing]
        assert added == len(set(missing) - recorded)

    @rule(host=st.sampled_from(HOSTS), keys=KEYS)
    def add_again(self, host: str, keys: set[str]) -> None:
        """Like a command that finds complete cells missing in MLflow."""
        newest = self.newest()
        lost = [key for key in sorted(keys) if key in newest and newest[key].state == "complete"]
        self.hosts[host].queue.add_again([CELLS[key] for key in sorted(keys)])
        self.trials += [Trial(key, "waiting") for key in lost]
        self.once_complete -= set(lost)

    @rule(host=st.sampled_from(HOSTS), keys=st.none() | KEYS)
    def claim(self, host: str, keys: set[str] | None) -> None:
        with self.at(host) as at:
            member = Membership(self.folder / "workers")
            self.members.append(member)
            task = at.queue.claim(member.identity, keys)
        first = next((t for t in self.trials if t.state == "waiting" and (keys is None or t.key in keys)), None)
        assert (task and task.cell) == (first and CELLS[first.key])
        if task and first:
            first.state, first.signed = "running", task.token
            first.holder = Worker(at, at.queue, task, first, member)
            self.workers.append(first.holder)

    @precondition(lambda self: self.workers)
    @rule(worker=A_WORKER, how=st.sampled_from(("complete", "failed", "failed for good", "waiting")))
    def end(self, worker: Worker, how: str) -> None:
        """Also a worker that was considered dead and has resumed without noticing."""
        queue, task, trial = worker.queue, worker.task, worker.trial
        end = {
            "complete": lambda: queue.complete(task, 1.0),
            "failed": lambda: queue.fail(task, "why"),
            "failed for good": lambda: queue.fail(task, "why", final=True),
            "waiting": lambda: queue.requeue(task, "interrupted"),
        }[how]
        if trial.holder is worker:
            end()
            trial.holder, trial.state, trial.final = None, how.removesuffix(" for good"), how == "failed for good"
            trial.reason = {"complete": trial.reason, "waiting": "interrupted"}.get(how, "why")
        else:
            with pytest.raises(CellLostError, match="given to another worker"):
                end()
        self.workers.remove(worker)

    @precondition(lambda self: self.workers)
    @rule(worker=A_WORKER)
    def die(self, worker: Worker) -> None:
        worker.member.__exit__(KeyboardInterrupt)  # its lock is freed, the lock's file stays
        worker.dead = True
        self.workers.remove(worker)

    @precondition(lambda self: self.workers)
    @rule(worker=A_WORKER)
    def stall_or_wake(self, worker: Worker) -> None:
        worker.stalled = not worker.stalled

    @precondition(lambda self: self.workers)
    @rule(worker=A_WORKER)
    def get_ahead(self, worker: Worker) -> None:
        checkpoint = self.folder / "cells" / worker.task.cell.key / "checkpoints" / "last.ckpt"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.touch()
        written = next(self.ticks)
        os.utime(checkpoint, ns=(written, written))
        self.progress[worker.task.cell.key] = str(written)

    @rule(
        seconds=st.lists(st.sampled_from((1, 30, 55, 55, 65, 130)), min_size=1, max_size=4),
        watching=st.lists(st.sampled_from(HOSTS), unique=True),
        taking=st.booleans(),
    )
    def pass_time(self, seconds: Sequence[int], watching: Sequence[str], taking: bool) -> None:
        """Awake workers send beats; commands release dead workers' cells and claim waiting ones."""
        for more in seconds:
            self.now += more
            for worker in self.workers:
                if not worker.stalled:
                    worker.queue.beat(worker.task)
                    worker.trial.beats += worker.trial.holder is worker
            for host in watching:
                self.look(host)
                if taking:
                    self.claim(host, None)

    def look(self, name: str) -> None:
        with self.at(name) as host:
            host.watcher.release_dead()
        running = [trial for trial in self.trials if trial.holder]
        host.looks.append((self.now, {trial: (trial.signed, trial.beats) for trial in running}))
        for trial in running:
            holder = trial.holder
            assert holder
            if holder.dead if holder.host is host else self.is_stale(host, trial):
                self.release(trial)

    def is_stale(self, host: Host, trial: Trial) -> bool:
        """Whether the beat is stale, judged by checks in close succession."""
        since = self.now
        for then, seen in reversed(host.looks):
            if since - then > STALE_SECONDS / 2 or seen.get(trial) != (trial.signed, trial.beats):
                break
            since = then
        return self.now - since > STALE_SECONDS

    def release(self, trial: Trial) -> None:
        progress = self.progress.get(trial.key, "")
        before, at = trial.deaths or (0, progress)
        deaths = before + 1 if at == progress else 1
        trial.reason = "its worker died" + (f" {deaths} times without progress" if deaths > 1 else "")
        trial.holder, trial.state, trial.deaths = None, "waiting", (deaths, progress)
        if deaths == MOST_DEATHS:
            trial.state, trial.reason = "failed", f"{trial.reason} (out of memory?)"

    @rule(host=st.sampled_from(HOSTS))
    def clean_up(self, host: str) -> None:
        """Like a command at its end."""
        with self.at(host) as at:
            remove_dead_locks(self.folder / "workers", [entry.worker for entry in at.queue.entries("running")])

    @precondition(lambda self: self.trials)
    @rule(host=st.sampled_from(HOSTS))
    def clear(self, host: str) -> None:
        """The other machine's workers, invisible here, still use the former queue."""
        self.hosts[host].queue.clear()
        for other in self.hosts.values():
            if other.name != host:
                other.queue = other.watcher.queue = self.opened()
        for trial in self.trials:
            trial.holder = None
        self.trials.clear()
        self.once_complete.clear()

    @invariant()
    def what_is_complete_stays_complete(self) -> None:
        states = self.hosts["one"].queue.states()
        assert all(states[key] == "complete" for key in self.once_complete)
        self.once_complete |= {key for key, state in states.items() if state == "complete"}

    @invariant()
    def states_and_entries_agree(self) -> None:
        newest = self.newest()
        in_order = [
            (state, t) for state in STATES.values() for t in self.trials if (newest[t.key], t.state) == (t, state)
        ]
        expected = [(t.key, state, t.reason, t.final, t.signed) for state, t in in_order]
        for host in self.hosts.values():
            assert host.queue.states() == {key: trial.state for key, trial in newest.items()}
        entries = self.hosts["two"].queue.entries(*STATES.values())
        assert [(e.key, e.state, e.reason, e.final, e.worker.get("token")) for e in entries] == expected

    @invariant()
    def one_at_most_holds_a_cell(self) -> None:
        held = [worker.queue.is_held(worker.task) for worker in self.workers]
        assert held == [worker.trial.holder is worker for worker in self.workers]


def explore(storage: str, folder: Path, options: settings) -> None:
    numbers = itertools.count()
    run_state_machine_as_test(lambda: Machine(storage, folder, numbers), settings=options)


OPTIONS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
FEW = settings(OPTIONS, max_examples=3, stateful_step_count=25, derandomize=True)
MANY = settings(OPTIONS, max_examples=40, stateful_step_count=50, print_blob=True)


@pytest.mark.parametrize("options", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_every_order_of_events_is_the_models(
    database: str, options: settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    in_file = f"sqlite:///{tmp_path / 'queue.db'}"
    explore(in_file if database == "sqlite" else request.getfixturevalue("postgres_storage"), tmp_path, options)
