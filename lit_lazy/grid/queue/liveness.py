"""Detection of dead processes: lock files on this machine, heartbeats on others."""

import os
import re
import socket
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import optuna
import sqlalchemy
from filelock import Timeout

from lit_lazy.grid.queue.queue import Queue, Task
from lit_lazy.support.inside import join_name
from lit_lazy.support.locks import FileLock

NAME = re.compile(
    r"(?P<host>.+)-(?P<pid>\d+)-(?P<token>[0-9a-f]{8})(-of-(?P<command>[0-9a-f]{8})-(?P<slot>\d+))?\.lock"
)


@dataclass(frozen=True)
class Member:
    """A process of a grid, parsed from the name of its lock file."""

    pid: str
    token: str
    command: str | None
    """Token of the command that started it; None for a command."""
    slot: int | None
    """Index among the workers of a command; None for a command."""


class Membership:
    """A lock file that marks this process as alive; the operating system frees the lock when it dies.

    Process ids are reused, and start times depend on a clock that can be changed; a lock has neither problem.
    """

    def __init__(self, folder: Path, command: str | None = None, slot: int = 0) -> None:
        """command, slot: given for a worker that a command started."""
        folder.mkdir(parents=True, exist_ok=True)
        self.token = uuid.uuid4().hex[:8]
        started_by = f"-of-{command}-{slot}" if command else ""
        name = f"{socket.gethostname()}-{os.getpid()}-{self.token}{started_by}.lock"
        path = (folder / name).resolve()
        self.identity = {"host": socket.gethostname(), "pid": str(os.getpid()), "lock": str(path)}
        self._lock = FileLock(path, timeout=0)
        self._lock.acquire()

    def __enter__(self) -> "Membership":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the lock. Delete its file only without an exception: it may still be needed to release a cell."""
        self._lock.release()
        if kind is None:
            Path(self.identity["lock"]).unlink(missing_ok=True)


def find_living(folder: Path) -> list[Member]:
    """The living processes of this machine, from a grid's folder of lock files."""
    return [member for path, member in _read_members(folder) if is_held(path)]


def find_orphaned_slots(folder: Path) -> set[int]:
    """Slots of this machine's living workers whose command has died."""
    members = find_living(folder)
    commands = {member.token for member in members}
    return {member.slot for member in members if member.slot is not None and member.command not in commands}


def remove_dead_locks(folder: Path, in_use: Collection[Mapping[str, str]]) -> None:
    """Remove lock files of this machine's dead processes, except of the workers `in_use`, to release their cells."""
    names = {_find_lock(worker, folder).name for worker in in_use}
    for path, _ in _read_members(folder):
        if path.name not in names and not is_held(path):
            path.unlink(missing_ok=True)


def _read_members(folder: Path) -> Iterator[tuple[Path, Member]]:
    """This machine's lock files and their processes."""
    for path in sorted(folder.glob("*.lock")):
        named = NAME.fullmatch(path.name)
        if named and named["host"] == socket.gethostname():
            slot = None if named["slot"] is None else int(named["slot"])
            yield path, Member(named["pid"], named["token"], named["command"], slot)


def is_held(path: Path) -> bool:
    """Whether a process of this machine holds a lock file, which exists."""
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def _find_lock(worker: Mapping[str, str], folder: Path) -> Path:
    """A worker's lock file in the folder of lock files, which may be elsewhere, or moved, since the worker began."""
    return join_name(folder, Path(worker["lock"]).name)


def is_dead(worker: Mapping[str, str], folder: Path) -> bool | None:
    """Whether a worker of this machine is dead; None if this machine cannot determine it. folder: of lock files."""
    path = _find_lock(worker, folder)
    if worker["host"] != socket.gethostname() or not os.access(path, os.W_OK):  # a read-only one cannot be locked
        return None
    return not is_held(path)


class StalenessDetector:
    """Detects dead workers: those whose heartbeat has not changed for `stale_seconds`.

    Uses the observer's monotonic clock and compares beats only with each other, so clocks may differ or jump.
    """

    def __init__(self, stale_seconds: float) -> None:
        self.stale_seconds = stale_seconds
        self._changed: dict[int, tuple[str, float]] = {}
        self._last_call = 0.0

    def find_stale(self, beats: Mapping[int, str], now: float) -> set[int]:
        """Ids of trials of dead workers. Call it several times within the stale time."""
        if now - self._last_call > self.stale_seconds / 2:
            self._changed = {}  # after a long gap, dead workers cannot be distinguished from living ones
        self._last_call = now
        known = self._changed
        self._changed = {
            trial_id: known[trial_id] if trial_id in known and known[trial_id][0] == beat else (beat, now)
            for trial_id, beat in beats.items()
        }
        return {trial_id for trial_id, (_, since) in self._changed.items() if now - since > self.stale_seconds}


class Heartbeat:
    """A thread that sends heartbeats for the cells that a worker holds."""

    def __init__(self, queue: Queue, every_seconds: float) -> None:
        self._queue, self._every = queue, every_seconds
        self._held: dict[int, Task] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def hold(self, task: Task) -> None:
        """Start sending heartbeats for a cell."""
        self._held[task.trial_id] = task

    def drop(self, task: Task) -> None:
        """Stop sending heartbeats for a cell."""
        self._held.pop(task.trial_id, None)

    def __enter__(self) -> "Heartbeat":
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
                    continue  # the database is away; observers start over when it is back
