"""Statistics of an ablation: means, contrasts of rows, equivalence, Holm's adjustment, minimum detectable effect.

All functions are pure and take `{seed: value}` mappings. A value that is None, NaN or infinite is undefined and
dropped; estimates count the dropped values. Sums are correctly rounded, so results do not depend on the order in which
cells finish. Formulas: docs/method.md, section 10; why this test: docs/results/default-test.md. Functions import
scipy.special, which takes a third of a second, when they are called; scipy.stats would take half a second more.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

SeedValues = Mapping[int, float | None]
Test = Literal["t", "tie", "constant", "saturated", "construction"]

ALPHA = 0.05
POWER = 0.8
FEWEST_SEEDS = 3
"""Minimum number of seeds for a p value: one degree of freedom hardly measures spread."""
RESOLUTION = 1e-6
"""Relative difference below which values count as equal: metrics are float32 sums, with seven digits."""
LEAST = 1e-150
"""Absolute difference below which values count as equal: its square would underflow to 0."""


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds with the half-width of its 95 % t interval.

    `mean` is None if n = 0. `ci95` is None if n < 2, 0 if all seeds have the same value, and None if every value lies
    at a bound of the metric: no spread was measured. `undefined` counts the dropped values.
    """

    mean: float | None
    ci95: float | None
    n: int
    undefined: int


@dataclass(frozen=True)
class Effect:
    """The mean over `n` seeds of a weighted sum of rows, its standard error, and the two-sided t test against zero.

    `n` counts the seeds that all rows share. `df` are the degrees of freedom, `low` and `high` the minimum and maximum
    of the sum over these seeds. `test` is one of
      "t"             a t test with unadjusted p value `p`;
      "tie"           the sum is exactly 0 in every seed;
      "constant"      the sum is the same in every seed and not 0 (parameter counts);
      "saturated"     a row has the same value in every seed, or always lies at a bound of the metric: its spread was
                      not measured, so there is a range but no t test;
      "construction"  set by a table whose column declares that rows differ by construction: p was dropped;
      None            the rows share fewer than three seeds.
    A "tie" or "constant" is exact for a deterministic quantity and untestable for a random one. The data cannot
    distinguish the two, so p is None, never 0; `ci95` and `se` are 0. `mean` is None if the rows share no
    seed; `ci95`, `se` and `df` are None if they share one, or if a row is saturated. A table sets `p_adj`, which is `p`
    after Holm over the rows or contrasts of a metric, and `mde`, the minimum detectable effect at this spread and n.
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
    p_adj: float | None = None
    mde: float | None = None

    @property
    def separated(self) -> bool:
        """Whether the effect is significant after Holm."""
        return self.p_adj is not None and self.p_adj < ALPHA


def drop_undefined(values: SeedValues) -> dict[int, float]:
    """The finite values in ascending order of seed."""
    return {seed: float(v) for seed, v in sorted(values.items()) if v is not None and math.isfinite(v)}


def is_saturated(values: Collection[float], bounds: Collection[float] = ()) -> bool:
    """Whether two or more values show no spread: all equal, or each at a bound of the metric."""
    if len(values) < 2:
        return False
    scale = max(RESOLUTION * max(map(abs, (*values, *bounds))), LEAST)
    return max(values) - min(values) <= scale or all(any(abs(v - bound) <= scale for bound in bounds) for v in values)


def drop_rounding(mean: float, half_width: float) -> float:
    """The mean, or 0 if it is a rounding error beside the half-width of its interval."""
    return 0.0 if abs(mean) <= RESOLUTION * half_width else mean


def estimate(values: SeedValues, bounds: Collection[float] = ()) -> Estimate:
    """Mean and 95 % half-width t(0.975, n - 1) * s / sqrt(n), s the sample standard deviation (n - 1)."""
    kept = list(drop_undefined(values).values())
    n = len(kept)
    if n == 0:
        return Estimate(None, None, 0, len(values))
    undefined = len(values) - n
    if is_saturated(kept, bounds):
        return Estimate(fmean(kept), 0.0 if is_saturated(kept) else None, n, undefined)
    half_width = t_quantile(ALPHA / 2, n - 1) * math.sqrt(compute_variance(kept) / n) if n > 1 else None
    return Estimate(fmean(kept), half_width, n, undefined)


def compute_contrast(
    values: Mapping[str, SeedValues], weights: Mapping[str, float], bounds: Collection[float] = ()
) -> Effect:
    """The weighted sum of rows per seed, its mean over the seeds that all its rows share, and the t test against zero.

    `values` holds one metric by row. `weights` are those of the contrast: +1, -1 for a difference, +1, -1, -1, +1 for
    the interaction of a 2x2 design. Rows share data order and initial weights within a seed, so what a seed does to all
    of them cancels. The test has n - 1 degrees of freedom.
    """
    kept = {variant: drop_undefined(values[variant]) for variant, weight in weights.items() if weight}
    shared = sorted(set.intersection(*map(set, kept.values())))
    terms = [[weights[variant] * row[seed] for variant, row in kept.items()] for seed in shared]
    sums = [math.fsum(row) for row in terms]
    n = len(sums)
    if n == 0:
        return Effect(None, None, 0)
    mean, ends = fmean(sums), {"low": min(sums), "high": max(sums)}
    if n > 1 and not any(sums):
        return Effect(0.0, 0.0, n, 0.0, test="tie", **ends)
    # Rounding spreads the sums by this much.
    if n > 1 and ends["high"] - ends["low"] <= max(RESOLUTION * max(abs(x) for row in terms for x in row), LEAST):
        return Effect(mean, 0.0, n, 0.0, test="constant", **ends)
    if any(is_saturated([row[seed] for seed in shared], bounds) for row in kept.values()):
        return Effect(mean, None, n, test="saturated", **ends)
    if n < 2:
        return Effect(mean, None, n, **ends)
    return replace(_test(mean, n, math.sqrt(compute_variance(sums) / n), n - 1), **ends)


def compute_unpaired_difference(first: SeedValues, second: SeedValues, bounds: Collection[float] = ()) -> Effect:
    """The mean of `first` minus that of `second`, each over its own seeds, and Welch's t test; `n` is the smaller."""
    kept = [list(drop_undefined(values).values()) for values in (first, second)]
    n = min(map(len, kept))
    if n == 0:
        return Effect(None, None, 0)
    mean = fmean(kept[0]) - fmean(kept[1])
    if any(is_saturated(values, bounds) for values in kept):
        return Effect(mean, None, n, test="saturated")
    if n < 2:
        return Effect(mean, None, n)
    parts = [compute_variance(values) / len(values) for values in kept]
    total = math.fsum(parts)
    df = total**2 / math.fsum(part**2 / (len(values) - 1) for part, values in zip(parts, kept, strict=True))
    return _test(mean, n, math.sqrt(total), df)


def _test(mean: float, n: int, se: float, df: float) -> Effect:
    """The interval of a mean, and with enough seeds its t test against zero."""
    half_width = t_quantile(ALPHA / 2, df) * se
    if n < FEWEST_SEEDS:
        return Effect(mean, half_width, n, se, df)
    return Effect(mean, half_width, n, se, df, test="t", p=2 * t_tail(abs(mean) / se, df))


def tost(effect: Effect, margin: float) -> float | None:
    """p value of equivalence within +-margin (TOST): the larger p of two one-sided t tests at the effect's se and df.

    It is below 0.05 exactly if the 90 % interval lies within the margin. None if the effect has no t test.
    Schuirmann, D. J. (1987), Journal of Pharmacokinetics and Biopharmaceutics 15, 657-680.
    """
    if not (margin > 0 and math.isfinite(margin)):
        raise ValueError(f"margin: {margin}; give the largest difference that counts as none, above 0")
    if effect.test != "t" or effect.mean is None or not effect.se or effect.df is None:
        return None
    return t_tail((margin - abs(effect.mean)) / effect.se, effect.df)


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


def minimum_detectable_effect(effect: Effect, alpha: float = ALPHA) -> float | None:
    """The true value that the two-sided t test detects with probability POWER at the effect's se and df.

    With T ~ noncentral t(df, delta / se) and c = t(1 - alpha/2, df), it is the delta > 0 that solves
    P(T > c) + P(T < -c) = POWER. None if the effect has no t test.
    """
    if effect.test != "t" or effect.se is None or effect.df is None:
        return None
    from scipy.special import ncfdtrinc

    critical = t_quantile(alpha / 2, effect.df)
    # T^2 is noncentral F(1, df, noncentrality^2).
    return effect.se * math.sqrt(float(ncfdtrinc(1, effect.df, 1 - POWER, critical**2)))


def t_tail(x: float, df: float) -> float:
    """P(T > x) of Student's t with `df` degrees of freedom."""
    from scipy.special import stdtr

    return float(stdtr(df, -x))


def t_quantile(tail: float, df: float) -> float:
    """The x with `t_tail(x, df) == tail`."""
    from scipy.special import stdtrit

    return -float(stdtrit(df, tail))


def compute_variance(values: Collection[float]) -> float:
    """Sample variance (n - 1) of two or more values."""
    mean = fmean(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
