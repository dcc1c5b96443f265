"""Files of JSON that the project writes: an older format is read, a newer one left as it is, and damage is named."""

import dataclasses
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lit_lazy.support.checked_fields import check_fields, field_types, is_part, item_types, list_types
from lit_lazy.support.error_messages import UnfinishedError, describe_exception

T = TypeVar("T")


class NewerFormatError(UnfinishedError):
    """A file was written by a newer version. Nothing is wrong with it, so it is no ValueError."""


def parse_json(text: str | bytes) -> Any:
    """The content of a file of JSON. Raises ValueError for what JSON or UTF-8 cannot hold, and for very deep nesting.

    Python's own parser takes NaN, Infinity and half a surrogate pair, which fail where they are printed or stored.
    """

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    try:
        content = json.loads(text, parse_constant=refuse)
        json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("is nested too deep") from None
    return content


def require_known_format(file: str, content: Mapping[str, Any], newest: int) -> None:
    """Raises NewerFormatError if a file's content has a `format` above the newest that this version reads.

    Files without one were written before formats were numbered; they have format 1.
    """
    found = content.get("format", 1)
    if isinstance(found, int) and found > newest:
        formats = f"format {found}, this version reads up to {newest}"
        problem = f"was written by a newer version of lit-lazy ({formats})"
        raise NewerFormatError(f"{file}: {problem}; update lit-lazy; the file is left as it is")


def parse_record(text: str | bytes, file: str, kind: str, newest: int, make: Callable[[Any], T]) -> T:
    """What `make` makes of a file's content. file, kind: name and kind of the file, for messages.

    Raises a one-line ValueError, `no KIND (why)`, if the text is none, NewerFormatError if a newer version wrote it.
    """
    try:
        content = parse_json(text)
        require_known_format(file, content, newest)
        return make(content)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"no {kind} ({describe_exception(error)})") from None


def make_record(kind: type[T], values: Mapping[str, Any], **changes: Any) -> T:
    """A dataclass from JSON's values: dataclasses for its dicts, tuples for its lists. Other versions' fields are left.

    changes: fields that come from elsewhere. Raises ValueError or TypeError for missing values and for other types.
    """
    hints = field_types(kind)
    fields = [field for field in dataclasses.fields(kind) if field.name not in changes]  # type: ignore[arg-type]
    names = [field.name for field in fields if field.name in values]
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    if lacking := [name for name in required if name not in values]:
        raise ValueError(f"lacks {', '.join(lacking)}")
    given = {name: make_value(values[name], hints[name], make_record) for name in names}
    made = kind(**given, **changes)
    check_fields(f"{kind.__name__}: ", made)
    return made


def make_value(value: Any, hint: Any, make: Callable[[Any, Mapping[str, Any]], Any]) -> Any:
    """A value of JSON as one of an annotation. make: makes a dataclass from its values."""
    hint = next((kind for kind in list_types(hint) if kind is not type(None)), hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(
            make_value(item, part, make) for item, part in zip(value, item_types(parts, len(value)), strict=True)
        )
    if not isinstance(value, Mapping):
        return value
    if origin in (Mapping, dict):
        return {name: make_value(item, parts[1], make) for name, item in value.items()}
    return make(hint, value) if is_part(hint) else value
