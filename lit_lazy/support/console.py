"""The terminal, as every command prints to it."""

from rich.console import Console


def plain_console(stderr: bool = False) -> Console:
    """A console that prints texts as they are: names and reasons may hold what rich takes for markup or an emoji."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 seed`, `2 seeds`. plural: that of the noun, where it is not with an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def clock(seconds: float) -> str:
    """`4:05` or `1:04:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
