"""`--model.d_model=128`: command-line overrides of any field of a RunConfig."""

import ast
import dataclasses
import difflib
import inspect
import json
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from lit_lazy.config.field_docs import format_class
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import find_leaf_classes, get_leaf_class, replace_at
from lit_lazy.support.checked_fields import require_decorated
from lit_lazy.support.errors import did_you_mean, one_line
from lit_lazy.support.typecheck import describe_kind, field_types, fits, is_exchangeable, is_group

LONGEST_VALUE = 4096
"""Characters, as for a path."""
DEEPEST_VALUE = 20
"""Upper bound on brackets of one kind in a value; the JSON parser fails at a few thousand."""
NONE = ("None", "null", "Null", "NULL", "~")
SYNONYMS = {"learning_rate": "lr", "epochs": "steps", "layers": "n_layers", "heads": "n_heads"}
"""Names that others give a field -> its name here."""
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class _Field(NamedTuple):
    hint: Any
    value: Any
    """None below a part that changes its class."""
    chosen: type | None
    """The class that the command line names for an exchangeable part."""


def apply_overrides(base: RunConfig, arguments: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """`base` with `--dotted.path=value` arguments applied, and the dotted paths they set.

    An exchangeable part takes a class name, and the fields of that class:
    `--model.attention.normaliser=Elastic --model.attention.normaliser.tau_init=2`.
    Raises a one-line ValueError for an unknown path or an invalid value.
    """
    texts = _split_arguments(arguments)
    fields = _collect_fields(RunConfig, base, "", texts)
    for path, text in texts.items():
        _check_path(path, text, fields)
    values = {path: _parse_field(path, text, fields[path]) for path, text in texts.items()}
    for path in sorted(texts, key=len, reverse=True):  # a part's own parts before the part
        _, value, chosen = fields[path]
        if chosen is None:
            continue
        del values[path]
        if chosen is not type(value):  # naming the current class changes nothing
            given = {f.name: values.pop(p) for f in dataclasses.fields(chosen) if (p := f"{path}.{f.name}") in values}
            try:
                values[path] = chosen(**given)
            except (TypeError, OverflowError) as error:
                raise ValueError(f"--{path}={texts[path]!r}: {error}") from None
    try:
        return replace_at(base, values), list(texts)
    except ValueError as error:
        raise ValueError(f"{error}{_name_the_other(str(error), texts, fields)}") from None


def _name_the_other(message: str, given: Mapping[str, str], fields: Mapping[str, _Field]) -> str:
    """The fix where a value of the base, which nobody gave, does not fit the given ones."""
    path = message.partition("=")[0]
    return f"; give --{path} too" if path in fields and path not in given else ""


def _split_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Dotted path -> text of its value, from `--path=text` or `--path text`."""
    texts: dict[str, str] = {}
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
                f"{path}={text!r}: at most {LONGEST_VALUE} characters and {DEEPEST_VALUE} brackets of each kind"
            )
        if (name := path[2:]) in texts:
            raise ValueError(f"{path}: is given twice, as {texts[name]!r} and as {text!r}; leave one out")
        texts[name] = text
    return texts


def _collect_fields(cls: Any, config: Any, prefix: str, texts: Mapping[str, str]) -> dict[str, _Field]:
    """Every field below a dataclass by dotted path, with the classes that `texts` choose."""
    found: dict[str, _Field] = {}
    for name in (field.name for field in dataclasses.fields(cls)):
        path, hint, value = f"{prefix}{name}", field_types(cls)[name], getattr(config, name, None)
        chosen = _find_chosen_class(path, texts[path], hint) if path in texts and is_exchangeable(hint) else None
        found[path] = _Field(hint, value, chosen)
        below = chosen or type(value)
        if dataclasses.is_dataclass(below):
            found |= _collect_fields(below, value if below is type(value) else None, f"{path}.", texts)
    return found


def _find_chosen_class(path: str, text: str, hint: Any) -> type:
    name, known = text.rpartition(".")[2], find_leaf_classes(hint)
    if name not in known:
        raise ValueError(
            f"--{path}={text!r}: unknown{did_you_mean(name, known)}; there are {', '.join(sorted(known))}, and any "
            "custom class that the experiment's file defines or imports"
        )
    chosen = get_leaf_class(hint, name)
    require_decorated(chosen)
    return chosen


def _check_path(path: str, text: str, fields: Mapping[str, _Field]) -> None:
    """Raise ValueError unless a path names a field that takes a value; for `PART.help=CLASS`, print help and exit."""
    parent, _, name = path.rpartition(".")
    part: Any = fields[parent].hint if parent in fields else None
    if name == "help" and is_exchangeable(part):
        print("\n".join(format_class(parent, get_leaf_class(part, text.rpartition(".")[2]))))
        raise SystemExit(0)
    if path in fields:
        if is_group(fields[path].hint):
            some = next(known for known in fields if known.startswith(f"{path}."))
            raise ValueError(f"--{path}={text!r}: its fields are set one by one, for example --{some}=VALUE")
        return
    if not is_exchangeable(part):
        fix = _guess_path(path, [known for known, field in fields.items() if not is_group(field.hint)])
    else:
        cls: Any = fields[parent].chosen or type(fields[parent].value)
        own = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        # The classes that define the field, without those that inherit it.
        owners = [owner for owner, leaf in find_leaf_classes(part).items() if name in inspect.get_annotations(leaf)]
        whose = " and ".join(f"{owner}'s" for owner in owners)
        fix = f"; it is {whose}: give --{parent}={owners[0]}" if owners else did_you_mean(name, own)
        fix += f"; {cls.__name__} has {', '.join(own) or 'no fields'}" if cls is not type(None) else ""
    raise ValueError(
        f"--{path}={text!r}: no such field{fix}; `lit-lazy fields EXPERIMENT` lists the fields, --help the options"
    )


def _guess_path(path: str, known: Sequence[str]) -> str:
    """` (did you mean ...?)` with a known path that ends in this name, begins like it, or is most similar; or ""."""
    name = path.rpartition(".")[2]
    name = SYNONYMS.get(name, name)
    by_name = {one.rpartition(".")[2]: one for one in sorted(known, key=len, reverse=True)}  # the shortest stays
    begun = [other for other in by_name if other.startswith(f"{name}_")]
    nearly = [name] * (name in by_name) or difflib.get_close_matches(name, by_name, n=1, cutoff=0.75) or begun[-1:]
    return (
        f" (did you mean --{by_name[nearly[0]]}?)" if nearly else did_you_mean(f"--{path}", map("--{}".format, known))
    )


def _parse_field(path: str, text: str, field: _Field) -> Any:
    if typing.get_origin(field.hint) is tuple and is_exchangeable(base := typing.get_args(field.hint)[0]):
        return _parse_parts(path, text, base)
    try:
        return field.chosen or _parse_value(text, field.hint)
    except (KeyError, ValueError):
        raise ValueError(f"--{path}={text!r}: must be {describe_kind(field.hint)}") from None


def _parse_parts(path: str, text: str, base: type) -> tuple[Any, ...]:
    """Parts of a base from calls of their classes, such as `Passkey(lengths=(512, 1024)), Int8()`."""
    try:
        tree = ast.parse(text.strip() or "()", mode="eval").body
        calls = tree.elts if isinstance(tree, ast.Tuple | ast.List) else [tree]
        parts = []
        for call in calls:
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                get_leaf_class(base, ast.unparse(call))  # a misspelt name is told first
                raise ValueError(f"write {ast.unparse(call)}(), with settings in the brackets, as in NAME(FIELD=VALUE)")
            arguments = map(_read_literal, call.args)
            settings = {str(keyword.arg): _read_literal(keyword.value) for keyword in call.keywords}
            parts.append(get_leaf_class(base, call.func.id)(*arguments, **settings))
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"--{path}={text!r}: {one_line(error)}") from None
    return tuple(parts)


def _read_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is no plain value; give numbers, texts or tuples of them") from None


def _parse_value(text: str, hint: Any) -> Any:
    """Parse a text as a value of an annotation. Raises ValueError or KeyError if that fails."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if type(None) in parts and text in NONE:
            return None
        for part in parts:
            with suppress(KeyError, ValueError):
                return _parse_value(text, part)
    if origin is Literal:
        return {str(part): part for part in parts}[text]
    if origin is tuple and text[:1] + text[-1:] in ("[]", "()"):
        inner = text[1:-1].strip(" ,")
        items = [item.strip(" '\"") for item in inner.split(",")] if inner else []
        kinds = parts[:1] * len(items) if parts[1:] == (Ellipsis,) else parts
        return tuple(_parse_value(item, kind) for item, kind in zip(items, kinds, strict=True))
    if hint is bool:
        return BOOLEANS[text.lower()]
    value = hint(text) if hint in (int, float, str) else json.loads(text)
    if hint is not int and not fits(value, hint):  # RunConfig reports an int beyond 64 bits
        raise ValueError(text)
    return value
