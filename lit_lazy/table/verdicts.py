"""Verdicts on the claim of a declared question.

All functions are pure in the declaration and the values of a table, so table.json is enough to recompute a verdict.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

from scipy.stats import t

from lit_lazy.table.declaration import MOST_SEEDS, Declaration, Finding, Rule, Status, Verdict
from lit_lazy.table.fixed_rules import compute_welch_contrast as compute_contrast
from lit_lazy.table.fixed_rules import seed_correlation
from lit_lazy.table.records import Column, Table
from lit_lazy.table.statistics import ALPHA, Effect, is_saturated


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float

    def is_within(self, margin: float) -> bool:
        return -margin < self.low and self.high < margin


def add_verdict(table: Table, declaration: Declaration | None) -> Table:
    """The table with the declaration of its question, if any, and the verdict."""
    verdict = None if declaration is None else judge(declaration, table)
    return replace(table, declaration=declaration, verdict=verdict)


def judge(declaration: Declaration, table: Table) -> Verdict | None:
    """The verdict of a table; None while any row of a contrast lacks the primary outcome in a declared seed."""
    if declaration.primary not in table.columns_by_key or _find_missing_seeds(declaration, table):
        return None
    column, values = _select_outcome(declaration, table)
    parts = tuple(_judge_contrast(declaration, name, values, column) for name in declaration.contrasts)
    statuses = {part.status for part in parts}
    status: Status = "refuted" if "refuted" in statuses else "undecided" if "undecided" in statuses else "supported"
    verdict = Verdict(status, "", len(declaration.seeds), parts, declaration.exploratory)
    return replace(verdict, sentence=_format_sentence(declaration, verdict))


def describe_missing(declaration: Declaration, table: Table) -> str:
    """Describe what an absent verdict still needs."""
    if declaration.primary not in table.columns_by_key:
        return f"No cell has measured its primary outcome, {declaration.primary}."
    missing = _find_missing_seeds(declaration, table)
    row, seeds = next(iter(missing.items()))
    others = f" ({len(missing)} rows lack some)" if len(missing) > 1 else ""
    return (
        f"Its verdict needs each of {len(declaration.seeds)} seeds: {row} lacks {', '.join(map(str, seeds))}{others}."
    )


def _find_missing_seeds(declaration: Declaration, table: Table) -> dict[str, list[int]]:
    """Declared seeds without a primary outcome, by row of a contrast."""
    known = {row.variant: row.metrics[declaration.primary].values for row in table.rows}
    wanted = dict.fromkeys(variant for weights in declaration.contrasts.values() for variant in weights)
    lacking = {row: [seed for seed in declaration.seeds if str(seed) not in known.get(row, {})] for row in wanted}
    return {row: seeds for row, seeds in lacking.items() if seeds}


class _WeightedSum(NamedTuple):
    """A weighted sum of row means, split into rows with and without a measured spread."""

    mean: float
    measured: Effect | None
    """The effect of the rows with a spread; None without such rows."""
    below: float
    above: float
    """Total distance from the mean to the minimum and to the maximum, over the rows without a spread."""
    n: int
    """Seeds per row."""

    def compute_interval(self, level: float, seeds: int) -> Interval:
        """Confidence interval at error rate `level`, extrapolated to `seeds` seeds at unchanged means and spreads.

        Welch's t interval for the rows with a spread, widened by the range of the others: a row that no seed moves is
        treated like one that seeds hardly move.
        """
        half = 0.0
        if self.measured is not None and self.measured.df is not None and self.measured.se is not None:
            df = self.measured.df * (seeds - 1) / (self.n - 1)  # Satterthwaite's with equal n in all rows
            half = float(t.isf(level / 2, df)) * self.measured.se * (self.n / seeds) ** 0.5
        return Interval(self.mean - self.below - half, self.mean + self.above + half)


class _ContrastSums(NamedTuple):
    """The inputs of a rule: the contrast, and the mean of each of its rows by the sign of the row's weight."""

    total: _WeightedSum
    plus: Mapping[str, _WeightedSum]
    minus: Mapping[str, _WeightedSum]


class Level(NamedTuple):
    """The mean of one row with the interval that a rule on single rows uses."""

    row: str
    claimed: bool
    """Whether the claim is that the row lies below `removed`; other rows must lie above `kept`."""
    mean: float
    interval: Interval


def compute_levels(declaration: Declaration, table: Table) -> dict[str, list[Level]]:
    """The rows of each contrast, claimed ones first; empty for a rule that uses only their sum.

    The intervals are simultaneous. Under the rule `alone`, unclaimed rows have the level at which one of them refutes
    the claim.
    """
    if declaration.rule not in _BY_LEVEL:
        return {}
    column, values = _select_outcome(declaration, table)
    level = ALPHA / len(declaration.contrasts)
    levels = {}
    for name in declaration.contrasts:
        sums = _compute_sums(declaration, name, values, column)
        share = level / len(sums.minus) if declaration.rule == "alone" else level
        levels[name] = [
            Level(row, claimed, row_sum.mean, row_sum.compute_interval(error_rate, len(declaration.seeds)))
            for rows, claimed, error_rate in ((sums.plus, True, level), (sums.minus, False, share))
            for row, row_sum in rows.items()
        ]
    return levels


def _select_outcome(declaration: Declaration, table: Table) -> tuple[Column, dict[str, dict[int, float]]]:
    """The column of the primary outcome, and its values by row and declared seed."""
    column = table.columns_by_key[declaration.primary]
    seeds = set(map(str, declaration.seeds))
    measures = table.collect_measures(column.key)
    return column, {name: {int(s): v for s, v in m.values.items() if s in seeds} for name, m in measures.items()}


def _compute_sums(
    declaration: Declaration, name: str, values: Mapping[str, Mapping[int, float]], column: Column
) -> _ContrastSums:
    weights = {row: weight for row, weight in declaration.contrasts[name].items() if weight}
    correlation = seed_correlation(values, column.bounds)

    def weighted_sum(weights: Mapping[str, float]) -> _WeightedSum:
        rows = {row: [weight * value for value in values[row].values()] for row, weight in weights.items()}
        saturated = [row for row in rows if is_saturated(values[row].values(), column.bounds)]
        spread = {row: weight for row, weight in weights.items() if row not in saturated}
        return _WeightedSum(
            math.fsum(map(fmean, rows.values())),
            compute_contrast(values, spread, column.bounds, correlation) if spread else None,
            math.fsum(fmean(rows[row]) - min(rows[row]) for row in saturated),
            math.fsum(max(rows[row]) - fmean(rows[row]) for row in saturated),
            len(declaration.seeds),
        )

    plus, minus = (
        {row: weighted_sum({row: 1.0}) for row, weight in weights.items() if sign * weight > 0} for sign in (1, -1)
    )
    return _ContrastSums(weighted_sum(weights), plus, minus)


def _judge_contrast(
    declaration: Declaration, name: str, values: Mapping[str, Mapping[int, float]], column: Column
) -> Finding:
    n = len(declaration.seeds)
    sums = _compute_sums(declaration, name, values, column)
    level = ALPHA / len(declaration.contrasts)  # Bonferroni: the statements on all contrasts must hold together
    apply_rule = partial(_RULES[declaration.rule], declaration, sums, level)
    status, why = apply_rule(n)
    needed, would = None, None
    if status == "undecided":
        # Intervals shrink around fixed means: if a number of seeds decides, so does every larger one.
        more = range(n + 1, MOST_SEEDS + 1)
        first = bisect_left(more, True, key=lambda seeds: apply_rule(seeds)[0] != "undecided")
        if first < len(more):
            needed, would = more[first], apply_rule(more[first])[0]
    low, high = sums.total.compute_interval(level, n)
    return Finding(
        name, status, why.format(**_format_thresholds(declaration, column)), sums.total.mean, low, high, needed, would
    )


def _judge_directed(declaration: Declaration, sums: _ContrastSums, level: float, seeds: int) -> tuple[Status, str]:
    # Two one-sided tests at `level` correspond to an interval at 2 * level.
    if sums.total.compute_interval(2 * level, seeds).is_within(declaration.margin):
        return "refuted", "the same within ±{margin}"
    low, high = sums.total.compute_interval(level, seeds)
    below, above = ("supported", "refuted") if declaration.rule == "lower" else ("refuted", "supported")
    if high < 0:
        return below, "lower"
    return (above, "higher") if low > 0 else ("undecided", "neither different nor shown to be the same")


def _judge_same(declaration: Declaration, sums: _ContrastSums, level: float, seeds: int) -> tuple[Status, str]:
    margin = declaration.margin
    if sums.total.compute_interval(2 * level, seeds).is_within(margin):
        return "supported", "the same within ±{margin}"
    low, high = sums.total.compute_interval(level, seeds)
    if high < -margin or low > margin:
        return "refuted", "differs by more than {margin}"
    return "undecided", "neither different nor shown to be the same"


def _judge_removed(declaration: Declaration, sums: _ContrastSums, level: float, seeds: int) -> tuple[Status, str]:
    plus, minus = ([row.compute_interval(level, seeds) for row in rows.values()] for rows in (sums.plus, sums.minus))
    removed, kept = declaration.removed, declaration.kept
    if any(row.high < kept for row in minus):
        return "undecided", "nothing to remove: below {kept} anyway"
    present = all(row.low > kept for row in minus)
    if present and all(row.high < removed for row in plus):
        return "supported", "below {removed} where it is above {kept} otherwise"
    if present and all(row.low > kept for row in plus):
        return "refuted", "above {kept} as well"
    return "undecided", "between the bounds"


def _judge_alone(declaration: Declaration, sums: _ContrastSums, level: float, seeds: int) -> tuple[Status, str]:
    share = level / len(sums.minus)  # any single row refutes the claim
    without = [row for row in sums.minus.values() if row.compute_interval(share, seeds).high < declaration.removed]
    if without and len(sums.minus) > 1:  # a single row without a sink leaves nothing to remove: `removed` decides
        return "refuted", f"{len(without)} of {len(sums.minus)} others are below {{removed}} as well"
    return _judge_removed(declaration, sums, level, seeds)


_RULES: Mapping[Rule, Callable[[Declaration, _ContrastSums, float, int], tuple[Status, str]]] = {
    "lower": _judge_directed,
    "higher": _judge_directed,
    "same": _judge_same,
    "removed": _judge_removed,
    "alone": _judge_alone,
}
"""The status of a contrast at a number of seeds, and the reason as a format string over the declaration's bounds."""
_BY_LEVEL = ("removed", "alone")
"""Rules on single rows instead of their weighted sum."""


def _format_sentence(declaration: Declaration, verdict: Verdict) -> str:
    """`Undecided (n = 5, 3 of 4 contrasts undecided): claim`, then the seeds that would decide it."""
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
    """The thresholds of the rules by name: the margin in the unit of differences, the levels in that of values."""
    units = {"margin": column.difference_unit, "removed": column.unit, "kept": column.unit}
    return {name: f"{getattr(declaration, name) * column.scale:g} {unit}".rstrip() for name, unit in units.items()}


def describe_bounds(declaration: Declaration, column: Column) -> tuple[str, ...]:
    """Describe the thresholds of the declaration's rule."""
    texts = ("removed below {removed}", "there above {kept}") if declaration.rule in _BY_LEVEL else ("margin {margin}",)
    return tuple(text.format(**_format_thresholds(declaration, column)) for text in texts)


def describe_contrasts(verdict: Verdict, column: Column) -> list[str]:
    """Describe the finding of each contrast."""
    number = partial(column.format, sign="+")
    return [
        f"{part.name}: {part.status}, {part.why}: {number(part.mean)} [{number(part.low)}, {number(part.high)}]"
        + (f" {column.difference_unit}" if column.unit else "")
        + (f"; {part.needed} seeds would {_WOULD[part.would]} it" if part.needed else "")
        for part in verdict.parts
    ]
