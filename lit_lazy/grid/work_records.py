"""What to execute and how: for a command, and for the workers that it starts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.plan import Plan
from lit_lazy.grid.reused_results import TakenResult
from lit_lazy.support.names_to_paths import join_name
from lit_lazy.training.execution_settings import ONE_DEVICE, Execution
from lit_lazy.training.run_folder import locate_cell


def is_over(until: float | None) -> bool:
    """Whether a time limit has passed, by the clock: unlike monotonic time it is shared with other machines."""
    return until is not None and time.time() >= until


@dataclass(frozen=True)
class Work:
    """Cells to execute and their location."""

    id: str
    """Name of the folder and of the MLflow experiment; the study's begins with it."""
    cells: Sequence[Cell]
    runs: Path
    files: Sequence[Path]
    """Python files that define classes of the cells' configs."""
    noun: ClassVar[str] = "cells"
    """The word for cells in messages."""

    @property
    def folder(self) -> Path:
        """The folder of the results."""
        return join_name(self.runs, self.id)

    def locate(self, key: str) -> Path:
        """The run folder of a cell."""
        return locate_cell(self.folder, key)


@dataclass(frozen=True)
class Grid(Work):
    """An ablation on an experiment, ready to run."""

    plan: Plan
    row_order: Sequence[str]
    taken: Mapping[str, TakenResult] = field(default_factory=dict)
    """Results by cell key from packed files."""
    changed: bool = False
    """Train rows that changed since the grid began, beside their former cells; otherwise they are refused."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options for running a grid."""

    workers: int
    threads: int
    fresh: bool = False
    keep_checkpoints: bool = False
    storage: str | None = None
    """URL of Optuna's storage; None for a file in the grid's folder."""
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
    until: float | None = None
    """Time, as by `time.time`, after which no cell starts; None for no limit."""


@dataclass(frozen=True)
class Job:
    """The parameters of a grid's workers."""

    folder: Path
    """The grid's folder."""
    mark: str
    """Content of the file `grid_id` there, by which a worker sees whether it shares the folder."""
    threads: int
    files: Sequence[Path]
    """Python files that define classes of the cells' configs."""
    keep_checkpoints: bool = False
    execution: Execution = ONE_DEVICE
    """How each cell is trained."""
    loggers: tuple[str, ...] = ()
    """Kinds of loggers in addition to MLflow."""
    monitored: str | None = None
    """Metric by which the points of a search are judged at each validation; None for no judgement."""


@dataclass(frozen=True)
class Ending:
    """How an attempt at a cell ended."""

    key: str
    kind: Literal["done", "failed", "pruned", "busy", "interrupted", "died", "disk_full"]
    reason: str = ""
    final: bool = False
    """Whether another attempt would fail again."""
    files: Mapping[str, bytes] | None = None
    """The run folder's files, by name, from a worker that does not share the folder."""
