"""Verdicts: what the results of a declared question say of its claim.

Everything here is a pure function of the declaration and of the values in a table, so a verdict can be made again from
table.json alone.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from scipy.stats import t

from lit_lazy.table.question import MOST_SEEDS, Declaration, Finding, Rule, Status, Verdict
from lit_lazy.table.records import Column, Table
from lit_lazy.table.statistics import ALPHA, Effect, compute_contrast, is_saturated, seed_correlation


class Interval(NamedTuple):
    """Where a true value lies."""

    low: float
    high: float

    def is_within(self, margin: float) -> bool:
        return -margin < self.low and self.high < margin


def add_verdict(table: Table, declaration: Declaration | None) -> Table:
    """The table with what it says of a question, if it answers one."""
    verdict = None if declaration is None else judge(declaration, table)
    return replace(table, declaration=declaration, verdict=verdict)


def judge(declaration: Declaration, table: Table) -> Verdict | None:
    """The verdict of a table; None while a declared seed of a contrast's row has no value of the primary outcome."""
    column = next((column for column in table.columns if column.key == declaration.primary), None)
    if column is None:  # no cell has it yet
        return None
    if _find_missing_seeds(declaration, table):
        return None
    _, values = _select_outcome(declaration, table)
    parts = tuple(_judge_contrast(declaration, name, values, column) for name in declaration.contrasts)
    statuses = {part.status for part in parts}
    status: Status = "refuted" if "refuted" in statuses else "undecided" if "undecided" in statuses else "supported"
    verdict = Verdict(status, "", len(declaration.seeds), parts, declaration.exploratory)
    return replace(verdict, sentence=_format_sentence(declaration, verdict))


def describe_missing(declaration: Declaration, table: Table) -> str:
    """What a verdict that is None waits for."""
    if all(column.key != declaration.primary for column in table.columns):
        return f"No cell has measured its primary outcome, {declaration.primary}."
    missing = _find_missing_seeds(declaration, table)
    row, seeds = next(iter(missing.items()))
    others = f" ({len(missing)} rows lack some)" if len(missing) > 1 else ""
    return (
        f"Its verdict needs each of {len(declaration.seeds)} seeds: {row} lacks {', '.join(map(str, seeds))}{others}."
    )


def _find_missing_seeds(declaration: Declaration, table: Table) -> dict[str, list[int]]:
    """Declared seeds without a value of the primary outcome, by row of a contrast."""
    known = {row.variant: row.metrics[declaration.primary].values for row in table.rows}
    wanted = dict.fromkeys(variant for weights in declaration.contrasts.values() for variant in weights)
    lacking = {row: [seed for seed in declaration.seeds if str(seed) not in known.get(row, {})] for row in wanted}
    return {row: seeds for row, seeds in lacking.items() if seeds}


class _WeightedSum(NamedTuple):
    """A weighted sum of rows' means: of those that have a measured spread, and of the others."""

    mean: float
    measured: Effect | None
    """Of the rows with a spread; None where there are none."""
    below: float
    above: float
    """How far the others' values reach below and above their means, together."""
    n: int
    """Seeds of each row."""

    def compute_interval(self, level: float, seeds: int) -> Interval:
        """Of the true value, at error rate `level`; with so many seeds, if means and spreads stay as they are.

        Welch's t interval of the rows that have a spread, and the others with their range: what no seed moves is as
        sure as what seeds hardly move, and no surer.
        """
        half = 0.0
        if self.measured is not None and self.measured.df is not None and self.measured.se is not None:
            df = self.measured.df * (seeds - 1) / (self.n - 1)  # Satterthwaite's, where all rows have as many
            half = float(t.isf(level / 2, df)) * self.measured.se * (self.n / seeds) ** 0.5
        return Interval(self.mean - self.below - half, self.mean + self.above + half)


class _ContrastSums(NamedTuple):
    """What a rule looks at: the contrast, and the mean of each of its rows, by the sign of its weight."""

    whole: _WeightedSum
    plus: Mapping[str, _WeightedSum]
    minus: Mapping[str, _WeightedSum]


class Level(NamedTuple):
    """Where a row's own mean lies, as a rule that asks for the rows one by one sees it."""

    row: str
    claimed: bool
    """Whether it is claimed to lie below `removed`; the others are to lie above `kept`."""
    mean: float
    interval: Interval


def compute_levels(declaration: Declaration, table: Table) -> dict[str, list[Level]]:
    """Of each contrast its rows, the claimed ones first; nothing for a rule that asks for their sum alone.

    The intervals hold together. Those of the others of `alone` are at the level at which one of them refutes the claim.
    """
    if declaration.rule not in _BY_LEVEL:
        return {}
    column, values = _select_outcome(declaration, table)
    level = ALPHA / len(declaration.contrasts)
    found = {}
    for name in declaration.contrasts:
        sums = _compute_sums(declaration, name, values, column)
        share = level / len(sums.minus) if declaration.rule == "alone" else level
        found[name] = [
            Level(row, claimed, one.mean, one.compute_interval(at, len(declaration.seeds)))
            for rows, claimed, at in ((sums.plus, True, level), (sums.minus, False, share))
            for row, one in rows.items()
        ]
    return found


def _select_outcome(declaration: Declaration, table: Table) -> tuple[Column, dict[str, dict[int, float]]]:
    """The primary outcome, and its values by row and declared seed."""
    (column,) = (column for column in table.columns if column.key == declaration.primary)
    seeds = set(map(str, declaration.seeds))
    rows = {row.variant: row.metrics[column.key].values for row in table.rows}
    return column, {name: {int(s): v for s, v in row.items() if s in seeds} for name, row in rows.items()}


def _compute_sums(
    declaration: Declaration, name: str, values: Mapping[str, Mapping[int, float]], column: Column
) -> _ContrastSums:
    weights = {row: weight for row, weight in declaration.contrasts[name].items() if weight}
    together = seed_correlation(values, column.bounds)

    def weighted_sum(weights: Mapping[str, float]) -> _WeightedSum:
        rows = {row: [weight * value for value in values[row].values()] for row, weight in weights.items()}
        still = [row for row in rows if is_saturated(values[row].values(), column.bounds)]
        moved = {row: weight for row, weight in weights.items() if row not in still}
        return _WeightedSum(
            math.fsum(map(fmean, rows.values())),
            compute_contrast(values, moved, column.bounds, together) if moved else None,
            math.fsum(fmean(rows[row]) - min(rows[row]) for row in still),
            math.fsum(max(rows[row]) - fmean(rows[row]) for row in still),
            len(declaration.seeds),
        )

    plus, minus = ([row for row, weight in weights.items() if sign * weight > 0] for sign in (1, -1))
    return _ContrastSums(
        weighted_sum(weights),
        {row: weighted_sum({row: 1.0}) for row in plus},
        {row: weighted_sum({row: 1.0}) for row in minus},
    )


def _judge_contrast(
    declaration: Declaration, name: str, values: Mapping[str, Mapping[int, float]], column: Column
) -> Finding:
    n = len(declaration.seeds)
    sums = _compute_sums(declaration, name, values, column)
    level = ALPHA / len(declaration.contrasts)  # Bonferroni: a statement on each contrast is to hold
    status, why = _apply_rule(declaration, sums, level, n)
    needed, would = None, None
    if status == "undecided":
        # Intervals shrink around fixed means, so what decides is decided by any greater number.
        more = range(n + 1, MOST_SEEDS + 1)
        first = bisect_left(more, True, key=lambda m: _apply_rule(declaration, sums, level, m)[0] != "undecided")
        if first < len(more):
            needed, would = more[first], _apply_rule(declaration, sums, level, more[first])[0]
    low, high = sums.whole.compute_interval(level, n)
    return Finding(
        name, status, why.format(**_format_thresholds(declaration, column)), sums.whole.mean, low, high, needed, would
    )


def _apply_rule(declaration: Declaration, sums: _ContrastSums, level: float, seeds: int) -> tuple[Status, str]:
    """What a rule makes of a contrast at so many seeds, and why, in words with the declaration's bounds by name."""
    return _RULES[declaration.rule](declaration, sums, level, seeds)


def _judge_directed(declaration: Declaration, sums: _ContrastSums, level: float, seeds: int) -> tuple[Status, str]:
    # Two one-sided tests, each at `level`, are an interval at twice that.
    if sums.whole.compute_interval(2 * level, seeds).is_within(declaration.margin):
        return "refuted", "the same within ±{margin}"
    low, high = sums.whole.compute_interval(level, seeds)
    below, above = ("supported", "refuted") if declaration.rule == "lower" else ("refuted", "supported")
    if high < 0:
        return below, "lower"
    return (above, "higher") if low > 0 else ("undecided", "neither different nor shown to be the same")


def _judge_same(declaration: Declaration, sums: _ContrastSums, level: float, seeds: int) -> tuple[Status, str]:
    margin = declaration.margin
    if sums.whole.compute_interval(2 * level, seeds).is_within(margin):
        return "supported", "the same within ±{margin}"
    low, high = sums.whole.compute_interval(level, seeds)
    if high < -margin or low > margin:
        return "refuted", "differs by more than {margin}"
    return "undecided", "neither different nor shown to be the same"


def _judge_removed(declaration: Declaration, sums: _ContrastSums, level: float, seeds: int) -> tuple[Status, str]:
    plus, minus = ([row.compute_interval(level, seeds) for row in rows.values()] for rows in (sums.plus, sums.minus))
    removed, kept = declaration.removed, declaration.kept
    if any(row.high < kept for row in minus):
        return "undecided", "nothing to remove: below {kept} anyway"
    there = all(row.low > kept for row in minus)
    if there and all(row.high < removed for row in plus):
        return "supported", "below {removed} where it is above {kept} otherwise"
    if there and all(row.low > kept for row in plus):
        return "refuted", "above {kept} as well"
    return "undecided", "between the bounds"


def _judge_alone(declaration: Declaration, sums: _ContrastSums, level: float, seeds: int) -> tuple[Status, str]:
    share = level / len(sums.minus)  # any of them refutes the claim
    without = [row for row in sums.minus.values() if row.compute_interval(share, seeds).high < declaration.removed]
    if without and len(sums.minus) > 1:  # where the only other row has no sink, there is none to remove
        return "refuted", f"{len(without)} of {len(sums.minus)} others are below {{removed}} as well"
    return _judge_removed(declaration, sums, level, seeds)


_RULES: Mapping[Rule, Callable[[Declaration, _ContrastSums, float, int], tuple[Status, str]]] = {
    "lower": _judge_directed,
    "higher": _judge_directed,
    "same": _judge_same,
    "removed": _judge_removed,
    "alone": _judge_alone,
}
_BY_LEVEL = ("removed", "alone")
"""Rules that ask where each row lies."""


def _format_sentence(declaration: Declaration, verdict: Verdict) -> str:
    """`Undecided (n = 5, 3 of 4 contrasts undecided): claim`, and what would decide it."""
    agreeing = sum(part.status == verdict.status for part in verdict.parts)
    count = f", {agreeing} of {len(verdict.parts)} contrasts {verdict.status}" if len(verdict.parts) > 1 else ""
    text = f"{verdict.status.capitalize()} (n = {verdict.n}{count}): {declaration.claim}"
    if verdict.status == "undecided":
        seeds, how = verdict.outlook or ("No number of", None)
        reach = "" if how else f" up to {MOST_SEEDS}"
        text += f" {seeds} seeds{reach} would {_WOULD[how]} it, if means and spreads stay."
    if verdict.exploratory:
        text += f" Exploratory: {'; '.join(verdict.exploratory)}."
    return text


_WOULD: Mapping[Status | None, str] = {"supported": "support", "refuted": "refute", None: "decide"}


def _format_thresholds(declaration: Declaration, column: Column) -> dict[str, str]:
    """What rules compare with, by name: a margin as differences are shown, the levels as values are."""
    units = {"margin": column.difference_unit, "removed": column.unit, "kept": column.unit}
    return {name: f"{getattr(declaration, name) * column.scale:g} {unit}".rstrip() for name, unit in units.items()}


def describe_bounds(declaration: Declaration, column: Column) -> tuple[str, ...]:
    """What the rule compares with."""
    texts = ("removed below {removed}", "there above {kept}") if declaration.rule in _BY_LEVEL else ("margin {margin}",)
    return tuple(text.format(**_format_thresholds(declaration, column)) for text in texts)


def describe_contrasts(verdict: Verdict, column: Column) -> list[str]:
    """What is found of each contrast."""

    def number(value: float) -> str:
        return column.format(value, "+")

    return [
        f"{part.name}: {part.status}, {part.why}: {number(part.mean)} [{number(part.low)}, {number(part.high)}]"
        + (f" {column.difference_unit}" if column.unit else "")
        + (f"; {part.needed} seeds would {_WOULD[part.would]} it" if part.needed else "")
        for part in verdict.parts
    ]
