"""What a command can end with, beside success, and errors in one line. Wrong input is a ValueError: exit status 2."""

from collections.abc import Iterator

from lit_lazy.support.secrets import redacted_text


class UnfinishedError(RuntimeError):
    """Work that could not be finished, for a reason outside the input: one line, exit status 1."""


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of moderate length, without passwords; its type where it says nothing."""
    text = redacted_text(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def named(error: BaseException) -> str:
    """Type and text of an exception, on one line."""
    name, text = type(error).__name__, one_line(error)
    return name if text == name else f"{name}: {text}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, the one that it came from, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
