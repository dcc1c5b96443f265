"""Result file of a finished run."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lit_lazy.support.checks import PositiveInt, check_value, require
from lit_lazy.support.disk import quarantine, write_text
from lit_lazy.support.stored_records import make_record, parse_record

RESULT, FINAL_CHECKPOINT, DIAGNOSTICS, METRICS = "result.json", "final.ckpt", "diagnostics.npz", "metrics.jsonl"

FORMAT = 1
"""Format of result.json; raised when a field is added, removed or changes its meaning."""

LARGEST = 1e150
"""Largest size of a metric."""


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run. `metrics` is deterministic for a key, machine and thread count."""

    key: str
    config: dict[str, Any]
    data: dict[str, str | int | float]
    metrics: dict[str, float]
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
    format: int = FORMAT

    @property
    def before(self) -> str:
        """What the metrics with the prefix `init/` are of, in words."""
        return "untrained" if self.config.get("init_from") is None else "at the start"

    @property
    def made_in(self) -> str:
        """Versions and machine in one line, without what the commit tells: a later one is no other environment."""
        names = sorted(self.environment.keys() - {"git_sha", "lit-lazy"})
        return ", ".join(f"{name} {self.environment[name]}" for name in names)

    def keep_evaluations(self, keys: Collection[str]) -> "RunResult | None":
        """The result without the metrics of other evaluations than these.

        None if two of its evaluations gave the same name, whose value is that of one of them.
        """
        names = [name for measured in self.evaluations.values() for name in measured]
        if len(set(names)) < len(names):
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
        for name, value in result.metrics.items():
            require(abs(value) <= LARGEST, name, value, f"must be at most {LARGEST:g}, so that its square is a number")
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
        return parse_record(path.read_bytes(), str(path), "result", FORMAT, cls.from_dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False)

    def write(self, folder: Path) -> None:
        """Write the result into a run folder, which finishes the run."""
        write_text(folder / RESULT, self.to_json())
