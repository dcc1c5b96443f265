"""The records of a table: requested rows, observed cells, and the table with the statistics that follow from them."""

import csv
import io
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from lit_lazy.support.errors import escape_controls, short_repr
from lit_lazy.support.names_to_paths import LONGEST_METRIC, NOT_IN_METRICS
from lit_lazy.table.column_statistics import Effect, Measure, Summary, compute_effects, measure_rows, summarise
from lit_lazy.table.columns import Column, Contrast
from lit_lazy.table.declaration import Declaration, Verdict
from lit_lazy.table.verdict_text import judge

FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")
"""Prefixes that spreadsheets read as a formula (OWASP, CSV injection). Only text is escaped, never numbers."""
FORMAT = 2
"""Format of table.json; raised when a field is added, removed or changes its meaning. 1 had the statistics too."""

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


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table of a finished or unfinished ablation, from `build_table` or `read_table`.

    Its fields are those of table.json; statistics and verdict follow from them. `primary` is the key of the primary
    outcome's column, None if there is no primary outcome; all other columns are exploratory. `baseline` is "" if the
    grid lacks that row, so that nothing is compared with it.
    """

    ablation: str
    base: str
    command: str
    environment: str
    seconds: float | None = None
    """Training and evaluation time of all complete cells; of a resumed cell since it resumed. None if unknown."""
    seconds_elsewhere: float = 0.0
    """The part of it that another grid spent, from which cells were taken."""
    files: dict[str, str] = field(default_factory=dict)
    """Hashes of the user's files that are in no commit, by name."""
    baseline: str
    primary: str | None
    declaration: Declaration | None = None
    """The declaration of the question that the ablation answers, if any."""
    yardstick: Yardstick | None = None
    """None if the data source has none."""
    columns: tuple[Column, ...]
    contrasts: tuple[Contrast, ...]
    rows: tuple[TableRow, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def collect_values(self, key: str) -> dict[str, dict[int, float | None]]:
        """The values of a column by row and seed, of complete cells; None where it is undefined."""
        return {
            row.variant: {seed: row.metrics.get(key, {}).get(seed) for seed in row.cells.get("complete", [])}
            for row in self.rows
        }

    @cached_property
    def measures(self) -> dict[str, dict[str, Measure]]:
        """By column's key and row."""
        return {
            column.key: measure_rows(column, self.collect_values(column.key), self.baseline) for column in self.columns
        }

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        """By column's key."""
        return {key: summarise(measures) for key, measures in self.measures.items()}

    @cached_property
    def effects(self) -> dict[str, dict[str, Effect]]:
        """The effects of the contrasts, by column's key and contrast's name."""
        weights = {contrast.name: contrast.weights for contrast in self.contrasts}
        return {
            column.key: compute_effects(column, self.collect_values(column.key), weights) for column in self.columns
        }

    @property
    def outcomes(self) -> dict[str, dict[int, float]]:
        """The declared primary outcome by row and seed; {} if the table lacks its column."""
        measures = self.measures.get(self.declaration.primary, {}) if self.declaration else {}
        return {name: measure.values for name, measure in measures.items()}

    @cached_property
    def verdict(self) -> Verdict | None:
        """None without a question, or while a required value is missing."""
        column = self.columns_by_key.get(self.declaration.primary) if self.declaration else None
        if self.declaration is None or column is None:
            return None
        return judge(self.declaration, column, self.outcomes, self.find_failures())

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
        usual, by_row, measures = self.yardstick.learned, self.yardstick.by_row, self.measures[self.yardstick.metric]
        bounds = {name: by_row.get(name, usual) for name in measures}
        return {
            name: {seed for seed, v in measures[name].values.items() if v >= bound}
            for name, bound in bounds.items()
            if bound is not None
        }

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
        losses = [measures for key, measures in self.measures.items() if key.startswith("loss/")]
        groups: list[list[str]] = []

        def are_twins(a: str, b: str) -> bool:
            values = [(measures[a].values, measures[b].values) for measures in losses]
            pairs = [(old[seed], new[seed]) for old, new in values for seed in old.keys() & new.keys()]
            return bool(pairs) and all(old == new for old, new in pairs)

        for name in (row.variant for row in self.rows):
            group = next((group for group in groups if are_twins(group[0], name)), None)
            groups.append([name]) if group is None else group.append(name)
        return [group for group in groups if len(group) > 1]

    def to_json(self) -> dict[str, Any]:
        """Strict JSON (no NaN, no infinity) of the fields, which `lit_lazy.table.build` reads."""
        written = {
            "seconds": self.seconds and round(self.seconds),
            "seconds_elsewhere": round(self.seconds_elsewhere),
            "declaration": self.declaration and self.declaration.to_json(),
            "yardstick": self.yardstick and _to_json(self.yardstick),
            "columns": [_to_json(column) for column in self.columns],
            "contrasts": [vars(contrast) for contrast in self.contrasts],
            "rows": [_to_json(row) for row in self.rows],
        }
        return {"format": FORMAT, **_to_json(self, **written)}

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
                of = {"metric": column.key, "better": column.better, **self.measures[column.key][row.variant].flatten()}
                lines.append({**about, **row.labels, **of})
        return format_csv([*map(list, lines[:1]), *(list(line.values()) for line in lines)])


def _to_json(record: Any, **written: Any) -> dict[str, Any]:
    """The fields without a default, or not at it, with lists for tuples, as JSON returns them."""
    known = vars(record) | written
    defaults = {part.name: {} if part.default_factory is dict else part.default for part in fields(record)}
    kept = {name: known[name] for name, default in defaults.items() if known[name] != default}
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
