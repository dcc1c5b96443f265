"""`lit-lazy ablate status`: finished, running and failed cells, by their folders."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from lit_lazy.grid.cells import Holder, was_left
from lit_lazy.grid.plan import CellRecord, GridFolder
from lit_lazy.grid.progress import describe_training
from lit_lazy.support.console import format_duration
from lit_lazy.support.errors import sanitise


def print_status(grid: GridFolder, console: Console) -> None:
    """Print the number of cells by state, then tables of running, failed and interrupted cells."""
    counts = Counter[str](cell.status for cell in grid.cells)
    console.print(f"{grid.title}: {counts['complete']}/{len(grid.cells)} cells complete", highlight=False)
    for state in ("running", "waiting", "failed"):
        if counts[state]:
            console.print(f"  {counts[state]:5} {state}", highlight=False)
    cells = {state: [cell for cell in grid.cells if cell.status == state] for state in counts}
    columns = ("process", "host", "for", "training")
    _print_table("running", columns, cells.get("running", []), _describe_holder, console)
    if failed := cells.get("failed", []):
        _print_table("failed", ("why",), failed, lambda cell: (sanitise(cell.reason),), console)
        console.print("The same `ablate run` command tries failed cells again.", highlight=False)
    interrupted = [cell for cell in cells.get("waiting", []) if cell.settings]
    _print_table("waiting, interrupted", ("why",), interrupted, _describe_interrupt, console)


def _print_table(
    title: str,
    columns: Sequence[str],
    cells: Sequence[CellRecord],
    describe: Callable[[CellRecord], Sequence[str]],
    console: Console,
) -> None:
    """Print a table of cells, if there are any; `describe` returns the values of the columns after cell and key."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in ("cell", "key", *columns):
        table.add_column(column, overflow="fold")
    for cell in cells:
        table.add_row(f"{cell.variant} seed {cell.seed}", cell.key, *describe(cell))
    if cells:
        console.print(table)


def _describe_interrupt(cell: CellRecord) -> tuple[str]:
    holder = Holder.read(cell.folder) if was_left(cell.folder) else None
    return ("interrupted" if holder is None else f"its worker ({holder}) died",)


def _describe_holder(cell: CellRecord) -> tuple[str, str, str, str]:
    holder, steps = Holder.read(cell.folder), cell.settings.get("train.steps")
    training = describe_training(cell.folder, steps if isinstance(steps, int) else None)
    if holder is None:
        return "", "", "", training
    return str(holder.pid), holder.host, format_duration(max(time.time() - holder.since, 0.0)), training
