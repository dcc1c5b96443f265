"""Outliers so far above the other values that a common scale would hide the differences between those."""

import math
from collections.abc import Iterable
from statistics import median

FAR = 10
"""Outliers are farther above the minimum than this times the median distance."""


def compute_far_limit(values: Iterable[float]) -> float:
    """The largest value that is not an outlier; infinity if most values are equal."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.inf
    reach = FAR * median(value - min(finite) for value in finite)
    return min(finite) + reach if reach else math.inf
