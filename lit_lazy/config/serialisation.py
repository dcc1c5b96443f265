"""Conversion of settings to plain dicts and back, and replacement of fields by dotted path."""

import dataclasses
import functools
import importlib
import itertools
import json
import numbers
import pkgutil
import sys
import typing
from abc import ABC
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from lit_lazy.support.checked_fields import check_value, field_types, item_types, list_types
from lit_lazy.support.error_messages import did_you_mean, explain, short_repr
from lit_lazy.support.stored_records import make_value

T = TypeVar("T")


class UnknownClassError(ValueError):
    """A part's class is not known. needs: what is missing, for messages that need not list the known ones."""

    def __init__(self, base: type, name: str | None, known: Iterable[str]) -> None:
        super().__init__(
            f"{base.__name__}={name!r}: unknown{did_you_mean(str(name), known)}; known are {', '.join(sorted(known))}. "
            "A custom class is known once the file that defines it has been imported"
        )
        self.needs = f"needs the class {name}, which is not imported" if name else f"names no class of {base.__name__}"


def to_dict(value: Any, annotation: Any = None, *, minimal: bool = False) -> Any:
    """The canonical plain form: dataclasses as dicts, exchangeable parts (ABCs' subclasses) with their class name.

    minimal: without the fields at their default.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls, hints = type(value), field_types(type(value))
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        entry = {"class": cls.__name__} if isinstance(value, ABC) else {}
        return entry | {
            name: to_dict(part, hints[name], minimal=minimal)
            for name, part in values.items()
            if not minimal or json.dumps(to_dict(part, hints[name])) != _make_default(cls, name)
        }
    kinds = list_types(annotation)
    if isinstance(value, tuple):
        of = next((item_types(typing.get_args(kind), len(value)) for kind in kinds if typing.get_args(kind)), ())
        return [to_dict(item, hint, minimal=minimal) for item, hint in itertools.zip_longest(value, of[: len(value)])]
    # An int in a float field is the same setting and must give the same key.
    is_float = float in kinds and type(value) not in kinds and isinstance(value, numbers.Real)
    return float(value) if is_float else value


@functools.cache
def _make_default(cls: type, name: str) -> str:
    """JSON of a field's default, in which 1, 1.0 and true differ. Cached: a grid compares hundreds of them per cell."""
    (field,) = (known for known in dataclasses.fields(cls) if known.name == name)
    default = to_dict(get_default(field), field_types(cls)[name])
    return "" if default is dataclasses.MISSING else json.dumps(default)


def get_default(field: "dataclasses.Field[Any]") -> Any:
    """A field's default; `dataclasses.MISSING`, which equals no value, if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def find_leaf_classes(base: type[T]) -> dict[str, type[T]]:
    """All concrete dataclasses under an abstract base, by class name; of one name, the newest of its file."""
    return {cls.__name__: cls for cls in sorted(_iter_leaf_classes(base), key=_is_current)}


def _iter_leaf_classes(base: type[T]) -> Iterator[type[T]]:
    _import_all_beside(base)
    for sub in base.__subclasses__():
        yield from _iter_leaf_classes(sub)
        if dataclasses.is_dataclass(sub) and ABC not in sub.__bases__:
            yield sub


def _is_current(cls: type) -> bool:
    """Whether a class is what its module has under its name, and not that of a former import."""
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


@functools.cache
def _import_all_beside(base: type) -> None:
    """Import every module of a base's package, so that subclasses in a new file are found without registration."""
    package = getattr(base, "LEAVES_IN", base.__module__.rpartition(".")[0])
    if package:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")


def get_leaf_class(base: type[T], name: str | None) -> type[T]:
    """The concrete dataclass of this name under an abstract base.

    Raises an error that lists the known ones, or the files of two of this name.
    """
    known = find_leaf_classes(base)
    if name not in known:
        raise UnknownClassError(base, name, known)
    modules = {cls.__module__ for cls in _iter_leaf_classes(base) if cls.__name__ == name and _is_current(cls)}
    places = sorted({getattr(sys.modules.get(module), "__file__", None) or module for module in modules})
    if len(places) > 1:
        problem = f"two classes have the name {name}, in {' and '.join(places)}"
        raise ValueError(f"{base.__name__}: {problem}; rename a custom one and restart Python")
    return known[name]


def from_dict(cls: Any, value: Any) -> Any:
    """The inverse of `to_dict` for the annotated type `cls`. Raises ValueError on unknown classes and fields."""
    return make_value(value, cls, _make_settings)


def require_restorable(settings: Any, cls: type) -> None:
    """Raise a one-line ValueError for a field that a file would give back as another value: models are made from files.

    cls: the annotated type of the settings, as for `from_dict`.
    """
    problem = f"{type(settings).__name__}: cannot be made from its fields"
    with explain(problem, "give each init=True and a type that its class takes", TypeError):
        read = from_dict(cls, json.loads(json.dumps(to_dict(settings), default=str, skipkeys=True)))
    for path, value, other in _iter_changed(settings, read, ""):
        fix = "use numbers, texts, tuples, or classes below an ABC, which are found by their names"
        raise ValueError(f"{path}={short_repr(value)}: would be read from a file as {short_repr(other)}; {fix}")


def _iter_changed(value: Any, read: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if dataclasses.is_dataclass(value) and type(value) is type(read):
        for name in (field.name for field in dataclasses.fields(value)):
            yield from _iter_changed(getattr(value, name), getattr(read, name), f"{type(value).__name__}.{name}")
    elif isinstance(value, list | tuple) and isinstance(read, list | tuple) and len(value) == len(read):
        for part, other in zip(value, read, strict=True):
            yield from _iter_changed(part, other, path)
    elif (type(value) is not type(read) and not isinstance(value, numbers.Real)) or value != read:
        yield path, value, read


def _make_settings(cls: Any, values: Mapping[str, Any]) -> Any:
    fields = dict(values)
    if issubclass(cls, ABC):
        cls = get_leaf_class(cls, fields.pop("class", None))
    hints = field_types(cls)
    if unknown := fields.keys() - hints:
        raise ValueError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
    return cls(**{name: from_dict(hints[name], item) for name, item in fields.items()})


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Scalars of a canonical dict by dotted path; a part's class name is stored under the part's path."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = prefix if name == "class" else f"{prefix}.{name}".lstrip(".")
        flat.update(flatten(value, path) if isinstance(value, Mapping) else {path: value})
    return flat


def shorten_paths(paths: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """The shortest end of each dotted path that no other has and that is not `taken`, or else the path itself."""
    ends = {path: [path.split(".", n)[-1] for n in reversed(range(path.count(".") + 1))] for path in paths}
    counts = Counter([*taken, *(end for found in ends.values() for end in found)])
    return {path: next((end for end in found if counts[end] == 1), path) for path, found in ends.items()}


def replace_at(config: T, changes: Mapping[str, Any]) -> T:
    """A copy of a config with the fields at dotted paths replaced.

    All changes of one dataclass are applied together, so values that are valid only together pass its checks.
    """
    check_value("changes", changes, Mapping[str, Any])
    here: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        known = [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
        if name not in known:
            there = f"{did_you_mean(name, known)}; it has {', '.join(known) or 'none'}"
            raise ValueError(f"{type(config).__name__} has no field {name!r}{there}")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            here[name] = value
    for name, inner in below.items():
        here[name] = replace_at(here.get(name, getattr(config, name)), inner)
    try:
        return dataclasses.replace(config, **here)  # type: ignore[type-var]
    except (TypeError, OverflowError) as error:  # a value that its checks cannot handle
        given = ", ".join(f"{name}={short_repr(value)}" for name, value in here.items())
        raise ValueError(f"{given}: {error}") from None
