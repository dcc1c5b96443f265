"""What a command can end with, beside success, and errors in one line. Wrong input is a ValueError: exit status 2."""

import difflib
from collections.abc import Iterable, Iterator

from lit_lazy.support.secrets import redact_text

LONGEST_MESSAGE = 1200
"""Characters of a message; a longer one keeps its beginning, which names the value, and its end, the fix."""


class UnfinishedError(RuntimeError):
    """Work that could not be finished, for a reason outside the input: one line, exit status 1."""


def sanitise(message: str) -> str:
    """A message as a terminal may show it: one line of moderate length, without control characters and passwords."""
    line = " ".join(redact_text(message).split())
    if len(line) > LONGEST_MESSAGE:
        line = f"{line[: 3 * LONGEST_MESSAGE // 4]} ... {line[-LONGEST_MESSAGE // 4 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of moderate length, without passwords; its type where it says nothing."""
    try:
        text = redact_text(" ".join(str(error).split()))
    except Exception:  # a user's own class may fail at this too
        text = ""
    text = text or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def short_repr(value: object) -> str:
    """A value of a user's on one line of moderate length; its type where it cannot be shown."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = ""
    text = text or f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that is most like an unknown one, behind which it is said; nothing where none is like it.

    Capitals do not count.
    """
    by_letters = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(by_letters), n=1)
    return f" (did you mean {by_letters[close[0]]}?)" if close else ""


def describe_exception(error: BaseException) -> str:
    """Type and text of an exception, on one line."""
    name, text = type(error).__name__, one_line(error)
    return name if text == name else f"{name}: {text}"


def iter_causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, the one that it came from, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
