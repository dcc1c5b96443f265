"""The table of an ablation with the statistics that follow from its records, and its JSON and CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from lit_lazy.support.error_messages import escape_controls
from lit_lazy.table.column_statistics import Effect, Measure, Summary, compute_effects, measure_rows, summarise
from lit_lazy.table.columns import Column, Contrast
from lit_lazy.table.declaration import Declaration, Verdict
from lit_lazy.table.records import TableRow, Yardstick
from lit_lazy.table.verdict import judge

FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")
"""Prefixes that spreadsheets read as a formula (OWASP, CSV injection). Only text is escaped, never numbers."""
FORMAT = 2
"""Format of table.json; raised when a field is added, removed or changes its meaning. 1 had the statistics too."""


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
    """Training and evaluation time of all complete cells; None if unknown."""
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
