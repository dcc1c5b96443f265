"""`lit-lazy ablate questions`"""

import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_lazy.command.ablate_run import ablate_run, add_run_options, make_grid, parse_request
from lit_lazy.command.grid_helpers import default_workers
from lit_lazy.command.options import Commands, add_command, add_options
from lit_lazy.support.named_files import find, list_available, suggest_file

if TYPE_CHECKING:
    from lit_lazy.grid.job import Grid


def add_to(commands: Commands) -> None:
    summary = "run the missing cells of every question, the cheapest question first"
    parser = add_command(commands, "questions", ablate_questions, summary, takes_overrides=True, resumes=True)
    add_options(
        parser,
        {
            "--limit 90m": "skip questions that by the estimate would not finish in this time, in m or h, and start "
            "no cell after it"
        },
    )
    add_run_options(parser)


def ablate_questions(options: Namespace, overrides: list[str]) -> int:
    import torch

    from lit_lazy.support.console import format_duration, track_progress

    names, waiting = list_questions(options.base)
    torch.set_num_threads(options.threads)  # as in a worker
    workers = options.workers or default_workers(options.threads, options.devices or 1)
    seconds = {}
    for name in track_progress(names, "pricing questions"):
        run = _make_run_options(options, name)
        seconds[name] = _estimate_seconds(make_grid(run, parse_request(run, overrides)))
    order = sorted(names, key=lambda name: seconds[name])
    for name in order:
        print(f"{name:16} about {format_duration(seconds[name] / workers)} with {workers} workers")
    for reason in waiting:
        print(f"not ready: {reason}")
    if options.dry_run:
        print("Nothing was created.")
        return 0
    begun, status, left_out = time.monotonic(), 0, []
    for name in order:
        left = None if options.limit is None else options.limit - (time.monotonic() - begun)
        if left is not None and seconds[name] / workers > left:
            left_out.append(name)
            continue
        print(f"\n{name}", flush=True)
        status = max(status, ablate_run(_make_run_options(options, name, left), overrides))
    if left_out:
        print(f"\nskipped by --limit: {', '.join(left_out)}; run the same command again with more time")
    return status


def list_questions(base: str | None = None) -> tuple[list[str], list[str]]:
    """Names of the questions that can run, and for each that waits for another's table or for a model, the reason.

    base: the experiment to run them on, if not their own.
    """
    from lit_lazy.config.user_files import load_attribute, load_experiment
    from lit_lazy.grid.question import load_ablation_or_question
    from lit_lazy.grid.stages import FirstStageMissing

    ready, waiting = [], []
    for name in list_available("ablations"):
        path = find("ablations", name)
        if load_attribute(path, "question") is None:
            continue
        try:
            ablation, _ = load_ablation_or_question(path)
        except FirstStageMissing as error:
            waiting.append(str(error))
            continue
        experiment = find("experiments", base or ablation.base)
        start = load_experiment(experiment).init_from
        if start is None or Path(start).exists():
            ready.append(name)
        else:
            fix = suggest_file(start, "make it, or start from another")
            waiting.append(f"{name}: needs the model {start}, from which {experiment.stem} starts; {fix}")
    return ready, waiting


def _make_run_options(options: Namespace, name: str, limit: float | None = None) -> Namespace:
    own = {"ablation": name, "rows": [], "baseline": None, "results": [], "limit": limit}
    return Namespace(**vars(options) | own)


def _estimate_seconds(grid: "Grid") -> float:
    """Training time of a grid's missing cells on one worker and device."""
    from lit_lazy.grid.estimate import estimate_training
    from lit_lazy.training.result import RESULT

    missing = [cell for cell in grid.cells if not (grid.locate(cell.key) / RESULT).exists()]
    configs = {cell.variant: cell.config for cell in missing}
    seconds = {variant: estimate_training(config) for variant, config in configs.items()}
    return sum(seconds[cell.variant] for cell in missing)
