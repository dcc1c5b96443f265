"""Checks of settings with one-line errors."""

import math

from lit_lazy.support.errors import short_repr

MOST_RATE = 1e6
"""Largest learning rate, weight decay, or factor on one: their products must be fp32 numbers."""


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


def require_rate(field: str, value: float) -> None:
    """Require a learning rate, or a factor on one, above 0 and at most `MOST_RATE`."""
    within = math.isfinite(value) and 0 < value <= MOST_RATE
    require(within, field, value, f"must be above 0 and at most {MOST_RATE:,.0f}")
