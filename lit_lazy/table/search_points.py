"""The record of one point of a search, from which its table and figures are made."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Point:
    """One training of a search: where it lies on the axes, and how it ended."""

    number: int
    run: str
    """Name of its run folder; "" before it is drawn."""
    params: dict[str, float]
    """By dotted path."""
    state: Literal["complete", "pruned", "diverged", "failed", "running", "waiting"]
    value: float | None
    """The objective at the end of training; None unless complete."""
    reports: dict[int, float]
    """The objective at each validation, by step, where it was finite."""
    reason: str

    @property
    def last_step(self) -> int:
        """The last validation; 0 before the first."""
        return max(self.reports, default=0)
