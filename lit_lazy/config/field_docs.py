"""`lit-lazy fields`: descriptions of the fields that the command line can override."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from operator import attrgetter
from typing import Any

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import find_leaf_classes, get_default
from lit_lazy.support.checks import describe_kind, field_types, is_exchangeable, is_group

WIDTH = 110
"""Characters per line."""


def list_fields(config: RunConfig, others: bool = False) -> list[str]:
    """Lines: each field as an option with its value and meaning, then the class of each exchangeable part.

    others: then also the classes that the config does not use, with their defaults.
    """
    parts: dict[str, Any] = {}
    lines = [*_format_group(config, "", parts)]
    own = {path: attrgetter(path)(config) for path in parts}
    classes = [(path, type(part), part) for path, part in own.items() if part is not None]
    for path, hint in parts.items() if others else ():
        leaves = sorted(find_leaf_classes(hint).items())
        classes += [(path, cls, None) for _, cls in leaves if cls is not type(own[path])]
    for described in classes:
        lines += ["", *format_class(*described)]
    return lines


def _format_group(config: Any, prefix: str, parts: dict[str, Any]) -> Iterator[str]:
    """Fields, those of groups last. parts: receives the annotation of each exchangeable part by path."""
    hints, values = field_types(type(config)), {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    groups = [name for name in values if is_group(hints[name])]
    parts |= {f"{prefix}{name}": hints[name] for name in values if is_exchangeable(hints[name])}
    yield from _format_fields(
        type(config), prefix, {name: value for name, value in values.items() if name not in groups}
    )
    for name in groups:
        yield from ("", _get_summary(type(values[name])))
        yield from _format_group(values[name], f"{prefix}{name}.", parts)


def format_class(path: str, cls: type, current: Any = None) -> Iterator[str]:
    """A class of an exchangeable part and its fields, with the values in `current` if it is of this class."""
    yield f"--{path}={cls.__name__}"
    if summary := _get_summary(cls):
        yield _indent(summary)
    values = {
        f.name: getattr(current, f.name) if type(current) is cls else get_default(f) for f in dataclasses.fields(cls)
    }
    yield from _format_fields(cls, f"{path}.", values)


def _format_fields(cls: type, prefix: str, values: Mapping[str, Any]) -> Iterator[str]:
    hints, meanings = field_types(cls), _collect_field_docs(cls)
    for name, value in values.items():
        hint = hints[name]
        kind = f"one of {', '.join(sorted(find_leaf_classes(hint)))}" if is_exchangeable(hint) else describe_kind(hint)
        yield f"  --{prefix}{name}={_format_value(value)}"
        yield _indent(f"{meanings.get(name, '')} ({kind})".strip())


def _format_value(value: Any) -> str:
    """A value as it is given on the command line."""
    if value is dataclasses.MISSING:
        return "VALUE"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(_format_value, value))}]"
    return type(value).__name__ if dataclasses.is_dataclass(value) else str(value)


def _collect_field_docs(cls: type) -> dict[str, str]:
    """Field -> its docstring, including inherited fields."""
    found: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (TypeError, OSError, SyntaxError):  # a class without a source file, or whose file is being edited
            continue
        for pair in pairwise(getattr(definition, "body", ())):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found


def _get_summary(cls: type) -> str:
    """The first paragraph of a class's docstring; "" if dataclasses generated it."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split("\n\n")[0].split())


def _indent(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
