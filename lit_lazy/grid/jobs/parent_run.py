"""The parent run of a grid, linked to its folder and its queue so that any command can resume it.

A grid id is created once and stored in the folder, in the queue and as a tag of the parent run. A grid that has lost
its queue thus finds its parent and cells again, and a command may be killed between any two of these steps.
"""

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TypeVar

from rich.console import Console

from lit_lazy.grid.jobs.backend import TAG, choose_backend
from lit_lazy.grid.jobs.job import Work
from lit_lazy.grid.plan import GRID_ID
from lit_lazy.grid.queue.liveness import find_living
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.support.disk import write_text
from lit_lazy.support.errors import one_line
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.run_folder import CELLS

ASIDE = ".until-"
"""In the names of folders that `--fresh` has moved aside."""
T = TypeVar("T")


def open_parent_run(
    work: Work,
    queue: Queue,
    tracker: Tracker,
    tags: Mapping[str, str],
    params: Mapping[str, str],
    plan: str,
    read: Callable[[str], T],
    console: Console,
) -> tuple[str, T | None]:
    """Find or start the parent run; returns its id and its artifact `plan` parsed by `read`, None if it has none.

    A damaged artifact (`read` raises ValueError) is reported on the console and treated as missing. The caller holds
    the queue's lock. Raises ValueError if MLflow has lost the run or if the queue belongs to another kind of work.
    """
    kind, facts = tags["kind"], queue.facts
    if (known := facts.get("kind", kind)) != kind:
        raise ValueError(f"{work.id}: the queue holds another kind of work, a {known}, under this name; rename one")
    grid_id = _find_grid_id(work, facts) or uuid.uuid4().hex
    write_text(work.folder / GRID_ID, grid_id)
    if "grid" not in facts:
        queue.facts = facts = facts | {"grid": grid_id, "kind": kind}
    begun = tracker.find({"grid": grid_id})
    if not begun and (where := facts.get("tracking")):
        lost = "no longer holds this grid's parent run; restore a backup"
        elsewhere = f"does not hold this grid's parent run, which is stored at {where}; set MLFLOW_TRACKING_URI to that"
        problem = lost if where == tracker.uri else elsewhere
        raise ValueError(f"MLflow at {tracker.uri} {problem}, or start again with --fresh")
    tags = {**tags, "grid": grid_id, TAG: choose_backend()}
    parent_id = begun[0].run_id if begun else tracker.create_run(work.id, tags)
    queue.facts = facts | {"tracking": tracker.uri}
    if (kept := tracker.read_bytes(parent_id, plan)) is not None:
        try:
            return parent_id, read(kept.decode())
        except ValueError as error:
            tracker.log_text(parent_id, kept.decode(errors="replace"), f"{plan}.damaged")
            console.print(
                f"{plan}, kept with the MLflow run, is damaged ({one_line(error)}): it is rewritten from this command; "
                f"the old one is now {plan}.damaged"
            )
    tracker.log_config(parent_id, params, work.base_config)
    return parent_id, None


def _find_grid_id(work: Work, facts: Mapping[str, str]) -> str | None:
    kept = work.folder / GRID_ID
    return facts.get("grid") or (kept.read_text(encoding="utf-8") if kept.exists() else None)


def reset_grid(work: Work, queue: Queue, tracker: Tracker, console: Console) -> None:
    """Start again without losing results: rename the folder and move the runs to MLflow's deleted runs.

    If this is killed, the same command completes it; a command without --fresh is refused, because the parent run is
    deleted first.
    """
    if alive := find_living(work.folder / "workers"):
        processes = ", ".join(sorted(member.pid for member in alive))
        raise ValueError(f"--fresh: {work.id} is running here (process {processes}); stop it first")
    if grid_id := _find_grid_id(work, queue.facts):
        for run in tracker.find({"grid": grid_id}, deleted=True):
            tracker.retire(run.run_id)
    if (work.folder / CELLS).exists():
        aside = work.folder.with_name(f"{work.id}{ASIDE}{datetime.now():%Y%m%d-%H%M%S}")
        work.folder.rename(aside)
        work.folder.mkdir()
        console.print(f"the former results are in {aside}", highlight=False)
    (work.folder / GRID_ID).unlink(missing_ok=True)
    queue.clear()
