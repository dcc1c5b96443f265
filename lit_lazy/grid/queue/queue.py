"""The durable queue of an ablation's cells: an Optuna study with one trial per cell, enqueued in advance.

A trial stores its cell in the user attributes `key` and `cell`, and its holder in `worker`. Optuna's storage keeps
trials, states and heartbeats on sqlite or PostgreSQL; claiming and counting are single queries on its tables, so the
cost per cell does not depend on the size of the grid.
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar

import optuna
import sqlalchemy
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial
from sqlalchemy import DateTime, Executable, Integer, String, bindparam, text

from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.queue.storage import (
    MADE_BY,
    create_tables,
    escape_braces,
    is_foreign,
    make_foreign_error,
    normalise_url,
    query_storage,
)
from lit_lazy.support.disk import is_disk_full, is_file_too_long
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.locks import FileLock
from lit_lazy.support.secrets import redact_url
from lit_lazy.tracking.databases import (
    KEEPALIVES,
    find_corruption,
    format_database_error,
    make_engine_options,
    sqlite_file,
)

optuna.logging.set_verbosity(optuna.logging.WARNING)

log = logging.getLogger("lit_lazy.grid.queue")
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
"""States without remaining work; only a search prunes."""
ADVISORY_LOCK = 0x6C69746C617A79
"""Number of the PostgreSQL lock that all processes on a storage share."""
OF_TRIALS = (
    text(
        "SELECT t.trial_id, t.state, t.datetime_start, a.key, a.value_json FROM trials t JOIN trial_user_attributes a "
        "ON a.trial_id = t.trial_id WHERE t.study_id = :study AND t.state IN :states"
    )
    .bindparams(bindparam("states", expanding=True))
    .columns(trial_id=Integer, state=String, datetime_start=DateTime, key=String, value_json=String)
)
"""All attributes of trials in given states; sqlite needs the column types to parse times."""
OF_GRIDS = text(
    "SELECT s.study_name, t.state, k.value_json, a.value_json FROM studies s "
    "JOIN study_user_attributes m ON m.study_id = s.study_id AND m.key = 'made_by' AND m.value_json = :made_by "
    "LEFT JOIN trials t ON t.study_id = s.study_id "
    "LEFT JOIN trial_user_attributes k ON k.trial_id = t.trial_id AND k.key = 'key' "
    "LEFT JOIN trial_user_attributes a ON a.trial_id = t.trial_id AND a.key = 'cell' ORDER BY s.study_id, t.trial_id"
)
"""State, key and cell of each trial of all grids; without a key, a queue is empty or a trial is being made."""
MAY_PASS = (sqlalchemy.exc.OperationalError, optuna.exceptions.StorageInternalError)
PATIENCE_SECONDS = 600.0
"""How long a process retries a database that does not answer."""


class StorageAwayError(UnfinishedError):
    """The database did not answer for a long time."""


class StorageDamagedError(UnfinishedError):
    """The database is an sqlite file that can no longer be read."""


class CellLostError(RuntimeError):
    """The cell was given to another worker, because this one seemed dead."""


@dataclass(frozen=True)
class Task:
    """A cell that this process has claimed."""

    cell: Cell
    trial_id: int
    token: str
    """Identifies this claim in the trial's attribute `worker`."""


@dataclass(frozen=True)
class Entry:
    """The queue's record of a cell."""

    trial_id: int
    key: str
    run: str
    """Name of the run folder."""
    variant: str
    seed: int
    state: State
    reason: str
    """Why the last attempt ended early; "" before the first."""
    worker: dict[str, str]
    """Holder of a running cell: host, pid, lock (path of its lock file), token."""
    since: datetime | None
    """Start of the last attempt, by the clock of its worker."""
    final: bool
    """Whether a failed cell must not be retried, because it would fail again."""


class Queue:
    """Waiting, running, complete and failed cells in a database that outlives every process."""

    def __init__(self, storage: str, name: str, accepted: Sequence[str] = (MADE_BY,)) -> None:
        """Open or create the study `name`. Raises StorageError if another program or version uses that name.

        accepted: versions whose studies can be opened; those of `READABLE` to read only.
        """
        self.url, self.name, self._accepted = normalise_url(storage), name, accepted
        self._engine = sqlalchemy.create_engine(self.url, **make_engine_options(self.url))
        with self.lock():  # concurrent processes must not create the tables at the same time
            if (file := sqlite_file(self.url)) is not None and not file.exists():
                create_tables(file)
            self._storage = self._retry(
                lambda: optuna.storages.RDBStorage(escape_braces(self.url), engine_kwargs=make_engine_options(self.url))
            )
            self._study_id = self._retry(self._open_study)
        self._key_of: dict[int, str] = {}

    def _open_study(self) -> int:
        try:
            study_id = self._storage.get_study_id_from_name(self.name)
        except KeyError:
            study_id = self._storage.create_new_study([StudyDirection.MINIMIZE], self.name)
        made_by = self._storage.get_study_user_attrs(study_id).get("made_by")
        has_trials = made_by is None and bool(self._storage.get_all_trials(study_id, deepcopy=False))
        if is_foreign(made_by, has_trials, self._accepted):
            raise make_foreign_error(self.url, self.name, made_by)
        if made_by is None:
            self._storage.set_study_user_attr(study_id, "made_by", MADE_BY)
        self.is_current = made_by in (None, MADE_BY)
        """Whether this version made the study; an earlier one is only read."""
        return study_id

    def delete(self) -> None:
        """Delete the queue; this object can no longer be used."""
        self._storage.delete_study(self._study_id)

    def clear(self) -> None:
        """Delete all cells."""
        self.delete()
        self._study_id = self._open_study()
        self._key_of.clear()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """A lock across all processes and machines of this storage; it is freed when its holder dies."""
        if (file := sqlite_file(self.url)) is not None:
            # sqlite ignores the row locks with which Optuna assigns a trial to one worker; all users of the database
            # file can share a lock file.
            with FileLock(f"{file}.lock"):
                yield
            return
        connection = self._retry(self._open_locked_connection)
        try:
            yield
        finally:
            with suppress(sqlalchemy.exc.OperationalError):  # a broken connection has freed the lock already
                connection.rollback()
            connection.close()

    def _open_locked_connection(self) -> sqlalchemy.Connection:
        connection = self._engine.connect()
        # Otherwise the server would keep the lock for two hours after this machine disappears.
        silence = [f"set_config('tcp_keepalives_{name}', '{number}', true)" for name, number in KEEPALIVES.items()]
        # A transaction lock: a session lock would outlive the connection's return to the pool.
        lock = f"SELECT {', '.join(silence)}, pg_advisory_xact_lock(:number)"
        connection.execute(text(lock), {"number": ADVISORY_LOCK})
        return connection

    def _retry(self, work: Callable[[], T]) -> T:
        """Access the database, retrying while it does not answer; logs the outage once.

        Raises StorageDamagedError immediately for a damaged sqlite file.
        """
        give_up, pause = time.monotonic() + PATIENCE_SECONDS, 0.5
        warned = False
        while True:
            try:
                return work()
            except (sqlalchemy.exc.DatabaseError, optuna.exceptions.StorageInternalError) as error:
                if why := find_corruption(error):
                    raise StorageDamagedError(
                        f"the queue's database {sqlite_file(self.url)} is damaged ({why}); move it away and give the "
                        "same command again: it finds the results of finished cells"
                    ) from error
                if is_disk_full(error) or is_file_too_long(error) or not isinstance(error, MAY_PASS):
                    raise
                away = f"the queue's database {redact_url(self.url)} has not answered"
                why, minutes = format_database_error(error), f"{PATIENCE_SECONDS / 60:.0f} minutes"
                if time.monotonic() > give_up:
                    raise StorageAwayError(
                        f"{away} for {minutes} ({why}); nothing is lost, the same command resumes"
                    ) from error
                if not warned:
                    warned = True
                    log.warning("%s (%s); retrying for %s", away, why, minutes)
            time.sleep(pause)
            pause = min(2 * pause, 15.0)

    def _query_rows(self, query: str | Executable, **values: Any) -> list[Any]:
        statement = text(query) if isinstance(query, str) else query

        def execute() -> list[Any]:
            with self._engine.connect() as connection:
                return list(connection.execute(statement, {"study": self._study_id, **values}))

        return self._retry(execute)

    @property
    def facts(self) -> dict[str, str]:
        """Data that all processes of the grid share in addition to the cells."""
        return self._retry(lambda: self._storage.get_study_user_attrs(self._study_id)).get("facts", {})

    @facts.setter
    def facts(self, facts: Mapping[str, str]) -> None:
        self._retry(lambda: self._storage.set_study_user_attr(self._study_id, "facts", dict(facts)))

    def states(self) -> dict[str, State]:
        """State of every cell by key, which is that of its newest trial."""
        rows = self._query_rows("SELECT trial_id, state FROM trials WHERE study_id = :study ORDER BY trial_id")
        if any(trial_id not in self._key_of for trial_id, _ in rows):
            self._read_keys()
        states: dict[str, State] = {}
        for trial_id, state in rows:
            # A trial that another process is creating has no key yet.
            key = self._key_of.get(trial_id)
            if key is not None:
                states[key] = STATES[state]
        return states

    def _read_keys(self) -> None:
        """Read the keys of trials that are new since the last call."""
        newest = max(self._key_of, default=0)
        rows = self._query_rows(
            "SELECT t.trial_id, a.value_json FROM trials t JOIN trial_user_attributes a ON a.trial_id = t.trial_id "
            "AND a.key = 'key' WHERE t.study_id = :study AND t.trial_id > :newest",
            newest=newest,
        )
        self._key_of |= {trial_id: json.loads(key) for trial_id, key in rows}

    def entries(self, *states: State) -> list[Entry]:
        """The cells in these states, sorted by state and queue order, in a constant number of queries."""
        self._read_keys()
        newest = {key: trial_id for trial_id, key in sorted(self._key_of.items())}
        found: dict[int, tuple[State, datetime | None, dict[str, str]]] = {}
        names = [name for name, state in STATES.items() if state in states]
        for trial_id, state, since, name, value in self._query_rows(OF_TRIALS, states=names):
            found.setdefault(trial_id, (STATES[state], since, {}))[2][name] = value
        entries = [
            _make_entry(trial_id, *known)
            for trial_id, known in found.items()
            if newest.get(self._key_of.get(trial_id, "")) == trial_id
        ]
        return sorted(entries, key=lambda entry: (states.index(entry.state), entry.trial_id))

    def add_missing(self, cells: Iterable[Cell], recorded: Mapping[str, float] | None = None) -> int:
        """Enqueue the cells that are new or failed; returns how many.

        recorded: validation losses by key; a new cell among them is added as complete instead.
        """
        with self.lock():
            states = self.states()
            missing = [cell for cell in cells if states.get(cell.key) in (None, "failed")]
            values = [(recorded or {}).get(cell.key) for cell in missing]
            for cell, value in zip(missing, values, strict=True):
                self._add(cell, value)
        return values.count(None)

    def add_again(self, cells: Iterable[Cell]) -> None:
        """Enqueue complete cells again, whose results MLflow has lost."""
        with self.lock():
            states = self.states()
            for cell in cells:
                if states.get(cell.key) == "complete":
                    self._add(cell)

    def _add(self, cell: Cell, value: float | None = None) -> None:
        """value: the loss of a complete cell; None for one that waits."""
        trial = create_trial(
            state=TrialState.WAITING if value is None else TrialState.COMPLETE,
            value=value,
            user_attrs={"key": cell.key, "cell": asdict(cell)},
        )
        self._retry(lambda: self._storage.create_new_trial(self._study_id, trial))

    def claim(self, worker: Mapping[str, str], keys: Set[str] | None = None) -> Task | None:
        """Claim a waiting cell, one of `keys` if given, for a worker; None if none waits."""
        token = uuid.uuid4().hex
        with self.lock():
            trial_id = self._first_waiting(keys)
            if trial_id is None:
                return None
            # Signed before the state changes: a process killed in between leaves a waiting trial.
            self._set_attribute(trial_id, "worker", {**worker, "token": token})
            self._retry(lambda: self._storage.set_trial_state_values(trial_id, TrialState.RUNNING))
        attrs = self._retry(lambda: self._storage.get_trial(trial_id)).user_attrs
        return Task(Cell(**attrs["cell"]), trial_id, token)

    def _first_waiting(self, keys: Set[str] | None) -> int | None:
        if keys is None:
            query = "SELECT min(trial_id) FROM trials WHERE study_id = :study AND state = 'WAITING'"
            return self._query_rows(query)[0][0]
        self._read_keys()
        rows = self._query_rows(
            "SELECT trial_id FROM trials WHERE study_id = :study AND state = 'WAITING' ORDER BY trial_id"
        )
        return next((trial_id for (trial_id,) in rows if self._key_of.get(trial_id) in keys), None)

    def _set_attribute(self, trial_id: int, name: str, value: object) -> None:
        self._retry(lambda: self._storage.set_trial_user_attr(trial_id, name, value))

    def beat(self, task: Task) -> None:
        """Record a heartbeat for a held cell. Raises database errors without retrying: the next beat is soon.

        A worker that has lost its cell sends no heartbeats: they would mask the new holder's death.
        """
        if self._is_holder(task.trial_id, task.token):
            self._storage.record_heartbeat(task.trial_id)

    def beats(self) -> dict[int, str]:
        """The last beat and the holder of every running trial, as an opaque text to compare for changes.

        Includes the holder, because a worker that has just claimed a dead one's cell has not sent a beat yet.
        """
        rows = self._query_rows(
            "SELECT t.trial_id, h.heartbeat, a.value_json FROM trials t "
            "LEFT JOIN trial_heartbeats h ON h.trial_id = t.trial_id "
            "LEFT JOIN trial_user_attributes a ON a.trial_id = t.trial_id AND a.key = 'worker' "
            "WHERE t.study_id = :study AND t.state = 'RUNNING'"
        )
        return {trial_id: f"{beat} by {worker}" for trial_id, beat, worker in rows}

    def is_held(self, task: Task) -> bool:
        """Whether the worker that claimed a cell still holds it."""
        return self._retry(lambda: self._is_holder(task.trial_id, task.token))

    def _is_holder(self, trial_id: int, token: str) -> bool:
        try:
            trial = self._storage.get_trial(trial_id)
        except KeyError:  # the queue was cleared
            return False
        return trial.state == TrialState.RUNNING and trial.user_attrs["worker"]["token"] == token

    def check_held(self, task: Task) -> None:
        """Raise CellLostError if another worker has the cell."""
        if not self.is_held(task):
            raise CellLostError(f"{task.cell.variant} seed {task.cell.seed} was given to another worker meanwhile")

    def complete(self, task: Task, value: float) -> None:
        """Record a cell as complete with its validation loss. Raises CellLostError if another worker has it."""
        self._end_attempt(task, TrialState.COMPLETE, value=value)

    def fail(self, task: Task, reason: str, final: bool = False) -> None:
        """Record a cell as failed with the reason; final: whether a retry would fail again."""
        self._end_attempt(task, TrialState.FAIL, reason=reason, final=final)

    def requeue(self, task: Task, reason: str) -> None:
        """Requeue a cell, which then resumes from its checkpoint."""
        self._end_attempt(task, TrialState.WAITING, reason=reason)

    def _end_attempt(self, task: Task, state: TrialState, value: float | None = None, **attributes: object) -> None:
        with self.lock():
            self.check_held(task)
            for name, attribute in attributes.items():
                self._set_attribute(task.trial_id, name, attribute)
            values = None if value is None else [value]
            self._retry(lambda: self._storage.set_trial_state_values(task.trial_id, state, values))

    def release(self, entry: Entry, progress: str, most: int | None) -> bool:
        """Requeue the cell of a dead worker, or fail it after `most` deaths without progress; returns whether it waits.

        progress: a value that changes when the cell makes progress. most: None for an end for lack of space, which
        counts as no death.
        """
        with self.lock():
            if not self._retry(lambda: self._is_holder(entry.trial_id, entry.worker["token"])):
                return True  # another process was faster
            if most is None:
                self._set_attribute(entry.trial_id, "reason", "no space left")
                self._retry(lambda: self._storage.set_trial_state_values(entry.trial_id, TrialState.WAITING))
                return True
            attrs = self._retry(lambda: self._storage.get_trial(entry.trial_id)).user_attrs
            deaths, former = attrs.get("deaths", (0, progress))
            deaths = deaths + 1 if former == progress else 1
            waits = deaths < most
            died = "its worker died" if deaths == 1 else f"its worker died {deaths} times without progress"
            self._set_attribute(entry.trial_id, "deaths", (deaths, progress))
            self._set_attribute(entry.trial_id, "reason", died if waits else f"{died} (out of memory?)")
            state = TrialState.WAITING if waits else TrialState.FAIL
            self._retry(lambda: self._storage.set_trial_state_values(entry.trial_id, state))
        return waits


def read_states(storage: str) -> dict[str, list[tuple[State, Cell]]]:
    """State and cell of every entry of every grid in a storage, by the grid's name; creates nothing.

    Raises StorageError if it cannot be reached.
    """

    def query(connection: sqlalchemy.Connection) -> dict[str, list[tuple[State, Cell]]]:
        newest: dict[str, dict[str, tuple[State, Cell]]] = {}
        for grid, state, key, cell in connection.execute(OF_GRIDS, {"made_by": json.dumps(MADE_BY)}):
            cells = newest.setdefault(grid, {})
            if key is not None and cell is not None:
                cells[key] = STATES[state], Cell(**json.loads(cell))  # a key's newest trial comes last
        return {grid: list(cells.values()) for grid, cells in newest.items()}

    return query_storage(storage, query) or {}


def _make_entry(trial_id: int, state: State, since: datetime | None, attributes: Mapping[str, str]) -> Entry:
    """attributes: the trial's, JSON by name."""
    cell = json.loads(attributes["cell"])
    return Entry(
        trial_id=trial_id,
        key=json.loads(attributes["key"]),
        run=cell["key"],
        variant=cell["variant"],
        seed=cell["seed"],
        state=state,
        reason=json.loads(attributes.get("reason", '""')),
        worker=json.loads(attributes.get("worker", "{}")),
        since=since,
        final=json.loads(attributes.get("final", "false")),
    )
