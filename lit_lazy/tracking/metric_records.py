"""The lines of a run folder's metric file."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
