"""`lit-lazy ablate questions` and `lit-lazy ablate search`"""

import argparse
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_lazy.command.ablate_run import ablate_run, add_run_options, make_grid, parse_request
from lit_lazy.command.grid_helpers import check_destinations, check_workers, default_workers, make_base, print_results
from lit_lazy.command.options import Commands, ablation_name, add_command, add_options
from lit_lazy.support.names_to_paths import find, list_available, suggest_file

if TYPE_CHECKING:
    from lit_lazy.grid.search.run import SearchWork
    from lit_lazy.grid.work_records import Grid


def add_questions_to(commands: Commands) -> None:
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
    from lit_lazy.training.run_folder import RESULT

    missing = [cell for cell in grid.cells if not (grid.locate(cell.key) / RESULT).exists()]
    configs = {cell.variant: cell.config for cell in missing}
    seconds = {variant: estimate_training(config) for variant, config in configs.items()}
    return sum(seconds[cell.variant] for cell in missing)


def add_search_to(commands: Commands) -> None:
    parser = add_command(
        commands,
        "search",
        ablate_search,
        "search the best values of continuous settings",
        takes_overrides=True,
        resumes=True,
    )
    add_options(
        parser,
        {"ablation NAME": ("a search in ablations/ or a .py file", {"type": ablation_name})},
        "--base",
        {"--trials N": "number of points to train (default: the number that the search names)"},
        "--workers",
    )
    add_options(parser, "--threads", default=1, help="CPU threads of each worker (default 1)")
    add_options(
        parser,
        {"--dry-run": "print the plan; create nothing", "--fresh": "move earlier results aside and start again"},
        "--storage",
        "--runs",
        "--init-from",
        "--logger",
    )


def ablate_search(options: argparse.Namespace, overrides: list[str]) -> int:
    from lit_lazy.support.console import plain_console, text_width
    from lit_lazy.training.logger_kinds import check_logger_kinds

    check_logger_kinds(options.loggers)
    check_workers(options)
    import torch

    torch.set_num_threads(options.threads)  # as in a worker
    work = make_search(options, overrides)
    workers = options.workers or default_workers(options.threads)
    from lit_lazy.grid.search.run import SearchDriver, SearchMirror, print_search, run_search
    from lit_lazy.grid.work_records import LaunchOptions

    if options.dry_run:
        print_search(work, workers, options.threads, plain_console())
        return 0
    from lit_lazy.grid.mlflow_mirror import follow
    from lit_lazy.report.index_and_search_pages import write_search_report
    from lit_lazy.table.document_formats import to_text

    check_destinations(options)
    launch = LaunchOptions(workers, options.threads, options.fresh, loggers=tuple(options.loggers))
    driver, console = SearchDriver(work, options.storage), plain_console()
    with follow(SearchMirror(driver), console):
        finished = run_search(driver, launch, console)
        report = write_search_report(driver)
        print_results(to_text(report.to_blocks(), text_width()), work.folder, options.runs)
    return 0 if finished else 1


def make_search(options: argparse.Namespace, overrides: list[str]) -> "SearchWork":
    """The search that the options of `ablate search` describe, fully checked. Creates nothing."""
    from lit_lazy.grid.ablation import load_defined
    from lit_lazy.grid.search.definition import Search, define

    search_path = find("ablations", options.ablation)
    search = load_defined(search_path, "search", Search)
    search = replace(search, trials=options.trials or search.trials)
    prefix = f"search-{search.name}"
    base = make_base(options, search, overrides, prefix)
    definition = define(search, base.config, base.overridden)
    from lit_lazy.grid.search.run import SearchWork

    cells = [definition.make_placeholder(number) for number in range(search.trials)]
    return SearchWork(f"{prefix}-{base.name}", cells, options.runs, (search_path, base.file), definition)
