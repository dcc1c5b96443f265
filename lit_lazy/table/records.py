"""The records of a table: requested rows, columns and contrasts, observed cells, and the resulting statistics."""

import csv
import io
import math
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from lit_lazy.support.checks import check_kinds, require
from lit_lazy.support.errors import escape_controls, short_repr
from lit_lazy.table.declaration import Declaration, Verdict
from lit_lazy.table.statistics import RESOLUTION, Effect

FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")
"""Prefixes that spreadsheets read as a formula (OWASP, CSV injection). Only text is escaped, never numbers."""
LONGEST = 250
"""Characters of a key, title or name: as many as a metric's name has in MLflow."""
REFUSED = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow does not take in the name of a metric."""
PRINTABLE = f"must be 1 to {LONGEST} printable characters"
MOST_DIGITS = 20
FORMAT = 2
"""Format of table.json; raised when a field is added, removed or changes its meaning. 1 had the statistics too."""

Status = Literal["complete", "failed", "missing", "waiting", "running"]

UNFINISHED = ("failed", "missing", "waiting", "running")
"""States of a cell without a result, most severe first."""
STATUS_ORDER = (*UNFINISHED, "complete")
"""A row's status is the first of these that any of its cells has."""


@dataclass(frozen=True)
class Column:
    """A metric of the table.

    `digits` is the number of decimals or a format spec such as ",.0f". `scale` multiplies displayed values (100 for a
    percentage, with `unit="%"`); JSON and CSV store raw values. A column with `better` appears in the table of
    differences, a `plotted` one in the figures. `bounds` are the raw limits of the metric: a row whose values all lie
    at a limit has no spread to test with. `by_construction` is the reason why rows differ regardless of training; the
    table then reports it instead of a test. A raw difference within +-`margin` counts as no difference: the table lists
    the rows equivalent to the baseline.
    """

    key: str
    title: str
    better: Literal["lower", "higher"] | None = None
    digits: int | str = 3
    unit: str = ""
    scale: float = 1.0
    note: str = ""
    plotted: bool = False
    bounds: tuple[float, ...] = ()
    by_construction: str = ""
    margin: float | None = None

    def __post_init__(self) -> None:
        what = f"column {short_repr(self.key)}"
        check_kinds(what, self)
        for name, text in (("key", self.key), ("title", self.title), ("unit", self.unit or "1")):
            require(_is_printable(text), f"{what}: {name}", text, PRINTABLE)
        require(is_metric_name(self.key), f"{what}: key", self.key, "MLflow takes no metric of this name")
        require(self.margin is None or self.margin > 0, f"{what}: margin", self.margin, "must be above 0, or None")
        require(bool(self.scale), f"{what}: scale", self.scale, "must not be 0; 1 shows values as they are")
        fix = f"must be 0 to {MOST_DIGITS} decimals or a format such as ',.0f'"
        require(isinstance(self.digits, str) or 0 <= self.digits <= MOST_DIGITS, f"{what}: digits", self.digits, fix)
        try:
            float(self.format(1.0 / self.scale))
        except ValueError:
            require(False, f"{what}: digits", self.digits, fix)

    def format(self, value: float, sign: str = "") -> str:
        """The value as displayed. A nonzero value that would round to 0 is shown with one significant digit."""
        shown = value * self.scale
        text = format(shown, sign + self._spec)
        return format(shown, sign + ".0e") if shown and not float(text.replace(",", "")) else text

    def clip_interval(self, mean: float, half_width: float, values: Collection[float]) -> tuple[float, float]:
        """The ends of an interval around the mean of values, within the least and the greatest bound of the metric.

        A bound that a value exceeds, as the mass of a custom rule may exceed 1, does not hold for these values.
        """
        low, high = mean - half_width, mean + half_width
        if not self.bounds:
            return low, high
        least, greatest = min(self.bounds), max(self.bounds)
        rounding = RESOLUTION * max(map(abs, (*values, *self.bounds)))
        return (
            low if min(values) < least - rounding else max(low, least),
            high if max(values) > greatest + rounding else min(high, greatest),
        )

    def round_value(self, value: float) -> float:
        """The value in the displayed unit, rounded to the displayed digits."""
        return float(format(value * self.scale, self._spec).replace(",", ""))

    @property
    def _spec(self) -> str:
        return f".{self.digits}f" if isinstance(self.digits, int) else self.digits

    @property
    def heading(self) -> str:
        return self.add_unit(self.title, self.unit)

    @property
    def difference_unit(self) -> str:
        """Unit of a difference: percentages differ by points."""
        return "points" if self.unit == "%" else self.unit

    def add_unit(self, title: str, unit: str) -> str:
        """A title with a unit and the direction that is better."""
        return title + (f" ({unit})" if unit else "") + {"lower": " ↓", "higher": " ↑", None: ""}[self.better]


def is_metric_name(name: str) -> bool:
    """Whether MLflow takes a name for a metric: some characters only, and no path that has another form."""
    inside = posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
    return inside and len(name) <= LONGEST and not REFUSED.search(name)


def make_outcome_name(key: str, row: str) -> str:
    """The name in MLflow of a row's mean of a metric. A row's name may have any printable characters, and be long."""
    return REFUSED.sub("_", f"{key}/{row}")[: LONGEST - 10].rstrip("./")


def check_row_name(name: object) -> None:
    """Raise a one-line ValueError if MLflow, a table or a terminal cannot have a row of this name."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST or not name.isprintable() or name.strip() != name:
        raise ValueError(f"row {short_repr(name)} has an empty, long or unprintable name; rename it")
    if posixpath.normpath(f"key/{name}") != f"key/{name}":
        fix = "leave out //, /./, /../ and outer slashes"
        raise ValueError(f"row {name!r}: MLflow would read its name as a path; {fix}")


def _is_printable(text: str) -> bool:
    return 0 < len(text) <= LONGEST and text.isprintable()


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
class Contrast:
    """A weighted sum of variants with weights that sum to zero, such as the interaction of a 2x2 design."""

    name: str
    weights: dict[str, float]

    def __post_init__(self) -> None:
        what = f"contrast {short_repr(self.name)}"
        check_kinds(what, self)
        require(_is_printable(self.name), f"{what}: name", self.name, PRINTABLE)
        balanced = any(self.weights.values()) and abs(math.fsum(self.weights.values())) <= 1e-9
        require(balanced, f"{what}: weights", self.weights, "must add up to zero")


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
class Measure:
    """One metric of one row, defined in `n` complete cells and undefined in `undefined`; `values` is by seed.

    `difference` compares the row with the baseline. `p_same` is the p value of equivalence to the baseline within the
    column's margin (TOST), after Holm over the rows.
    """

    mean: float | None
    ci95: float | None
    n: int
    undefined: int
    values: dict[str, float]
    difference: Effect
    p_same: float | None

    def flatten(self) -> dict[str, Any]:
        """The numbers as in table.csv, where those of the difference stand next to the row's own mean, ci95 and n."""
        difference = {_OF_DIFFERENCE.get(name, name): value for name, value in vars(self.difference).items()}
        own = {"mean": self.mean, "ci95": self.ci95, "n": self.n, "undefined": self.undefined}
        return own | difference | {"p_same": self.p_same}


_OF_DIFFERENCE = {"mean": "diff"} | {name: f"diff_{name}" for name in ("ci95", "n", "se", "df", "low", "high")}


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
    metrics: dict[str, Measure]
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

    @property
    def values(self) -> dict[str, dict[str, float]]:
        """The defined values of each metric by seed."""
        return {key: measure.values for key, measure in self.metrics.items() if measure.values}


@dataclass(frozen=True)
class Detectable:
    """Median minimum detectable effect over the tested rows with `n` seeds, at alpha = 0.05.

    `mde_holm` uses Holm's first step, alpha = 0.05 / rows compared.
    """

    n: int
    mde: float
    mde_holm: float


@dataclass(frozen=True)
class Summary:
    """The tests of one column over all rows.

    `compared` is the size of Holm's family: the rows with at least three seeds. `tested` of them have a p value.
    `separates` lists the rows with p < 0.05 after Holm, `same` the rows equivalent to the baseline within the column's
    margin after Holm. `seeds` are the distinct numbers of seeds.
    """

    compared: int
    tested: int
    separates: tuple[str, ...]
    same: tuple[str, ...]
    seeds: tuple[int, ...]
    detectable: tuple[Detectable, ...]


@dataclass(frozen=True)
class Yardstick:
    """What a loss is held against. `marks` are losses of known predictors by name, such as optimum or trigram.

    A cell has learned the task if its `metric`, a column's key, is below `learned`. `remedy` is a sentence on what to
    run where no row has.
    """

    metric: str
    learned: float
    marks: dict[str, float]
    remedy: str = ""


@dataclass(frozen=True)
class ContrastRow:
    name: str
    weights: dict[str, float]
    metrics: dict[str, Effect]


@dataclass(frozen=True)
class Table:
    """The table of a finished or unfinished ablation, from `build_table` or `read_table`.

    `primary` is the key of the primary outcome's column, None if there is no primary outcome; all other columns are
    exploratory. `baseline` is "" if the grid lacks that row, so that nothing is compared with it.
    """

    ablation: str
    base: str
    baseline: str
    command: str
    environment: str
    rows: tuple[TableRow, ...]
    columns: tuple[Column, ...]
    summaries: dict[str, Summary]
    contrasts: tuple[ContrastRow, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    primary: str | None = None
    declaration: Declaration | None = None
    """The declaration of the question that the ablation answers, if any."""
    verdict: Verdict | None = None
    """None without a question, or while a required value is missing."""
    yardstick: Yardstick | None = None
    """None if the data source has none."""
    seconds: float | None = None
    """Training and evaluation time of all complete cells; of a resumed cell since it resumed. None if unknown."""
    seconds_elsewhere: float = 0.0
    """The part of it that another grid spent, from which cells were taken."""
    files: dict[str, str] = field(default_factory=dict)
    """Hashes of the user's files that are in no commit, by name."""

    @property
    def git_sha(self) -> str:
        """The commit of the complete cells, or "mixed: a, b"."""
        return join_or_mixed({sha for row in self.rows for sha in row.git_shas})

    @property
    def compared(self) -> list[str]:
        """Keys of the main columns in which a row is compared with the baseline."""
        return [column.key for column in self.main_columns if self.is_compared(column)]

    def is_compared(self, column: Column) -> bool:
        """Whether a row and the baseline have values of the same seed."""
        return bool(self.summaries[column.key].seeds)

    @property
    def main_columns(self) -> list[Column]:
        """The primary column, or else the task's loss, then the other plotted ones."""
        shown = [column for column in self.columns if column.plotted or column.key == self.primary]
        first = self.primary or (self.yardstick.metric if self.yardstick else None)
        return sorted(shown, key=lambda column: column.key != first)

    @property
    def columns_by_key(self) -> dict[str, Column]:
        return {column.key: column for column in self.columns}

    @cached_property
    def unlearned(self) -> dict[str, str]:
        """The variants that in more than half of their cells did not learn the task; `4 of 5` says in how many."""
        cells = {row.variant: row.n for row in self.rows}
        failed = {name: len(seeds) for name, seeds in self.find_failures().items()}
        return {name: f"{count} of {cells[name]}" for name, count in failed.items() if 2 * count > cells[name]}

    def describe_state(self, variant: str) -> str:
        """`did not learn (4 of 5)` of a row that did not learn the task in 4 of 5 cells; "" of one that did."""
        return f"did not learn ({self.unlearned[variant]})" if variant in self.unlearned else ""

    def find_failures(self) -> dict[str, set[int]]:
        """The seeds in which a variant did not learn the task; {} without a yardstick."""
        if self.yardstick is None or self.yardstick.metric not in self.columns_by_key:
            return {}
        bound, measures = self.yardstick.learned, self.collect_measures(self.yardstick.metric)
        return {name: {int(seed) for seed, v in m.values.items() if v >= bound} for name, m in measures.items()}

    def is_void(self, variant: str, key: str) -> bool:
        """Whether a row's value in a column says nothing: the row did not learn the task, and this is not its loss."""
        return self.yardstick is not None and key != self.yardstick.metric and variant in self.unlearned

    def group_by_seeds(self) -> dict[tuple[int, ...], list[str]]:
        """The variants by their expected seeds."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for row in self.rows:
            groups.setdefault(tuple(row.seeds), []).append(row.variant)
        return groups

    def count_cells(self) -> tuple[int, int]:
        """The numbers of complete and of expected cells."""
        return sum(row.n for row in self.rows), sum(len(row.seeds) for row in self.rows)

    def find_twins(self) -> list[list[str]]:
        """Groups of rows that have the same losses, to the last bit, in all seeds that they share."""
        losses = [key for key in self.columns_by_key if key.startswith("loss/")]
        groups: list[list[TableRow]] = []

        def are_twins(a: TableRow, b: TableRow) -> bool:
            values = [(a.metrics[key].values, b.metrics[key].values) for key in losses]
            pairs = [(old[seed], new[seed]) for old, new in values for seed in old.keys() & new.keys()]
            return bool(pairs) and all(old == new for old, new in pairs)

        for row in self.rows:
            group = next((group for group in groups if are_twins(group[0], row)), None)
            groups.append([row]) if group is None else group.append(row)
        return [[row.variant for row in group] for group in groups if len(group) > 1]

    def collect_measures(self, key: str) -> dict[str, Measure]:
        """The measures of a column by variant."""
        return {row.variant: row.metrics[key] for row in self.rows}

    def to_json(self) -> dict[str, Any]:
        """Strict JSON (no NaN, no infinity) of the values and of all else that cannot be computed from them.

        `lit_lazy.table.build` reads it and computes the rest.
        """
        return {
            "format": FORMAT,
            "ablation": self.ablation,
            "base": self.base,
            "command": self.command,
            "environment": self.environment,
            **({} if self.seconds is None else {"seconds": round(self.seconds)}),
            **({"seconds_elsewhere": round(self.seconds_elsewhere)} if self.seconds_elsewhere else {}),
            **({"files": self.files} if self.files else {}),
            "baseline": self.baseline,
            "primary": self.primary,
            **({} if self.declaration is None else {"declaration": self.declaration.to_json()}),
            **({} if self.yardstick is None else {"yardstick": _drop_defaults(self.yardstick)}),
            "columns": [_drop_defaults(column) for column in self.columns],
            "contrasts": [{"name": row.name, "weights": row.weights} for row in self.contrasts],
            "rows": [_drop_defaults(row, metrics=row.values) for row in self.rows],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    def to_csv(self) -> str:
        """Tidy CSV: one line per variant and metric, with raw values; undefined values are empty.

        `pandas.read_csv(...).pivot(index="variant", columns="metric", values="mean")` is the wide form.
        """
        lines: list[dict[str, object]] = []
        for row in self.rows:
            about = {
                "ablation": self.ablation,
                "baseline": self.baseline,
                "variant": row.variant,
                "base": row.base,
                "source": row.source,
                "status": row.status,
                **({} if self.yardstick is None else {"state": self.describe_state(row.variant)}),
                "cells": len(row.seeds),
                "complete": row.n,
                "git_sha": join_or_mixed(row.git_shas),
            }
            for column in self.columns:
                of = {"metric": column.key, "better": column.better, **row.metrics[column.key].flatten()}
                lines.append({**about, **row.labels, **of})
        return format_csv([*map(list, lines[:1]), *(list(line.values()) for line in lines)])


def _drop_defaults(record: "Column | TableRow | Yardstick", **changes: Any) -> dict[str, Any]:
    """The fields that are not at their default, with lists for tuples, as JSON returns them."""
    known = vars(record) | changes
    kept = {part.name: known[part.name] for part in fields(record) if known[part.name] != part.default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}


def format_csv(lines: Iterable[Sequence[object]]) -> str:
    """CSV of cells. Text that a spreadsheet would read as a formula gets a leading apostrophe."""

    def escape(text: str) -> str:
        line = escape_controls(text.replace("\r", " "))  # csv with lineterminator "\n" does not quote a carriage return
        return f"'{line}" if line.startswith(FORMULA) else line

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for line in lines:
        writer.writerow(escape(value) if isinstance(value, str) else value for value in line)
    return out.getvalue()


def join_or_mixed(values: Iterable[str]) -> str:
    found = sorted(values)
    return f"mixed: {', '.join(found)}" if len(found) > 1 else "".join(found)


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
