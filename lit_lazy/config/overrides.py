"""`--model.d_model=128`: command-line overrides of any field of a RunConfig, by jsonargparse."""

import dataclasses
import inspect
import typing
import warnings
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import find_leaf_classes, get_leaf_class
from lit_lazy.support.errors import did_you_mean
from lit_lazy.support.typecheck import describe_kind, field_types, is_exchangeable, is_group

set_parsing_settings(docstring_parse_attribute_docstrings=True)

LONGEST_VALUE = 4096
"""Characters: of a path."""
DEEPEST_VALUE = 20
"""Brackets of one kind in a value; the parser of values ends Python itself at some ten thousand."""


def apply_overrides(base: RunConfig, arguments: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """`base` with `--dotted.path=value` arguments applied, and the dotted paths they set.

    A part that can be exchanged takes a class name, and its fields after it:
    `--model.attention.normaliser=Elastic --model.attention.normaliser.tau_init=2`.
    Raises ValueError, in one line, for an unknown path or a value that does not fit.
    """
    if not arguments:
        return base, []
    given = _split_arguments(arguments)
    types = _collect_types(RunConfig, base, "", given)
    for path, text in given.items():
        _check_path(path, text, types)
    parser = _make_parser(base, given)
    try:
        made = _parse(parser, given, types)
    except (OverflowError, TypeError) as error:  # a number, or a kind, that a field's checks cannot take
        raise ValueError(f"{_format_arguments(given)}: {error}") from None
    except ArgumentError as error:
        for path, text in given.items():
            if not _is_accepted(parser, path, text, types):
                raise ValueError(f"--{path}={text!r}: must be {describe_kind(types[path])}") from None
        raise ValueError(_join_lines(str(error))) from None
    return RunConfig(**{field.name: made[field.name] for field in dataclasses.fields(RunConfig)}), list(given)


def _format_arguments(given: Mapping[str, str]) -> str:
    return " ".join(f"--{path}={text!r}" for path, text in given.items())


def _parse(parser: ArgumentParser, given: Mapping[str, str], types: Mapping[str, Any]) -> Any:
    # YAML's null is what jsonargparse knows; None is what this project's help says.
    none = {path for path, text in given.items() if text == "None" and type(None) in typing.get_args(types.get(path))}
    arguments = [f"--{path}={'null' if path in none else text}" for path, text in given.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parser.instantiate(parser.parse_args(arguments))


def _is_accepted(parser: ArgumentParser, path: str, text: str, types: Mapping[str, Any]) -> bool:
    try:
        _parse(parser, {path: text}, types)
    except ArgumentError:
        return False
    except ValueError:  # of the right type, and a value that another field's makes wrong
        return True
    return True


def _make_parser(base: RunConfig, given: Mapping[str, str]) -> ArgumentParser:
    """A parser of every field of a RunConfig, `base` giving the defaults.

    given: the text given for each dotted path.
    """
    parser = ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    hints = field_types(RunConfig)
    for name, default in _collect_defaults(base, "", given).items():
        parser.add_argument(f"--{name}", type=hints[name], default=default)
    return parser


def _split_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Dotted path -> the text given for it, by `--path=text` or `--path text`."""
    given: dict[str, str] = {}
    left = list(arguments)
    while left:
        path, equals, text = left.pop(0).partition("=")
        if not path.startswith("--"):
            raise ValueError(f"unknown argument {path + equals + text!r}; a field is set by --FIELD=VALUE")
        if not equals:
            if not left or left[0].startswith("--"):
                raise ValueError(f"{path}: has no value; give one as in {path}=VALUE")
            text = left.pop(0)
        if len(text) > LONGEST_VALUE or max(map(text.count, "[{(")) > DEEPEST_VALUE:
            raise ValueError(
                f"{path}={text!r}: must have at most {LONGEST_VALUE} characters, and {DEEPEST_VALUE} brackets of a kind"
            )
        if (name := path[2:]) in given:
            raise ValueError(f"{path}: is given twice, as {given[name]!r} and as {text!r}; leave one out")
        given[name] = text
    return given


def _collect_types(cls: type, config: Any, prefix: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Dotted path -> annotation of every field below a dataclass that is there with the classes that were given."""
    types: dict[str, Any] = {}
    hints = field_types(cls)
    for field in dataclasses.fields(cls):
        path, hint, value = f"{prefix}{field.name}", hints[field.name], getattr(config, field.name, None)
        types[path] = hint
        below = _find_chosen_class(hint, path, given) or type(value)
        if dataclasses.is_dataclass(below):
            types |= _collect_types(below, value, f"{path}.", given)
    return types


def _find_chosen_class(hint: Any, path: str, given: Mapping[str, str]) -> type | None:
    """The class that was given for an exchangeable part; None where none was, or for another field."""
    if path not in given or not is_exchangeable(hint):
        return None
    name = given[path].rpartition(".")[2]
    known = find_leaf_classes(hint)
    if name not in known:
        raise ValueError(
            f"--{path}={given[path]!r}: unknown{did_you_mean(name, known)}; there are {', '.join(sorted(known))}, and "
            "any custom class that the experiment's file defines or imports"
        )
    return known[name]


def _check_path(path: str, text: str, types: Mapping[str, Any]) -> None:
    """Raise ValueError unless a path leads to a field that can be set as a whole."""
    parent, _, name = path.rpartition(".")
    if name == "help" and is_exchangeable(types.get(parent)):
        get_leaf_class(types[parent], text.rpartition(".")[2])  # jsonargparse's own: prints the fields of a class
        return
    hint = types.get(path)
    if is_group(hint):
        some = next(known for known in types if known.startswith(f"{path}."))
        raise ValueError(f"--{path}={text!r}: its fields are set one by one, for example --{some}=VALUE")
    if hint is not None:
        return
    fix = did_you_mean(f"--{path}", [f"--{known}" for known, hint in types.items() if not is_group(hint)])
    if is_exchangeable(types.get(parent)):
        # Those that define it, not those derived from them.
        owners = [
            part for part, cls in find_leaf_classes(types[parent]).items() if name in inspect.get_annotations(cls)
        ]
        whose = " and ".join(f"{owner}'s" for owner in owners)
        fix = f"; it is {whose}: add --{parent}={owners[0]}" if owners else fix
    raise ValueError(
        f"--{path}={text!r}: no such field{fix}; `lit-lazy fields EXPERIMENT` lists all, --help what else there is"
    )


def _collect_defaults(config: Any, prefix: str, given: Mapping[str, str]) -> dict[str, Any]:
    """A dataclass's fields in jsonargparse's form: an exchangeable part with the path of its class."""
    hints = field_types(type(config))
    return {
        field.name: _convert_default(getattr(config, field.name), hints[field.name], f"{prefix}{field.name}", given)
        for field in dataclasses.fields(config)
    }


def _convert_default(value: Any, annotation: Any, path: str, given: Mapping[str, str]) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    fields = _collect_defaults(value, f"{path}.", given)
    if not isinstance(value, ABC):
        return fields
    cls = type(value)
    chosen = _find_chosen_class(annotation, path, given)
    if chosen is not None and chosen is not cls:
        # Another leaf starts from its own defaults; jsonargparse would keep the old leaf's fields of the same name.
        cls, fields = chosen, {}
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": fields}


def _join_lines(message: str) -> str:
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    return ": ".join(line.rstrip(":") for line in lines)
