"""What is published of an ablation: its table and report, into its folder and onto its parent run."""

from pathlib import Path

from rich.console import Console

from lit_lazy import figures
from lit_lazy.grid.plan import read_plan, save_views, table_from_mlflow
from lit_lazy.report.page import REPORT, write_report
from lit_lazy.table.records import Table
from lit_lazy.table.render import save
from lit_lazy.tracking.tracker import Tracker


def publish(tracker: Tracker, parent_id: str, folder: Path, is_new: bool, console: Console) -> Table:
    """Write the table; the report too where cells were executed (is_new), or where there is none yet."""
    table = write_table(tracker, parent_id, folder)
    if is_new or not (folder / REPORT).exists():
        console.print("drawing the report", highlight=False)
        tracker.keep_files(parent_id, write_report(tracker, parent_id, folder))
    return table


def write_table(tracker: Tracker, parent_id: str, folder: Path) -> Table:
    """Build the table from MLflow, write it with its figure into a folder and onto the parent run."""
    table = table_from_mlflow(tracker, parent_id)
    files = save(table, folder / "table")
    if table.compared and any(row.n for row in table.rows):
        files += figures.save_figure(figures.effects_figure(table, table.compared), folder / "effects")
    tracker.keep_files(parent_id, files)
    if table.verdict:
        tracker.tag(parent_id, "verdict", table.verdict.sentence)
    save_views(tracker, read_plan(tracker, parent_id).axes, table.columns)
    return table
