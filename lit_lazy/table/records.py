"""The records of a table: columns and contrasts, requested rows, observed cells, and rows of results."""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lit_lazy.support.error_messages import short_repr
from lit_lazy.support.names_to_paths import LONGEST_METRIC, NOT_IN_METRICS
from lit_lazy.table.columns import Column, Contrast  # noqa: F401 (users import them from here)

Status = Literal["complete", "failed", "missing", "waiting", "running"]

UNFINISHED = ("failed", "missing", "waiting", "running")
"""States of a cell without a result, most severe first."""
STATUS_ORDER = (*UNFINISHED, "complete")
"""A row's status is the first of these that any of its cells has."""


def make_outcome_name(key: str, row: str) -> str:
    """The name in MLflow of a row's mean of a metric. A row's name may have any printable characters, and be long."""
    return NOT_IN_METRICS.sub("_", f"{key}/{row}")[: LONGEST_METRIC - 10].rstrip("./")


def check_row_name(name: object) -> None:
    """Raise a one-line ValueError if MLflow, a table or a terminal cannot have a row of this name."""
    is_text = isinstance(name, str) and name.isprintable() and name.strip() == name
    if not is_text or not 0 < len(name) <= LONGEST_METRIC:
        raise ValueError(f"row {short_repr(name)} has an empty, long or unprintable name; rename it")
    if posixpath.normpath(f"key/{name}") != f"key/{name}":
        fix = "leave out //, /./, /../ and outer slashes"
        raise ValueError(f"row {name!r}: MLflow would read its name as a path; {fix}")


@dataclass(frozen=True)
class RowInfo:
    """A requested variant: its source and the seeds to run."""

    variant: str
    source: str
    seeds: tuple[int, ...]
    base: str
    note: str = ""

    def __post_init__(self) -> None:
        check_row_name(self.variant)


@dataclass(frozen=True)
class Observation:
    """The state of one cell. `metrics` is used only if `status` is "complete".

    `environment` is one line with the versions and the machine of the training; `normaliser` and `position` are class
    names, as in `TableRow`; `taken_from` is where the result comes from if this grid did not train the cell.
    """

    variant: str
    seed: int
    status: Literal["complete", "failed", "waiting", "running"]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    git_sha: str = ""
    environment: str = ""
    reason: str = ""
    normaliser: str = ""
    position: str = ""
    taken_from: str = ""


@dataclass(frozen=True)
class TableRow:
    """The results of a variant; `cells` lists the expected seeds by status."""

    variant: str
    base: str
    source: str
    cells: dict[str, list[int]]
    reasons: dict[str, str]
    git_shas: tuple[str, ...]
    labels: dict[str, str]
    note: str
    metrics: dict[str, dict[int, float]]
    """The defined values of each metric by seed."""
    normaliser: str = ""
    """Class of the normaliser, or of the mixer if that does not attend; empty if no cell is complete."""
    position: str = ""
    """Class of the position; empty if there is no position."""

    def __post_init__(self) -> None:
        check_row_name(self.variant)

    @property
    def n(self) -> int:
        """Number of complete cells."""
        return len(self.cells.get("complete", ()))

    @property
    def status(self) -> Status:
        return next((status for status in STATUS_ORDER if self.cells.get(status)), "missing")

    @property
    def seeds(self) -> list[int]:
        return sorted(seed for seeds in self.cells.values() for seed in seeds)


@dataclass(frozen=True)
class Yardstick:
    """What a loss is held against. `marks` are losses of known predictors by name, such as optimum or trigram.

    A cell has learned the task if its `metric`, a column's key, is below `learned`, or below `by_row` of a row on other
    data, None where no bound is known. `remedy` is a sentence on what to run where no row has.
    """

    metric: str
    learned: float
    marks: dict[str, float]
    remedy: str = ""
    by_row: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """One training of a search: its position on the axes and its outcome."""

    number: int
    run: str
    """Name of the run folder."""
    params: dict[str, float]
    """Values by dotted path."""
    state: Literal["complete", "pruned", "diverged", "failed", "running"]
    value: float | None
    """The objective at the end of training; None unless complete."""
    reports: dict[int, float]
    """The objective at each validation with a finite value, by step."""
    reason: str

    @property
    def last_step(self) -> int:
        """Step of the last validation; 0 before the first."""
        return max(self.reports, default=0)
