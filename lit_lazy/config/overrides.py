"""Fields of a RunConfig on the command line: overrides, such as `--model.d_model=128`, and what `fields` lists.

Needs no torch, which takes seconds, until a config is there.
"""

import ast
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lit_lazy.config.serialisation import find_leaf_classes, flatten, get_default, get_leaf_class, to_dict
from lit_lazy.support.checked_fields import (
    describe_kind,
    field_types,
    is_exchangeable,
    is_group,
    parse,
    require_decorated,
)
from lit_lazy.support.error_messages import did_you_mean, one_line

if TYPE_CHECKING:
    from lit_lazy.config.schema import RunConfig

WIDTH = 110
"""Characters per line."""


def list_fields(config: "RunConfig", others: bool = False) -> list[str]:
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


SYNONYMS = {"learning_rate": "lr", "epochs": "steps", "layers": "n_layers", "heads": "n_heads"}
"""Names that others give a field -> its name here."""
GROUPS = {
    "": ("config/schema.py", "RunConfig"),
    "model.": ("config/schema.py", "ModelConfig"),
    "model.attention.": ("attention/layer.py", "AttentionSpec"),
    "train.": ("config/schema.py", "TrainConfig"),
}
"""Prefix of the fields that every config has -> file and class that define them."""


def check_field_names(arguments: Sequence[str], options: Iterable[str] = ()) -> None:
    """Raise a one-line ValueError for what is nearly a field that every config has, or an option. Needs no torch.

    options: those of the command, as `--name`. `apply_overrides` says the same of fields, and checks all others.
    """
    known = list(_iter_common_fields()) if arguments else []
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        path, equals, text = word.removeprefix("--").partition("=")
        is_part = any(f"{path}.".startswith(f"{field}.") for field in known)  # or is it, or below one
        if not word.startswith("--") or is_part or f"{path}." in GROUPS:
            continue
        guess = _guess_path(path, known)
        option = difflib.get_close_matches(f"--{path.rpartition('.')[2]}", options, n=1, cutoff=0.8)
        if option and not (guess and "." in path):
            raise ValueError(f"--{path}: no such option or field (did you mean {option[0]}?); {LISTING}")
        if guess:
            raise _unknown_field(path, text if equals else following, guess)


def _iter_common_fields() -> Iterator[str]:
    for prefix, (file, name) in GROUPS.items():
        module = ast.parse((Path(__file__).parents[1] / file).read_text(encoding="utf-8"))
        (cls,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
        paths = [f"{prefix}{ast.unparse(node.target)}" for node in cls.body if isinstance(node, ast.AnnAssign)]
        yield from (path for path in paths if f"{path}." not in GROUPS)


def apply_overrides(base: "RunConfig", arguments: Sequence[str]) -> tuple["RunConfig", list[str]]:
    """`base` with `--dotted.path=value` arguments applied, and the dotted paths they set.

    An exchangeable part takes a class name, and the fields of that class:
    `--model.attention.normaliser=Elastic --model.attention.normaliser.tau_init=2`.
    Raises a one-line ValueError for an unknown path or an invalid value.
    """
    texts = _split_arguments(arguments)
    known = list(flatten(to_dict(base)))
    try:
        return _change(type(base), base, "", texts, known), list(texts)
    except ValueError as error:
        path = str(error).partition("=")[0]  # of a value of the base, which does not fit the given ones
        raise ValueError(f"{error}{f'; give --{path} too' if path in known and path not in texts else ''}") from None


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
        if (name := path[2:]) in texts:
            raise ValueError(f"{path}: is given twice, as {texts[name]!r} and as {text!r}; leave one out")
        texts[name] = text
    return texts


def _change(cls: Any, value: Any, prefix: str, texts: Mapping[str, str], known: Sequence[str]) -> Any:
    """A dataclass with the texts of its fields, and of theirs, applied; a new one with its defaults if value is None.

    texts: by path below prefix. known: paths of the base, to guess misspelt ones.
    """
    changes: dict[str, Any] = {}
    hints: Mapping[str, Any] = field_types(cls)
    defaults = {field.name: get_default(field) for field in dataclasses.fields(cls)}
    for name in dict.fromkeys(path.partition(".")[0] for path in texts):
        path, text = f"{prefix}{name}", texts.get(name)
        below = {rest.removeprefix(f"{name}."): given for rest, given in texts.items() if rest.startswith(f"{name}.")}
        hint, current = hints.get(name), getattr(value, name, defaults.get(name))
        if is_exchangeable(hint):
            changes[name] = _change_part(hint, current, path, text, below, known)
        elif is_group(hint) and text is None:
            changes[name] = _change(type(current), current, f"{path}.", below, known)
        elif name not in defaults or below:
            rest, given = next((rest, given) for rest, given in texts.items() if rest.partition(".")[0] == name)
            whole = f"{prefix}{rest}"
            guess = _guess_path(whole, known) or did_you_mean(f"--{whole}", map("--{}".format, known))
            raise _unknown_field(whole, given, guess)
        elif is_group(hint):
            some = next(other for other in known if other.startswith(f"{path}."))
            raise ValueError(f"--{path}={text!r}: its fields are set one by one, for example --{some}=VALUE")
        else:
            part = next(iter(get_args(hint)), None)  # of a tuple of parts
            try:
                exchangeable = is_exchangeable(part)
                changes[name] = _parse_parts(text or "", part) if exchangeable else parse(text or "", hint)
            except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:  # the last two: nested
                raise ValueError(f"--{path}={text or ''!r}: {one_line(error)}") from None
    try:
        return cls(**changes) if value is None else dataclasses.replace(value, **changes)
    except (TypeError, OverflowError) as error:  # a value that the checks of a custom class cannot handle
        raise ValueError(f"--{prefix.removesuffix('.')}: {error}") from None


def _change_part(
    base: Any, current: Any, path: str, text: str | None, below: Mapping[str, str], known: Sequence[str]
) -> Any:
    """An exchangeable part: of the class that a text names, or the current one, with the fields below changed."""
    if "help" in below:
        print("\n".join(format_class(path, get_leaf_class(base, below["help"].rpartition(".")[2]))))
        raise SystemExit(0)
    cls, leaves = type(current), find_leaf_classes(base)
    if text is not None:
        if (name := text.rpartition(".")[2]) not in leaves:
            there = ", ".join(sorted(leaves))
            raise ValueError(
                f"--{path}={text!r}: unknown{did_you_mean(name, leaves)}; there are {there}, and any custom class that "
                "the experiment's file defines or imports"
            )
        require_decorated(cls := get_leaf_class(base, name))
    own = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    for rest, given in below.items():
        if (name := rest.partition(".")[0]) not in own:
            # The classes that define the field, without those that inherit it.
            owners = [owner for owner, leaf in leaves.items() if name in inspect.get_annotations(leaf)]
            whose = " and ".join(f"{owner}'s" for owner in owners)
            fix = f"; it is {whose}: give --{path}={owners[0]}" if owners else did_you_mean(name, own)
            fix += f"; {cls.__name__} has {', '.join(own) or 'no fields'}"
            raise _unknown_field(f"{path}.{rest}", given, fix)
    return _change(cls, current if type(current) is cls else None, f"{path}.", below, known)


LISTING = "`lit-lazy fields EXPERIMENT` lists the fields, --help the options"


def _unknown_field(path: str, text: str, fix: str) -> ValueError:
    return ValueError(f"--{path}={text!r}: no such field{fix}; {LISTING}")


def _guess_path(path: str, known: Sequence[str]) -> str:
    """` (did you mean ...?)` with a known path that ends in this name, nearly so, or begins like it; or ""."""
    name = path.rpartition(".")[2]
    name = SYNONYMS.get(name, name)
    by_name = {one.rpartition(".")[2]: one for one in sorted(known, key=len, reverse=True)}  # the shortest stays
    begun = [other for other in by_name if other.startswith(f"{name}_")]
    nearly = [name] * (name in by_name) or difflib.get_close_matches(name, by_name, n=1, cutoff=0.75) or begun[-1:]
    return f" (did you mean --{by_name[nearly[0]]}?)" if nearly else ""


def _parse_parts(text: str, base: Any) -> tuple[Any, ...]:
    """Parts of a base from calls of their classes, such as `Passkey(lengths=(512, 1024)), Int8()`."""
    tree = ast.parse(text.strip() or "()", mode="eval").body
    parts = []
    for call in tree.elts if isinstance(tree, ast.Tuple | ast.List) else [tree]:
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            get_leaf_class(base, ast.unparse(call))  # a misspelt name is told first
            raise ValueError(f"write {ast.unparse(call)}(), with settings in the brackets, as in NAME(FIELD=VALUE)")
        settings = {str(keyword.arg): _read_literal(keyword.value) for keyword in call.keywords}
        parts.append(get_leaf_class(base, call.func.id)(*map(_read_literal, call.args), **settings))
    return tuple(parts)


def _read_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is no plain value; give numbers, texts or tuples of them") from None
