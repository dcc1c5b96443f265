"""The base of all settings: a value of the wrong type is an error that names its field."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Self

from lit_lazy.support.checks import check_fields
from lit_lazy.support.class_source import keep_file


class CheckedFields:
    """Base of frozen dataclasses: each field must fit its annotation, or a one-line ValueError names it.

    A subclass's own `__post_init__` runs after this check, and has only what an annotation cannot say.
    prefix: what precedes a field's name in messages; the class's name by default.
    """

    _prefix: str | None = None
    first_values: tuple[str, ...] = ()
    """Fields that only begin or guide a training: a trained model has values of its own."""

    def __new__(cls, *_: object, **__: object) -> Self:
        require_decorated(cls)
        return super().__new__(cls)

    def initial_values(self) -> tuple[str, ...]:
        """Those of the first values that are only initial values of parameters: loaded ones replace them."""
        return self.first_values

    def __init_subclass__(cls, prefix: str | None = None) -> None:
        super().__init_subclass__()
        keep_file(cls)
        if prefix is not None:
            cls._prefix = prefix
        if "__post_init__" in vars(cls):
            cls.__post_init__ = _check_first(cls.__post_init__)

    def __post_init__(self) -> None:
        cls = type(self)
        check_fields(f"{cls.__name__}." if cls._prefix is None else cls._prefix, self)


@functools.cache
def require_decorated(cls: type) -> None:
    """Raise a one-line ValueError if a class of settings has values that are no fields, and so no part of its key."""
    # What a dataclass adds comes from no file.
    if "__init__" in vars(cls) and cls.__init__.__code__.co_filename != "<string>":
        raise ValueError(
            f"{cls.__name__}: has an __init__ of its own, whose values are no fields; write @dataclass(frozen=True) "
            "above the class, and each value as `NAME: TYPE = VALUE` in it"
        )
    decorated = "__dataclass_fields__" in vars(cls)
    typed = {name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)}
    if not decorated and (typed or not dataclasses.is_dataclass(cls)):
        names = f", as its settings are no fields: {', '.join(sorted(typed))}" if typed else ""
        raise ValueError(f"{cls.__name__}: write @dataclass(frozen=True) above the class{names}")
    for name in (field.name for field in dataclasses.fields(cls)):
        # Slots are no defaults.
        if name in vars(cls) and name not in typed and not inspect.ismemberdescriptor(vars(cls)[name]):
            raise ValueError(f"{cls.__name__}.{name}: is a new default without a type; write `{name}: TYPE = VALUE`")


def _check_first(own: Callable[..., None]) -> Callable[..., None]:
    """A class's own check, after that of the annotations."""

    @functools.wraps(own)
    def check(self: CheckedFields) -> None:
        CheckedFields.__post_init__(self)
        own(self)

    return check


def list_changes(
    before: object, after: object, path: str
) -> Iterator[tuple[str, str, "CheckedFields", "CheckedFields"]]:
    """Each field in which two settings differ, at any depth where their classes are equal.

    Yields its dotted path, its name, and the settings it is part of, before and after.
    """
    if isinstance(before, CheckedFields) and isinstance(after, CheckedFields) and type(before) is type(after):
        for name in (field.name for field in dataclasses.fields(before)):  # type: ignore[arg-type]
            old, new, below = getattr(before, name), getattr(after, name), f"{path}.{name}"
            if old != new:
                yield below, name, before, after
            yield from list_changes(old, new, below)
