"""The users' classes in a config: which they are, their code, and the files that define them."""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_lazy.support.imported_code import locate, read_code, require_unedited


def hash_user_code(config: Any) -> list[str]:
    """A hash of the code of each custom class in a config."""
    return sorted({digest for _, digest in iter_user_classes(config)})


def iter_user_classes(config: Any) -> Iterator[tuple[str, str]]:
    """Name of each custom class in a config, and 16 hex digits of its code when it was imported."""
    for cls in _find_user_classes(config):
        yield cls.__name__, hashlib.sha256(read_code(cls).encode()).hexdigest()[:16]


def list_user_files(config: Any) -> list[Path]:
    """The files that define the custom classes in a config, without the script that this process runs."""
    return sorted({locate(cls)[0] for cls in _find_user_classes(config) if cls.__module__ != "__main__"})


def require_unedited_code(config: Any) -> None:
    """Raise a one-line ValueError if a custom class's file was edited since its import: the user means the new code."""
    for cls in _find_user_classes(config):
        require_unedited(*locate(cls))


def _find_user_classes(config: Any) -> list[type]:
    return [cls for cls in iter_classes(config) if is_users(cls)]


def has_user_classes(*configs: Any) -> bool:
    """Whether a custom class is in any of the configs."""
    return any(map(_find_user_classes, configs))


def is_users(cls: type) -> bool:
    """Whether a class is none of this project."""
    return cls.__module__.partition(".")[0] != __name__.partition(".")[0]


def iter_classes(config: Any) -> Iterator[type]:
    """The classes of a config and of all its parts, at any depth."""
    if dataclasses.is_dataclass(config):
        yield type(config)
        config = tuple(getattr(config, field.name) for field in dataclasses.fields(config))
    for part in config if isinstance(config, tuple) else ():
        yield from iter_classes(part)
