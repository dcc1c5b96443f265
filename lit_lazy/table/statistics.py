"""Statistics of an ablation: means, contrasts of rows, equivalence, Holm's adjustment, minimum detectable effect.

All functions are pure and take `{seed: value}` mappings. A value that is None, NaN or infinite is undefined and
dropped; estimates count the dropped values. Sums are correctly rounded, so results do not depend on the order in which
cells finish. Formulas: docs/method.md, section 10; why this test: docs/results/default-test.md.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import fmean
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
"""Minimum number of seeds per row for a p value: one degree of freedom hardly measures spread."""
RESOLUTION = 1e-6
"""Relative difference below which values count as equal: metrics are float32 sums, with seven digits."""
LEAST = 1e-150
"""Absolute difference below which values count as equal: its square would underflow to 0."""


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds with the half-width of its 95 % t interval.

    `mean` is None if n = 0. `ci95` is None if n < 2, 0 if all seeds have the same value, and None if every value lies
    at a bound of the metric. `saturated` marks the last two cases, which have no measured spread. `undefined` counts
    the dropped values.
    """

    mean: float | None
    ci95: float | None
    n: int
    undefined: int
    saturated: bool = False


@dataclass(frozen=True)
class Effect:
    """A weighted sum of row means, its standard error, and the two-sided t test against zero.

    `n` is the smallest number of seeds of a row, `df` the Welch-Satterthwaite degrees of freedom. `low` and `high` are
    the minimum and maximum of the sum over the seeds that all rows share. `test` is one of
      "t"             a t test with unadjusted p value `p`;
      "tie"           the sum is exactly 0 in every seed;
      "constant"      the sum is the same in every seed and not 0 (parameter counts);
      "saturated"     a row has the same value in every seed, or always lies at a bound of the metric: its spread was
                      not measured, so there is a range but no t test;
      "construction"  set by a table whose column declares that rows differ by construction: p was dropped;
      None            a row has fewer than three seeds.
    A "tie" or "constant" is exact for a deterministic quantity and untestable for a random one. The data cannot
    distinguish the two, so p is None, never 0; `ci95` and `se` are 0. `mean` is None if a row has no value; `ci95`,
    `se` and `df` are None if a row has one value or is saturated.
    """

    mean: float | None
    ci95: float | None
    n: int
    se: float | None = None
    df: float | None = None
    low: float | None = None
    high: float | None = None
    test: Test | None = None
    p: float | None = None


def drop_undefined(values: SeedValues) -> dict[int, float]:
    """The finite values in ascending order of seed."""
    return {seed: float(v) for seed, v in sorted(values.items()) if v is not None and math.isfinite(v)}


def is_saturated(values: Collection[float], bounds: Collection[float] = ()) -> bool:
    """Whether two or more values show no spread: all equal, or each at a bound of the metric."""
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
        return Estimate(fmean(kept), 0.0 if is_saturated(kept) else None, n, undefined, True)
    half_width = float(t.isf(ALPHA / 2, n - 1)) * math.sqrt(_variance(kept) / n) if n > 1 else None
    return Estimate(fmean(kept), half_width, n, undefined)


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


def compute_contrast(
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
    half_width = float(t.isf(ALPHA / 2, df)) * se
    if n < FEWEST_SEEDS:
        return Effect(mean, half_width, n, se, df, **ends)
    return Effect(mean, half_width, n, se, df, test="t", p=float(2 * t.sf(abs(mean) / se, df)), **ends)


def tost(effect: Effect, margin: float) -> float | None:
    """p value of equivalence within +-margin (TOST): the larger p of two one-sided t tests at the effect's se and df.

    It is below 0.05 exactly if the 90 % interval lies within the margin. None if the effect has no t test.
    Schuirmann, D. J. (1987), Journal of Pharmacokinetics and Biopharmaceutics 15, 657-680.
    """
    if not (margin > 0 and math.isfinite(margin)):
        raise ValueError(f"margin: {margin}; give the largest difference that counts as none, above 0")
    if effect.test != "t" or effect.mean is None or not effect.se:
        return None
    return float(t.sf((margin - abs(effect.mean)) / effect.se, effect.df))


def holm(p_values: Mapping[str, float], family: int | None = None) -> dict[str, float]:
    """Holm's step-down adjusted p values: p_(i) -> max over j <= i of min(1, (m - j + 1) p_(j)).

    `family` is m, the number of hypotheses (default: the number of p values). A row that was compared but has no p (a
    tie) counts towards m; otherwise the family-wise error rate would depend on the data.
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
    """The true value that the two-sided t test detects with probability `power` at the effect's se and df.

    With T ~ noncentral t(df, delta / se) and c = t(1 - alpha/2, df), it is the delta > 0 that solves
    P(T > c) + P(T < -c) = power; `power` must exceed `alpha`. None if the effect has no t test.
    """
    if effect.test != "t" or effect.se is None or effect.df is None:
        return None
    critical = float(t.isf(alpha / 2, effect.df))
    # T^2 is noncentral F(1, df, noncentrality^2).
    return effect.se * math.sqrt(float(ncfdtrinc(1, effect.df, 1 - power, critical**2)))


def _standard_error(
    rows: Mapping[str, Mapping[int, float]], weights: Mapping[str, float], correlation: float
) -> tuple[float, float]:
    """Standard error of a contrast and its degrees of freedom."""
    variances = {variant: _variance(row.values()) for variant, row in rows.items()}
    unshared = {variant: weights[variant] ** 2 * variances[variant] / len(row) for variant, row in rows.items()}
    shared = (
        weights[a] * weights[b] * correlation * min(variances[a], variances[b])
        * len(rows[a].keys() & rows[b].keys()) / (len(rows[a]) * len(rows[b]))
        for a in rows for b in rows if a != b
    )  # fmt: skip
    total = math.fsum(unshared.values())
    df = total**2 / math.fsum(part**2 / (len(rows[variant]) - 1) for variant, part in unshared.items())
    return math.sqrt(math.fsum([total, *shared])), df


def _variance(values: Collection[float]) -> float:
    """Sample variance (n - 1) of two or more values."""
    mean = fmean(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
