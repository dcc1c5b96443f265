"""The durable queue of an ablation's cells: an Optuna study with one trial per cell, enqueued in advance.

A trial carries its cell in user attributes: `key`, `cell`, and `worker` while one holds it. Optuna's storage keeps the
trials, their states and heartbeats, on sqlite or PostgreSQL; handing them out and counting them are single queries on
its tables, so that a cell costs the same in a grid of ten thousand as in one of ten.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import optuna
import sqlalchemy
from filelock import FileLock, Timeout
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial
from sqlalchemy import text

from lit_lazy.databases import StorageError, engine_options, first_line, reach, redacted, sqlite_file
from lit_lazy.disk import is_disk_full, writable_folder
from lit_lazy.errors import UnfinishedError
from lit_lazy.grid.ablation import Cell

optuna.logging.set_verbosity(optuna.logging.WARNING)

T = TypeVar("T")
State = Literal["waiting", "running", "complete", "pruned", "failed"]
STATES: dict[str, State] = {
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}
FINISHED: tuple[State, ...] = ("complete", "pruned")
"""States after which nothing is left to do for a cell; only a search prunes."""
MADE_BY = "lit-lazy ablate run, queue 2"
ADVISORY_LOCK = 0x6C69746C617A79
"""PostgreSQL's number of the lock that all processes on a storage share."""
PATIENCE_SECONDS = 600.0
"""How long a database that does not answer is tried again before a process gives up."""


class StorageAwayError(UnfinishedError):
    """The database did not answer for a long time."""


class LostError(RuntimeError):
    """The cell was given to another worker meanwhile, because this one seemed dead."""


@dataclass(frozen=True)
class Task:
    """A cell in the hands of this process."""

    cell: Cell
    trial_id: int
    token: str
    """Says of the trial that it is this process that holds it."""


@dataclass(frozen=True)
class Entry:
    """What the queue knows of a cell."""

    trial_id: int
    key: str
    run: str
    """Name of its run folder."""
    variant: str
    seed: int
    state: State
    reason: str
    """Why the last attempt ended early; "" for a first one."""
    worker: dict[str, str]
    """Of a running cell: host, pid, lock (the file that its process holds), token."""
    since: datetime | None
    """When its last attempt began, by the clock of its worker."""
    final: bool
    """Of a failed cell: that trying again would end alike."""


def normalised(storage: str) -> str:
    """A storage URL with the driver that this project installs.

    Raises StorageError for a URL that is neither PostgreSQL's nor that of an sqlite file.
    """
    scheme, _, rest = storage.partition("://")
    known = scheme in ("sqlite", "postgresql", "postgresql+psycopg")
    if not known or rest in ("", "/", "/:memory:") or (scheme == "sqlite" and not rest.startswith("/")):
        raise StorageError(
            f"--storage {redacted(storage)!r}: must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    if rest.count("@") > 1:
        raise StorageError(f"--storage {redacted(storage)!r}: has more than one @; write %40 for that of a password")
    return storage.replace("postgresql://", "postgresql+psycopg://", 1)


def default_storage(runs: Path) -> str:
    """The queue's database where none is given: a file in the runs folder."""
    return f"sqlite:///{(runs / 'queue.db').resolve()}"


def check_storage(storage: str, grid: str) -> None:
    """Raise StorageError, in one line, where a storage cannot hold a grid's queue. Nothing is created."""
    url = normalised(storage)
    if (file := sqlite_file(url)) is not None:
        if not file.parent.is_dir():
            raise StorageError(
                f"--storage {storage!r}: there is no folder {str(file.parent)!r}; make it, or name another file"
            )
        writable_folder("--storage", file.parent)

    def ask(connection: sqlalchemy.Connection) -> None:
        query = (
            "SELECT a.value_json, EXISTS (SELECT 1 FROM trials t WHERE t.study_id = s.study_id) FROM studies s "
            "LEFT JOIN study_user_attributes a ON a.study_id = s.study_id AND a.key = 'made_by' "
            "WHERE s.study_name = :grid"
        )
        for made_by, has_trials in connection.execute(text(query), {"grid": grid}):
            if _is_foreign(json.loads(made_by or "null"), has_trials):
                raise _foreign(storage, grid)

    _reach(storage, ask)


def _is_foreign(made_by: str | None, has_trials: bool) -> bool:
    """Whether a study is not a queue of this version; one without trials that nobody signed is just being made."""
    return made_by != MADE_BY and (made_by is not None or has_trials)


def _foreign(storage: str, name: str) -> StorageError:
    return StorageError(
        f"--storage {redacted(storage)!r}: its study {name!r} was not made by this version of "
        "`lit-lazy ablate run`; name another storage, or another --runs folder"
    )


def grid_names(storage: str) -> list[str]:
    """Names of the grids that a storage holds. Raises StorageError where it cannot be reached; creates nothing."""

    def ask(connection: sqlalchemy.Connection) -> list[str]:
        query = (
            "SELECT s.study_name FROM studies s JOIN study_user_attributes a ON a.study_id = s.study_id "
            "AND a.key = 'made_by' WHERE a.value_json = :made_by ORDER BY s.study_id"
        )
        return [name for (name,) in connection.execute(text(query), {"made_by": json.dumps(MADE_BY)})]

    return _reach(storage, ask) or []


def _reach(storage: str, ask: Callable[[sqlalchemy.Connection], T]) -> T | None:
    normalised(storage)
    return reach("--storage", storage, "studies", ask)


class Queue:
    """Cells waiting, running, complete or failed, in a database that outlives every process."""

    def __init__(self, storage: str, name: str) -> None:
        """Open the study `name`, created if it is not there. Raises StorageError where that name is another's."""
        self.url, self.name = normalised(storage), name
        self._engine = sqlalchemy.create_engine(self.url, **engine_options(self.url))
        with self.lock():  # processes that start together must not create the tables together
            self._storage = self._persist(
                lambda: optuna.storages.RDBStorage(self.url, engine_kwargs=engine_options(self.url))
            )
            self._study_id = self._persist(self._open)
        self._key_of: dict[int, str] = {}

    def _open(self) -> int:
        try:
            study_id = self._storage.get_study_id_from_name(self.name)
        except KeyError:
            study_id = self._storage.create_new_study([StudyDirection.MINIMIZE], self.name)
        made_by = self._storage.get_study_user_attrs(study_id).get("made_by")
        if _is_foreign(made_by, made_by is None and bool(self._storage.get_all_trials(study_id, deepcopy=False))):
            raise _foreign(self.url, self.name)
        if made_by is None:
            self._storage.set_study_user_attr(study_id, "made_by", MADE_BY)
        return study_id

    def clear(self) -> None:
        """Forget all cells."""
        self._storage.delete_study(self._study_id)
        self._study_id = self._open()
        self._key_of.clear()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held by one process of all that use this storage, on any machine; it falls when its holder dies."""
        if self.url.startswith("sqlite"):
            # sqlite ignores the row locks by which Optuna keeps two workers off one trial; everyone who shares the
            # database file can share a lock file.
            with FileLock(f"{self.url.removeprefix('sqlite:///')}.lock"):
                yield
            return
        connection = self._persist(self._locked_connection)
        try:
            yield
        finally:
            with suppress(sqlalchemy.exc.OperationalError):  # a connection that broke has freed it already
                connection.rollback()
            connection.close()

    def _locked_connection(self) -> sqlalchemy.Connection:
        connection = self._engine.connect()
        # Of the transaction, not of the session: that one would outlive the connection's return to the pool.
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": ADVISORY_LOCK})
        return connection

    def _persist(self, work: Callable[[], T]) -> T:
        """Do something to the database, again and again while it does not answer."""
        give_up, pause = time.monotonic() + PATIENCE_SECONDS, 0.5
        while True:
            try:
                return work()
            except (sqlalchemy.exc.OperationalError, optuna.exceptions.StorageInternalError) as error:
                if is_disk_full(error):
                    raise
                if time.monotonic() > give_up:
                    raise StorageAwayError(
                        f"the queue's database {redacted(self.url)} has not answered for {PATIENCE_SECONDS / 60:.0f} "
                        f"minutes ({first_line(error)}); nothing is lost, the same command goes on"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 15.0)

    def _rows(self, query: str, **values: Any) -> list[Any]:
        def ask() -> list[Any]:
            with self._engine.connect() as connection:
                return list(connection.execute(text(query), {"study": self._study_id, **values}))

        return self._persist(ask)

    @property
    def facts(self) -> dict[str, str]:
        """What all processes of the grid have to know beside the cells."""
        return self._persist(lambda: self._storage.get_study_user_attrs(self._study_id)).get("facts", {})

    @facts.setter
    def facts(self, facts: Mapping[str, str]) -> None:
        self._persist(lambda: self._storage.set_study_user_attr(self._study_id, "facts", dict(facts)))

    def states(self) -> dict[str, State]:
        """State of every cell by key: complete if it ever completed, else that of its newest trial."""
        rows = self._rows("SELECT trial_id, state FROM trials WHERE study_id = :study ORDER BY trial_id")
        if any(trial_id not in self._key_of for trial_id, _ in rows):
            self._read_keys()
        states: dict[str, State] = {}
        for trial_id, state in rows:
            # A trial that is being created by another process has no key yet.
            key = self._key_of.get(trial_id)
            if key is not None and states.get(key) != "complete":
                states[key] = STATES[state]
        return states

    def _read_keys(self) -> None:
        """Learn the keys of the trials that are new since last asked."""
        newest = max(self._key_of, default=0)
        rows = self._rows(
            "SELECT t.trial_id, a.value_json FROM trials t JOIN trial_user_attributes a ON a.trial_id = t.trial_id "
            "AND a.key = 'key' WHERE t.study_id = :study AND t.trial_id > :newest",
            newest=newest,
        )
        self._key_of |= {trial_id: json.loads(key) for trial_id, key in rows}

    def entries(self, *states: State) -> list[Entry]:
        """The cells in these states, in the order of the queue."""
        names = {state: name for name, state in STATES.items()}
        newest: dict[str, int] = {}
        self._read_keys()
        for trial_id, key in sorted(self._key_of.items()):
            newest[key] = trial_id
        found = []
        for state in dict.fromkeys(states):
            rows = self._rows(
                f"SELECT trial_id FROM trials WHERE study_id = :study AND state = '{names[state]}' ORDER BY trial_id"
            )
            found += [trial_id for (trial_id,) in rows if newest.get(self._key_of.get(trial_id, "")) == trial_id]
        entries = [self._entry(trial_id) for trial_id in found]
        return [entry for entry in entries if entry.state in states]

    def _entry(self, trial_id: int) -> Entry:
        trial = self._persist(lambda: self._storage.get_trial(trial_id))
        attrs = trial.user_attrs
        return Entry(
            trial_id=trial_id,
            key=attrs["key"],
            run=attrs["cell"]["key"],
            variant=attrs["cell"]["variant"],
            seed=attrs["cell"]["seed"],
            state=STATES[trial.state.name],
            reason=attrs.get("reason", ""),
            worker=attrs.get("worker", {}),
            since=trial.datetime_start,
            final=attrs.get("final", False),
        )

    def add_missing(self, cells: Iterable[Cell]) -> int:
        """Enqueue the cells that are neither complete nor waiting nor running; how many those were."""
        with self.lock():
            states = self.states()
            missing = [cell for cell in cells if states.get(cell.key) in (None, "failed")]
            for cell in missing:
                attrs = {"key": cell.key, "cell": asdict(cell)}
                trial = create_trial(state=TrialState.WAITING, user_attrs=attrs)
                self._persist(lambda trial=trial: self._storage.create_new_trial(self._study_id, trial))
        return len(missing)

    def claim(self, worker: Mapping[str, str], keys: Set[str] | None = None) -> Task | None:
        """Take a waiting cell, one of `keys` where they are given, for a worker; None when there is none."""
        token = uuid.uuid4().hex
        with self.lock():
            trial_id = self._first_waiting(keys)
            if trial_id is None:
                return None
            # Signed before it is taken: a process killed in between leaves a trial that still waits.
            self._set(trial_id, "worker", {**worker, "token": token})
            self._persist(lambda: self._storage.set_trial_state_values(trial_id, TrialState.RUNNING))
        attrs = self._persist(lambda: self._storage.get_trial(trial_id)).user_attrs
        return Task(Cell(**attrs["cell"]), trial_id, token)

    def _first_waiting(self, keys: Set[str] | None) -> int | None:
        if keys is None:
            query = "SELECT min(trial_id) FROM trials WHERE study_id = :study AND state = 'WAITING'"
            return self._rows(query)[0][0]
        self._read_keys()
        rows = self._rows("SELECT trial_id FROM trials WHERE study_id = :study AND state = 'WAITING' ORDER BY trial_id")
        return next((trial_id for (trial_id,) in rows if self._key_of.get(trial_id) in keys), None)

    def _set(self, trial_id: int, name: str, value: object) -> None:
        self._persist(lambda: self._storage.set_trial_user_attr(trial_id, name, value))

    def beat(self, task: Task) -> None:
        """Say that the holder of a cell lives. Raises the database's error at once: the next beat is soon."""
        self._storage.record_heartbeat(task.trial_id)

    def beats(self) -> dict[int, str]:
        """The last beat of every running trial, as the database wrote it: only whether it changes means something."""
        rows = self._rows(
            "SELECT t.trial_id, h.heartbeat FROM trials t LEFT JOIN trial_heartbeats h ON h.trial_id = t.trial_id "
            "WHERE t.study_id = :study AND t.state = 'RUNNING'"
        )
        return {trial_id: str(beat) for trial_id, beat in rows}

    def is_held(self, task: Task) -> bool:
        """Whether a cell is still in the hands of the worker that claimed it."""
        trial = self._persist(lambda: self._storage.get_trial(task.trial_id))
        return trial.state == TrialState.RUNNING and trial.user_attrs["worker"]["token"] == task.token

    def complete(self, task: Task, value: float) -> None:
        """Record that a cell is done; `value` is its validation loss. Raises LostError if another worker has it."""
        self._end(task, TrialState.COMPLETE, value=value)

    def fail(self, task: Task, reason: str, final: bool = False) -> None:
        """Record that a cell failed, and why; final: that trying again would end alike."""
        self._end(task, TrialState.FAIL, reason=reason, final=final)

    def put_back(self, task: Task, reason: str) -> None:
        """Let a cell wait again; it goes on from its checkpoint."""
        self._end(task, TrialState.WAITING, reason=reason)

    def _end(
        self, task: Task, state: TrialState, value: float | None = None, reason: str = "", final: bool = False
    ) -> None:
        with self.lock():
            if not self.is_held(task):
                raise LostError(f"{task.cell.variant} seed {task.cell.seed} was given to another worker meanwhile")
            if reason:
                self._set(task.trial_id, "reason", reason)
            if final:
                self._set(task.trial_id, "final", True)
            values = None if value is None else [value]
            self._persist(lambda: self._storage.set_trial_state_values(task.trial_id, state, values))

    def release(self, entry: Entry, progress: str, most: int) -> bool:
        """Let the cell of a dead worker wait again, or fail it when workers keep dying of it; whether it waits.

        progress: anything that changes when the cell gets ahead. After `most` deaths without that it has failed.
        """
        with self.lock():
            trial = self._persist(lambda: self._storage.get_trial(entry.trial_id))
            attrs = trial.user_attrs
            if trial.state != TrialState.RUNNING or attrs["worker"]["token"] != entry.worker["token"]:
                return True  # another process was quicker
            deaths, at = attrs.get("deaths", (0, progress))
            deaths = deaths + 1 if at == progress else 1
            waits = deaths < most
            died = "its worker died" if deaths == 1 else f"its worker died {deaths} times without getting ahead"
            self._set(entry.trial_id, "deaths", (deaths, progress))
            self._set(entry.trial_id, "reason", died if waits else f"{died} (out of memory?)")
            state = TrialState.WAITING if waits else TrialState.FAIL
            self._persist(lambda: self._storage.set_trial_state_values(entry.trial_id, state))
        return waits


class Membership:
    """Shows that this process lives: it holds a lock file, which the system frees when it dies in whatever way.

    Process ids are used again, and start times are read off a clock that can be set; a lock is neither.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = (folder / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.lock").resolve()
        self.identity = {"host": socket.gethostname(), "pid": str(os.getpid()), "lock": str(path)}
        self._lock = FileLock(path, timeout=0)
        self._lock.acquire()

    def __enter__(self) -> "Membership":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Free the lock. Its file goes only at an orderly end: a cell may still have to be released by it."""
        self._lock.release()
        if kind is None:
            Path(self.identity["lock"]).unlink(missing_ok=True)


def living(folder: Path) -> list[str]:
    """Names of the lock files in a folder that processes of this machine hold."""
    host = socket.gethostname()
    return [path.name for path in folder.glob("*.lock") if is_dead({"host": host, "lock": str(path)}) is False]


def is_dead(worker: Mapping[str, str]) -> bool | None:
    """Whether a worker of this machine is gone; None where that cannot be seen from here."""
    path = worker["lock"]
    if worker["host"] != socket.gethostname() or not Path(path).exists():
        return None
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return False
    lock.release()
    return True


class Watch:
    """Judges by heartbeats: a worker whose beat has not changed for long enough is dead.

    Time is the watcher's own monotonic clock, and beats are only compared with each other: clocks that differ between
    machines, or jump, do no harm.
    """

    def __init__(self, stale_seconds: float) -> None:
        self.stale_seconds = stale_seconds
        self._changed: dict[int, tuple[str, float]] = {}
        self._looked = 0.0

    def stale(self, beats: Mapping[int, str], now: float) -> set[int]:
        """The trials of dead workers. Call it several times within the stale time."""
        if now - self._looked > self.stale_seconds / 2:
            self._changed = {}  # it has not looked for a while: who died in between cannot be told from who beat
        self._looked = now
        known = self._changed
        self._changed = {
            trial_id: known[trial_id] if trial_id in known and known[trial_id][0] == beat else (beat, now)
            for trial_id, beat in beats.items()
        }
        return {trial_id for trial_id, (_, since) in self._changed.items() if now - since > self.stale_seconds}


class Heart:
    """A thread that beats for the cells a worker holds."""

    def __init__(self, queue: Queue, every_seconds: float) -> None:
        self._queue, self._every = queue, every_seconds
        self._held: dict[int, Task] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def hold(self, task: Task) -> None:
        """Beat for this cell from now on."""
        self._held[task.trial_id] = task

    def drop(self, task: Task) -> None:
        """No longer beat for this cell."""
        self._held.pop(task.trial_id, None)

    def __enter__(self) -> "Heart":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            for task in list(self._held.values()):
                try:
                    self._queue.beat(task)
                except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError):
                    continue  # the database is away; watchers start anew when it is back
