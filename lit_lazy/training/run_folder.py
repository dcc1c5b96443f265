"""A run folder: its lock, the settings of its training, its metrics, why it failed, and the checkpoints."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, SoftFileLease, Timeout

from lit_lazy.support.disk import guards, write_text
from lit_lazy.support.locks import is_held, make_file_lock, read_id
from lit_lazy.support.named_files import delete, join_name
from lit_lazy.support.stored_records import parse_record

CHECKPOINTS, LAST = "checkpoints", "last.ckpt"
"""Folder of a run's checkpoints, and the one to resume from."""
CELLS = "cells"
"""Folder of a grid's run folders."""
GRID_ID = "grid_id"
"""File in the folder of a grid, or of the trainings of an experiment, with the tag `grid` of its MLflow run or runs."""

SETTINGS, FAILURE = "cell.json", "failed.json"
"""What a run folder trains, and why its last training failed."""
FORMAT = 1
"""Format of both; raised when a field is added, removed or changes its meaning."""

TAIL_BYTES = 2**16
"""Bytes at the end of a metric file that hold its last records."""
log = logging.getLogger("lit_lazy.training.run_folder")


def make_lock(folder: Path) -> BaseFileLock:
    """The lock of a run folder. One process holds it; it is released when the process ends.

    A process that loses it, which a lease alone allows, writes no file of the folder any more (`disk.require_held`).
    """
    lock = make_file_lock(folder / "lock")
    if isinstance(lock, SoftFileLease):
        guards[folder.resolve()] = lambda: lock.is_lock_held_by_us or not lock.is_locked
    return lock


@contextmanager
def hold(folder: Path, seconds: float = 1.0) -> Iterator[bool]:
    """Hold the lock of a run folder; gives whether no other process does. Whoever writes a file there holds it.

    seconds: to wait for it; one who looks whether it is held (`is_locked`) holds it for a moment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = make_lock(folder)
    with suppress(Timeout):
        lock.acquire(timeout=seconds)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder."""
    return is_held(folder / "lock")


def write_settings(folder: Path, key: str, fingerprint: str, config: Mapping[str, Any]) -> None:
    """Write what a run folder trains."""
    _write(folder / SETTINGS, {"key": key, "fingerprint": fingerprint, "config": config})


def read_settings(folder: Path) -> dict[str, Any]:
    """The canonical config that a run folder trains; {} before its training began."""
    return _read(folder / SETTINGS).get("config", {})


def write_failure(folder: Path, reason: str, final: bool = False) -> None:
    """Write why a training failed. final: whether another attempt would fail again."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / FAILURE, {"reason": reason, "final": final})


def is_final(folder: Path) -> bool:
    """Whether another training in a run folder would fail as the last one."""
    return bool(_read(folder / FAILURE).get("final", False))


def read_failure(folder: Path) -> str:
    """Why the last training in a run folder failed; "" if it did not."""
    return str(_read(folder / FAILURE).get("reason", ""))


def clear_failure(folder: Path) -> None:
    """Remove what `write_failure` wrote."""
    (folder / FAILURE).unlink(missing_ok=True)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps({"format": FORMAT, **content}, sort_keys=True))


def _read(path: Path) -> dict[str, Any]:
    """A file's content; {} without a readable one. Raises NewerFormatError if a newer version wrote it."""
    try:
        return parse_record(path.read_bytes(), str(path), "settings", FORMAT, dict)
    except (OSError, ValueError):
        return {}


def read_grid_id(folder: Path) -> str:
    """The random id of the folder of a grid or of trainings."""
    return read_id(folder / GRID_ID)


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


@dataclass(frozen=True)
class MetricRecord:
    """Metrics of one step and the time of their measurement, which makes logging them idempotent."""

    step: int
    milliseconds: int
    """Since the epoch."""
    metrics: Mapping[str, float]


def read_lines(path: Path, most: int | None = None) -> list[MetricRecord]:
    """The records of a metric file, without damaged lines and an unfinished last line; [] without a file.

    most: only those in so many bytes at its end.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(0 if most is None else max(0, file.seek(0, os.SEEK_END) - most))
        lines = file.read().split(b"\n")[:-1]
    return [record for line in lines if (record := parse_line(line))]


def parse_line(line: bytes) -> MetricRecord | None:
    """The record of a line; None if it is damaged."""
    try:
        return MetricRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None
