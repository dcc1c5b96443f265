"""`--model.d_model=128`: command-line overrides of any field of a RunConfig, by jsonargparse."""

import dataclasses
import re
import typing
import warnings
from abc import ABC
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from docstring_parser import parse_from_object
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from lit_lazy.config import RunConfig, leaf

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def apply_overrides(base: RunConfig, arguments: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """`base` with `--dotted.path=value` arguments applied, and the dotted paths they set.

    A part that can be exchanged takes a class name, and its fields after it:
    `--model.attention.normaliser=Elastic --model.attention.normaliser.tau_init=2`.
    Raises ValueError, in one line, for an unknown path or a value that does not fit.
    """
    if not arguments:
        return base, []
    given = _given(arguments)
    parser = override_parser(base, given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # YAML's null is what jsonargparse knows; None is what this project's help says.
            parsed = parser.parse_args([re.sub(r"(^|=)None$", r"\1null", argument) for argument in arguments])
            made = parser.instantiate(parsed)
        values = {field.name: made[field.name] for field in dataclasses.fields(RunConfig)}
    except ArgumentError as error:
        raise ValueError(_one_line(str(error))) from None
    return RunConfig(**values), list(given)


def override_parser(base: RunConfig, given: Mapping[str, str] = MappingProxyType({})) -> ArgumentParser:
    """A parser of every field of a RunConfig, `base` giving the defaults; its help is the fields' docstrings.

    given: the text given for each dotted path, where arguments are to be parsed.
    """
    parser = ArgumentParser(
        exit_on_error=False,
        usage="--FIELD=VALUE overrides a field of the experiment",
        add_help=False,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(RunConfig)
    help_of = {field.arg_name: field.description for field in parse_from_object(RunConfig).params}
    for name, default in _defaults(base, "", given).items():
        parser.add_argument(f"--{name}", type=hints[name], default=default, help=help_of[name])
    return parser


def _given(arguments: Sequence[str]) -> dict[str, str]:
    """Dotted path -> the text given for it, by `--path=text` or `--path text`."""
    given: dict[str, str] = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument.startswith("--"):
            path, equals, text = argument[2:].partition("=")
            path = path.replace(".init_args.", ".")  # jsonargparse's longer way to name the same field
            given[path] = text if equals else following
    return given


def _defaults(config: Any, prefix: str, given: Mapping[str, str]) -> dict[str, Any]:
    """A dataclass's fields in jsonargparse's form: an exchangeable part with the path of its class."""
    hints = typing.get_type_hints(type(config))
    return {
        field.name: _default(getattr(config, field.name), hints[field.name], f"{prefix}{field.name}", given)
        for field in dataclasses.fields(config)
    }


def _default(value: Any, annotation: Any, path: str, given: Mapping[str, str]) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    fields = _defaults(value, f"{path}.", given)
    if not isinstance(value, ABC):
        return fields
    cls, name = type(value), given.get(path, "").rpartition(".")[2]
    if name.isidentifier() and leaf(annotation, name) is not cls:
        # Another leaf starts from its own defaults; jsonargparse would keep the old leaf's fields of the same name.
        cls, fields = leaf(annotation, name), {}
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": fields}


def _one_line(message: str) -> str:
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    return ": ".join(line.rstrip(":") for line in lines)
