"""What a field takes: an annotation declares type, bounds and choices; values and texts are checked by it alone.

`CheckedFields` is the base of all settings.
"""

import dataclasses
import functools
import inspect
import json
import math
import operator
import types
import typing
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self

from lit_lazy.support.error_messages import short_repr
from lit_lazy.support.imported_code import keep_file

MOST = 2**63 - 1
"""Upper bound of whole numbers, as in tensors and databases."""
MOST_RATE, MOST_FACTOR = 1e20, 1e6
"""Largest learning rate, and largest factor on one, or weight decay: their product must be an fp32 number."""
KINDS: dict[Any, str] = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
KINDS[type(None)] = "None"
UNIONS = (types.UnionType, typing.Union)
EXAMPLES = {str: "('a','b')", int: "(1,2)", float: "(0.5,1.0)"}
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NONE = ("None", "null", "Null", "NULL", "~")
COMPARISONS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (operator.ge, "of at least {}"),
    "gt": (operator.gt, "above {}"),
    "le": (operator.le, "at most {}"),
    "lt": (operator.lt, "below {}"),
    "min_length": (lambda value, least: len(value) >= least, ", of length {} or more"),
}


class Bounds(NamedTuple):
    """In `Annotated[TYPE, Bounds(...)]`: limits of a number, or of a tuple's length, by annotated-types' names."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None

    def hold(self, value: Any) -> bool:
        """Whether a value of the type is within all bounds."""
        return all(COMPARISONS[name][0](value, bound) for name, bound in self._iter_set())

    def __str__(self) -> str:
        """In words, to follow those of the type."""
        texts = [COMPARISONS[name][1].format(x if isinstance(x, int) else f"{x:g}") for name, x in self._iter_set()]
        return " and ".join(texts)

    def _iter_set(self) -> list[tuple[str, float]]:
        return [(name, bound) for name, bound in self._asdict().items() if bound is not None]


NonNegativeInt, PositiveInt = Annotated[int, Bounds(ge=0)], Annotated[int, Bounds(ge=1)]
NonNegativeFloat, PositiveFloat = Annotated[float, Bounds(ge=0)], Annotated[float, Bounds(gt=0)]
NonEmptyText = Annotated[str, Bounds(min_length=1)]
Share = Annotated[float, Bounds(ge=0, le=1)]
BelowOne = Annotated[float, Bounds(ge=0, lt=1)]
Metric = Annotated[float, Bounds(ge=-1e150, le=1e150)]
"""Of a size whose square is a number."""
Threads = Annotated[int, Bounds(ge=1, le=1024)]
"""CPU threads of a process; torch crashes with tens of thousands."""


def require(holds: bool, field: str, value: object, fix: str) -> None:
    """Raise a one-line ValueError that names the field, its value and the fix, unless the condition holds."""
    if not holds:
        raise ValueError(f"{field}={short_repr(value)}: {fix}")


def check_fields(prefix: str, settings: Any) -> None:
    """Raise a one-line ValueError if a dataclass field's value does not fit its annotation, also not when made plain.

    prefix: what precedes the field's name in the message.
    """
    hints = field_types(type(settings))
    for name in (field.name for field in dataclasses.fields(settings)):
        value = getattr(settings, name)
        if (plain := check_value(f"{prefix}{name}", value, hints[name])) is not value:
            object.__setattr__(settings, name, plain)


def check_value(name: str, value: Any, hint: Any) -> Any:
    """The value, made plain if it must be to fit an annotation. Raises a one-line ValueError if it does not fit."""
    if fits(value, hint):
        return value
    if not fits(plain := make_plain(value), hint):
        require(False, name, value, _describe_need(value, hint))
    return plain


def make_plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's; lists, ranges, arrays and iterators as tuples; at any depth."""
    if isinstance(value, Mapping):
        return {name: make_plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list | range | Iterator):
        return tuple(map(make_plain, value))
    return make_plain(value.tolist()) if hasattr(value, "tolist") else value


@functools.cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Field -> annotation of a dataclass. Cached: a grid calls this hundreds of times per cell."""
    return MappingProxyType(typing.get_type_hints(cls, include_extras=True))


def list_types(hint: Any) -> list[Any]:
    """The types of a union, or the one of another annotation, without bounds."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return list_types(parts[0])
    return [kind for part in parts for kind in list_types(part)] if origin in UNIONS else [hint]


def item_types(parts: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    """The annotations of the n items of a tuple, from the arguments of its own."""
    return parts[:1] * n if parts[1:] == (Ellipsis,) else parts


def fits(value: Any, hint: Any) -> bool:
    """Whether a value fits an annotation; always True for kinds of annotations that this project does not use."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return fits(value, parts[0]) and all(bounds.hold(value) for bounds in parts[1:])
    if origin in UNIONS:
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        kinds = item_types(parts, len(value)) if isinstance(value, tuple) else ()
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
        with suppress(OverflowError):  # of an int
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return False
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -MOST <= value <= MOST
    return isinstance(value, hint) if isinstance(hint, type) and hint is not Any else True


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
    if hint in KINDS:
        return KINDS[hint]
    if origin is Annotated:
        return f"{describe_kind(parts[0])} {parts[1]}".replace(" ,", ",")
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is tuple and parts[1:] == (Ellipsis,):
        example = EXAMPLES.get(list_types(parts[0])[0])
        return f"a tuple, each item {describe_kind(parts[0])}{f', for example {example}' if example else ''}"
    if origin is tuple:
        example = ",".join("0.5" for _ in parts)
        return f"{len(parts)} items in brackets, each {describe_kind(parts[0])}, for example [{example}]"
    if origin in (Mapping, dict):
        return f"a dict, each key {describe_kind(parts[0])}, each value {describe_kind(parts[1])}"
    if origin is Sequence:
        return "a list or tuple"
    if origin is Callable:
        return "a function"
    if parts:
        return " or ".join(describe_kind(part) for part in parts)
    if hint is Any or not isinstance(hint, type):
        return "anything"
    return f"a{'n' * (hint.__name__[0] in 'AEIO')} {hint.__name__}"


def _describe_need(value: object, hint: Any) -> str:
    """What a value that does not fit must be, with an example of a part."""
    need = f"must be {describe_kind(hint)}"
    if is_exchangeable(hint):
        known = sorted(_iter_leaves(hint))
        given = value.__name__ if isinstance(value, type) else str(value)
        meant = [name for name in known if name.lower() == given.lower()]
        return f"{need}, such as {[*meant, *known, hint.__name__][0]}()"
    if is_part(hint):
        return f"{need}, such as {hint.__name__}()"
    return f"{need}, within 64 bits" if type(value) is int and abs(value) > MOST else need


def _iter_leaves(base: type) -> typing.Iterator[str]:
    """Names of the dataclasses under a base, of those that are imported."""
    for sub in base.__subclasses__():
        if dataclasses.is_dataclass(sub) and ABC not in sub.__bases__:
            yield sub.__name__
        yield from _iter_leaves(sub)


def parse(text: str, hint: Any) -> Any:
    """The value of an annotation that a text gives. Raises ValueError with what it must be."""
    value: object = text
    with suppress(KeyError, ValueError):
        if fits(value := _read(text, hint), hint):
            return value
    raise ValueError(_describe_need(value, hint))


def _read(text: str, hint: Any) -> Any:
    """A text as a value of the type of an annotation. Raises ValueError or KeyError if it is none."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _read(text, parts[0])
    if origin in UNIONS:
        for part in sorted(parts, key=lambda part: part is not type(None)):
            with suppress(ValueError):
                return parse(text, part)
        raise ValueError
    if origin is Literal:
        return {str(part): part for part in parts}[text]
    if origin is tuple and text[:1] + text[-1:] in ("[]", "()"):
        inner = text[1:-1].strip(" ,")
        items = [item.strip(" '\"") for item in inner.split(",")] if inner else []
        kinds = item_types(parts, len(items))
        return tuple(parse(item, kind) for item, kind in zip(items, kinds, strict=True))
    if hint is bool:
        return WORDS[text.lower()]
    if hint is type(None):
        return None if text in NONE else text
    return hint(text) if hint in (int, float, str) else json.loads(text)


class CheckedFields:
    """Base of frozen dataclasses: each field must fit its annotation, or a one-line ValueError names it.

    A subclass's own `__post_init__` runs after this check, and has only what an annotation cannot say.
    prefix: what precedes a field's name in messages; the class's name by default.
    """

    _prefix: str | None = None
    first_values: tuple[str, ...] = ()
    """Fields that only begin or guide a training: a trained model has values of its own."""

    def __new__(cls, *_: object, **__: object) -> Self:
        require_decorated(cls)
        return super().__new__(cls)

    def __init_subclass__(cls, prefix: str | None = None) -> None:
        super().__init_subclass__()
        keep_file(cls)
        if prefix is not None:
            cls._prefix = prefix
        if (own := vars(cls).get("__post_init__")) is not None:

            @functools.wraps(own)
            def check(self: CheckedFields) -> None:  # the annotations, and then the class's own rules
                CheckedFields.__post_init__(self)
                own(self)

            cls.__post_init__ = check

    def __post_init__(self) -> None:
        cls = type(self)
        check_fields(f"{cls.__name__}." if cls._prefix is None else cls._prefix, self)


@functools.cache
def require_decorated(cls: type) -> None:
    """Raise a one-line ValueError if a class of settings has values that are no fields, and so no part of its key."""
    # What a dataclass adds comes from no file.
    if "__init__" in vars(cls) and cls.__init__.__code__.co_filename != "<string>":
        fix = "write @dataclass(frozen=True) above the class, and each value as `NAME: TYPE = VALUE` in it"
        raise ValueError(f"{cls.__name__}: has an __init__ of its own, whose values are no fields; {fix}")
    decorated = "__dataclass_fields__" in vars(cls)
    typed = {name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)}
    if not decorated and (typed or not dataclasses.is_dataclass(cls)):
        names = f", as its settings are no fields: {', '.join(sorted(typed))}" if typed else ""
        raise ValueError(f"{cls.__name__}: write @dataclass(frozen=True) above the class{names}")
    for name in (field.name for field in dataclasses.fields(cls)):
        # Slots are no defaults.
        if name in vars(cls) and name not in typed and not inspect.ismemberdescriptor(vars(cls)[name]):
            raise ValueError(f"{cls.__name__}.{name}: is a new default without a type; write `{name}: TYPE = VALUE`")


def list_changes(
    before: CheckedFields, after: CheckedFields, path: str
) -> Iterator[tuple[str, str, CheckedFields, CheckedFields]]:
    """Each field in which two settings of a class differ, at any depth where classes are equal.

    Yields its dotted path, its name, and the settings it is part of, before and after.
    """
    for name in (field.name for field in dataclasses.fields(before)):  # type: ignore[arg-type]
        old, new, below = getattr(before, name), getattr(after, name), f"{path}.{name}"
        if isinstance(old, CheckedFields) and type(old) is type(new):
            yield from list_changes(old, new, below)
        elif old != new:
            yield below, name, before, after
