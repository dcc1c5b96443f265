"""The terminal, as every command prints to it."""

from rich.console import Console


def plain_console(stderr: bool = False) -> Console:
    """A console that prints texts as they are: names and reasons may hold what rich takes for markup or an emoji."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
