"""A run folder: its lock, the settings of its training, its metrics, its result or failure, and the checkpoints."""

import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, SoftFileLease, Timeout

from lit_lazy.support.checked_fields import Metric, PositiveInt, check_value, list_changes, require
from lit_lazy.support.disk import guards, quarantine, write_text
from lit_lazy.support.locks import is_held, make_file_lock, read_id
from lit_lazy.support.names_to_paths import delete, join_name
from lit_lazy.support.stored_records import make_record, parse_record

CHECKPOINTS, LAST = "checkpoints", "last.ckpt"
"""Folder of a run's checkpoints, and the one to resume from."""
CELLS = "cells"
"""Folder of a grid's run folders."""
GRID_ID = "grid_id"
"""File in the folder of a grid, or of the trainings of an experiment, with the tag `grid` of its MLflow run or runs."""

SETTINGS, FAILURE = "cell.json", "failed.json"
"""What a run folder trains, and why its last training failed."""
FORMAT, RESULT_FORMAT = 1, 1
"""Format of both, and of the result; raised when a field is added, removed or changes its meaning."""
TAIL_BYTES = 2**16
"""Bytes at the end of a metric file that hold its last records."""
RESULT, FINAL_CHECKPOINT, DIAGNOSTICS, METRICS = "result.json", "final.ckpt", "diagnostics.npz", "metrics.jsonl"
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


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run. `metrics` is deterministic for a key, machine and thread count."""

    key: str
    config: dict[str, Any]
    data: dict[str, str | int | float]
    metrics: dict[str, Metric]
    """Final values, without metrics that are undefined for this variant."""
    labels: dict[str, str]
    timings: dict[str, float]
    """Seconds, and training tokens per second (since the last resume)."""
    environment: dict[str, str]
    fingerprint: str
    """Fingerprint of the data."""
    execution: dict[str, Any]
    """`Execution` of the run."""
    training_key: str
    """`training_key` of the config."""
    evaluations: dict[str, list[str]]
    """Names of the metrics that each evaluation measured, by `evaluation_key`."""
    taken_from: str = ""
    """Where the result was taken from instead of being trained; "" if it was trained here."""
    format: int = RESULT_FORMAT

    @property
    def before(self) -> str:
        """What the metrics with the prefix `init/` are of, in words."""
        return "untrained" if self.config.get("init_from") is None else "at the start"

    @property
    def made_in(self) -> str:
        """Versions and machine in one line, without what the commit tells: a later one is no other environment."""
        names = sorted(self.environment.keys() - {"git_sha", "lit-lazy"})
        return ", ".join(f"{name} {self.environment[name]}" for name in names)

    def require_settings(self, config: Mapping[str, Any]) -> None:
        """Raise a one-line ValueError if a result with the key of a canonical config is of other settings.

        The key has no defaults, so it does not tell those that a user's class computes.
        """
        start = {"init_from": config.get("init_from")}  # where its first weights lie does not matter
        if self.config | start == {**config, **start}:
            return
        from lit_lazy.config.schema import RunConfig  # it imports torch, which the list of runs does without
        from lit_lazy.config.serialisation import from_dict

        made, asked = (from_dict(RunConfig, settings) for settings in (self.config | start, config))
        for path, name, old, new in list_changes(made, asked, ""):
            problem = f"is a default that was {getattr(old, name)!r} when cell {self.key} was trained"
            require(False, path.lstrip("."), getattr(new, name), f"{problem}; write the default as a constant")

    def keep_evaluations(self, keys: Collection[str]) -> "RunResult | None":
        """The result without the metrics of other evaluations than these.

        None if one gave a name that another had: what it is called, and in results of earlier versions its value, then
        depends on the others.
        """
        names = [name for measured in self.evaluations.values() for name in measured]
        apart = any(f"-{key[:6]}/" in name for key, measured in self.evaluations.items() for name in measured)
        if apart or len(set(names)) < len(names):
            return None
        kept = {key: measured for key, measured in self.evaluations.items() if key in keys}
        unasked = set(names).difference(*kept.values())
        metrics = {name: value for name, value in self.metrics.items() if name not in unasked}
        return replace(self, metrics=metrics, evaluations=kept)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "RunResult":
        """The inverse of `asdict`. Raises ValueError or TypeError if the fields are not those of a result."""
        result = make_record(cls, fields)
        train = result.config.get("train")
        check_value("config.train.steps", train.get("steps") if isinstance(train, Mapping) else None, PositiveInt)
        require("loss/val" in result.metrics, "metrics", result.metrics, "must have loss/val")
        require("git_sha" in result.environment, "environment", result.environment, "must have git_sha")
        return result

    @classmethod
    def peek(cls, folder: Path) -> "RunResult | None":
        """The result in a run folder, or None if there is none that can be read; changes nothing.

        Raises NewerFormatError if a newer version wrote it.
        """
        try:
            return cls.load(folder / RESULT)
        except (OSError, ValueError):
            return None

    @classmethod
    def read(cls, folder: Path) -> "RunResult | None":
        """The result in a run folder, or None. Quarantines an unreadable result.

        Raises NewerFormatError if a newer version wrote it.
        """
        path = folder / RESULT
        if not path.exists():
            return None
        try:
            return cls.load(path)
        except ValueError as error:
            quarantine(path, str(error))
            return None

    @classmethod
    def load(cls, path: Path) -> "RunResult":
        """The result in a file. Raises OSError, ValueError if it holds none, NewerFormatError as `peek`."""
        return parse_record(path.read_bytes(), str(path), "result", RESULT_FORMAT, cls.from_dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False)

    def write(self, folder: Path) -> None:
        """Write the result into a run folder, which finishes the run."""
        write_text(folder / RESULT, self.to_json())
