"""The parameters that `train.trainable` leaves out of the training. Needs only torch."""

import re
from collections.abc import Collection
from fnmatch import fnmatchcase

from torch import nn

from lit_lazy.support.checks import require
from lit_lazy.support.errors import did_you_mean

MOST_NAMED = 3
"""Frozen parameters in a message, at most."""


def freeze_others(model: nn.Module, patterns: Collection[str]) -> set[str]:
    """Freeze the parameters that match none of the patterns; returns their names. No patterns freeze nothing.

    A parameter with two names (a tied head) is trained if one of them matches. One that its own module does not train
    stays as it is. Raises a one-line ValueError for a pattern that matches nothing, or if nothing is left to train.
    """
    if not patterns:
        return set()
    named = [*model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        known = sorted({re.sub(r"\.\d+\.", ".*.", name) for name, _ in named})
        fix = f"matches no parameter{did_you_mean(pattern, known)}; there are {', '.join(known)}"
        require(any(fnmatchcase(name, pattern) for name, _ in named), "train.trainable", pattern, fix)
    chosen = {id(p) for name, p in named if any(fnmatchcase(name, pattern) for pattern in patterns)}
    frozen = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in chosen}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    fix = "trains nothing, as its parameters are constants or follow a schedule; add the names of others"
    require(any(p.requires_grad for _, p in named), "train.trainable", patterns, fix)
    return set(frozen)


def require_loaded(patterns: Collection[str], frozen: Collection[str], loaded: Collection[str]) -> None:
    """Raise a one-line ValueError if a parameter that the patterns freeze is not loaded: it would stay random."""
    new = sorted(set(frozen) - set(loaded))
    names = ", ".join(new[:MOST_NAMED]) + (f", ... ({len(new)})" if len(new) > MOST_NAMED else "")
    fix = f"leaves {names} at their first values; add a pattern that trains them, or an init_from that has them"
    require(not new, "train.trainable", patterns, fix)
