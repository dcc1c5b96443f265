"""The record of one point of a search."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Point:
    """One training of a search: its position on the axes and its outcome."""

    number: int
    run: str
    """Name of the run folder; "" before the point is sampled."""
    params: dict[str, float]
    """Values by dotted path."""
    state: Literal["complete", "pruned", "diverged", "failed", "running", "waiting"]
    value: float | None
    """The objective at the end of training; None unless complete."""
    reports: dict[int, float]
    """The objective at each validation with a finite value, by step."""
    reason: str

    @property
    def last_step(self) -> int:
        """Step of the last validation; 0 before the first."""
        return max(self.reports, default=0)
