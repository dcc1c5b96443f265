"""Runs an ablation: enqueues what is missing, starts workers, shows progress, writes the table."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

from lit_lazy import figures
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.plan import PLAN, Plan, read_plan, save, table_from_mlflow
from lit_lazy.grid.progress import Progress
from lit_lazy.grid.queue import Queue
from lit_lazy.grid.table import Table
from lit_lazy.grid.worker import RUN_ID
from lit_lazy.run import git_sha
from lit_lazy.tracking import Tracker, default_uri

POLL_SECONDS = 1.0
MOST_CRASHES = 3
"""Deaths per worker, without a cell ending in between, after which starting another makes no sense."""


class GridError(RuntimeError):
    """A grid cannot go on."""


@dataclass(frozen=True)
class Grid:
    """An ablation on an experiment, ready to run."""

    id: str
    plan: Plan
    row_order: Sequence[str]
    cells: Sequence[Cell]
    base_config: dict[str, object]
    runs: Path
    files: Sequence[Path]
    """Python files that define classes of the cells' configs."""

    @property
    def folder(self) -> Path:
        return self.runs / self.id


@dataclass(frozen=True)
class Launch:
    """How to run a grid."""

    workers: int
    threads: int
    fresh: bool = False
    keep_checkpoints: bool = False


def default_storage(runs: Path) -> str:
    """The queue's database."""
    return f"sqlite:///{(runs / 'queue.db').resolve()}"


def run_grid(grid: Grid, launch: Launch, console: Console) -> tuple[Table, bool]:
    """Execute what is missing of a grid; its table, and whether every cell is complete.

    Another process may be running the same grid: both take cells from the one queue.
    """
    git_sha()
    grid.folder.mkdir(parents=True, exist_ok=True)
    queue = Queue(default_storage(grid.runs), grid.id)
    tracker = Tracker(default_uri(grid.runs), grid.runs, grid.id)
    if launch.fresh:
        _set_aside(grid, queue, tracker, console)
    parent_id = _parent(grid, queue, tracker)
    _recover(grid, queue, tracker, console)
    added = queue.add_missing(grid.cells)
    keys = {cell.key for cell in grid.cells}
    left = [key for key, state in queue.states().items() if key in keys and state in ("waiting", "running")]
    if left:
        console.print(f"{len(keys)} cells, {len(keys) - len(left)} already complete, {added} enqueued", highlight=False)
        tracker.set_running(parent_id)
        _work(grid, launch, queue, tracker, parent_id, console)
    else:
        console.print(f"{len(keys)} cells, all complete: nothing to do", highlight=False)
    states = queue.states()
    finished = all(states.get(key) == "complete" for key in keys)
    table = write_table(tracker, parent_id, grid.folder)
    if left:
        tracker.set_ended(parent_id, "FINISHED" if finished else "FAILED")
    return table, finished


def write_table(tracker: Tracker, parent_id: str, folder: Path) -> Table:
    """Build the table from MLflow, write it with its figure into a folder and onto the parent run."""
    table = table_from_mlflow(tracker, parent_id)
    files = save(table, folder / "table")
    shown = [column.key for column in table.columns if column.plotted]
    if shown and any(row.n for row in table.rows):
        files += figures.save_figure(figures.effects_figure(table, shown), folder / "effects")
    tracker.keep_files(parent_id, files)
    tracker.keep_views(read_plan(tracker, parent_id).axes, [column.key for column in table.columns])
    return table


def _set_aside(grid: Grid, queue: Queue, tracker: Tracker, console: Console) -> None:
    """Begin anew, and lose nothing: the folder is renamed, MLflow's runs go to its deleted ones."""
    if parent_id := queue.facts.get("parent"):
        tracker.retire(parent_id)
    queue.clear()
    if any(grid.folder.iterdir()):
        aside = grid.folder.with_name(f"{grid.id}.until-{datetime.now():%Y%m%d-%H%M%S}")
        grid.folder.rename(aside)
        grid.folder.mkdir()
        console.print(f"the former results are in {aside}", highlight=False)


def _parent(grid: Grid, queue: Queue, tracker: Tracker) -> str:
    """The parent run of the grid, begun or gone on with; its plan is brought up to date."""
    parent_id = queue.facts.get("parent")
    plan = grid.plan
    if parent_id is None:
        tags = {"kind": "ablation", "ablation": grid.id, "git_sha": git_sha(), "mlflow.note.content": plan.command}
        parent_id = tracker.start_run(grid.id, tags, {}, grid.base_config)
        queue.facts = {"parent": parent_id}
    else:
        plan = plan.widened(read_plan(tracker, parent_id), grid.row_order)
    tracker.keep_text(parent_id, plan.to_json(), PLAN)
    tracker.keep_views(plan.axes, [column.key for column in plan.columns])
    return parent_id


def _recover(grid: Grid, queue: Queue, tracker: Tracker, console: Console) -> None:
    """Fail the cells whose worker on this machine is dead, in the queue and in MLflow, and say so."""
    for cell, reason in queue.recover():
        console.print(f"{cell.variant} seed {cell.seed}: {reason}", highlight=False)
        run_id = grid.folder / "cells" / cell.key / RUN_ID
        if run_id.exists():
            tracker.fail(run_id.read_text(), reason)


def _work(grid: Grid, launch: Launch, queue: Queue, tracker: Tracker, parent_id: str, console: Console) -> None:
    """Keep workers busy until no cell of the grid waits or runs. Ctrl-C ends the workers after their bookkeeping."""
    keys = [cell.key for cell in grid.cells]
    workers: dict[int, subprocess.Popen[bytes]] = {}
    crashes, ended_before, told = 0, 0, False
    with Progress(queue, keys, launch.workers, console) as progress:
        try:
            while True:
                died = sum(worker.poll() not in (None, 0) for worker in workers.values())
                workers = {slot: worker for slot, worker in workers.items() if worker.poll() is None}
                if died or not workers:
                    _recover(grid, queue, tracker, console)
                states = queue.states()
                progress.update(states)
                waiting = sum(states[key] == "waiting" for key in keys)
                ended = sum(states[key] in ("complete", "failed") for key in keys)
                crashes, ended_before = (0, ended) if ended > ended_before else (crashes + died, ended_before)
                if crashes >= MOST_CRASHES * launch.workers:
                    raise GridError(f"workers keep dying before they finish a cell; see {grid.folder}/worker-0.log")
                free = [slot for slot in range(launch.workers) if slot not in workers]
                for slot in free[:waiting]:
                    workers[slot] = _start_worker(grid, launch, queue, tracker, parent_id, slot)
                if not workers and not any(states[key] == "running" for key in keys):
                    return
                if not workers and not told:
                    told = True
                    held = [name for key, name in queue.running().items() if key in keys]
                    console.print(f"waiting for workers that this process did not start: {'; '.join(held)}. If they")
                    console.print("are gone for good, interrupt and run again with --fresh")
                time.sleep(POLL_SECONDS)
        except BaseException:
            for worker in workers.values():
                worker.send_signal(signal.SIGTERM)
            for worker in workers.values():
                worker.wait()
            raise


def _one_gpu(slot: int) -> dict[str, str]:
    """The environment that gives a worker a GPU of its own, where there are any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus and torch.cuda.is_available() else {}


def _start_worker(
    grid: Grid, launch: Launch, queue: Queue, tracker: Tracker, parent_id: str, slot: int
) -> subprocess.Popen[bytes]:
    """A worker in a process group of its own, so that Ctrl-C reaches it through its parent alone."""
    command = [
        *(sys.executable, "-m", "lit_lazy.grid.worker"),
        *("--storage", queue.storage_url),
        *("--study", grid.id),
        *("--folder", str(grid.folder.resolve())),
        *("--threads", str(launch.threads)),
        *("--tracking-uri", tracker.uri),
        *("--experiment", grid.id),
        *("--parent", parent_id),
        *(["--keep-checkpoints"] if launch.keep_checkpoints else []),
        *("--import", *(str(file) for file in grid.files)),
    ]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(launch.threads))
    with (grid.folder / f"worker-{slot}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | threads | _one_gpu(slot),
            start_new_session=True,
        )


def command_line() -> str:
    """The command as a user would type it."""
    return shlex.join(["lit-lazy", *sys.argv[1:]])
