"""`--model.d_model=128`: command-line overrides of any field of a RunConfig, by jsonargparse."""

import dataclasses
import typing
import warnings
from abc import ABC
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from lit_lazy.config import RunConfig

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def apply_overrides(base: RunConfig, arguments: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """`base` with `--dotted.path=value` arguments applied, and the dotted paths they set.

    A part that can be exchanged takes a class name, and its fields after it:
    `--model.attention.normaliser=Elastic --model.attention.normaliser.tau_init=2`.
    Raises ValueError, in one line, for an unknown path or a value that does not fit.
    """
    if not arguments:
        return base, []
    parser = override_parser(base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse_args(list(arguments))
            made = parser.instantiate(parsed)
        values = {field.name: made[field.name] for field in dataclasses.fields(RunConfig)}
    except ArgumentError as error:
        raise ValueError(_one_line(str(error))) from None
    return RunConfig(**values), [argument.lstrip("-").partition("=")[0] for argument in arguments if argument[0] == "-"]


def override_parser(base: RunConfig) -> ArgumentParser:
    """A parser of every field of a RunConfig, `base` giving the defaults; its help is the fields' docstrings."""
    parser = ArgumentParser(
        exit_on_error=False, usage="--FIELD=VALUE overrides a field of the experiment", add_help=False
    )
    hints = typing.get_type_hints(RunConfig)
    for field in dataclasses.fields(RunConfig):
        parser.add_argument(f"--{field.name}", type=hints[field.name], default=_default(getattr(base, field.name)))
    return parser


def _default(value: Any) -> Any:
    """A default in jsonargparse's form: an exchangeable part with the path of its class."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = {field.name: _default(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, ABC):
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": fields}
    return fields


def _one_line(message: str) -> str:
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    return ": ".join(line.rstrip(":") for line in lines)
