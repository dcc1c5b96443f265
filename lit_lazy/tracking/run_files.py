"""Files of a run folder: the lines of its metric file, and the name of its run in MLflow."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_lazy.support.disk import write_text

TAIL_BYTES = 2**16


@dataclass(frozen=True)
class MetricRecord:
    """Metrics of one step and the time of their measurement, which makes logging them idempotent."""

    step: int
    milliseconds: int
    """Since the epoch."""
    metrics: Mapping[str, float]


def read_lines(path: Path) -> list[MetricRecord]:
    """The records of a metric file, without damaged lines and an unfinished last line."""
    if not path.exists():
        return []
    return _parse_lines(path.read_bytes().split(b"\n")[:-1])


def read_last_lines(path: Path) -> list[MetricRecord]:
    """The records in the last 64 KiB of a metric file; [] without a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return _parse_lines(file.read().split(b"\n")[:-1])
    except FileNotFoundError:
        return []


def _parse_lines(lines: Sequence[bytes]) -> list[MetricRecord]:
    return [record for line in lines if (record := parse_line(line))]


def parse_line(line: bytes) -> MetricRecord | None:
    """The record of a line; None if it is damaged."""
    try:
        return MetricRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None


RUN_ID = "mlflow_run_id"
"""The file, with the run's id and that of its experiment; the second is missing in files of former versions."""


def write_run_address(folder: Path, run_id: str, experiment_id: str) -> None:
    """Name the run of a run folder."""
    write_text(folder / RUN_ID, f"{run_id} {experiment_id}")


def read_run_id(folder: Path) -> str:
    """The id of a run folder's run; "" if it is not known."""
    return (_read(folder) or [""])[0]


def read_run_address(folder: Path) -> tuple[str, str] | None:
    """The ids of a run folder's experiment and run; None if one is not known."""
    known = _read(folder)
    return (known[1], known[0]) if len(known) == 2 else None


def _read(folder: Path) -> list[str]:
    file = folder / RUN_ID
    return file.read_text(encoding="utf-8", errors="replace").split() if file.exists() else []
