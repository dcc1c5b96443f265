"""What is executed, where and how: as a command is given it, and as its workers are told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from lit_lazy.grid.ablation import Cell
from lit_lazy.training.execution import ONE_DEVICE, Execution


@dataclass(frozen=True)
class Work:
    """Cells to execute, and where."""

    id: str
    """Name of the folder, of the study and of the MLflow experiment."""
    cells: Sequence[Cell]
    base_config: dict[str, object]
    runs: Path
    files: Sequence[Path]
    """Python files that define classes of the cells' configs."""
    noun: ClassVar[str] = "cells"
    """What messages call the cells."""
    module: ClassVar[str] = "lit_lazy.grid.jobs.worker"
    """What a worker process runs."""

    @property
    def folder(self) -> Path:
        """Of the results."""
        return self.runs / self.id


@dataclass(frozen=True)
class LaunchOptions:
    """How to run a grid."""

    workers: int
    threads: int
    fresh: bool = False
    keep_checkpoints: bool = False
    storage: str | None = None
    """URL of the queue's database; None for sqlite in the runs folder."""
    only_these: bool = False
    """Leave cells of the same grid that were not asked for to others."""
    retry_failed: int = 0
    """How often a cell that fails is tried again."""
    launcher: Literal["local", "ray"] = "local"
    """Worker processes on this machine, or tasks on the Ray cluster that this process has joined."""
    gpus: float = 0.0
    """GPUs of a Ray task."""
    execution: Execution = ONE_DEVICE
    """How each cell is trained."""
    loggers: tuple[str, ...] = ()
    """Kinds of loggers beside MLflow."""


@dataclass(frozen=True)
class Job:
    """What every worker of a grid has to know."""

    storage: str = field(repr=False)  # may hold a password, as may the other address
    study: str
    runs: Path
    tracking_uri: str = field(repr=False)
    parent_id: str
    command: str | None
    """Token of the command's membership; None where workers are not processes of its machine."""
    threads: int
    keep_checkpoints: bool
    keys: frozenset[str] | None
    """Take only these cells; None for all."""
    files: Sequence[Path]
    """Python files that define classes of the cells' configs."""
    module: str = "lit_lazy.grid.jobs.worker"
    """What a worker process on this machine runs."""
    execution: Execution = ONE_DEVICE
    """How each cell is trained."""
    loggers: tuple[str, ...] = ()
    """Kinds of loggers beside MLflow."""

    @property
    def folder(self) -> Path:
        """The grid's folder."""
        return self.runs / self.study
