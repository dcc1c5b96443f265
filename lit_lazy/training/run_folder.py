"""A run folder's lock, and the checkpoints to resume from."""

import logging
from pathlib import Path

from filelock import BaseFileLock

from lit_lazy.support.inside import delete, join_name
from lit_lazy.support.locks import FileLock

CHECKPOINTS, LAST = "checkpoints", "last.ckpt"
"""Folder of a run's checkpoints, and the one to resume from."""
CELLS = "cells"
"""Folder of a grid's run folders."""

log = logging.getLogger("lit_lazy.training.run_folder")


def make_lock(folder: Path) -> BaseFileLock:
    """The lock of a run folder. One process holds it; it is released when the process ends."""
    return FileLock(folder / "lock")


def locate_cell(grid: Path, key: str) -> Path:
    """The run folder of a cell in its grid's folder. Raises a one-line ValueError if its key is no name."""
    return join_name(grid / CELLS, key)


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints to resume from, and keep quarantined files."""
    keep_quarantined(folder)
    try:
        delete(folder / CHECKPOINTS)
    except (OSError, ValueError) as error:  # the run is finished all the same
        log.warning("%s: its checkpoints stay (%s)", folder, error)


def keep_quarantined(folder: Path) -> None:
    """Move quarantined files out of the folder of checkpoints, unless it is a link."""
    checkpoints = folder / CHECKPOINTS
    for quarantined in () if checkpoints.is_symlink() else checkpoints.glob("*.damaged"):
        quarantined.replace(folder / quarantined.name)
