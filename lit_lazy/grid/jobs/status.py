"""`lit-lazy ablate status`: finished, running and failed cells, read from the queue only."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lit_lazy.grid.jobs.progress import describe_training
from lit_lazy.grid.queue.liveness import is_dead
from lit_lazy.grid.queue.queue import Entry, Queue
from lit_lazy.support.console import format_duration
from lit_lazy.support.errors import sanitise
from lit_lazy.training.run_folder import locate_cell


def print_status(queue: Queue, folder: Path, console: Console) -> None:
    """Print the number of cells by state, then tables of running, failed and interrupted cells. folder: the grid's."""
    counts = Counter[str](queue.states().values())
    total = sum(counts.values())
    console.print(f"{queue.name}: {counts['complete']}/{total} cells complete", highlight=False)
    if not queue.is_current:
        console.print(
            "Made by an earlier version of lit-lazy, which alone can continue it; `lit-lazy ablate table` shows its "
            "results.",
            highlight=False,
            soft_wrap=True,
        )
    for state in ("pruned", "running", "waiting", "failed"):
        if counts[state]:
            console.print(f"  {counts[state]:5} {state}", highlight=False)
    describe_worker = partial(_describe_worker, folder=folder)
    _print_table("running", ("process", "host", "for", "training"), queue.entries("running"), describe_worker, console)
    if failed := queue.entries("failed"):
        _print_table("failed", ("why",), failed, _format_reason, console)
        if queue.is_current:
            console.print("The same `ablate run` command tries failed cells again.", highlight=False)
    interrupted = [entry for entry in queue.entries("waiting") if entry.reason] if counts["waiting"] else []
    _print_table("waiting, interrupted", ("why",), interrupted, _format_reason, console)


def _print_table(
    title: str,
    columns: Sequence[str],
    entries: Sequence[Entry],
    describe: Callable[[Entry], Sequence[str]],
    console: Console,
) -> None:
    """Print a table of cells, if there are any; `describe` returns the values of the columns after cell and key."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in ("cell", "key", *columns):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(f"{entry.variant} seed {entry.seed}", entry.key, *describe(entry))
    if entries:
        console.print(table)


def _format_reason(entry: Entry) -> tuple[str]:
    return (sanitise(entry.reason),)


def _describe_worker(entry: Entry, folder: Path) -> tuple[str, str, str, str]:
    worker = entry.worker
    seconds = (datetime.now() - entry.since).total_seconds() if entry.since else 0.0
    dead = " (dead)" if is_dead(worker, folder / "workers") else ""
    training = describe_training(locate_cell(folder, entry.run))
    return f"{worker['pid']}{dead}", worker["host"], format_duration(max(seconds, 0.0)), training
