"""A cell's state is what its folder says: a result, a reason of failure, or the lock that its training holds."""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from filelock import BaseFileLock, Timeout

from lit_lazy.support.disk import write_atomically, write_text
from lit_lazy.support.stored_records import parse_json
from lit_lazy.training import run_folder
from lit_lazy.training.run_folder import RESULT

State = Literal["waiting", "running", "complete", "failed"]
HOLDER = "holder.json"
"""Who trains in a run folder; left behind by a process that died."""
MOST_DEATHS = 3
"""Deaths of a cell's workers, without progress in between, after which the cell has failed."""


@dataclass(frozen=True)
class Holder:
    """The process that trains, or trained, in a run folder."""

    pid: int
    host: str
    since: float
    """Start, in seconds since the epoch."""
    deaths: int
    """Holders before it that died without progress."""
    progress: int
    """Time of the checkpoint from which it resumed, in ns; 0 for none."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {time.strftime('%a %H:%M:%S', time.localtime(self.since))}"

    @classmethod
    def read(cls, folder: Path) -> "Holder | None":
        """The holder that a run folder names; None if there is none."""
        try:
            return cls(**parse_json((folder / HOLDER).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None


def read_state(folder: Path) -> State:
    """The state of the cell in a run folder."""
    if (folder / RESULT).exists():
        return "complete"
    if run_folder.read_failure(folder):
        return "failed"
    return "running" if run_folder.is_locked(folder) else "waiting"


def find_dead(folder: Path) -> Holder | None:
    """The process that trained in a run folder and died; None if it did not."""
    holder = Holder.read(folder)
    return None if holder is None or run_folder.is_locked(folder) else holder


def claim(folder: Path) -> BaseFileLock | None:
    """Take the lock of a cell's folder, which the caller releases by `give_back`; None if it is taken or has failed.

    Counts the deaths of former holders: after MOST_DEATHS without progress the cell has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = run_folder.make_lock(folder)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    former, last = Holder.read(folder), folder / run_folder.CHECKPOINTS / run_folder.LAST
    progress = last.stat().st_mtime_ns if last.exists() else 0  # changes whenever a training makes progress
    died = former is not None and not (folder / RESULT).exists()
    deaths = 0 if not died or former is None else former.deaths + 1 if former.progress == progress else 1
    if deaths >= MOST_DEATHS:
        run_folder.write_failure(folder, f"its worker died {deaths} times without progress (out of memory?)")
    if run_folder.read_failure(folder):
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()
        return None
    holder = Holder(os.getpid(), socket.gethostname(), time.time(), deaths, progress)
    write_text(folder / HOLDER, json.dumps(asdict(holder)))
    return lock


def give_back(folder: Path, lock: BaseFileLock) -> None:
    """Release what `claim` took."""
    holder = Holder.read(folder)
    if holder is not None and (holder.pid, holder.host) == (os.getpid(), socket.gethostname()):  # a lease may be lost
        with suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
    lock.release()


def clear_leftovers(folder: Path) -> None:
    """Remove what a process that was killed after its result left beside it."""
    if (folder / HOLDER).exists():
        with run_folder.hold(folder, seconds=0) as is_free:
            if is_free:
                run_folder.remove_checkpoints(folder)
                (folder / HOLDER).unlink(missing_ok=True)


def read_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The content of a run folder's files of these names, in their order."""
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def put(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Write the files of a training elsewhere into a cell's folder, in their order; the result comes last.

    Returns False, and writes nothing, if the cell has a result or a process trains it.
    """
    with run_folder.hold(folder) as is_free:
        if not is_free or (folder / RESULT).exists():
            return False
        for name, content in files.items():
            write_atomically(folder / name, lambda file, content=content: file.write(content))
        return True
