"""A grid's folder is its record: the plan of an ablation, its cells, and the table of both."""

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from pathlib import Path

from lit_lazy.grid.cell_record import CellRecord
from lit_lazy.grid.grid_table import build_grid_table
from lit_lazy.grid.plan import PLAN, Plan
from lit_lazy.support.error_messages import one_line, sanitise
from lit_lazy.table.build import TABLE, read_table
from lit_lazy.table.results_table import Table
from lit_lazy.training.run_folder import CELLS, locate_cell

ASIDE = ".until-"
"""In the names of folders that `--fresh` has moved aside."""
QUEUE = "queue.db"
"""File in the runs folder, in which versions before plan.json was kept in a grid's folder had its cells."""
CELLS_OF_GRID = (
    "SELECT a.value_json FROM trial_user_attributes a JOIN trials t ON t.trial_id = a.trial_id "
    "JOIN studies s ON s.study_id = t.study_id WHERE a.key = 'cell' AND s.study_name = ?"
)


class DamagedPlanError(ValueError):
    """The file of a plan cannot be read."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{str(file)!r}: is damaged ({why}); run the grid's command again to rewrite it")
        self.file = file


@dataclass(frozen=True)
class GridFolder:
    """A grid's folder, which is the record of the grid: its plan, and its cells by row and seed."""

    path: Path
    plan: Plan

    @property
    def title(self) -> str:
        """Its name, and the experiment's overrides that a name cannot hold."""
        named = self.path.name.startswith(f"{self.plan.ablation}-{self.plan.base}")
        return sanitise(self.path.name if named else f"{self.path.name} ({self.plan.base})")

    @classmethod
    def read(cls, path: Path) -> "GridFolder | None":
        """The grid in a folder; None if it has no plan. Raises a one-line ValueError if the plan is damaged."""
        file = path / PLAN
        former = None if file.exists() else find_former_plan(path)
        file = former or file
        if not file.exists():
            return None
        try:
            plan = Plan.from_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DamagedPlanError(file, one_line(error)) from None
        return cls(path, plan if former is None else add_queued_keys(plan, path))

    @cached_property
    def cells(self) -> list[CellRecord]:
        """The cells that the plan asks for and whose keys it has."""
        plan = self.plan
        return [
            CellRecord(row.variant, seed, key, locate_cell(self.path, key), plan.axis_values.get(row.variant, {}))
            for row in plan.rows
            for seed in row.seeds
            if (key := plan.get_keys(row).get(str(seed)))
        ]

    def build_table(self) -> Table:
        """The table of the plan's cells."""
        return build_grid_table(self.plan, self.cells)


def read_grid(folder: Path) -> GridFolder:
    """The grid in a folder. Raises a one-line ValueError if it has none."""
    grid = GridFolder.read(folder)
    if grid is None:
        raise ValueError(f"{str(folder)!r}: has no {PLAN}; `lit-lazy ablate run` makes it")
    return grid


def read_current_table(folder: Path) -> Table:
    """The table of a grid's cells as they are, which its file may be behind; of a folder without a plan the file's."""
    grid = GridFolder.read(folder)
    return read_table(folder / TABLE) if grid is None else grid.build_table()


def list_grids(runs: Path) -> list[str]:
    """Names of the grids in a runs folder, without those that `--fresh` moved aside."""
    folders = [folder for folder in runs.iterdir() if ASIDE not in folder.name] if runs.is_dir() else []
    return sorted(folder.name for folder in folders if (folder / PLAN).exists() or find_former_plan(folder))


def find_former_plan(folder: Path) -> Path | None:
    """The plan of a grid that a version before plan.json was kept in the grid's folder began: an artifact of MLflow's.

    None if no such version trained cells there.
    """
    if not ((folder / CELLS).is_dir() and (folder.parent / QUEUE).exists()):
        return None
    from lit_lazy.tracking.store_address import ARTIFACTS

    found = (folder.parent / ARTIFACTS).glob(f"{escape(folder.name)}/*/artifacts/{PLAN}")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def add_queued_keys(plan: Plan, folder: Path) -> Plan:
    """Such a plan with the keys and axes of its cells, which the queue in the runs folder has.

    Raises a one-line ValueError if the queue is damaged.
    """
    keys: dict[str, dict[str, str]] = {}
    axes: dict[str, dict[str, str]] = {}
    queue = folder.parent / QUEUE
    try:
        with closing(sqlite3.connect(f"{queue.resolve().as_uri()}?mode=ro", uri=True)) as database:
            cells = [json.loads(text) for (text,) in database.execute(CELLS_OF_GRID, (folder.name,))]
    except sqlite3.Error as error:
        raise ValueError(f"{str(queue)!r}: cannot be read ({error}); move it away to begin another") from None
    for cell in cells:
        keys.setdefault(cell["variant"], {})[str(cell["seed"])] = cell["key"]
        axes[cell["variant"]] = cell["axes"]
    return replace(plan, keys=keys, axis_values=axes)
