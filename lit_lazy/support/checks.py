"""Checks of settings with one-line errors."""

import math

from lit_lazy.support.errors import short_repr

MOST_RATE, MOST_FACTOR = 1e20, 1e6
"""Largest learning rate, and largest factor on one, or weight decay: their product must be an fp32 number."""


def require(holds: bool, field: str, value: object, fix: str) -> None:
    """Raise a one-line ValueError that names the field, its value and the fix, unless the condition holds."""
    if not holds:
        raise ValueError(f"{field}={short_repr(value)}: {fix}")


def require_field(settings: object, path: str, holds: bool, fix: str) -> None:
    """`require` for the field of `settings` at the last part of a dotted path."""
    require(holds, path, getattr(settings, path.rpartition(".")[2]), fix)


def require_whole(field: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Require an int (not a bool) of at least `minimum` and, if given, at most `maximum`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    within = whole and value >= minimum and (maximum is None or value <= maximum)
    wanted = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    require(within, field, value, f"must be a whole number {wanted}")


def require_positive(field: str, value: float, most: float) -> None:
    """Require a number above 0 and at most `most`."""
    require(math.isfinite(value) and 0 < value <= most, field, value, f"must be above 0 and at most {most:g}")
