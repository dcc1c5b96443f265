"""Contrasts with one correlation for all rows: for the questions that were declared when tables had them.

Their verdicts and tables must not change, so these functions stay as they are. All else uses
`lit_lazy.table.statistics`.
"""

import math
from collections.abc import Collection, Mapping
from statistics import fmean

import numpy as np
import pandas as pd
from scipy.stats import t

from lit_lazy.table.declaration import Declaration
from lit_lazy.table.statistics import (
    ALPHA,
    FEWEST_SEEDS,
    RESOLUTION,
    Effect,
    SeedValues,
    compute_variance,
    drop_undefined,
    is_saturated,
)


def has_fixed_rules(declaration: Declaration | None) -> bool:
    """Whether a table has the contrasts of this file: if it answers a question that was declared with them."""
    return declaration is not None


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
    half_width = float(t.isf(ALPHA / 2, df)) * se
    if n < FEWEST_SEEDS:
        return Effect(mean, half_width, n, se, df, **ends)
    return Effect(mean, half_width, n, se, df, test="t", p=float(2 * t.sf(abs(mean) / se, df)), **ends)


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
