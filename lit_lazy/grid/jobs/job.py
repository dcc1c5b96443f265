"""Descriptions of what to execute and how, for a command and for its workers."""

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from lit_lazy.grid.ablation import Cell
from lit_lazy.support.inside import join_name
from lit_lazy.training.execution import ONE_DEVICE, Execution

DISK_FULL = 28
"""Exit status of a worker that ran out of disk space: errno's ENOSPC."""
FILE_TOO_LONG = 27
"""Exit status of a worker that met a limit on the size of files: errno's EFBIG."""
INTERRUPTED = 130
"""Exit status of an interrupted worker that requeued its cells."""


def is_over(until: float | None) -> bool:
    """Whether a time limit has passed, by the clock: unlike monotonic time it is shared with other machines."""
    return until is not None and time.time() >= until


@dataclass(frozen=True)
class Work:
    """Cells to execute and their location."""

    id: str
    """Name of the folder, the study and the MLflow experiment."""
    cells: Sequence[Cell]
    base_config: dict[str, object]
    runs: Path
    files: Sequence[Path]
    """Python files that define classes of the cells' configs."""
    noun: ClassVar[str] = "cells"
    """The word for cells in messages."""
    module: ClassVar[str] = "lit_lazy.grid.jobs.worker"
    """Module that worker processes run."""

    @property
    def folder(self) -> Path:
        """The folder of the results."""
        return join_name(self.runs, self.id)


@dataclass(frozen=True)
class LaunchOptions:
    """Options for running a grid."""

    workers: int
    threads: int
    fresh: bool = False
    keep_checkpoints: bool = False
    storage: str | None = None
    """URL of the queue's database; None for sqlite in the runs folder."""
    only_these: bool = False
    """Execute only the cells of this command, not other waiting cells of the same grid."""
    retry_failed: int = 0
    """Maximum number of retries of a failed cell."""
    launcher: Literal["local", "ray"] = "local"
    """Worker processes on this machine, or tasks on the Ray cluster that this process has joined."""
    gpus: float = 0.0
    """GPUs per Ray task."""
    execution: Execution = ONE_DEVICE
    """How each cell is trained."""
    loggers: tuple[str, ...] = ()
    """Kinds of loggers in addition to MLflow."""
    mixed: bool = False
    """Take results of another backend, torch or Python too."""
    until: float | None = None
    """Time, as by `time.time`, after which no cell starts; None for no limit."""
    one_each: bool = False
    """Let each worker execute one cell, whatever the time."""


@dataclass(frozen=True)
class Job:
    """The parameters of a grid's workers."""

    storage: str = field(repr=False)  # may contain a password, like the other address
    study: str
    runs: Path
    tracking_uri: str = field(repr=False)
    parent_id: str
    command: str | None
    """Token of the command's membership; None if workers may run on other machines."""
    threads: int
    keep_checkpoints: bool
    keys: Set[str] | None
    """Claim only these cells; None for all."""
    files: Sequence[Path]
    """Python files that define classes of the cells' configs."""
    module: str = "lit_lazy.grid.jobs.worker"
    """Module that worker processes on this machine run."""
    execution: Execution = ONE_DEVICE
    """How each cell is trained."""
    loggers: tuple[str, ...] = ()
    """Kinds of loggers in addition to MLflow."""
    until: float | None = None
    """As in `LaunchOptions`."""
    one_each: bool = False
    """As in `LaunchOptions`."""
    compiled: bool | None = None
    """Whether cells are trained with the compiled backend of CPUs; None: if the machine has it."""

    @property
    def folder(self) -> Path:
        """The grid's folder."""
        return join_name(self.runs, self.study)
