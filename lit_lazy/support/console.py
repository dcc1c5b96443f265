"""Terminal output of commands."""

import shutil
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from lit_lazy.support.error_messages import escape_controls

T = TypeVar("T")
LEAST_WIDTH, MOST_WIDTH = 60, 120
"""Bounds on the width of printed text, in characters."""
QUIET_SECONDS, PLAIN_EVERY_SECONDS = 2.0, 15.0
"""Time before anything is shown, and between lines where stderr is no terminal."""


class PlainConsole(Console):
    """A console whose texts, which may be of others' files and databases, cannot control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))


def plain_console(stderr: bool = False) -> Console:
    """A console that reads nothing into texts: names and reasons may contain what rich takes for markup or an emoji."""
    return PlainConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


def text_width() -> int:
    """The width for printed text, in characters: the terminal's within bounds; the largest without a terminal."""
    return min(max(shutil.get_terminal_size((MOST_WIDTH, 24)).columns, LEAST_WIDTH), MOST_WIDTH)


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


def open_page(address: str) -> None:
    """Open a page in the user's browser; without one, say where it is."""
    if not webbrowser.open(address):
        print(f"there is no browser here; open {address} in one", flush=True)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells in columns, two spaces apart; the rows have equal lengths."""
    shown = [[escape_controls(cell) for cell in row] for row in rows]
    sizes = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(map(str.ljust, row, sizes)).rstrip() for row in shown]


def track_progress(items: Sequence[T], what: str) -> Iterator[T]:
    """Yields the items; beyond QUIET_SECONDS with a bar on stderr, or a line now and then if that is no terminal."""
    console, started = plain_console(stderr=True), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True)
    task, due = bar.add_task(what, total=len(items)), QUIET_SECONDS
    try:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(task, completed=done)
            seconds = time.monotonic() - started
            if seconds >= due and console.is_terminal:
                bar.start()
            elif seconds >= due:
                due = seconds + PLAIN_EVERY_SECONDS
                left = format_duration(seconds / done * (len(items) - done))
                console.print(f"{what}: {done:,} of {len(items):,}, about {left} left")
    finally:
        if bar.live.is_started:  # it would print an empty line
            bar.stop()
