"""What a finished run leaves in its folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_lazy.support.disk import quarantine
from lit_lazy.support.typecheck import check_kinds

RESULT, FINAL_CHECKPOINT, DIAGNOSTICS = "result.json", "final.ckpt", "diagnostics.npz"


@dataclass(frozen=True)
class RunResult:
    """What a finished run measured. `metrics` is the same for the same key, machine and thread count."""

    key: str
    config: dict[str, Any]
    data: dict[str, str | int | float]
    metrics: dict[str, float]
    """Final values; a metric that is undefined for this variant is absent."""
    labels: dict[str, str]
    timings: dict[str, float]
    """Seconds, and tokens per second of training (of the last leg, if the run was resumed)."""
    environment: dict[str, str]
    fingerprint: str = ""
    """Of the data; "" in a result of an earlier version."""
    execution: dict[str, Any] = field(default_factory=dict)
    """How it was executed; empty in a result of an earlier version."""

    @classmethod
    def read(cls, folder: Path) -> "RunResult | None":
        """The result in a run folder, or None while there is none. One that cannot be read is quarantined."""
        path = folder / RESULT
        if not path.exists():
            return None
        try:
            result = cls(**json.loads(path.read_text()))
            check_kinds(RESULT, result)
        except (ValueError, TypeError, RecursionError) as error:
            quarantine(path, f"damaged ({type(error).__name__})")
            return None
        return result
