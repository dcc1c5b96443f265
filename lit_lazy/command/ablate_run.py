"""`lit-lazy ablate run`"""

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_lazy.command.grid_helpers import (
    Base,
    check_destinations,
    check_workers,
    default_workers,
    make_base,
    print_results,
)
from lit_lazy.command.options import (
    Commands,
    ablation_name,
    add_command,
    add_execution,
    add_options,
    make_execution,
)
from lit_lazy.support.checked_fields import require
from lit_lazy.support.environment_variables import read_torchrun_size
from lit_lazy.support.names_to_paths import find
from lit_lazy.support.secrets import format_command_line

MOST_LISTED = 3
"""Rows of earlier commands that the end of a command names."""

if TYPE_CHECKING:
    from lit_lazy.config import RunConfig
    from lit_lazy.grid.ablation import Ablation, Row
    from lit_lazy.grid.question import Question
    from lit_lazy.grid.work_records import Grid
    from lit_lazy.table.declaration import Declaration, Verdict
    from lit_lazy.table.results_table import Table
    from lit_lazy.training.execution_settings import Execution


class GridRequest(NamedTuple):
    """The ablation, experiment and rows that the options of `ablate run` name."""

    file: Path
    """Of the ablation."""
    ablation: "Ablation"
    question: "Question | None"
    base: Base
    chosen: "Sequence[tuple[Row, tuple[int, ...]]]"
    looks: tuple[int, ...] = ()
    """The question's looks, which the command makes; none if it trains rows or seeds of the user's choice at once."""

    @property
    def files(self) -> tuple[Path, Path]:
        """The files of the ablation and of the experiment."""
        return self.file, self.base.file

    @property
    def grid(self) -> str:
        """The grid's id."""
        return f"{self.ablation.name}-{self.base.name}"

    @property
    def declaration(self) -> "Declaration | None":
        """The question's declaration on the experiment, without a commit if the command line overrides settings."""
        if self.question is None:
            return None
        declared = self.question.declare(self.base.name, self.base.config, self.files)
        return replace(declared, commit="") if self.base.overridden else declared

    def at_look(self, verdict: "Verdict | None") -> "GridRequest":
        """The request of the question's look after those of a verdict."""
        assert self.question is not None
        return self._replace(chosen=self.question.select_look(verdict))

    def apply_rows(self) -> "dict[str, RunConfig]":
        """The config of each chosen row by name."""
        from lit_lazy.grid.ablation import apply_rows

        return apply_rows(self.chosen, self.base.config, self.base.overridden)


def add_to(commands: Commands) -> None:
    parser = add_command(
        commands, "run", ablate_run, "run the missing cells of an ablation", takes_overrides=True, resumes=True
    )
    add_options(
        parser,
        {
            "ablation NAME": ("a name in ablations/ or a .py file", {"type": ablation_name}),
            "--rows A,B": "only these rows",
            "--baseline ROW": "the row to compare with (default: the ablation's baseline)",
            "--results FILE ...": "take finished cells from this file of `ablate pack` and train only what it lacks; "
            "repeatable",
            "--limit 90m": "start no cell after this time, in m or h, from the command's start; those that run are "
            "finished, and the same command resumes; each worker starts at least one, however long the preparation "
            "took",
        },
    )
    add_run_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a grid's experiment, seeds and execution."""
    add_options(parser, "--base", {"--seeds 0,1": "run every row with these seeds"}, "--workers")
    add_options(parser, "--threads", default=1, help="CPU threads of each worker (default 1)")
    add_options(
        parser,
        "--launcher",
        "--gpus",
        "--ray-address",
        {
            "--looks N": "make at most N further looks of a question that has looks, also if it is futile to "
            "continue (default: until it is decided or futile)",
            "--dry-run": "list what would be trained and estimate its time; create nothing",
        },
    )
    former = parser.add_mutually_exclusive_group()
    add_options(
        former,
        {
            "--fresh": "move earlier results aside and start again",
            "--changed": "train rows anew whose code, settings or data changed, and keep their former cells beside "
            "them",
        },
    )
    add_options(parser, {"--keep-checkpoint": "keep each cell's trained model, final.ckpt"})
    output = parser.add_mutually_exclusive_group()
    add_options(
        output,
        {
            "--brief": "print only the verdict and the table's path",
            "--verbose": "print the whole table, not only its primary column",
        },
    )
    add_options(
        parser,
        {
            "--retry-failed N": (
                "retry a failed cell immediately, up to N times (default 1), unless it diverged",
                {"nargs": "?", "const": 1, "default": 0},
            )
        },
        "--storage",
        "--runs",
        "--init-from",
        "--logger",
    )
    add_execution(parser)


def ablate_run(options: argparse.Namespace, overrides: list[str]) -> int:
    from lit_lazy.training.logger_kinds import check_logger_kinds

    check_logger_kinds(options.loggers)
    until = None if options.limit is None else time.time() + options.limit
    check_launcher(options)
    execution = make_execution(options)
    if options.results and options.keep_checkpoint:
        raise ValueError("--results, --keep-checkpoint: a packed file holds no models; leave one of the two out")
    import torch

    torch.set_num_threads(options.threads)  # as in a worker: more wait for each other when rows are checked
    request = parse_request(options, overrides)
    if options.dry_run:
        return _dry_run(options, request, execution)
    from lit_lazy.support.console import plain_console
    from lit_lazy.training.run_folder import CELLS, RESULT

    found = len(list((options.runs / request.grid / CELLS).glob(f"*/{RESULT}")))
    lacks_results = found < sum(len(seeds) for _, seeds in request.chosen)
    if options.launcher == "local" and (options.fresh or options.changed or lacks_results):
        from lit_lazy.grid.pool import start_fork_server

        start_fork_server()  # now: it takes as long as the checks of rows and data
    grid = make_grid(options, request)
    for cell in grid.cells:
        execution.accumulation_steps(cell.config["train"]["batch_size"])
    from lit_lazy.grid.cell_state import read_state
    from lit_lazy.grid.mlflow_mirror import GridMirror, follow
    from lit_lazy.grid.run import run_grid
    from lit_lazy.grid.work_records import LaunchOptions
    from lit_lazy.table.declaration import Look
    from lit_lazy.table.verdict import describe_missing

    check_destinations(options)
    console = plain_console()
    with follow(GridMirror(grid.folder), console):
        with allocate_workers(options) as (workers, gpus):
            same = ("threads", "fresh", "storage", "retry_failed", "launcher")
            given = {name: getattr(options, name) for name in same} | {"loggers": tuple(options.loggers)}
            keep = options.keep_checkpoint
            launch = LaunchOptions(workers, keep_checkpoints=keep, gpus=gpus, execution=execution, until=until, **given)
            table, finished, executed = run_grid(grid, launch, console)
            made, former = int(executed), tuple[Look, ...]()
            while request.looks and finished and find_next_look(table, options.looks, made):
                assert table.declaration
                assert table.verdict
                if former == table.verdict.looks:  # all cells of the next look are there, but not all outcomes
                    console.print(describe_missing(table.declaration, table.outcomes, former), highlight=False)
                    break
                former = table.verdict.looks
                grid = make_grid(options, request.at_look(table.verdict))
                console.print(describe_next_look(table, grid, workers), highlight=False, soft_wrap=True)
                table, finished, executed = run_grid(grid, replace(launch, fresh=False), console)
                made += int(executed)
        _print_table(options, request, grid, table)
        waiting = [cell for cell in grid.cells if read_state(grid.locate(cell.key)) == "waiting"]
        if not finished and until is not None and waiting:
            print(f"ended by --limit: {len(waiting)} of {len(grid.cells)} cells wait; the same command resumes")
        report, saved = grid.folder / "report.html", grid.folder / "table.json"
        if made or not report.exists() or report.stat().st_mtime_ns < saved.stat().st_mtime_ns:
            from lit_lazy.report.ablation_page import draw_report

            draw_report(grid.folder, table)
        print(f"report:     {report}", flush=True)
    return 0 if finished else 1


def _dry_run(options: argparse.Namespace, request: GridRequest, execution: "Execution") -> int:
    from lit_lazy.grid.estimate import print_estimate
    from lit_lazy.grid.reused_results import read_row_settings
    from lit_lazy.grid.work_records import LaunchOptions

    table = None if options.fresh else _read_looks(request, options.runs)
    verdict = None if table is None else table.verdict
    if table is not None and verdict is not None:
        if find_next_look(table, options.looks, 0) is None:
            print(f"{verdict.sentence}\nThere is no look to make.")
            return 0
        request = request.at_look(verdict)
    configs, left = request.apply_rows(), request.chosen
    if not options.fresh:
        if not options.changed:
            check_settings(request, read_row_settings(options.runs / request.grid) or {})
        left = _drop_finished(options, request)
    if left:
        workers = options.workers or default_workers(options.threads, execution.devices)
        launch = LaunchOptions(workers, options.threads, execution=execution)
        print_estimate(request.grid, left, configs, launch)
    if left and request.looks:
        number = 1 if verdict is None else len(verdict.looks) + 1
        print(f"This is look {number} of {len(request.looks)}, at n = {', '.join(map(str, request.looks))}.")
    return 0


def _print_table(options: argparse.Namespace, request: GridRequest, grid: "Grid", table: "Table") -> None:
    """Print a grid's table, and which of its rows and seeds this command did not ask for."""
    from lit_lazy.support.console import text_width
    from lit_lazy.table.render import DETAILS, render_summary, render_text

    if options.brief:
        verdict = "" if table.verdict is None else f"{table.verdict.sentence}\n"
        done, cells = table.count_cells()
        print(f"\n{done} of {cells} cells of {grid.id} are trained; their table, figures and report are saved.")
        print(f"{verdict}{grid.folder / 'table.md'}")
    else:
        render = render_text if options.verbose else render_summary
        print_results(render(table, grid.folder / DETAILS, text_width()), grid.folder, options.runs)
    asked = {row.variant: {*row.seeds} for row in grid.plan.rows}
    unasked = {
        row.variant: [seed for seed in row.seeds if seed not in asked.get(row.variant, ())] for row in table.rows
    }
    others = [f"{name} (seeds {', '.join(map(str, seeds))})" for name, seeds in unasked.items() if seeds]
    if others and not request.looks:
        more = f" and {len(others) - MOST_LISTED} more rows" if len(others) > MOST_LISTED else ""
        print(f"Also in the table, by earlier commands: {', '.join(others[:MOST_LISTED])}{more}.")


def check_settings(request: GridRequest, former: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError if rows have other settings than in the grid, which the run itself would refuse too.

    former: the grid's settings by row and dotted path. Other evaluations may need no training.
    """
    from lit_lazy.config.serialisation import to_dict
    from lit_lazy.grid.plan_merging import GONE, ChangedRowError, describe_changes

    rows = [(row, ()) for row in request.ablation.all_rows if row.name in former]
    configs = request._replace(chosen=rows).apply_rows()
    now = {name: {k: v for k, v in to_dict(config).items() if k != "evaluations"} for name, config in configs.items()}
    found = {name: describe_changes(settings, now[name]) if name in now else GONE for name, settings in former.items()}
    if changes := {name: change for name, change in found.items() if change}:
        raise ChangedRowError(changes)


def _read_looks(request: GridRequest, runs: Path) -> "Table | None":
    """The table of the looks that a question's unchanged declaration has made in the runs folder, if any."""
    from lit_lazy.table.build import read_table

    file = runs / request.grid / "table.json"
    if not (request.looks and file.exists()):
        return None
    table, declared = read_table(file), request.declaration
    same = table.declaration is not None and declared is not None and table.declaration.digest == declared.digest
    return table if same else None


def _drop_finished(options: argparse.Namespace, request: GridRequest) -> "Sequence[tuple[Row, tuple[int, ...]]]":
    """The rows with the seeds that are still to train; prints how many are not.

    Raises ValueError, as the run itself does, if the code or the data of a row changed.
    """
    from lit_lazy.grid.ablation import has_built_data
    from lit_lazy.grid.plan import PLAN

    if not (options.results or any(options.runs.glob(f"*/{PLAN}"))):
        return request.chosen
    if not has_built_data(request.ablation, request.base.config):
        print("Which cells are finished is unknown until their text is tokenised; `lit-lazy tokenise` does that.")
        return request.chosen
    from lit_lazy.grid.cell_state import read_state
    from lit_lazy.grid.plan_merging import describe_measurable, merge_plan
    from lit_lazy.grid.run import describe_taken, find_results

    grid = make_grid(options, request)
    _, measurable = merge_plan(grid)
    done = {(cell.variant, cell.seed) for cell in grid.cells if read_state(grid.locate(cell.key)) == "complete"}
    if measurable:
        print(describe_measurable(measurable))
    taken = find_results(grid, shares=not options.keep_checkpoint)
    for line in describe_taken(grid, taken.values()):
        print(line)
    without = [*measurable, *(cell for cell in grid.cells if cell.key in taken)]
    had = done | {(cell.variant, cell.seed) for cell in without}
    left = [(row, tuple(s for s in seeds if (row.name, s) not in had)) for row, seeds in request.chosen]
    n = len(grid.cells)
    if len(done) == n:
        print(f"{n} cells, all finished: nothing to do")
    elif (grid.folder / PLAN).exists():
        print(f"{len(done)} of {n} cells are finished already")
    return [(row, seeds) for row, seeds in left if seeds]


def find_next_look(table: "Table", most: int | None, made: int) -> int | None:
    """The number of the look to make next, from 1; None if the question is decided or futile, or after `most` looks.

    most: the looks that the user asked for, which also overrules futility; made: those that this command made.
    """
    declared, verdict = table.declaration, table.verdict
    if declared is None or verdict is None or verdict.status != "undecided":
        return None
    number = len(verdict.looks) + 1
    stops = verdict.futile if most is None else made >= most
    return None if stops or number > len(declared.looks) else number


def describe_next_look(table: "Table", grid: "Grid", workers: int) -> str:
    """What a look left open, and the price of the next one by the time of the cells so far."""
    from lit_lazy.support.console import format_duration
    from lit_lazy.table.verdict import describe_chances, describe_contrasts, describe_looks

    declared, verdict = table.declaration, table.verdict
    assert declared is not None
    assert verdict is not None
    lines = describe_contrasts(declared, verdict, table.columns_by_key[declared.primary])
    known = {(row.variant, seed) for row in table.rows for seed in row.cells.get("complete", [])}
    missing = sum((cell.variant, cell.seed) not in known and cell.key not in grid.taken for cell in grid.cells)
    number, seconds = len(verdict.looks) + 1, (table.seconds or 0.0) / max(len(known), 1)
    price = f"{missing} cells, about {format_duration(missing * seconds / workers)} with {workers} workers"
    following = f"look {number} of {len(declared.looks)}: n = {declared.looks[number - 1]}, {price}"
    lines += [describe_chances(verdict)] if verdict.chances else []
    return "\n".join([describe_looks(declared, verdict)[-1], *(f"  {line}" for line in lines), following])


def parse_request(options: argparse.Namespace, overrides: list[str]) -> GridRequest:
    """The request of the options; of a question with looks, its first one."""
    from lit_lazy.grid.ablation import require_known, select_rows
    from lit_lazy.grid.question import load_ablation_or_question

    file = find("ablations", options.ablation)
    ablation, question = load_ablation_or_question(file)
    if options.baseline is not None:
        require_known("--baseline", [options.baseline], options.rows or [row.name for row in ablation.all_rows])
        ablation = replace(ablation, baseline=options.baseline)
    looks = () if question is None or options.rows or options.seeds else question.all_looks
    if options.looks is not None:
        fix = f"there are {len(looks)}, and with --rows or --seeds none; ask for at most those, or leave --looks out"
        require(options.looks <= len(looks), "--looks", options.looks, fix)
    base = make_base(options, ablation, overrides, ablation.name)
    if question is not None and looks:
        return GridRequest(file, ablation, question, base, question.select_look(None), looks)
    first = () if question is None else ablation.seeds[: question.all_looks[0]]
    return GridRequest(file, ablation, question, base, select_rows(ablation, options.rows, options.seeds or first))


def make_grid(options: argparse.Namespace, request: GridRequest) -> "Grid":
    """The grid that a request describes, fully checked. Creates nothing."""
    from lit_lazy.config.key import SCHEMA
    from lit_lazy.config.serialisation import to_dict
    from lit_lazy.config.user_files import hash_uncommitted
    from lit_lazy.grid.ablation import expand, group_keys, hash_row_definitions, prepare_rows

    ablation, base = request.ablation, request.base.config
    prepared = prepare_rows(request.chosen, base, request.base.overridden)
    cells = expand(prepared)
    from lit_lazy.data.source_interface import load_data

    if request.question is not None:
        from lit_lazy.measure.evaluation import require_measured

        require_measured(request.question.primary, [row.config.data.load() for row in prepared])
    from lit_lazy.grid.plan import Plan
    from lit_lazy.grid.reused_results import take_from_files
    from lit_lazy.grid.work_records import Grid
    from lit_lazy.table.records import RowInfo

    plan = Plan(
        ablation=ablation.name,
        base=request.base.title,
        baseline=ablation.baseline,
        command=format_command_line(),
        rows=tuple(RowInfo(row.name, row.source, seeds, request.base.title, row.note) for row, seeds, *_ in prepared),
        columns=ablation.columns,
        contrasts=ablation.all_contrasts,
        axes=tuple(dict.fromkeys(name for cell in cells for name in cell.axes)),
        definitions=hash_row_definitions(ablation, base, prepared),
        facts=load_data(base.data).info,
        schema=SCHEMA,
        declaration=request.declaration,
        primary=ablation.primary,
        files=hash_uncommitted(request.files),
        keys=group_keys(cells),
        axis_values={cell.variant: cell.axes for cell in cells},
        config=to_dict(base),
    )
    folder = None if options.fresh else options.runs / request.grid
    return Grid(
        id=request.grid,
        plan=plan,
        row_order=[row.name for row in ablation.all_rows],
        cells=cells,
        runs=options.runs,
        files=request.files,
        taken=take_from_files(cells, options.results, folder),
        changed=options.changed,
    )


def check_launcher(options: argparse.Namespace) -> None:
    """Raise ValueError under torchrun, if an option needs --launcher ray, or if Ray is not installed."""
    if read_torchrun_size() is not None:
        raise ValueError("torchrun: would start the grid several times; run it without torchrun, and give --devices")
    if options.launcher == "local":
        check_workers(options)
        for name, value in (("--gpus", options.gpus), ("--ray-address", options.ray_address)):
            if value is not None:
                raise ValueError(f"{name} {value}: needs --launcher ray; add that, or leave {name} out")
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--launcher ray: {error}; pip install 'lit-lazy[ray]'") from None


@contextmanager
def allocate_workers(options: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """The number of cells to run at a time, and the GPUs of each; stays connected to a Ray cluster meanwhile.

    Raises ValueError if the cluster cannot be used.
    """
    if options.launcher == "local":
        yield options.workers or default_workers(options.threads, options.devices or 1), 0.0
        return
    from lit_lazy.grid.ray_pool import count_cells, join_cluster

    with join_cluster(options.ray_address or os.environ.get("RAY_ADDRESS") or "local") as machines:
        devices = options.devices or 1
        has_gpus = any(gpus >= 1 for _, gpus in machines)
        gpus = devices * float(has_gpus) if options.gpus is None else options.gpus
        fitting = count_cells(machines, options.threads * devices, gpus)
        yield options.workers or fitting, gpus
