"""Lock files, leases where no file can be locked, and the random ids that folders keep."""

import fcntl
import functools
import os
import re
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

import filelock

from lit_lazy.support.disk import NO_LOCKS, write_text

LEASE_SECONDS = 60.0
"""Time after which a lease that nobody renews can be taken over."""


def make_file_lock(path: Path) -> filelock.BaseFileLock:
    """A lock file, freed when its process ends. Where no file can be locked, a lease: a file renewed every 20 s.

    A process that was stopped for longer than `LEASE_SECONDS` loses its lease, and is soon interrupted when it goes on.
    """
    if can_lock(path.parent):
        return filelock.FileLock(path)
    lost = {"on_compromise": lambda _: os.kill(os.getpid(), signal.SIGTERM)}
    return filelock.SoftFileLease(_locate_lease(path), lease_duration=LEASE_SECONDS, **lost)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of this path."""
    lease = not can_lock(path.parent)
    if not os.access(_locate_lease(path) if lease else path, os.W_OK):  # none, or one that nobody here can take
        return False
    try:
        with (_watch_lease(path) if lease else make_file_lock(path)).acquire(timeout=0):
            return False
    except filelock.Timeout:
        return True


def can_lock(folder: Path) -> bool:
    """Whether files in a folder can be locked: on some NFS they cannot."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not os.access(there, os.W_OK):
        return True
    if (device := there.stat().st_dev) not in _known:
        with TemporaryFile(dir=there) as probe:
            try:
                fcntl.flock(probe, fcntl.LOCK_EX)
                _known[device] = True
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                _known[device] = False
    return _known[device]


def describe_leases(folder: Path) -> str:
    """One line on what replaces locks in a folder; "" where files can be locked."""
    problem = f"no file can be locked in {folder}"
    effect = f"leases replace locks, so the cell of a dead machine waits for {LEASE_SECONDS:.0f} s"
    return "" if can_lock(folder) else f"{problem}: {effect}"


_known: dict[int, bool] = {}
"""Whether files can be locked, by device."""


def _locate_lease(path: Path) -> Path:
    """A file of its own: one that was locked elsewhere would be none."""
    return path.with_name(f"{path.name}.lease")


@functools.cache
def _watch_lease(path: Path) -> filelock.SoftFileLease:
    """A lease that remembers for how long it saw no renewal."""
    return filelock.SoftFileLease(_locate_lease(path), lease_duration=LEASE_SECONDS)


@contextmanager
def hold_shared(path: Path) -> Iterator[None]:
    """Hold a lock file that others may hold too."""
    with path.open("ab") as file:
        with suppress(OSError):  # where no file can be locked, nobody sees that it is held
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_shared(path: Path) -> bool:
    """Whether a process holds a lock file by `hold_shared`; False where no file can be locked."""
    if not (os.access(path, os.W_OK) and can_lock(path.parent)):
        return False
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def read_id(file: Path) -> str:
    """The random id in a file, which gets one if it has none or a damaged one."""
    with make_file_lock(file.with_name(f"{file.name}.lock")):
        known = file.read_bytes() if file.exists() else b""
        if not re.fullmatch(rb"[0-9a-f]{32}", known):
            write_text(file, uuid.uuid4().hex)
        return file.read_text(encoding="utf-8")
