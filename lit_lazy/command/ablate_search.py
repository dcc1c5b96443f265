"""`lit-lazy ablate search`"""

import argparse
from typing import TYPE_CHECKING

from lit_lazy.command.grid_helpers import check_destinations, check_workers, default_workers, make_base, print_results
from lit_lazy.command.options import Commands, ablation_name, add_command, add_options

if TYPE_CHECKING:
    from lit_lazy.grid.search.run import SearchWork


def add_to(commands: Commands) -> None:
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
    work = make_search(options, overrides)
    workers = options.workers or default_workers(options.threads)
    from lit_lazy.grid.job import LaunchOptions
    from lit_lazy.grid.search.run import SearchDriver, SearchMirror, print_search, run_search

    if options.dry_run:
        print_search(work, workers, options.threads, plain_console())
        return 0
    from lit_lazy.grid.mirror import follow
    from lit_lazy.report.search import write_search_report
    from lit_lazy.table.document import to_text

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
    from lit_lazy.grid.ablation import check_cell_count
    from lit_lazy.grid.search.definition import define, load_search
    from lit_lazy.support.named_files import find

    search_path = find("ablations", options.ablation)
    search = load_search(search_path)
    prefix = f"search-{search.name}"
    base = make_base(options, search, overrides, prefix)
    trials = options.trials or search.trials
    check_cell_count("--trials", trials)
    definition = define(search, base.config, base.overridden)
    from lit_lazy.grid.search.run import SearchWork

    return SearchWork(
        id=f"{prefix}-{base.name}",
        cells=[definition.make_placeholder(number) for number in range(trials)],
        runs=options.runs,
        files=(search_path, base.file),
        definition=definition,
    )
