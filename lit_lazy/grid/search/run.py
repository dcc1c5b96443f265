"""Runs a search: enqueues missing points, starts workers, shows progress, publishes the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from rich.console import Console

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.grid.jobs.job import LaunchOptions, Work
from lit_lazy.grid.jobs.launch import execute_cells, is_finished, open_grid
from lit_lazy.grid.jobs.parent_run import open_parent_run
from lit_lazy.grid.search.definition import Definition
from lit_lazy.grid.search.queue import SearchQueue
from lit_lazy.support.console import format_count, format_duration
from lit_lazy.support.provenance import git_sha
from lit_lazy.support.secrets import format_command_line
from lit_lazy.table.search_points import Point
from lit_lazy.tracking.tracker import NOTE, TrackedRun, Tracker
from lit_lazy.training.cost_estimate import estimate_cost, estimate_seconds
from lit_lazy.training.execution import ONE_DEVICE
from lit_lazy.training.prepare import load_outline

R = TypeVar("R")
DEFINITION = "search.json"


@dataclass(frozen=True)
class SearchWork(Work):
    """A search on an experiment, ready to run; `cells` are placeholders for its points."""

    definition: Definition
    noun: ClassVar[str] = "points"
    module: ClassVar[str] = "lit_lazy.grid.search.worker"


Publish = Callable[[SearchWork, SearchQueue, Tracker, str], R]
"""Writes the report of a search to its folder and to its parent run, whose id is the last argument."""


def format_best(queue: SearchQueue) -> list[str]:
    """A line such as `best 0.0099 at point 7 (tau_init 0.5, lr 0.003)`; none until a point is complete."""
    best = queue.best()
    if best is None:
        return []
    names = queue.definition.names
    values = ", ".join(f"{names[path]} {value:.4g}" for path, value in best.params.items())
    return [f"best {best.value:.4f} at point {best.number} ({values})"]


def run_search(work: SearchWork, launch: LaunchOptions, console: Console, publish: Publish[R]) -> tuple[R, bool]:
    """Execute the missing points of a search; returns the report from `publish` and whether every point is finished."""
    with open_grid(work, launch, SearchQueue, console) as opened:
        queue, tracker = opened.queue, opened.tracker
        with queue.lock():
            parent_id = _ensure_parent(work, queue, tracker, console)
        with execute_cells(work, launch, opened, parent_id, console, lambda: format_best(queue)):
            _report_ends(queue.points(), tracker.find_children(parent_id), tracker)
            report = publish(work, queue, tracker, parent_id)
        return report, is_finished(work, queue)


def _report_ends(points: Sequence[Point], runs: Sequence[TrackedRun], tracker: Tracker) -> None:
    """Mark ended points in MLflow whose workers could not: they were killed, or MLflow was away."""
    ends = {point.run: point for point in points}
    for run in runs:
        end = ends.get(run.tags["cell"])
        if end and end.state in ("pruned", "diverged") and "optuna.state" not in run.tags:
            tracker.prune(run.run_id, end.reason)
        elif run.state == "running" and (end is None or end.state == "failed"):
            tracker.fail(run.run_id, end.reason if end else "failed; its point was drawn again")


def _ensure_parent(work: SearchWork, queue: SearchQueue, tracker: Tracker, console: Console) -> str:
    """Start or resume the parent run of the search; returns its id. Raises ValueError if the search has changed."""
    definition = work.definition
    known = queue.facts.get("definition")
    _reject_changed(work, None if known is None else Definition.from_json(known))
    tags = {"kind": "search", "ablation": work.id, "git_sha": git_sha(), NOTE: format_command_line()}
    params = {f"axis.{definition.names[path]}": str(axis) for path, axis in definition.axes.items()}
    params |= {"objective": definition.objective, "sampler": f"TPE, seed {definition.seed}"}
    parent_id, former = open_parent_run(work, queue, tracker, tags, params, DEFINITION, Definition.from_json, console)
    _reject_changed(work, former)
    if former is None:
        tracker.save_views(list(definition.names.values()), [definition.objective])
        tracker.log_text(parent_id, definition.to_json(), DEFINITION)
    queue.facts = queue.facts | {"definition": definition.to_json()}
    return parent_id


def _reject_changed(work: SearchWork, former: Definition | None) -> None:
    changed = work.definition.find_differences(former) if former else []
    if changed:
        raise ValueError(
            f"{work.id}: {', '.join(changed)} changed since this search was started; --fresh moves the former results "
            "away, another name of the search, or another --runs folder, keeps both"
        )


def print_search(work: SearchWork, workers: int, threads: int, console: Console) -> None:
    """Print the plan of a search and an upper bound on its time; creates nothing."""
    import torch

    torch.set_num_threads(threads)
    definition = work.definition
    config = from_dict(RunConfig, definition.base)
    data = load_outline(config.data)
    seconds, _ = estimate_seconds(config, data, estimate_cost(config, data, ONE_DEVICE), ONE_DEVICE)
    lines = [f"{definition.names[path]:12} {axis}   ({path})" for path, axis in definition.axes.items()]
    every = definition.base["train"]["val_every"]
    judged = range(every, definition.steps, every)
    pruned = [step for step in judged if step >= definition.min_steps]
    when = (
        f"after {', '.join(map(str, pruned))} of {definition.steps} steps"
        if pruned
        else "none: no validation lies there"
    )
    lines += [
        "",
        f"{len(work.cells)} points of {work.id} with seed {definition.base['seed']}, minimising "
        f"{definition.objective}.",
        f"Sampler: TPE, seed {definition.seed}, {definition.startup} random points first. Pruning from step "
        f"{definition.min_steps} on: {when}.",
        f"About {format_duration(seconds)} per point, at most "
        f"{format_duration(seconds * len(work.cells) / workers)} of training with "
        f"{format_count(workers, 'worker')} of {format_count(threads, 'thread')}; pruned points take less.",
        "Nothing was created.",
    ]
    console.print("\n".join(lines), highlight=False)
