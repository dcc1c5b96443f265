"""What a table has come to, in a sentence or two: the first thing that anybody reads of an ablation."""

from collections.abc import Sequence

from lit_lazy.support.console import counted
from lit_lazy.table.records import Column, Summary, Table

MOST_COLUMNS = 2
MOST_NAMES = 4
"""Rows that a sentence names of a group; the others are counted."""


def findings(table: Table) -> list[str]:
    """The verdict of the question that the table answers; of any other a sentence on each of up to two metrics.

    Of the primary one first, then of those that are plotted: which rows differ from the baseline, which are the same,
    which are undecided, at which n. Where the baseline never varies there is no test, but rows that lie beyond it in
    every seed are named. Where nothing can be said, why not; nothing where there is no other row.
    """
    if table.verdict is not None:
        return [table.verdict.sentence]
    plotted = [column for column in table.columns if column.plotted or column.key == table.primary]
    asked = sorted(plotted, key=lambda column: column.key != table.primary)
    said = [sentence for column in asked if (sentence := _tested(table, column) or _beyond(table, column))]
    if said:
        return said[:MOST_COLUMNS]
    summaries = [(column, table.summaries[column.key]) for column in asked]
    return [f"{_head(table, column)}: {why_untested(found)}." for column, found in summaries if found.seeds][:1]


def why_untested(summary: Summary) -> str:
    """Why a metric has no test at all, in a clause."""
    if not summary.seeds:
        return "nothing to compare, no row has a value beside the baseline's"
    if not summary.compared:
        return f"no test, at most {counted(max(summary.seeds), 'seed')} in a row and the baseline; three are needed"
    return "no test, no spread was measured in the baseline, or in any row beside it"


def _tested(table: Table, column: Column) -> str:
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
    untested = [name for name in rest if measures[name].p_adj is None]
    words = {"lower": ("worse", "better"), "higher": ("better", "worse"), None: ("higher", "lower")}[column.better]
    unit = f" {column.difference_unit}" if column.unit else ""
    within = "" if column.margin is None else f"the same within ±{column.format(column.margin)}{unit}"
    groups = [(words[0], above), (words[1], below), (within, same), ("undecided", undecided), ("not tested", untested)]
    parts = [f"{what}: {_names(names)}" for what, names in groups if names]
    return f"{_head(table, column)} ({_n(summary)}): {'; '.join(parts)}."


def _beyond(table: Table, column: Column) -> str:
    """Of a baseline that is the same in every seed, which rows are not, in any of theirs; empty where none is."""
    measures = {row.variant: row.metrics[column.key] for row in table.rows}
    summary, levels = table.summaries[column.key], {*measures[table.baseline].values.values()}
    if not summary.compared or column.by_construction or len(levels) != 1:
        return ""
    (level,) = levels
    beyond = {}
    for name, measure in measures.items():
        low, high = min(measure.values.values(), default=level), max(measure.values.values(), default=level)
        if low > level or high < level:
            beyond[name] = f"{name} ({column.format(low)} to {column.format(high)})"
    if not beyond:
        return ""
    far = sorted(beyond, key=lambda name: -abs(measures[name].diff or 0.0))
    unit = f" {column.unit}" if column.unit else ""
    return (
        f"{_head(table, column)} ({_n(summary)}), which has {column.format(level)}{unit} in every seed, so without a "
        f"test; beyond it in every seed: {_names([beyond[name] for name in far])}."
    )


def _n(summary: Summary) -> str:
    few, many = min(summary.seeds), max(summary.seeds)
    return f"n = {few}" if few == many else f"n = {few} to {many}"


def _head(table: Table, column: Column) -> str:
    return f"{column.title[:1].upper()}{column.title[1:]} against {table.baseline}"


def _names(names: Sequence[str]) -> str:
    """`a, b and 7 others`"""
    if len(names) <= MOST_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} others"
