"""The rules of questions with a fixed number of seeds: Welch's intervals with one correlation for all rows of a table.

Verdicts that were declared under them and the tables of these questions must not change, so these functions stay as
they are; questions with looks are judged by `lit_lazy.table.looks`, all other tables use `lit_lazy.table.statistics`.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from functools import partial
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_lazy.table.declaration import FIXED, MOST_SEEDS, Declaration, Finding, Rule, Status
from lit_lazy.table.statistics import (
    ALPHA,
    FEWEST_SEEDS,
    RESOLUTION,
    Effect,
    SeedValues,
    compute_variance,
    drop_undefined,
    is_saturated,
    t_quantile,
    t_tail,
)


def has_fixed_rules(declaration: Declaration | None) -> bool:
    """Whether a table has the contrasts of this file: that of a question that was declared with them."""
    return declaration is not None and declaration.rules == FIXED


def seed_correlation(values: Mapping[str, SeedValues], bounds: Collection[float] = ()) -> float:
    """Correlation over seeds that the rows of a metric share, in [0, 1).

    With r the mean pairwise correlation of R rows, it is max(0, 1 - (1 - r) R / (R - 1)). The factor R / (R - 1)
    corrects the unshared part as in a block model, whose residual has (R - 1) (n - 1) degrees of freedom instead of
    R (n - 1). Rows with fewer than three seeds or without spread are ignored.
    """
    rows = {name: drop_undefined(row) for name, row in values.items()}
    measured = {name: row for name, row in rows.items() if len(row) >= FEWEST_SEEDS}
    kept = {name: row for name, row in measured.items() if not is_saturated(row.values(), bounds)}
    if len(kept) < 2:
        return 0.0
    pairs = pd.DataFrame(kept).sort_index().corr(min_periods=FEWEST_SEEDS).to_numpy()[np.triu_indices(len(kept), 1)]
    known = pairs[np.isfinite(pairs)].tolist()
    apart = (1 - fmean(known)) * len(kept) / (len(kept) - 1) if known else 1.0
    return min(max(0.0, 1 - apart), 1 - RESOLUTION)


def compute_welch_contrast(
    values: Mapping[str, SeedValues],
    weights: Mapping[str, float],
    bounds: Collection[float] = (),
    correlation: float | None = None,
) -> Effect:
    """The weighted sum of row means, each over the row's seeds, and the t test against zero.

    `values` holds one metric for every row of a table. `weights` are those of the contrast: +1, -1 for a difference,
    +1, -1, -1, +1 for the interaction of a 2x2 design. Each row has its own variance. Rows share data order and initial
    weights within a seed, so two rows covary by `correlation` (default: `seed_correlation` of all rows) times the
    smaller variance. Degrees of freedom are Welch-Satterthwaite.
    """
    kept = {variant: drop_undefined(values[variant]) for variant, weight in weights.items() if weight}
    n = min(map(len, kept.values()))
    if n == 0:
        return Effect(None, None, 0)
    common = sorted(set.intersection(*map(set, kept.values())))
    terms = [[weights[variant] * row[seed] for variant, row in kept.items()] for seed in common]
    sums = [math.fsum(row) for row in terms]
    ends = {"low": min(sums, default=None), "high": max(sums, default=None)}
    if len(sums) > 1 and not any(sums):
        return Effect(0.0, 0.0, n, 0.0, test="tie", **ends)
    # The terms are rounded, so a spread this small is rounding error.
    if len(sums) > 1 and max(sums) - min(sums) <= 4 * math.ulp(max(abs(term) for row in terms for term in row)):
        return Effect(fmean(sums), 0.0, n, 0.0, test="constant", **ends)
    mean = math.fsum(weights[variant] * fmean(row.values()) for variant, row in kept.items())
    if any(is_saturated(row.values(), bounds) for row in kept.values()):
        return Effect(mean, None, n, test="saturated", **ends)
    if n < 2:
        return Effect(mean, None, n, **ends)
    if correlation is None:
        correlation = seed_correlation(values, bounds)
    se, df = _standard_error(kept, weights, correlation)
    half_width = t_quantile(ALPHA / 2, df) * se
    if n < FEWEST_SEEDS:
        return Effect(mean, half_width, n, se, df, **ends)
    return Effect(mean, half_width, n, se, df, test="t", p=2 * t_tail(abs(mean) / se, df), **ends)


def _standard_error(
    rows: Mapping[str, Mapping[int, float]], weights: Mapping[str, float], correlation: float
) -> tuple[float, float]:
    """Standard error of a contrast and its degrees of freedom."""
    variances = {variant: compute_variance(row.values()) for variant, row in rows.items()}
    unshared = {variant: weights[variant] ** 2 * variances[variant] / len(row) for variant, row in rows.items()}
    shared = (
        weights[a] * weights[b] * correlation * min(variances[a], variances[b])
        * len(rows[a].keys() & rows[b].keys()) / (len(rows[a]) * len(rows[b]))
        for a in rows for b in rows if a != b
    )  # fmt: skip
    total = math.fsum(unshared.values())
    df = total**2 / math.fsum(part**2 / (len(rows[variant]) - 1) for variant, part in unshared.items())
    return math.sqrt(math.fsum([total, *shared])), df


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float

    def is_within(self, margin: float) -> bool:
        return -margin < self.low and self.high < margin


def judge_contrasts(
    declaration: Declaration, values: Mapping[str, Mapping[int, float]], bounds: Collection[float]
) -> tuple[Finding, ...]:
    """The finding of each contrast, from the primary outcome by row and declared seed; `why` is a format string.

    bounds: those of the outcome's column.
    """
    return tuple(_judge_contrast(declaration, name, values, bounds) for name in declaration.contrasts)


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
            half = t_quantile(level / 2, df) * self.measured.se * (self.n / seeds) ** 0.5
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


def compute_levels(
    declaration: Declaration, values: Mapping[str, Mapping[int, float]], bounds: Collection[float]
) -> dict[str, list[Level]]:
    """The rows of each contrast, claimed ones first; empty for a rule that uses only their sum.

    The intervals are simultaneous. Under the rule `alone`, unclaimed rows have the level at which one of them refutes
    the claim.
    """
    if declaration.rule not in _BY_LEVEL:
        return {}
    level = ALPHA / len(declaration.contrasts)
    levels = {}
    for name in declaration.contrasts:
        sums = _compute_sums(declaration, name, values, bounds)
        share = level / len(sums.minus) if declaration.rule == "alone" else level
        levels[name] = [
            Level(row, claimed, row_sum.mean, row_sum.compute_interval(error_rate, len(declaration.seeds)))
            for rows, claimed, error_rate in ((sums.plus, True, level), (sums.minus, False, share))
            for row, row_sum in rows.items()
        ]
    return levels


def _compute_sums(
    declaration: Declaration, name: str, values: Mapping[str, Mapping[int, float]], bounds: Collection[float]
) -> _ContrastSums:
    weights = {row: weight for row, weight in declaration.contrasts[name].items() if weight}
    correlation = seed_correlation(values, bounds)

    def weighted_sum(weights: Mapping[str, float]) -> _WeightedSum:
        rows = {row: [weight * value for value in values[row].values()] for row, weight in weights.items()}
        saturated = [row for row in rows if is_saturated(values[row].values(), bounds)]
        spread = {row: weight for row, weight in weights.items() if row not in saturated}
        return _WeightedSum(
            math.fsum(map(fmean, rows.values())),
            compute_welch_contrast(values, spread, bounds, correlation) if spread else None,
            math.fsum(fmean(rows[row]) - min(rows[row]) for row in saturated),
            math.fsum(max(rows[row]) - fmean(rows[row]) for row in saturated),
            len(declaration.seeds),
        )

    plus, minus = (
        {row: weighted_sum({row: 1.0}) for row, weight in weights.items() if sign * weight > 0} for sign in (1, -1)
    )
    return _ContrastSums(weighted_sum(weights), plus, minus)


def _judge_contrast(
    declaration: Declaration, name: str, values: Mapping[str, Mapping[int, float]], bounds: Collection[float]
) -> Finding:
    n = len(declaration.seeds)
    sums = _compute_sums(declaration, name, values, bounds)
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
    return Finding(name, status, why, sums.total.mean, low, high, needed, would)


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
