"""`lit-lazy ablate status`: finished, running and failed cells, read from the queue only."""

from collections import Counter
from datetime import datetime

from rich.console import Console
from rich.table import Table

from lit_lazy.grid.queue.liveness import is_dead
from lit_lazy.grid.queue.queue import Entry, Queue
from lit_lazy.support.console import format_duration
from lit_lazy.support.errors import sanitise


def print_status(queue: Queue, console: Console) -> None:
    """Print the number of cells by state, then tables of running, failed and interrupted cells."""
    counts = Counter[str](queue.states().values())
    total = sum(counts.values())
    console.print(f"{queue.name}: {counts['complete']}/{total} cells complete", highlight=False)
    for state in ("pruned", "running", "waiting", "failed"):
        if counts[state]:
            console.print(f"  {counts[state]:5} {state}", highlight=False)
    if running := queue.entries("running"):
        console.print(
            _build_table("running", ("cell", "key", "process", "host", "for"), [_format_running(e) for e in running])
        )
    if failed := queue.entries("failed"):
        console.print(
            _build_table(
                "failed", ("cell", "key", "why"), [(_format_cell(e), e.key, sanitise(e.reason)) for e in failed]
            )
        )
        console.print("The same `ablate run` command tries failed cells again.", highlight=False)
    begun = [entry for entry in queue.entries("waiting") if entry.reason] if counts["waiting"] else []
    if begun:
        console.print(
            _build_table(
                "waiting, interrupted",
                ("cell", "key", "why"),
                [(_format_cell(e), e.key, sanitise(e.reason)) for e in begun],
            )
        )


def _build_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _format_running(entry: Entry) -> tuple[str, ...]:
    worker = entry.worker
    seconds = (datetime.now() - entry.since).total_seconds() if entry.since else 0.0
    dead = " (dead)" if is_dead(worker) else ""
    return _format_cell(entry), entry.key, f"{worker['pid']}{dead}", worker["host"], format_duration(max(seconds, 0.0))


def _format_cell(entry: Entry) -> str:
    return f"{entry.variant} seed {entry.seed}"
