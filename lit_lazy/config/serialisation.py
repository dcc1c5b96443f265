"""Settings as plain dicts and back, and replacement of fields by dotted path; the content of a checkpoint's file.

A checkpoint is read without running code, and validated. Settings need no torch.
"""

import dataclasses
import functools
import importlib
import numbers
import pickle
import pkgutil
import sys
import typing
import warnings
import zipfile
from abc import ABC
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lit_lazy.support.checks import MOST, field_types, list_types
from lit_lazy.support.disk import open_file
from lit_lazy.support.errors import describe_exception, did_you_mean, is_larger_than, short_repr
from lit_lazy.support.stored_records import make_value, require_known_format

T = TypeVar("T")
CHECKPOINT_FORMAT = 1
"""Format of a checkpoint; raised when its content is laid out otherwise."""
MOST_ITEMS = 10**7
"""Numbers, characters and other items of a checkpoint beside the elements of its weights."""


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
            if not minimal or to_dict(part, hints[name]) != _make_default(cls, name)
        }
    kinds = list_types(annotation)
    if isinstance(value, tuple):
        item_kinds = [part for kind in kinds for part in typing.get_args(kind)[:1]]
        return [to_dict(item, next(iter(item_kinds), None), minimal=minimal) for item in value]
    # An int in a float field is the same setting and must give the same key.
    return float(value) if float in kinds and isinstance(value, numbers.Real) else value


@functools.cache
def _make_default(cls: type, name: str) -> Any:
    """The canonical form of a field's default. Cached: a grid compares hundreds of them per cell."""
    (field,) = (known for known in dataclasses.fields(cls) if known.name == name)
    return to_dict(get_default(field), field_types(cls)[name])


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


def shorten_paths(paths: Iterable[str]) -> dict[str, str]:
    """The shortest end of each dotted path that no other has; the path itself if all its ends are others' too."""
    ends = {path: [path.split(".", n)[-1] for n in reversed(range(path.count(".") + 1))] for path in paths}
    counts = Counter(end for found in ends.values() for end in found)
    return {path: next((end for end in found if counts[end] == 1), path) for path, found in ends.items()}


def replace_at(config: T, changes: Mapping[str, Any]) -> T:
    """A copy of a config with the fields at dotted paths replaced.

    All changes of one dataclass are applied together, so values that are valid only together pass its checks.
    """
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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Content of one of this project's checkpoints.

    Raises a one-line ValueError if the file is not one, NewerFormatError if a newer version wrote it.
    """
    import torch

    try:
        with open_file(path) as file:
            # torch does not verify the checksums that it wrote.
            archive = zipfile.ZipFile(file)
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise zipfile.BadZipFile("it is compressed, which torch does not do")  # could expand to any size
            if (part := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"bad checksum of {part}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about kinds of tensors that are refused below
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except pickle.UnpicklingError:
        raise ValueError("holds more than weights and numbers, so it is not loaded: it could run code") from None
    except Exception as error:  # other files raise almost anything
        raise ValueError(f"is no checkpoint, or damaged ({describe_exception(error)})") from None
    if is_larger_than(content, MOST_ITEMS):
        raise ValueError("is no checkpoint: by references to itself it stands for more than the file holds")
    if isinstance(content, dict):
        require_known_format(f"checkpoint {str(path)!r}", content, CHECKPOINT_FORMAT)
    if not _is_ours(content):
        raise ValueError("was not made by this project")
    return content


def _is_ours(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and isinstance(state := content.get("state_dict"), dict)
        and all(isinstance(name, str) and _is_plain(value) for name, value in state.items())
        and type(step := content.get("global_step")) is int
        and 0 <= step <= MOST
        and isinstance(content.get("callbacks", {}), dict)
        and isinstance(sources := content.get("sources", {}), dict)
        and isinstance(sources.get("code", {}), dict)
        and isinstance(settings := content.get("hyper_parameters"), dict)
        and settings.keys() == {"config", "vocab_size", "context_length"}
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor as this project writes it: dense, on the CPU, of real numbers."""
    import torch

    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_nested or value.is_quantized or value.is_complex())
        and value.nbytes <= value.untyped_storage().nbytes()
    )
