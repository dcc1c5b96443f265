"""The plan of a grid that a version before plan.json was kept in the grid's folder began: an artifact of MLflow's."""

import json
import sqlite3
from contextlib import closing
from glob import escape
from pathlib import Path
from typing import NamedTuple

from lit_lazy.training.run_folder import CELLS

CELLS_OF_GRID = (
    "SELECT a.value_json FROM trial_user_attributes a JOIN trials t ON t.trial_id = a.trial_id "
    "JOIN studies s ON s.study_id = t.study_id WHERE a.key = 'cell' AND s.study_name = ?"
)


class FormerPlan(NamedTuple):
    """The newest artifact of a grid's plan, and what the queue in the runs folder has of its cells."""

    artifact: Path
    keys: dict[str, dict[str, str]]
    """Keys of the cells by row and seed."""
    axis_values: dict[str, dict[str, str]]
    """Values of the axes by row."""


def find_former_plan(file: Path) -> FormerPlan | None:
    """What replaces the missing plan file of a grid; None if no former version trained cells in its folder.

    Raises a one-line ValueError if the queue is damaged.
    """
    folder, queue = file.parent, file.parents[1] / "queue.db"
    if not ((folder / CELLS).is_dir() and queue.exists()):
        return None
    from lit_lazy.tracking.store import ARTIFACTS

    found = list((folder.parent / ARTIFACTS).glob(f"{escape(folder.name)}/*/artifacts/{file.name}"))
    if not found:
        return None
    keys: dict[str, dict[str, str]] = {}
    axes: dict[str, dict[str, str]] = {}
    try:
        with closing(sqlite3.connect(f"{queue.resolve().as_uri()}?mode=ro", uri=True)) as database:
            cells = [json.loads(text) for (text,) in database.execute(CELLS_OF_GRID, (folder.name,))]
    except sqlite3.Error as error:
        raise ValueError(f"{str(queue)!r}: cannot be read ({error}); move it away to begin another") from None
    for cell in cells:
        keys.setdefault(cell["variant"], {})[str(cell["seed"])] = cell["key"]
        axes[cell["variant"]] = cell["axes"]
    return FormerPlan(max(found, key=lambda path: path.stat().st_mtime), keys, axes)
