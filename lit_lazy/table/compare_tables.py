"""Two tables side by side: rows of the same name, their differences, and what else differs between the two."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_lazy.support.console import align, format_count
from lit_lazy.support.error_messages import did_you_mean, escape_controls
from lit_lazy.table.finding_text import describe_unlearned, format_seeds
from lit_lazy.table.render import NOT_DEFINED, format_effect, format_estimate
from lit_lazy.table.results_table import Table
from lit_lazy.table.statistics import Effect, compute_contrast, compute_unpaired_difference

Settings = Mapping[str, Mapping[str, str]]
"""The settings of rows: values as text, by row and dotted path."""
OVERRIDDEN = re.compile(r"-([0-9a-f]{6}|[\w.]+=.*)$", re.DOTALL)
"""What the command line's overrides add to the name of an experiment."""
MOST_NAMES = 3
"""Rows that a difference in settings names; more are counted."""


@dataclass(frozen=True)
class RowComparison:
    """One metric of a row in two tables.

    `effect` is the second row minus the first. It is paired over the seeds that both have on the same experiment, where
    a seed fixes the initial weights and the order of the data; with fewer than two such seeds it is Welch's, of all.
    """

    variant: str
    means: tuple[float | None, float | None]
    seeds: tuple[int, int]
    """Numbers of seeds."""
    paired: bool
    effect: Effect


@dataclass(frozen=True)
class TableComparison:
    """Two tables, and what `compare_tables` found. `columns` are by key; `only` are the rows in one of them."""

    names: tuple[str, str]
    tables: tuple[Table, Table]
    columns: Mapping[str, Sequence[RowComparison]]
    only: tuple[Sequence[str], Sequence[str]]
    facts: Mapping[str, tuple[str, str]]
    """What differs between the tables, by name."""
    settings: Mapping[tuple[str, str, str], Sequence[str]] | None
    """Rows in both whose settings differ, by path, first and second value; None if those of a table are unknown."""

    def to_json(self) -> dict[str, Any]:
        """Strict JSON of everything but the tables."""

        def drop_adjusted(effect: Effect) -> dict[str, Any]:  # which only the tests of one table have
            return {name: value for name, value in vars(effect).items() if name not in ("p_adj", "mde")}

        columns = {
            key: [{**vars(row), "effect": drop_adjusted(row.effect)} for row in rows]
            for key, rows in self.columns.items()
        }
        settings = None if self.settings is None else [[*found, list(rows)] for found, rows in self.settings.items()]
        kept = {"names": self.names, "columns": columns, "only": self.only, "facts": self.facts}
        return {**kept, "settings": settings}


def compare_tables(
    names: tuple[str, str], tables: tuple[Table, Table], asked: Sequence[str], settings: tuple[Settings | None, ...]
) -> TableComparison:
    """Compare the rows that two tables share in the asked columns; by default in their primary or plotted ones.

    Raises a one-line ValueError for a column that they do not share, or if they share no row.
    """
    rows = [{row.variant: row for row in table.rows} for table in tables]
    shared = [name for name in rows[0] if name in rows[1]]
    if not shared:
        listed = "; ".join(f"{name} has {', '.join(of)}" for name, of in zip(names, rows, strict=True))
        raise ValueError(f"{names[0]!r}, {names[1]!r}: share no row; {listed}")
    known = [key for key in tables[0].columns_by_key if key in tables[1].columns_by_key]
    for key in asked:
        if key not in known:
            near = did_you_mean(key, known)
            raise ValueError(f"--columns {key!r}: is not in both tables{near}; both have {', '.join(known)}")
    primary = [key for key in known if key in (tables[0].primary, tables[1].primary)]
    main = [column.key for column in tables[0].main_columns if column.key in known]
    columns = list(asked) or primary or main or known
    if not columns:
        raise ValueError(f"{tables[0].ablation!r}, {tables[1].ablation!r}: their tables share no column")
    first, second = map(_list_facts, tables)
    return TableComparison(
        names=names,
        tables=tables,
        columns={key: [_compare_rows(tables, key, name) for name in shared] for key in columns},
        only=([name for name in rows[0] if name not in rows[1]], [name for name in rows[1] if name not in rows[0]]),
        facts={name: (a, b) for (name, a), b in zip(first.items(), second.values(), strict=True) if a != b},
        settings=_find_differing_settings(settings, shared),
    )


def _compare_rows(tables: tuple[Table, Table], key: str, variant: str) -> RowComparison:
    a, b = (table.measures[key][variant] for table in tables)
    bases = {OVERRIDDEN.sub("", table.base) for table in tables}
    paired = len(a.values.keys() & b.values.keys()) > 1 and len(bases) == 1
    bounds, weights = tables[0].columns_by_key[key].bounds, {"first": -1.0, "second": 1.0}
    if paired:
        effect = compute_contrast({"first": a.values, "second": b.values}, weights, bounds)
    else:
        effect = compute_unpaired_difference(b.values, a.values, bounds)
    return RowComparison(variant, (a.mean, b.mean), (a.n, b.n), paired, effect)


def _list_facts(table: Table) -> dict[str, str]:
    return {
        "ablation": table.ablation,
        "base": table.base,
        "baseline": table.baseline,
        "seeds": "; ".join(format_seeds(seeds, 3) for seeds in table.group_by_seeds()),
        "commit": table.git_sha,
        "made with": table.environment,
        "command": table.command,
        "backend": ", ".join(sorted({label for row in table.rows for label in row.labels.values()})),
        "claim": table.declaration.claim if table.declaration else NOT_DEFINED,
    }


def _find_differing_settings(
    settings: tuple[Settings | None, ...], shared: Sequence[str]
) -> dict[tuple[str, str, str], list[str]] | None:
    first, second = settings
    if first is None or second is None:
        return None
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in shared:
        if name not in first or name not in second:  # no cell of the row is finished
            continue
        for path in {**first[name], **second[name]}:
            pair = first[name].get(path, NOT_DEFINED), second[name].get(path, NOT_DEFINED)
            if pair[0] != pair[1]:
                found.setdefault((path, *pair), []).append(name)
    return found


def format_comparison(found: TableComparison) -> str:
    """The comparison for a terminal."""
    tables = []
    for letter, name, table in zip("AB", found.names, found.tables, strict=True):
        done, cells = table.count_cells()
        tables.append(f"{letter}  {name}: {table.ablation} on {table.base}, {done} of {format_count(cells, 'cell')}")
    parts = ["\n".join(tables)]
    for key, rows in found.columns.items():
        column, measures = found.tables[0].columns_by_key[key], [of.measures[key] for of in found.tables]
        grid = [(column.heading, "A", "B", "B - A", "")]
        for row in rows:
            a, b = (format_estimate(of[row.variant], column) for of in measures)
            grid.append((row.variant, a, b, format_effect(row.effect, column), _describe_test(row)))
        parts.append("\n".join(align(grid)))
    parts.append("± is half of a 95 % interval, not adjusted for the number of rows; = is the same in every seed.")
    for letter, table, only in zip("AB", found.tables, found.only, strict=True):
        if only:
            parts.append(f"Only in {letter}: {', '.join(only)}")
        if table.unlearned:
            parts.append(f"In {letter}: {' '.join(describe_unlearned(table))}")
    if found.facts:
        lines = [line for name, (a, b) in found.facts.items() for line in ((name, "A", a), ("", "B", b))]
        parts.append("\n".join(["What differs", *align(lines)]))
    if found.settings is None:
        parts.append("Settings of the rows are unknown: name grids of --runs, or folders with a cells.jsonl.xz.")
        return escape_controls("\n\n".join(parts))
    shared, lines = len(next(iter(found.columns.values()))), []
    for (path, a, b), names in found.settings.items():
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        lines.append((path, a, b, "all rows" if len(names) == shared else ", ".join(names[:MOST_NAMES]) + more))
    settings = ["Settings that differ", *align([("", "A", "B", ""), *lines])] if lines else []
    parts.append("\n".join(settings or ["The rows have the same settings."]))
    return escape_controls("\n\n".join(parts))


def _describe_test(row: RowComparison) -> str:
    """How the difference was computed: `paired, n = 5`."""
    if row.effect.mean is None:
        return ""
    first, second = row.seeds
    how = f"paired, n = {row.effect.n}" if row.paired else f"Welch, n = {first} and {second}"
    if row.paired and row.effect.n < max(row.seeds):
        how = f"{how} in both of {first} and {second}"
    return f"{how}; no interval, as one has no spread" if row.effect.test == "saturated" else how
