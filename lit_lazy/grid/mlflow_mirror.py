"""MLflow shows what a grid's folder holds; nothing of this project reads it again.

Whatever MLflow has, `GridMirror.sync` adds what it lacks: the parent run and a run for each cell that has begun, with
its metrics and its end. It may be called at any time, by any process that shares the folder, and again after a kill.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import Timeout
from rich.console import Console

from lit_lazy.grid.grid_folder import ASIDE, GridFolder, read_grid
from lit_lazy.support.background import repeat_in_background
from lit_lazy.support.console import get_program_name
from lit_lazy.support.error_messages import BusyError
from lit_lazy.support.locks import make_file_lock
from lit_lazy.support.provenance import git_sha
from lit_lazy.table.document_formats import Paragraph, to_markdown
from lit_lazy.table.finding_text import describe_findings
from lit_lazy.table.records import make_outcome_name
from lit_lazy.table.results_table import Table
from lit_lazy.tracking.store_address import COMPLETE, INTERRUPTED, NOTE, PARENT, End, default_uri, run_link
from lit_lazy.tracking.views import build_views
from lit_lazy.training.run_folder import (
    GRID_ID,
    METRICS,
    RESULT,
    RunResult,
    is_locked,
    read_failure,
    read_grid_id,
    read_settings,
)

if TYPE_CHECKING:  # MLflow takes seconds to import: the first `sync` does, in the thread of `follow`
    from lit_lazy.tracking.tracker import MirroredRun, Tracker

SYNC_SECONDS = 5.0
BUSY_SECONDS, HANG_SECONDS = 30.0, 60.0
"""How long the end of a grid waits for another process that sends it to MLflow, and for MLflow without any progress."""
FILES = ("plan.json", "search.json", "table.*", "details.md", "*.png", "*.svg", "report.html")
"""Files of a grid's folder that its parent run carries."""

log = logging.getLogger("lit_lazy.grid.mlflow_mirror")


@dataclass(frozen=True)
class MirroredCell:
    """A cell as MLflow shows it."""

    folder: Path
    variant: str
    source: str
    seed: int
    axes: Mapping[str, str]
    end: End | None
    """None if it waits or is trained."""


def find_end(folder: Path) -> End | None:
    """How the training in a run folder ended; None if it has not."""
    if (folder / RESULT).exists():  # it is parsed only when it is sent
        return COMPLETE
    reason = read_failure(folder)
    return End("failed", reason) if reason else None


class GridMirror:
    """MLflow's copy of an ablation. That of a search says by its own methods what its folder holds."""

    kind = "ablation"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Kept, since a lease is taken over by whoever saw it for long.
        self._lock = make_file_lock(folder / "mirror.lock")
        self._parent_id = ""
        self._runs: dict[str, MirroredRun] = {}
        """Runs that this process has sent to, by key."""
        self._shown: dict[str, tuple[End, Set[str]]] = {}
        """Ends of the cells that MLflow shows, and the names of their params, by key."""
        self._last_progress = time.monotonic()

    def has_begun(self) -> bool:
        """Whether the folder says what it is of."""
        return GridFolder.read(self.folder) is not None

    def list_cells(self) -> list[MirroredCell]:
        """The cells of the folder now."""
        grid = read_grid(self.folder)
        sources = {row.variant: row.source for row in grid.plan.rows}
        return [
            MirroredCell(cell.folder, cell.variant, sources[cell.variant], cell.seed, cell.axes, find_end(cell.folder))
            for cell in grid.cells
        ]

    def make_parent(self) -> tuple[Mapping[str, str], Mapping[str, str], Mapping[str, Any]]:
        """Tags, params and config of the parent run."""
        plan = read_grid(self.folder).plan
        return {NOTE: plan.command}, {}, plan.config

    def show(self, parent_id: str, ended: bool) -> None:
        """Show the whole on the parent run: its views and, at the end, its outcome."""
        grid, tracker = read_grid(self.folder), self.tracker
        columns = grid.plan.columns
        if ended:
            self._name_rows(parent_id, {cell.key: cell.variant for cell in grid.cells})
            table = grid.build_table()
            columns = table.columns
            page = "report.html" if (self.folder / "report.html").exists() else "table.html"
            link = run_link("", tracker.experiment_id, parent_id, page).removeprefix("/")  # on MLflow's own page
            findings = [to_markdown([Paragraph(text)]).strip() for text in describe_findings(table)]
            verdict = {"verdict": table.verdict.sentence} if table.verdict else {}
            former = tracker.client.get_run(parent_id).data.metrics
            # MLflow deletes no metric; of a row that has no mean any more, it is undefined.
            gone = {name: math.nan for name, value in former.items() if math.isfinite(value)}
            tracker.update(parent_id, metrics=gone | collect_outcomes(table), tags=verdict)
            tracker.describe(parent_id, [*findings, f"[{page}]({link})", f"`{table.command}`"], "table.md")
        charted = ended and tracker.mark_outliers()
        keys = [column.key for column in columns]
        main = [column.key for column in columns if column.plotted] or keys
        tracker.save_views("cell", lambda cells: build_views(grid.plan.axes, keys, main, cells, charted))

    def _name_rows(self, parent_id: str, rows: Mapping[str, str]) -> None:
        """Tag runs with their rows in the table, by key: views take means, and --changed gives former cells others."""
        for run in self.tracker.find({PARENT: parent_id}):
            row = rows.get(run.data.tags["cell"], "not in the table")
            if row != run.data.tags["variant"]:
                self.tracker.update(run.info.run_id, tags={"variant": row})

    @cached_property
    def tracker(self) -> "Tracker":
        """MLflow's experiment of the grid, created on first use."""
        from lit_lazy.tracking.tracker import Tracker

        return Tracker(default_uri(self.folder.parent), self.folder.name)

    def hangs(self) -> bool:
        """Whether MLflow has taken nothing for HANG_SECONDS since a `sync` began."""
        return time.monotonic() - self._last_progress > HANG_SECONDS

    def sync(self, final: bool = False) -> None:
        """Send what MLflow lacks, once the folder says what it is of. Raises TrackingError if MLflow is away.

        One process sends at a time, whatever the folder holds; another one leaves it to that, and comes again.

        final: nothing is being trained by this command any more, so that the parent run ends too. Raises BusyError if
        another process still sends after BUSY_SECONDS.
        """
        self._last_progress = time.monotonic()
        if not self.has_begun():
            return
        try:
            held = self._lock.acquire(timeout=BUSY_SECONDS if final else 0)
        except Timeout:
            if not final:
                return
            since = f"for {BUSY_SECONDS:g} s"
            raise BusyError(f"another process has been sending {self.folder.name} to MLflow {since}") from None
        with held:
            parent_id = self._open_parent(final)
            cells, goes_on = self.list_cells(), False
            for cell in cells:
                if cell.end is None and not (cell.folder / METRICS).exists():  # it has not begun
                    continue
                end = INTERRUPTED if cell.end is None and final and not is_locked(cell.folder) else cell.end
                goes_on |= end is None
                shown, params = self._shown.get(cell.folder.name, (None, set[str]()))
                if end is None or end != shown or not cell.axes.keys() <= params:
                    self._send(cell, end, parent_id)
                    self._last_progress = time.monotonic()
            if final:
                self._end_parent(parent_id, {cell.end.state if cell.end else "" for cell in cells}, goes_on)

    def _open_parent(self, final: bool) -> str:
        """The id of the parent run, which is created if MLflow has none; of a new one, learn what MLflow shows."""
        about = {"grid": read_grid_id(self.folder), "kind": self.kind}
        tags, params, config = self.make_parent()
        tags = {**about, "ablation": self.folder.name, "git_sha": git_sha(), **tags}
        begun = self.tracker.find(about)
        parent_id = begun[0].info.run_id if begun else self.tracker.create_run(self.folder.name, tags)
        if parent_id != self._parent_id:  # at first, after --fresh, and if MLflow lost it
            if config:
                self.tracker.log_config(parent_id, params, config)
            self.show(parent_id, ended=False)
            if not final:
                self.tracker.update(parent_id, "RUNNING")
            self._shown = {
                run.data.tags["cell"]: (
                    End(run.data.tags.get("state", "failed"), run.data.tags.get("reason", "")),
                    run.data.params.keys(),
                )
                for run in self.tracker.find({PARENT: parent_id})
                if run.info.status != "RUNNING"
            }
            self._runs.clear()
            self._parent_id = parent_id
        return parent_id

    def _send(self, cell: MirroredCell, end: End | None, parent_id: str) -> None:
        """Send what MLflow lacks of a cell that has begun. end: None if it goes on."""
        from lit_lazy.tracking.tracker import MirroredRun

        key, result = cell.folder.name, RunResult.peek(cell.folder)
        if end == COMPLETE and result is None:  # damaged: the grid's command trains it again
            return
        self._shown.pop(key, None)  # one that failed may go on
        run = self._runs.get(key)
        if run is None or run.params != cell.axes:  # another command may add axes
            config = read_settings(cell.folder) if result is None else result.config
            about = {"kind": "cell", "ablation": self.folder.name, "git_sha": git_sha(), PARENT: parent_id}
            about |= {"variant": cell.variant, "source": cell.source, "seed": str(cell.seed), "cell": key}
            name = f"{cell.variant} seed {cell.seed}"
            run = self._runs[key] = MirroredRun(self.tracker, cell.folder, name, about, cell.axes, config)
        run.sync(result if end == COMPLETE else end)
        if end is not None:
            self._shown[key] = end, cell.axes.keys()

    def _end_parent(self, parent_id: str, states: Set[str], goes_on: bool) -> None:
        """Show the outcome, without the runs that --fresh moved aside.

        states: of the cells; "" of one that has not ended. goes_on: whether another command trains a cell.
        """
        for kept in self.folder.parent.glob(f"{escape(self.folder.name)}{ASIDE}*/{GRID_ID}"):
            for run in self.tracker.find({"grid": read_grid_id(kept.parent)}):
                self.tracker.delete_run(run.info.run_id)
        files = sorted(path for pattern in FILES for path in self.folder.glob(pattern))
        self.tracker.update(parent_id, files={path.name: path.read_bytes() for path in files})
        self._last_progress = time.monotonic()
        self.show(parent_id, ended=True)
        if not goes_on:
            status = "KILLED" if "" in states else "FAILED" if "failed" in states else "FINISHED"
            self.tracker.update(parent_id, status)


def collect_outcomes(table: Table) -> dict[str, float]:
    """The mean of the primary outcome, or of the first main column, by `metric/row`, to four significant digits.

    MLflow shows all digits of a metric, and takes only some characters in its name.
    """
    if not table.main_columns:
        return {}
    key = table.main_columns[0].key
    found: dict[str, float] = {}
    for row in table.rows:
        if (mean := table.measures[key][row.variant].mean) is not None:
            name = make_outcome_name(key, row.variant)
            while name in found:  # rows may differ in other characters only
                name += "_"
            found[name] = float(f"{mean:.4g}")
    return found


@contextmanager
def follow(mirror: GridMirror, console: Console) -> Iterator[None]:
    """Keep MLflow up to date from a thread, and once more at the end.

    No failure undoes or ends anything: it is said once. A server that hangs is left after HANG_SECONDS.
    """
    by_itself = f"`{get_program_name()} mirror {mirror.folder.name}`"  # any other command may train, too
    fix = f"{'the same command' if mirror.kind == 'search' else by_itself} sends what it lacks"
    lost = f"MLflow lacks the newest results, which are in {mirror.folder}"
    errors: list[str] = []
    try:
        with repeat_in_background(mirror.sync, SYNC_SECONDS, log, lost, mirror.hangs) as errors:
            yield
    finally:
        for error in errors:
            console.print(f"MLflow lacks results ({error}); {fix}", highlight=False, markup=False, soft_wrap=True)
