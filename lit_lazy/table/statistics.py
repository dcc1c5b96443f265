"""Statistics of an ablation: means, contrasts of rows, equivalence, Holm's adjustment, minimum detectable effect.

Every function is pure and takes `{seed: value}` mappings. A value that is None, NaN or infinite is undefined: it is
dropped, and counted where the count is of use. Sums are exactly rounded, so no result depends on the order in which
cells finished. Formulas: docs/method.md, section 10; why this test: docs/results/default-test.md.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy.special import ncfdtrinc
from scipy.stats import t

SeedValues = Mapping[int, float | None]
Test = Literal["t", "tie", "constant", "saturated", "construction"]

ALPHA = 0.05
POWER = 0.8
FEWEST_SEEDS = 3
"""A p value needs as many in every row: one degree of freedom measures hardly any spread."""
RESOLUTION = 1e-6
"""Values this close, relative to the largest, are the same: metrics are sums in float32, which has seven digits."""
LEAST = 1e-150
"""Values closer than this are the same too: the square of their distance would be 0."""


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds with the half-width of its 95 % t interval.

    `mean` is None when n = 0. `ci95` is None when n < 2, 0 where the value is the same in every seed, and None for one
    that lies at either bound of its metric in every seed: then `saturated`, and its range is all that can be said.
    `undefined` counts the seeds whose value was dropped.
    """

    mean: float | None
    ci95: float | None
    n: int
    undefined: int
    saturated: bool = False


@dataclass(frozen=True)
class Effect:
    """A weighted sum of the means of rows, its standard error, and the two-sided t test that it is zero.

    `n` counts the seeds of the row that has the fewest, `df` are Welch and Satterthwaite's degrees of freedom, `low`
    and `high` the least and greatest value of the sum in a seed that all rows have. `test` says what was done:
      "t"          a t test; `p` is its unadjusted p value;
      "tie"        the sum is exactly 0 in every seed;
      "constant"   it is the same in every seed and not 0 (parameter counts);
      "saturated"  a row of it is the same in every seed, or always at a bound of the metric: that row's spread was not
                   measured, so there is a range and no t test;
      None         a row has fewer than three seeds;
      "construction"  is a table's: its column declares that rows differ in it by construction, so the p was dropped.
    A "tie" or "constant" is exact for a deterministic quantity and untestable for a random one. The data cannot tell
    the two apart, so there is no p, never p = 0; `ci95` and `se` are 0. `mean` is None where a row has no value;
    `ci95`, `se` and `df` are None where a row has one value, or is saturated.
    """

    mean: float | None
    ci95: float | None
    n: int
    se: float | None = None
    df: float | None = None
    p: float | None = None
    test: Test | None = None
    low: float | None = None
    high: float | None = None

    def half_width(self, level: float) -> float | None:
        """Of the interval that holds the true value with this probability; None where there is no interval."""
        if self.df is None or self.se is None:
            return self.ci95
        return float(t.isf((1 - level) / 2, self.df)) * self.se


def drop_undefined(values: SeedValues) -> dict[int, float]:
    """The finite values, by ascending seed."""
    return {seed: float(v) for seed, v in sorted(values.items()) if v is not None and math.isfinite(v)}


def is_saturated(values: Collection[float], bounds: Collection[float] = ()) -> bool:
    """Whether values of two or more seeds show no spread: all the same, or each at one of the metric's bounds."""
    if len(values) < 2:
        return False
    scale = max(RESOLUTION * max(map(abs, (*values, *bounds))), LEAST)
    return max(values) - min(values) <= scale or all(any(abs(v - bound) <= scale for bound in bounds) for v in values)


def estimate(values: SeedValues, bounds: Collection[float] = ()) -> Estimate:
    """Mean and 95 % half-width t(0.975, n - 1) * s / sqrt(n), s the sample standard deviation (n - 1)."""
    kept = list(drop_undefined(values).values())
    n = len(kept)
    if n == 0:
        return Estimate(None, None, 0, len(values))
    undefined = len(values) - n
    if is_saturated(kept, bounds):
        return Estimate(_mean(kept), 0.0 if is_saturated(kept) else None, n, undefined, True)
    half_width = float(t.isf(ALPHA / 2, n - 1)) * math.sqrt(_variance(kept) / n) if n > 1 else None
    return Estimate(_mean(kept), half_width, n, undefined)


def seed_correlation(values: Mapping[str, SeedValues], bounds: Collection[float] = ()) -> float:
    """How far the rows of a metric move together from seed to seed: from 0, not at all, to 1.

    From r, the mean over all pairs of R rows of their correlation over seeds: 1 - (1 - r) R / (R - 1), and at least 0.
    What rows do not have in common is raised as in a block model, whose residual has (R - 1) (n - 1) degrees of freedom
    and not R (n - 1). Rows of fewer than three seeds or without spread are left out.
    """
    rows = {name: drop_undefined(row) for name, row in values.items()}
    kept = {name: row for name, row in rows.items() if _has_spread(row, bounds)}
    if len(kept) < 2:
        return 0.0
    pairs = pd.DataFrame(kept).sort_index().corr(min_periods=FEWEST_SEEDS).to_numpy()[np.triu_indices(len(kept), 1)]
    known = pairs[np.isfinite(pairs)].tolist()
    apart = (1 - _mean(known)) * len(kept) / (len(kept) - 1) if known else 1.0
    return min(max(0.0, 1 - apart), 1 - RESOLUTION)


def compute_contrast(
    values: Mapping[str, SeedValues],
    weights: Mapping[str, float],
    bounds: Collection[float] = (),
    correlation: float | None = None,
) -> Effect:
    """The weighted sum of the rows' means, each over its own seeds, and the t test that it is zero.

    `values` has a metric of every row of a table, `weights` those of the contrast: a difference has +1 and -1, the
    interaction of a 2x2 design +1, -1, -1, +1. Each row has the spread s of its own values. Rows of one seed share data
    order and initial weights: two of them covary by `correlation` (by default `seed_correlation` of all rows) times the
    smaller of their variances. The degrees of freedom are Welch and Satterthwaite's.
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
    # The terms are themselves rounded: a spread of this size says nothing about the seeds.
    if len(sums) > 1 and max(sums) - min(sums) <= 4 * math.ulp(max(abs(term) for row in terms for term in row)):
        return Effect(_mean(sums), 0.0, n, 0.0, test="constant", **ends)
    mean = math.fsum(weights[variant] * _mean(list(row.values())) for variant, row in kept.items())
    if any(is_saturated(row.values(), bounds) for row in kept.values()):
        return Effect(mean, None, n, test="saturated", **ends)
    if n < 2:
        return Effect(mean, None, n, **ends)
    if correlation is None:
        correlation = seed_correlation(values, bounds)
    se, df = _standard_error(kept, weights, correlation)
    half_width = float(t.isf(ALPHA / 2, df)) * se
    if n < FEWEST_SEEDS:
        return Effect(mean, half_width, n, se, df, **ends)
    return Effect(mean, half_width, n, se, df, float(2 * t.sf(abs(mean) / se, df)), "t", **ends)


def tost(effect: Effect, margin: float) -> float | None:
    """p value of equivalence within +-margin: the larger of two one-sided t tests at the effect's se and df.

    Below 0.05 exactly where the 90 % interval lies within the margin. None where no t test was made.
    Schuirmann, D. J. (1987), Journal of Pharmacokinetics and Biopharmaceutics 15, 657-680.
    """
    if not (margin > 0 and math.isfinite(margin)):
        raise ValueError(f"margin: {margin}; give the largest difference that counts as none, above 0")
    if effect.test != "t" or effect.mean is None or not effect.se:
        return None
    return float(t.sf((margin - abs(effect.mean)) / effect.se, effect.df))


def holm(p_values: Mapping[str, float], family: int | None = None) -> dict[str, float]:
    """Holm's step-down adjusted p values: p_(i) -> max over j <= i of min(1, (m - j + 1) p_(j)).

    `family` is m, the number of hypotheses asked; it defaults to the number of p values. A row that was compared but
    has no p (a tie) still belongs to m: leaving it out would make the family's error rate depend on the data.
    Holm, S. (1979), Scandinavian Journal of Statistics 6, 65-70.
    """
    m = len(p_values) if family is None else family
    if m < len(p_values):
        raise ValueError(f"family: {m} is smaller than the number of p values, {len(p_values)}; count every hypothesis")
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (m - rank) * p))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def minimum_detectable_effect(effect: Effect, alpha: float = ALPHA, power: float = POWER) -> float | None:
    """The true value that the two-sided t test, at the effect's se and df, finds with probability `power`.

    With T ~ noncentral t(df, delta / se) and c = t(1 - alpha/2, df), it is the delta > 0 that solves
    P(T > c) + P(T < -c) = power; `power` lies above `alpha`. None where no test was made.
    """
    if effect.test != "t" or effect.se is None or effect.df is None:
        return None
    critical = float(t.isf(alpha / 2, effect.df))
    # T^2 is noncentral F(1, df, noncentrality^2).
    return effect.se * math.sqrt(float(ncfdtrinc(1, effect.df, 1 - power, critical**2)))


def _has_spread(row: Mapping[int, float], bounds: Collection[float]) -> bool:
    return len(row) >= FEWEST_SEEDS and not is_saturated(row.values(), bounds)


def _standard_error(
    rows: Mapping[str, Mapping[int, float]], weights: Mapping[str, float], correlation: float
) -> tuple[float, float]:
    """Of a contrast's estimate, with its degrees of freedom."""
    variances = {variant: _variance(list(row.values())) for variant, row in rows.items()}
    own = {variant: weights[variant] ** 2 * variances[variant] / len(row) for variant, row in rows.items()}
    shared = (
        weights[a] * weights[b] * correlation * min(variances[a], variances[b])
        * len(rows[a].keys() & rows[b].keys()) / (len(rows[a]) * len(rows[b]))
        for a in rows for b in rows if a != b
    )  # fmt: skip
    total = math.fsum(own.values())
    df = total**2 / math.fsum(part**2 / (len(rows[variant]) - 1) for variant, part in own.items())
    return math.sqrt(math.fsum([total, *shared])), df


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: list[float]) -> float:
    """Of the sample, of two or more."""
    mean = _mean(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
