"""Which rows of a grid that has begun would train something else now."""

from collections.abc import Mapping
from typing import Any

from lit_lazy.config.serialisation import flatten

GONE = "was removed from the ablation"
MOST_CHANGES = 3
"""Changed settings that a message shows."""
VERSION_DIGITS = 6
"""Digits by which a table tells what a changed row trained before and now."""


class ChangedRowError(ValueError):
    """Rows of a grid that has begun would train something else. changes: what changed, by row."""

    def __init__(self, changes: Mapping[str, str]) -> None:
        (variant, change), *others = changes.items()
        also = f" (also changed: {', '.join(repr(name) for name, _ in others)})" if others else ""
        beside = "" if GONE in changes.values() else "--changed trains it anew and keeps its former cells beside, "
        super().__init__(
            f"row {variant!r}: {change} since this grid began{also}; {beside}another name= in the ablation keeps both "
            "and takes the results of other rows, --fresh moves all former results away"
        )


def name_version(variant: str, definition: str) -> str:
    """The name of the row that keeps a row's cells from before it changed. definition: hash of what they train."""
    return f"{variant} (version {definition[:VERSION_DIGITS]})"


def describe_changes(former: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Which settings of a row changed: `train.steps changed from 6 to 8`; '' if none did.

    former: of an earlier cell, by dotted path. config: in canonical form. What only one of them has belongs to
    a class that changed, or is a field of another version; another path of the same weights changes nothing.
    """
    now = {path: str(value) for path, value in flatten(config).items() if path not in ("seed", "init_from")}
    changed = [path for path, value in now.items() if str(former.get(path, value)) != value]
    more = f" and {len(changed) - MOST_CHANGES} more" if len(changed) > MOST_CHANGES else ""
    return ", ".join(f"{path} changed from {former[path]} to {now[path]}" for path in changed[:MOST_CHANGES]) + more
