"""Statistics of an ablation: means, paired differences over seeds, Holm's adjustment, minimum detectable effect.

Every function is pure and takes `{seed: value}` mappings. A value that is None, NaN or infinite is undefined: it is
dropped, and counted where the count is of use. Sums are exactly rounded over sorted seeds, so no result depends on the
order in which cells finished.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from scipy.optimize import brentq
from scipy.stats import ncf, t

SeedValues = Mapping[int, float | None]

ALPHA = 0.05
POWER = 0.8
FEWEST_PAIRS = 3
"""Below three pairs a p value is not reported: one degree of freedom measures hardly any spread."""


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds with the half-width of its 95 % t interval.

    `mean` is None when n = 0, `ci95` when n < 2. `undefined` counts the seeds whose value was dropped.
    """

    mean: float | None
    ci95: float | None
    n: int
    undefined: int


@dataclass(frozen=True)
class Effect:
    """A mean of per-seed differences (or contrasts) and the two-sided t test that it is zero.

    `test` says what was done:
      "t"         a t test with n - 1 degrees of freedom; `p` is its unadjusted p value;
      "tie"       every one of n >= 2 differences is exactly 0: t = 0/0 does not exist, there is no p;
      "constant"  n >= 2 differences are equal and not 0 (parameter counts; a saturated score): t would be x/0.
                  For a deterministic quantity the difference is exact and needs no test; for a random one no spread was
                  measured to test against. The data cannot tell the two apart, so there is no p, never p = 0;
      None        fewer than three pairs: no test.
    In "tie" and "constant" `ci95` and `sd` are 0, the formula's value. `mean` is None when n = 0, `ci95` and `sd` when
    n < 2.
    """

    mean: float | None
    ci95: float | None
    n: int
    sd: float | None
    p: float | None
    test: Literal["t", "tie", "constant"] | None


def defined(values: SeedValues) -> dict[int, float]:
    """The finite values, by ascending seed."""
    return {seed: float(v) for seed, v in sorted(values.items()) if v is not None and math.isfinite(v)}


def estimate(values: SeedValues) -> Estimate:
    """Mean and 95 % half-width t(0.975, n - 1) * s / sqrt(n), s the sample standard deviation (n - 1)."""
    kept = list(defined(values).values())
    n = len(kept)
    if n == 0:
        return Estimate(None, None, 0, len(values))
    return Estimate(_mean(kept), _half_width(_sd(kept), n) if n > 1 else None, n, len(values) - n)


def paired(values: SeedValues, baseline: SeedValues) -> Effect:
    """`values - baseline` over the seeds on which both are defined: a paired t test."""
    return contrast({"row": values, "baseline": baseline}, {"row": 1.0, "baseline": -1.0})


def contrast(values: Mapping[str, SeedValues], weights: Mapping[str, float]) -> Effect:
    """The weighted sum over variants, seed by seed where all are defined, and the one-sample t test that it is zero.

    Values of different variants with one seed are paired (same data order, same initial weights), so their common
    variation cancels. The interaction of a 2x2 design has the weights +1, -1, -1, +1.
    """
    kept = {variant: defined(values[variant]) for variant in weights}
    seeds = sorted(set.intersection(*(set(v) for v in kept.values())))
    terms = [[weight * kept[variant][seed] for variant, weight in weights.items()] for seed in seeds]
    sums = [math.fsum(row) for row in terms]
    n = len(sums)
    if n < 2:
        return Effect(sums[0] if sums else None, None, n, None, None, None)
    mean = _mean(sums)
    # The terms are themselves rounded: a spread of this size says nothing about the seeds.
    rounding = 4 * math.ulp(max(abs(term) for row in terms for term in row))
    if not any(sums):
        return Effect(0.0, 0.0, n, 0.0, None, "tie")
    if max(sums) - min(sums) <= rounding:
        return Effect(mean, 0.0, n, 0.0, None, "constant")
    sd = _sd(sums)
    half_width = _half_width(sd, n)
    if n < FEWEST_PAIRS:
        return Effect(mean, half_width, n, sd, None, None)
    statistic = mean / (sd / math.sqrt(n))
    return Effect(mean, half_width, n, sd, float(2 * t.sf(abs(statistic), n - 1)), "t")


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


def minimum_detectable_effect(sd: float, n: int, alpha: float = ALPHA, power: float = POWER) -> float | None:
    """The true mean difference that a two-sided paired t test over `n` seeds finds with probability `power`.

    With T ~ noncentral t(n - 1, delta sqrt(n) / sd) and c = t(1 - alpha/2, n - 1), it is the delta > 0 that solves
    P(T > c) + P(T < -c) = power; `power` lies above `alpha`. `sd` is the standard
    deviation of the differences. None where no test is made (n < 3, or sd = 0).
    """
    return sd * _standard_effect(n, alpha, power) if n >= FEWEST_PAIRS and sd > 0 else None


@cache
def _standard_effect(n: int, alpha: float, power: float) -> float:
    """delta / sd of `minimum_detectable_effect`."""
    critical = float(t.isf(alpha / 2, n - 1))

    def excess(noncentrality: float) -> float:
        # T^2 is noncentral F(1, n - 1, noncentrality^2). scipy's lower tail of the noncentral t is NaN far out.
        return float(ncf.sf(critical**2, 1, n - 1, noncentrality**2)) - power

    upper = critical
    while excess(upper) < 0:
        upper *= 2
    # Not from 0, where scipy's noncentral F breaks down; there the power is alpha, below any power asked for.
    return float(brentq(excess, 1e-3, upper, xtol=1e-12)) / math.sqrt(n)  # pyrefly: ignore[bad-argument-type]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _sd(values: list[float]) -> float:
    """Sample standard deviation of two or more; exactly 0 for equal values, whose mean may be off by a rounding."""
    if max(values) == min(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _half_width(sd: float, n: int) -> float:
    return float(t.isf(ALPHA / 2, n - 1)) * sd / math.sqrt(n)
