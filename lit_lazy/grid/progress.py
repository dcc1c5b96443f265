"""What a command says of running cells: a live display, and the tables of `lit-lazy ablate status`."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lit_lazy.grid.cell_record import CellRecord
from lit_lazy.grid.cell_state import Holder, find_dead
from lit_lazy.grid.grid_folder import GridFolder
from lit_lazy.support.console import format_duration
from lit_lazy.support.error_messages import sanitise
from lit_lazy.training.run_folder import METRICS, TAIL_BYTES, read_lines

PLAIN_EVERY_SECONDS = 15.0
QUIET_SECONDS = 60.0
"""After which a line says what runs though no cell has ended, and how long ago a cell reported."""
MOST_SHOWN = 12
FINISHED = ("complete", "pruned", "diverged")
"""States without remaining work; only a search prunes."""


class Progress:
    """A live display on a terminal; otherwise a line when cells have ended, and each minute what runs."""

    def __init__(
        self, read_states: Callable[[], Mapping[str, str]], console: Console, notes: Callable[[], list[str]] = list
    ) -> None:
        """read_states: the state of each cell by key. notes: returns further parts of the summary."""
        self.read_states, self.console, self.notes = read_states, console, notes
        self._running: list[str] = []
        self.started = time.monotonic()
        states = read_states()
        self.n, self.done_before = len(states), _count_finished(Counter(states.values()))
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._last_line, self._last_shown = self.started - PLAIN_EVERY_SECONDS, (-1, False)

    def __enter__(self) -> "Progress":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()
            return
        counts = Counter(self.read_states().values())
        if _count_ended(counts) != self._last_shown:
            self._print_line(counts)

    def update(self, states: Mapping[str, str]) -> None:
        """Show the states of the cells by key."""
        counts = Counter(states.values())
        if self.live:
            bar = Table.grid(padding=(0, 1))
            done = ProgressBar(total=self.n, completed=_count_finished(counts), width=40)
            bar.add_row(done, self._format_summary(counts))
            self.live.update(Group(bar, *(Text(f"  {name}", style="dim") for name in self._running)))
            return
        shown, now = _count_ended(counts), time.monotonic()
        quiet = now - self._last_line
        if quiet >= QUIET_SECONDS or (
            shown != self._last_shown and (quiet >= PLAIN_EVERY_SECONDS or shown == (self._last_shown[0], True))
        ):
            self._last_line, self._last_shown = now, shown
            self._print_line(counts)
            if quiet >= QUIET_SECONDS:
                for name in self._running:
                    self.console.print(f"  {name}", highlight=False, markup=False, soft_wrap=True)

    def show_running(self, names: Sequence[str]) -> None:
        """Set the running cells that are listed, of which a few are shown."""
        rest = [f"and {len(names) - MOST_SHOWN} more"] if len(names) > MOST_SHOWN else []
        self._running = [*names[:MOST_SHOWN], *rest]

    def _format_summary(self, counts: Counter[str]) -> str:
        parts = [f"{_count_finished(counts)}/{self.n} cells done", f"{counts['running']} running"]
        parts += [f"{counts[state]} {state}" for state in ("pruned", "failed") if counts[state]]
        elapsed, done = time.monotonic() - self.started, _count_finished(counts) - self.done_before
        left, rest = counts["waiting"] + counts["running"], "nothing left"
        if left:
            half = 0.5 * counts["running"]  # running cells are about half done, on average
            rest = (
                f"about {format_duration(elapsed / (done + half) * (left - half))} left"
                if done
                else "estimating the rest"
            )
        return ", ".join([*parts, f"{format_duration(elapsed)} elapsed", rest, *self.notes()])

    def _print_line(self, counts: Counter[str]) -> None:
        self.console.print(self._format_summary(counts), highlight=False)


def describe_training(folder: Path, steps: int | None = None) -> str:
    """`step 40 of 64, loss 2.41, about 3:20 left` by a run folder's metrics; "" before its first step or elsewhere.

    Ends in `reported 1:30 ago` after a minute without a report. steps: of the whole training; without them the time
    left is not told.
    """
    records = read_lines(folder / METRICS, TAIL_BYTES)
    if not any(record.step for record in records):
        return ""
    last = max(records[-2:], key=lambda record: record.step)  # a step's means may be written after its validation
    losses = [record.metrics["train/loss"] for record in records if "train/loss" in record.metrics]
    parts = [f"step {last.step:,}" if steps is None else f"step {last.step:,} of {steps:,}"]
    if losses:
        parts.append(f"loss {losses[-1]:.3f}")
    # Of the median step: the mean would count the pause of a training that was killed and resumed.
    paces = [
        (after.milliseconds - before.milliseconds) / 1000 / (after.step - before.step)
        for before, after in pairwise(records)
        for _ in range(before.step, after.step)
    ]
    pace = median_low(paces) if paces else None
    if pace is not None and steps is not None and last.step < steps:
        parts.append(f"about {format_duration(pace * (steps - last.step))} left")
    if (silent := time.time() - records[-1].milliseconds / 1000) >= QUIET_SECONDS:
        parts.append(f"reported {format_duration(silent)} ago")
    return ", ".join(parts)


def _count_ended(counts: Mapping[str, int]) -> tuple[int, bool]:
    """How many cells have ended, and whether any runs: what a new line would tell."""
    return _count_finished(counts) + counts["failed"], counts["running"] > 0


def _count_finished(counts: Mapping[str, int]) -> int:
    return sum(counts[state] for state in FINISHED)


def print_status(grid: GridFolder, console: Console) -> None:
    """Print the number of cells by state, then tables of running, failed and interrupted cells."""
    cells: dict[str, list[CellRecord]] = {"complete": [], "running": [], "waiting": [], "failed": []}
    for cell in grid.cells:
        cells[cell.status].append(cell)
    console.print(f"{grid.title}: {len(cells.pop('complete'))}/{len(grid.cells)} cells complete", highlight=False)
    for state, found in cells.items():
        if found:
            console.print(f"  {len(found):5} {state}", highlight=False)
    running = [(cell, *_describe_holder(cell)) for cell in cells["running"]]
    _print_table("running", ("process", "host", "for", "training"), running, console)
    _print_table("failed", ("why",), [(cell, sanitise(cell.reason)) for cell in cells["failed"]], console)
    if cells["failed"]:
        console.print("The same `ablate run` command tries failed cells again.", highlight=False)
    dead = [(cell, find_dead(cell.folder)) for cell in cells["waiting"] if cell.settings]
    why = [(cell, f"its worker ({holder}) died" if holder else "interrupted") for cell, holder in dead]
    _print_table("waiting, interrupted", ("why",), why, console)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]], console: Console) -> None:
    """Print a table of cells, each with the values of the columns, if there are any."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in ("cell", "key", *columns):
        table.add_column(column, overflow="fold")
    for cell, *values in rows:
        table.add_row(f"{cell.variant} seed {cell.seed}", cell.key, *values)
    if rows:
        console.print(table)


def _describe_holder(cell: CellRecord) -> tuple[str, str, str, str]:
    """Process and host of the worker that trains a cell, for how long, and how far it is."""
    holder, steps = Holder.read(cell.folder), cell.settings.get("train.steps")
    training = describe_training(cell.folder, steps if isinstance(steps, int) else None)
    if holder is None:
        return "", "", "", training
    return str(holder.pid), holder.host, format_duration(max(time.time() - holder.since, 0.0)), training
