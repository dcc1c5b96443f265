"""Who is alive: lock files on this machine, heartbeats on others."""

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
from filelock import FileLock, Timeout

from lit_lazy.grid.queue.queue import Queue, Task

NAME = re.compile(
    r"(?P<host>.+)-(?P<pid>\d+)-(?P<token>[0-9a-f]{8})(-of-(?P<command>[0-9a-f]{8})-(?P<slot>\d+))?\.lock"
)


@dataclass(frozen=True)
class Member:
    """A process at a grid, as the name of its lock file tells."""

    pid: str
    token: str
    command: str | None
    """Of a worker: token of the command that started it."""
    slot: int | None
    """Of a worker: its place among the workers of a command."""


class Membership:
    """Shows that this process lives: it holds a lock file, which the system frees when it dies in whatever way.

    Process ids are used again, and start times are read off a clock that can be set; a lock is neither.
    """

    def __init__(self, folder: Path, command: str | None = None, slot: int = 0) -> None:
        """command, slot: of a worker that a command started."""
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
        """Free the lock. Its file goes only at an orderly end: a cell may still have to be released by it."""
        self._lock.release()
        if kind is None:
            Path(self.identity["lock"]).unlink(missing_ok=True)


def find_living(folder: Path) -> list[Member]:
    """The processes of this machine that are at a grid, from the folder of its lock files."""
    return [member for path, member in _read_members(folder) if _is_held(path)]


def find_orphaned_slots(folder: Path) -> set[int]:
    """The slots of workers of this machine whose command has died."""
    members = find_living(folder)
    commands = {member.token for member in members}
    return {member.slot for member in members if member.slot is not None and member.command not in commands}


def remove_dead_locks(folder: Path, in_use: Collection[str]) -> None:
    """Remove what dead processes of this machine left; in_use: lock files that cells are to be released by."""
    for path, _ in _read_members(folder):
        if str(path.resolve()) not in in_use and not _is_held(path):
            path.unlink(missing_ok=True)


def _read_members(folder: Path) -> Iterator[tuple[Path, Member]]:
    """This machine's lock files, and whose they are."""
    for path in sorted(folder.glob("*.lock")):
        named = NAME.fullmatch(path.name)
        if named and named["host"] == socket.gethostname():
            slot = None if named["slot"] is None else int(named["slot"])
            yield path, Member(named["pid"], named["token"], named["command"], slot)


def _is_held(path: Path) -> bool:
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return True
    lock.release()
    return False


def is_dead(worker: Mapping[str, str]) -> bool | None:
    """Whether a worker of this machine is gone; None where that cannot be seen from here."""
    path = Path(worker["lock"])
    if worker["host"] != socket.gethostname() or not path.exists():
        return None
    return not _is_held(path)


class StalenessDetector:
    """Judges by heartbeats: a worker whose beat has not changed for long enough is dead.

    Time is the watcher's own monotonic clock, and beats are only compared with each other: clocks that differ between
    machines, or jump, do no harm.
    """

    def __init__(self, stale_seconds: float) -> None:
        self.stale_seconds = stale_seconds
        self._changed: dict[int, tuple[str, float]] = {}
        self._looked = 0.0

    def find_stale(self, beats: Mapping[int, str], now: float) -> set[int]:
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


class Heartbeat:
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
                    continue  # the database is away; watchers start anew when it is back
