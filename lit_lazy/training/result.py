"""Result file of a finished run."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_lazy.support.disk import quarantine
from lit_lazy.support.typecheck import check_kinds

RESULT, FINAL_CHECKPOINT, DIAGNOSTICS = "result.json", "final.ckpt", "diagnostics.npz"


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

    @classmethod
    def read(cls, folder: Path) -> "RunResult | None":
        """The result in a run folder, or None. Quarantines an unreadable result."""
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
