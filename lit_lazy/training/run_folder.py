"""A run folder's lock, and the checkpoints to resume from."""

import shutil
from pathlib import Path

from filelock import BaseFileLock, FileLock

CHECKPOINTS, LAST = "checkpoints", "last.ckpt"
"""Folder of a run's checkpoints, and the one to resume from."""


def make_lock(folder: Path) -> BaseFileLock:
    """The lock of a run folder. One process holds it; it is released when the process ends."""
    return FileLock(folder / "lock")


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints to resume from, and keep quarantined files."""
    checkpoints = folder / CHECKPOINTS
    for quarantined in checkpoints.glob("*.damaged"):
        quarantined.replace(folder / quarantined.name)
    shutil.rmtree(checkpoints, ignore_errors=True)  # another process may remove them too
