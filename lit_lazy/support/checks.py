"""Checks of settings, each failing in one line."""


def require(holds: bool, field: str, value: object, mend: str) -> None:
    """Raise a one-line ValueError that names the field, its value and the mend, unless the condition holds."""
    if not holds:
        raise ValueError(f"{field}={value!r}: {mend}")


def require_whole(field: str, value: object, minimum: int) -> None:
    """Require an int (not a bool) of at least `minimum`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= minimum, field, value, f"must be a whole number of at least {minimum}")
