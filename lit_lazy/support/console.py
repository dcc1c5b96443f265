"""Terminal output of commands."""

import shutil
import sys
from pathlib import Path

from rich.console import Console


def plain_console(stderr: bool = False) -> Console:
    """A console that prints texts unchanged: names and reasons may contain what rich takes for markup or an emoji."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def get_program_name() -> str:
    """How to call this program again: by its path if the shell would find none or another one."""
    name, typed = "lit-lazy", Path(sys.argv[0])
    found = shutil.which(name)
    found_elsewhere = found is None or not typed.exists() or not typed.samefile(found)
    return str(typed) if typed.name == name and found_elsewhere else name


def format_count(number: int, noun: str, plural: str = "") -> str:
    """`1 seed`, `2 seeds`. plural: an irregular plural of the noun."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def format_duration(seconds: float) -> str:
    """`4:05` or `1:04:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
