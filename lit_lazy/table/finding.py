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
    which are undecided, at which n. Where no row was tested, why not; nothing where there is no other row.
    """
    if table.verdict is not None:
        return [table.verdict.sentence]
    plotted = [column for column in table.columns if column.plotted or column.key == table.primary]
    asked = sorted(plotted, key=lambda column: column.key != table.primary)
    compared = [column for column in asked if table.summaries[column.key].tested]
    if compared:
        return [_sentence(table, column) for column in compared[:MOST_COLUMNS]]
    summaries = [(column, table.summaries[column.key]) for column in asked]
    return [f"{_head(table, column)}: {why_untested(found)}." for column, found in summaries if found.seeds][:1]


def why_untested(summary: Summary) -> str:
    """Why a metric has no test at all, in a clause."""
    if not summary.seeds:
        return "nothing to compare, no row has a value beside the baseline's"
    if not summary.compared:
        return f"no test, at most {counted(max(summary.seeds), 'seed')} in a row and the baseline; three are needed"
    return "no test, no spread was measured in the baseline, or in any row beside it"


def _sentence(table: Table, column: Column) -> str:
    summary = table.summaries[column.key]
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
    few, many = min(summary.seeds), max(summary.seeds)
    n = f"n = {few}" if few == many else f"n = {few} to {many}"
    return f"{_head(table, column)} ({n}): {'; '.join(parts)}."


def _head(table: Table, column: Column) -> str:
    return f"{column.title[:1].upper()}{column.title[1:]} against {table.baseline}"


def _names(names: Sequence[str]) -> str:
    """`a, b and 7 others`"""
    if len(names) <= MOST_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} others"
