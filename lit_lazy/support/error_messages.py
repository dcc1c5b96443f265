"""Errors of commands, in one line. Invalid input is a ValueError: exit status 2."""

import difflib
import itertools
import traceback
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lit_lazy.support.secrets import redact_text

LONGEST_MESSAGE = 1200
"""Characters of a message; a longer one loses its middle: the beginning names the value, the end the fix."""

MOST_SHOWN = 10**6
"""Items of a value that a message quotes; Python has no `repr` of its beginning alone."""


class UnfinishedError(RuntimeError):
    """Work could not be finished for a reason other than the input: one line, exit status 1."""


class BusyError(UnfinishedError):
    """Another process works in a folder, or has taken it over."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Begin the message of a ValueError with what it is about, such as an option."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


@contextmanager
def naming_user_errors(what: str) -> Iterator[None]:
    """Turn whatever a user's class raises into a one-line ValueError, with its last line instead of a traceback."""
    try:
        yield
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind, _, text = describe_exception(error).partition(": ")
        where = f"{what}: {kind} ({Path(last.filename).name}, line {last.lineno})"
        raise ValueError(f"{where}{text and ': '}{text}") from error


def sanitise(message: str) -> str:
    """A message for a terminal: one line of moderate length without control characters and passwords."""
    line = " ".join(redact_text(message).split())
    if len(line) > LONGEST_MESSAGE:
        line = f"{line[: 3 * LONGEST_MESSAGE // 4]} ... {line[-LONGEST_MESSAGE // 4 :]}"
    return escape_controls(line)


def escape_controls(text: str) -> str:
    """A text from anywhere, safe to show: control and formatting characters as Python writes them."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else ascii(c)[1:-1] for c in text
    )


def one_line(error: BaseException) -> str:
    """An exception's message in one line of moderate length without passwords; its type if the message is empty."""
    try:
        text = redact_text(" ".join(str(error).split()))
    except Exception:  # a custom class may fail here too
        text = ""
    text = text or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def short_repr(value: object) -> str:
    """`repr` of a user's value in one line of moderate length; its type if `repr` fails, or the value is large."""
    try:
        shown = value[:LONGEST_MESSAGE] if isinstance(value, str) else value
        text = "" if is_larger_than(shown, MOST_SHOWN) else " ".join(repr(shown).split())
    except Exception:
        text = ""
    text = text or f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def is_larger_than(value: object, most: int) -> bool:
    """Whether a value has more items than `most`: those of its containers, at any depth, and characters.

    What is contained twice counts twice, as in its `repr`.
    """
    size, left = 0, [value]
    while left and size <= most:
        item = left.pop()
        size += 1
        if isinstance(item, Mapping):
            left += itertools.chain.from_iterable(item.items())
        elif isinstance(item, (list, tuple, set, frozenset)):
            left += item
        elif isinstance(item, (str, bytes, bytearray)):
            size += len(item)
    return size > most


@contextmanager
def explain(problem: str, fix: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Turn errors of these kinds in the block into a one-line ValueError: `PROBLEM (why); FIX`."""
    try:
        yield
    except kinds as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{problem} ({why}); {fix}") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` with the known name that is most similar, ignoring case; "" if none is similar."""
    by_letters = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), list(by_letters), n=1)
    return f" (did you mean {by_letters[close[0]]}?)" if close else ""


def describe_exception(error: BaseException) -> str:
    """Type and message of an exception in one line."""
    name, text = type(error).__name__, one_line(error)
    return name if text == name else f"{name}: {text}"


def iter_causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
