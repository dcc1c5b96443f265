"""Who is alive: lock files on this machine, heartbeats on others."""

import os
import socket
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

import optuna
import sqlalchemy
from filelock import FileLock, Timeout

from lit_lazy.grid.queue.queue import Queue, Task


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


class Staleness:
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
