"""What a table has come to, in a sentence or two: the first thing that anybody reads of an ablation."""

from collections.abc import Sequence
from typing import NamedTuple

from lit_lazy.support.console import format_count
from lit_lazy.table.records import Column, Measure, Summary, Table
from lit_lazy.table.statistics import FEWEST_SEEDS

MOST_COLUMNS = 2
MOST_NAMES = 4
"""Rows that a sentence names of a group; the others are counted."""


def describe_findings(table: Table) -> list[str]:
    """The verdict of the question that the table answers; of any other a sentence on each of up to two metrics.

    Of the primary one first, then of those that are plotted: which rows differ from the baseline, which are the same,
    which are undecided, at which n. Where the baseline or a row never varies there is no test between them, but rows
    that lie above or below it in every seed are named. Where nothing can be said, why not; nothing where no other row
    has a value.
    """
    if table.verdict is not None:
        return [table.verdict.sentence]
    plotted = [column for column in table.columns if column.plotted or column.key == table.primary]
    asked = sorted(plotted, key=lambda column: column.key != table.primary)
    said = [
        sentence
        for column in asked
        if (sentence := _describe_tested(table, column) or _describe_beyond_baseline(table, column))
    ]
    if said:
        return said[:MOST_COLUMNS]
    summaries = [(column, table.summaries[column.key]) for column in asked]
    return [
        f"{_format_heading(table, column)}: {explain_untested(found)}." for column, found in summaries if found.seeds
    ][:1]


def explain_untested(summary: Summary) -> str:
    """Why a metric has no test at all, in a clause."""
    if not summary.seeds:
        return "nothing to compare, no row has a value beside the baseline's"
    if not summary.compared:
        return (
            f"no test, at most {format_count(max(summary.seeds), 'seed')} in a row and the baseline; three are needed"
        )
    return "no test, no spread was measured in the baseline, or in any row beside it"


def _describe_tested(table: Table, column: Column) -> str:
    """What the tests of a column found; empty where it has none."""
    summary = table.summaries[column.key]
    if not summary.tested:
        return ""
    measures = {row.variant: row.metrics[column.key] for row in table.rows}
    separated = [name for name in measures if name in summary.separates]
    above = [name for name in separated if (measures[name].diff or 0.0) > 0]
    below = [name for name in separated if name not in above]
    same = [name for name in measures if name in summary.same and name not in separated]
    rest = [name for name in measures if name != table.baseline and name not in (*separated, *same)]
    undecided = [name for name in rest if measures[name].p_adj is not None]
    apart = _find_disjoint_rows(table, column, [name for name in rest if measures[name].p_adj is None])
    untested = [name for name in rest if measures[name].p_adj is None and name not in (*apart.above, *apart.below)]
    words = {"lower": ("worse", "better"), "higher": ("better", "worse"), None: ("higher", "lower")}[column.better]
    unit = f" {column.difference_unit}" if column.unit else ""
    within = "" if column.margin is None else f"the same within ±{column.format(column.margin)}{unit}"
    groups = [
        (words[0], above),
        (words[1], below),
        (within, same),
        ("undecided", undecided),
        ("without a test, but above it in every seed", apart.above),
        ("without a test, but below it in every seed", apart.below),
        ("not tested", untested),
    ]
    parts = [f"{what}: {_join_names(names)}" for what, names in groups if names]
    return f"{_format_heading(table, column)} ({_format_n(summary)}): {'; '.join(parts)}."


def _describe_beyond_baseline(table: Table, column: Column) -> str:
    """Of a baseline that is the same in every seed, which rows are not, in any of theirs; empty where none is."""
    measures = {row.variant: row.metrics[column.key] for row in table.rows}
    levels = {*measures[table.baseline].values.values()}
    apart = _find_disjoint_rows(table, column, list(measures))
    if column.by_construction or len(levels) != 1 or not (apart.above or apart.below):
        return ""
    unit = f" {column.unit}" if column.unit else ""
    level = f"{table.baseline} has {column.format(levels.pop())}{unit} in every seed, so there is no test"
    groups = [("above it in every seed", apart.above), ("below it in every seed", apart.below)]
    parts = [
        f"{what}: {_join_names([f'{name} {_format_range(measures[name], column)}' for name in far])}"
        for what, far in groups
        if far
    ]
    return f"{_capitalise_title(column)} ({_format_n(table.summaries[column.key])}): {level}; {'; '.join(parts)}."


class _DisjointRows(NamedTuple):
    """Rows whose every value lies above, or below, every value of the baseline; the farthest first."""

    above: list[str]
    below: list[str]


def _find_disjoint_rows(table: Table, column: Column, names: Sequence[str]) -> _DisjointRows:
    """Of rows that have a value in each of three complete cells or more, as the baseline has; by what is shown."""
    measures = {row.variant: row.metrics[column.key] for row in table.rows}
    baseline = measures[table.baseline]
    whole = [name for name in names if all(m.n >= FEWEST_SEEDS and not m.undefined for m in (measures[name], baseline))]
    far = sorted(whole, key=lambda name: -abs(measures[name].diff or 0.0))
    shown = {name: [*map(column.round_value, measures[name].values.values())] for name in measures}
    least, most = min(shown[table.baseline], default=0.0), max(shown[table.baseline], default=0.0)
    return _DisjointRows(
        [name for name in far if min(shown[name]) > most], [name for name in far if max(shown[name]) < least]
    )


def _format_range(measure: Measure, column: Column) -> str:
    low, high = column.format(min(measure.values.values())), column.format(max(measure.values.values()))
    return f"({low})" if low == high else f"({low} to {high})"


def _format_n(summary: Summary) -> str:
    few, many = min(summary.seeds), max(summary.seeds)
    return f"n = {few}" if few == many else f"n = {few} to {many}"


def _format_heading(table: Table, column: Column) -> str:
    return f"{_capitalise_title(column)} against {table.baseline}"


def _capitalise_title(column: Column) -> str:
    return column.title[:1].upper() + column.title[1:]


def _join_names(names: Sequence[str]) -> str:
    """`a, b and 7 others`"""
    if len(names) <= MOST_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} others"
