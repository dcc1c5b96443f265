"""Wrong and other values of a field, by what its annotation declares, and settings of every class to try them on."""

import math
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from lit_lazy.attention import AttentionSpec, Bias, Eviction, Gate, Mixer, Normaliser, Position
from lit_lazy.attention.position import RopeScaling
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import find_leaf_classes
from lit_lazy.data import DataConfig
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.source_interface import SpecialTokens
from lit_lazy.measure.evaluation import Varied
from lit_lazy.model.generation import Sampling
from lit_lazy.optim import Distillation, Optimiser, Schedule
from lit_lazy.support.checked_fields import list_types
from lit_lazy.training.execution_settings import Execution

PARTS = (
    *(Normaliser, Bias, Gate, Mixer, Position, RopeScaling, DataConfig, Optimiser, Schedule, Distillation, Evaluation),
)
GIVEN: dict[type, dict[str, Any]] = {
    RunConfig: {"data": Backcopy()},
    Varied: {"field": "n_pairs", "values": (2,)},
    Eviction: {"first": 1, "window": 2},
}
"""Fields without a default."""
SETTINGS = [
    *(RunConfig, ModelConfig, TrainConfig, AttentionSpec, SpecialTokens, Eviction, Sampling, Execution),
    *(leaf for base in PARTS for leaf in find_leaf_classes(base).values() if leaf.__module__.startswith("lit_lazy.")),
]
OTHER_KINDS: dict[Any, list[Any]] = {
    int: [None, "1", 1.5, True, b"1", 2**64],
    float: [None, "1", True, math.nan, math.inf, 10**400],
    bool: [None, "yes", 1],
    str: [None, 3, b"x"],
    Mapping: [None, 3, {1: 2}],
    Callable: [None, 3],
}


def wrong_values(hint: Any) -> Iterator[Any]:
    """Values of other kinds than an annotation's, and those next to its bounds."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        yield from wrong_values(parts[0])
        yield from _iter_outside(parts[0], parts[1])
    elif parts[1:] == (type(None),):
        yield from (value for value in wrong_values(parts[0]) if value is not None)
    elif origin is Literal:
        yield from (None, "nothing", b"x")
    elif origin is tuple:
        items = [(value,) * len(parts) for value in wrong_values(parts[0])]
        yield from (None, 3, {1}, object(), *items)
        yield from () if parts[1:] == (Ellipsis,) else ((), (0.5,) * (len(parts) + 1))
    elif origin or hint in OTHER_KINDS:
        yield from OTHER_KINDS.get(origin or hint, [object()])
    else:  # a part
        yield from (None, "nothing", hint)


def _iter_outside(kind: Any, bounds: Any) -> Iterator[Any]:
    """Values of a kind that are just beyond its bounds."""
    number, up, down = (int, 1, -1) if kind is int else (float, math.inf, -math.inf)
    for bound, towards in ((bounds.ge, down), (bounds.le, up)):
        if bound is not None:
            yield bound + towards if number is int else math.nextafter(bound, towards)
    yield from (number(bound) for bound in (bounds.gt, bounds.lt) if bound is not None)
    if bounds.min_length is not None:
        yield "" if kind is str else ()


def wrong_texts(hint: Any) -> Iterator[str]:
    """Texts that are no value of a field, if there are any, and those of numbers next to its bounds."""
    kinds = [typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind for kind in list_types(hint)]
    if str not in kinds:
        yield from ("nothing", "", "[1,nothing]")
    if int in kinds or float in kinds:
        yield from (str(value) for value in wrong_values(hint) if type(value) in (int, float))


def other_value(value: Any, hint: Any) -> Any:
    """A valid value of a field that is not the given one."""
    kinds = [typing.get_origin(kind) or kind for kind in (hint, *typing.get_args(hint))]
    if typing.get_origin(hint) is Literal:
        return next(option for option in typing.get_args(hint) if option != value)
    if isinstance(value, bool):
        return not value
    if str in kinds:
        return "other"
    if tuple in kinds:
        return tuple(item / 2 for item in value or ()) or ((3,) if value == () else (0.5,))
    if value is None:
        return 1
    return value / 2 + 0.0625 if isinstance(value, float) else value * 2 or 1
