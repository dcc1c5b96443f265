"""Checks of values against the annotations of their fields, and descriptions of annotations."""

import dataclasses
import functools
import math
import numbers
import types
import typing
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from lit_lazy.support.errors import short_repr

MOST = 2**63 - 1
"""Upper bound of whole numbers, as in tensors and databases."""
MOST_THREADS = 1024
"""Upper bound of CPU threads per process; torch crashes with tens of thousands."""
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    type(None): "None",
}


@functools.cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Field -> annotation of a dataclass. Cached: a grid calls this hundreds of times per cell."""
    return MappingProxyType(typing.get_type_hints(cls))


def check_kinds(what: str, settings: Any) -> None:
    """Raise a one-line ValueError if a dataclass field's value does not fit its annotation."""
    hints = field_types(type(settings))
    for name in (field.name for field in dataclasses.fields(settings)):
        value = getattr(settings, name)
        if not fits(value, hints[name]):
            raise ValueError(f"{what}: {name}={short_repr(value)}: must be {describe_kind(hints[name])}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value fits an annotation; always True for kinds of annotations that this project does not use."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        kinds = parts[:1] * len(value) if isinstance(value, tuple) and parts[1:] == (Ellipsis,) else parts
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin in (Mapping, dict):
        return isinstance(value, Mapping) and all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
    if origin is list:
        return isinstance(value, list) and all(fits(item, parts[0]) for item in value)
    if origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str)
    if origin is Callable:
        return callable(value)
    if hint is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and _is_finite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -MOST <= value <= MOST
    if hint in (bool, str, type(None)) or is_part(hint):
        return isinstance(value, hint)
    return True


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # of an int
        return False


def is_part(hint: Any) -> bool:
    """Whether a field holds a dataclass or an exchangeable part."""
    return dataclasses.is_dataclass(hint) or is_exchangeable(hint)


def is_exchangeable(hint: Any) -> bool:
    """Whether a field holds one of several classes: the concrete dataclasses under an abstract base."""
    return ABC in getattr(hint, "__mro__", ())  # issubclass would include int, which other ABCs register


def is_group(hint: Any) -> bool:
    """Whether a field's own fields are set one by one. A base of exchangeable parts may be a dataclass too."""
    return dataclasses.is_dataclass(hint) and not is_exchangeable(hint)


def describe_kind(hint: Any) -> str:
    """An annotation in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is tuple and parts[1:] == (Ellipsis,):
        example = {str: ", for example ('a','b')", int: ", for example (1,2)", float: ", for example (0.5,1.0)"}
        return f"a tuple, each item {describe_kind(parts[0])}{example.get(parts[0], '')}"
    if origin is tuple:
        return f"{len(parts)} numbers in brackets, for example [{','.join('0.5' for _ in parts)}]"
    if origin in (Mapping, dict):
        return f"a dict, each key {describe_kind(parts[0])}, each value {describe_kind(parts[1])}"
    if origin is Sequence:
        return "a list or tuple"
    if origin is Callable:
        return "a function"
    if parts:
        return " or ".join(describe_kind(part) for part in parts)
    return f"a {hint.__name__}" if isinstance(hint, type) else "anything"
