"""Result file of a finished run."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lit_lazy.support.disk import quarantine, write_text
from lit_lazy.support.typecheck import check_kinds

RESULT, FINAL_CHECKPOINT, DIAGNOSTICS, METRICS = "result.json", "final.ckpt", "diagnostics.npz", "metrics.jsonl"


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
    fingerprint: str = ""
    """Fingerprint of the data; "" in results of earlier versions."""
    execution: dict[str, Any] = field(default_factory=dict)
    """`Execution` of the run; empty in results of earlier versions."""
    training_key: str = ""
    """`training_key` of the config; "" in results of earlier versions."""
    evaluations: dict[str, list[str]] = field(default_factory=dict)
    """Names of the metrics that each evaluation measured, by `evaluation_key`; empty in results of earlier versions."""
    taken_from: str = ""
    """Where the result was taken from instead of being trained; "" if it was trained here."""

    @classmethod
    def from_json(cls, content: bytes | str) -> "RunResult":
        """Parse a result. Raises ValueError or TypeError if it is none."""
        try:
            result = cls(**json.loads(content))
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        check_kinds(RESULT, result)
        return result

    @classmethod
    def read(cls, folder: Path) -> "RunResult | None":
        """The result in a run folder, or None. Quarantines an unreadable result."""
        path = folder / RESULT
        if not path.exists():
            return None
        try:
            return cls.from_json(path.read_bytes())
        except (ValueError, TypeError) as error:
            quarantine(path, f"damaged ({type(error).__name__})")
            return None

    def write(self, folder: Path) -> None:
        """Write the result into a run folder, which finishes the run."""
        write_text(folder / RESULT, json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False))
