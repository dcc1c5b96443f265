"""The finding of a table in one or two sentences, which open every rendering of it."""

from collections.abc import Sequence

from lit_lazy.table.column_statistics import Summary
from lit_lazy.table.columns import Column
from lit_lazy.table.results_table import Table
from lit_lazy.table.statistics import FEWEST_SEEDS

MOST_COLUMNS = 2
MOST_NAMES = 4
"""Maximum number of rows that a sentence names per group; the others are counted."""
MOST_UNLEARNED = 12
"""The same of the sentence on rows that did not learn, whose values its reader must not trust."""


def describe_findings(table: Table) -> list[str]:
    """The verdict of a question's table; otherwise one sentence for each of up to two metrics.

    Rows that did not learn the task come before everything else. The primary metric comes first, then the plotted ones.
    A sentence lists the rows that differ from the baseline, that are equivalent to it and that are undecided, with n. A
    row or baseline without spread has no test; rows above or below the baseline in every seed are listed instead, of a
    share also with one seed. If there is no such sentence, or no test, one explains why; the list is empty if no other
    row has a value.
    """
    dead = describe_unlearned(table)
    if table.verdict is not None:
        return [*dead, table.verdict.sentence]
    compared = [column for column in table.main_columns if table.is_compared(column)]
    said = {column: _describe_tested(table, column) or _describe_beyond_baseline(table, column) for column in compared}
    untested = [
        f"{_format_heading(table, column)}: {explain_untested(table.summaries[column.key])}."
        for column, sentence in said.items()
        if not sentence
    ]
    found = [*filter(None, said.values())]
    if not (found and any(table.summaries[column.key].compared for column in compared)):
        found = [*untested[:1], *found]
    return [*dead, *found[:MOST_COLUMNS]]


def describe_unlearned(table: Table) -> list[str]:
    """A sentence on the rows that did not learn the task, if there are any."""
    rows = [f"{name} ({count})" for name, count in table.unlearned.items()]
    if not rows:
        return []
    if len(rows) == sum(row.n > 0 for row in table.rows):
        remedy = f" {table.yardstick.remedy}" if table.yardstick and table.yardstick.remedy else ""
        return [f"No row learned the task. Only the losses say anything.{remedy}"]
    named = _join_names(rows, MOST_UNLEARNED)
    return [f"Did not learn the task (in so many cells): {named}. Only their loss says anything."]


def describe_yardstick(table: Table) -> list[str]:
    """`Validation loss: trigram 2.574, unigram 4.485 bits/byte; learned below 3.529.`, if the table has a yardstick."""
    yardstick = table.yardstick
    if yardstick is None or yardstick.metric not in table.columns_by_key:
        return []
    column = table.columns_by_key[yardstick.metric]
    marks = ", ".join(f"{name} {value * column.scale:.3f}" for name, value in yardstick.marks.items())
    meaning = " (the best predictor without attention)" if "chance" in yardstick.marks else ""
    learned = yardstick.learned * column.scale
    known = {name: bound * column.scale for name, bound in yardstick.by_row.items() if bound is not None}
    others = "".join(f", {name} below {bound:.3f}" for name, bound in known.items())
    return [f"{_capitalise_title(column)}: {marks} {column.unit}{meaning}; learned below {learned:.3f}{others}."]


def explain_untested(summary: Summary) -> str:
    """A clause that explains why a metric has no test."""
    if not summary.seeds:
        return "nothing to compare, no row has a value beside the baseline's"
    if not summary.compared:
        most = max(summary.seeds)
        return f"no test: it needs {FEWEST_SEEDS} seeds that a row shares with the baseline, here at most {most}"
    return "no test, all seeds of the baseline, or of every other row, have the same value"


def _describe_tested(table: Table, column: Column) -> str:
    """The results of a column's tests; "" if it has none, or none of a row that learned the task."""
    summary = table.summaries[column.key]
    if not summary.tested:
        return ""
    measures = table.measures[column.key]
    separated = group_separated(table, column)
    names = [name for name in measures if not table.is_void(name, column.key)]
    same = [name for name in names if name in summary.same and name not in summary.separates]
    rest = [name for name in names if name != table.baseline and name not in (*summary.separates, *same)]
    untested = [name for name in rest if measures[name].difference.p_adj is None]
    above, below = _find_disjoint_rows(table, column, untested)
    groups = [
        *separated.items(),
        (format_margin(column), same),
        ("undecided", [name for name in rest if name not in untested]),
        ("without a test, but above it in every seed", above),
        ("without a test, but below it in every seed", below),
        ("not tested", [name for name in untested if name not in (*above, *below)]),
    ]
    parts = [f"{title}: {_join_names(names)}" for title, names in groups if names]
    if not parts:
        return ""
    return f"{_format_heading(table, column)} ({_format_n(summary)}): {'; '.join(parts)}."


def group_separated(table: Table, column: Column) -> dict[str, list[str]]:
    """Rows that differ from the baseline, in table order, as better and worse, or as higher and lower.

    Without those whose value says nothing, since they did not learn the task.
    """
    titles = {"lower": ("worse", "better"), "higher": ("better", "worse"), None: ("higher", "lower")}[column.better]
    groups: dict[str, list[str]] = {title: [] for title in titles}
    for name, measure in table.measures[column.key].items():
        diff = measure.difference.mean
        if diff is not None and measure.difference.separated and not table.is_void(name, column.key):
            groups[titles[diff < 0]].append(name)
    return groups


def format_margin(column: Column) -> str:
    """`the same within ±0.02 bits/byte`; "" for a column without a margin."""
    if column.margin is None:
        return ""
    return f"the same within ±{column.format(column.margin)}{format_unit(column)}"


def format_unit(column: Column) -> str:
    """The unit of a difference with a leading space; "" for a column without a unit."""
    return f" {column.difference_unit}" if column.unit else ""


def _describe_beyond_baseline(table: Table, column: Column) -> str:
    """The rows that lie above or below a baseline with the same value in every seed; "" if there are none.

    Also of a share with one seed: that nothing was left of it is seen at once, unlike a difference of two losses.
    """
    measures = table.measures[column.key]
    levels = {*measures[table.baseline].values.values()}
    single = bool(column.bounds) and table.summaries[column.key].seeds == (1,)
    learned = [name for name in measures if not table.is_void(name, column.key)]
    above, below = _find_disjoint_rows(table, column, learned, 1 if single else FEWEST_SEEDS)
    if column.by_construction or len(levels) != 1 or table.baseline not in learned or not (above or below):
        return ""
    unit = f" {column.unit}" if column.unit else ""
    where, why = (" at one seed", "neither interval nor test") if single else (" in every seed", "no test")
    level = f"{table.baseline} has {column.format(levels.pop())}{unit}{where}, so there is {why}"
    groups = [(f"above it{where}", above), (f"below it{where}", below)]

    def format_range(name: str) -> str:
        values = measures[name].values.values()
        low, high = column.format(min(values)), column.format(max(values))
        return f"{name} ({low})" if low == high else f"{name} ({low} to {high})"

    parts = [f"{title}: {_join_names([*map(format_range, far)])}" for title, far in groups if far]
    return f"{_capitalise_title(column)} ({_format_n(table.summaries[column.key])}): {level}; {'; '.join(parts)}."


def _find_disjoint_rows(
    table: Table, column: Column, names: Sequence[str], fewest: int = FEWEST_SEEDS
) -> tuple[list[str], list[str]]:
    """The rows whose values all lie above, and all below, every value of the baseline, as displayed; farthest first.

    Of those that, like the baseline, have at least `fewest` seeds and no undefined value.
    """
    measures = table.measures[column.key]
    baseline = measures[table.baseline]
    full = [name for name in names if all(m.n >= fewest and not m.undefined for m in (measures[name], baseline))]
    far = sorted(full, key=lambda name: -abs(measures[name].difference.mean or 0.0))
    shown = {name: [*map(column.round_value, measures[name].values.values())] for name in measures}
    least, most = min(shown[table.baseline], default=0.0), max(shown[table.baseline], default=0.0)
    return [name for name in far if min(shown[name]) > most], [name for name in far if max(shown[name]) < least]


def _format_n(summary: Summary) -> str:
    low, high = min(summary.seeds), max(summary.seeds)
    return f"n = {low}" if low == high else f"n = {low} to {high}"


def _format_heading(table: Table, column: Column) -> str:
    exploratory = " (exploratory)" if table.primary not in (None, column.key) else ""
    return f"{_capitalise_title(column)}{exploratory} against {table.baseline}"


def _capitalise_title(column: Column) -> str:
    return column.title[:1].upper() + column.title[1:]


def _join_names(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """`a, b and 7 others`"""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} others"


def format_seeds(seeds: Sequence[int], fewest: int) -> str:
    """`0 to 4` of at least so many consecutive seeds, else each one."""
    if len(seeds) >= fewest and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))
