"""What a command can end with, beside success, and errors in one line. Wrong input is a ValueError: exit status 2."""


class UnfinishedError(RuntimeError):
    """Work that could not be finished, for a reason outside the input: one line, exit status 1."""


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of moderate length; its type where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def named(error: BaseException) -> str:
    """Type and text of an exception, on one line."""
    name, text = type(error).__name__, one_line(error)
    return name if text == name else f"{name}: {text}"
