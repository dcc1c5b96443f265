"""Which values are so far above all others that on one scale with them these could not be told apart."""

import math
from collections.abc import Iterable
from statistics import median

FAR = 10
"""Times as far above the least value as the median one is."""


def compute_far_limit(values: Iterable[float]) -> float:
    """The highest that a value can be before it is far; infinity where the values, or most of them, are alike."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.inf
    reach = FAR * median(value - min(finite) for value in finite)
    return min(finite) + reach if reach else math.inf
