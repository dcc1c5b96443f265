"""lit-lazy: train, run ablations, look at results.

What a command needs is imported when it is given, so that help is instant.
"""

import argparse
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lit_lazy import __version__
from lit_lazy.disk import is_disk_full
from lit_lazy.errors import UnfinishedError
from lit_lazy.options import (
    Parser,
    add_base,
    add_launcher,
    add_out,
    add_runs,
    add_storage,
    add_threads,
    add_workers,
    command,
    folder,
    names,
    not_empty,
    port,
    positive,
    whole_numbers,
)

if TYPE_CHECKING:
    from lit_lazy.config import RunConfig
    from lit_lazy.grid.ablation import Ablation
    from lit_lazy.grid.launch import Grid
    from lit_lazy.grid.search import Search
    from lit_lazy.grid.search_run import SearchWork
    from lit_lazy.tracking import Tracker

BYTES_PER_WORKER = 3 * 2**29
"""1.5 GB: torch, lightning and mlflow take 0.9 GB before a small model is trained."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status: 0 done, 1 some cell failed, 2 wrong input, 130 interrupted."""
    options, rest = make_parser().parse_known_args(argv)
    if rest and not options.takes_overrides:
        return wrong(f"unknown argument {rest[0]!r}; see `{options.name} --help`")
    # A batch system ends jobs by SIGTERM: it is to be as orderly as Ctrl-C.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return options.command(options, rest)
    except ValueError as error:
        return wrong(str(error))
    except UnfinishedError as error:
        print(f"lit-lazy: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except Exception as error:
        if not is_disk_full(error):
            raise
        print("lit-lazy: no space left; free some and give the same command again, nothing is lost", file=sys.stderr)
        return 1


def wrong(message: str) -> int:
    """Tell a user's mistake in one line."""
    print(f"lit-lazy: {message}", file=sys.stderr)
    return 2


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The options that name a trained model."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a final.ckpt of --keep-checkpoint")
    parser.add_argument(
        "--import",
        metavar="FILE",
        dest="imports",
        action="append",
        default=[],
        help="a .py file that defines a class of your own, which the model was made with; may be given again",
    )


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = Parser(prog="lit-lazy", description="Reference laboratory for Lazy Attention.")
    parser.add_argument("--version", action="version", version=f"lit-lazy {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train_parser = command(commands, "train", train, "train one experiment", takes_overrides=True)
    train_parser.add_argument("experiment", metavar="EXPERIMENT", help="a name in experiments/, or a .py file")
    add_threads(train_parser)
    train_parser.add_argument(
        "--keep-checkpoint", action="store_true", help="keep the trained model, final.ckpt in the run folder"
    )
    add_runs(train_parser)

    evaluate_parser = command(commands, "evaluate", evaluate, "measure a trained model on its own validation data")
    add_checkpoint(evaluate_parser)
    add_threads(evaluate_parser)

    diagnose_parser = command(
        commands, "diagnose", diagnose, "look into a trained model: sinks, mass, sparsity, collapse, with figures"
    )
    add_checkpoint(diagnose_parser)
    diagnose_parser.add_argument(
        "--data",
        metavar="EXPERIMENT",
        type=not_empty,
        help="experiment whose validation data are measured: a name or a .py file (default: the model's own data)",
    )
    diagnose_parser.add_argument(
        "--lengths",
        metavar="512,1024",
        type=whole_numbers,
        default=[],
        help="context lengths to measure at, beside that of the data",
    )
    for part, what in (("layers", "up to four, spread"), ("heads", "the one with the strongest first key")):
        diagnose_parser.add_argument(
            f"--{part}",
            metavar="0,1",
            type=whole_numbers,
            default=None,
            help=f"{part} whose attention maps are kept, counted from 0 (default: {what})",
        )
    diagnose_parser.add_argument(
        "--sequences",
        metavar="N",
        type=positive,
        default=64,
        help="validation sequences to measure, at most (default 64)",
    )
    diagnose_parser.add_argument(
        "--out", metavar="FOLDER", type=folder, help="write the results there (default: diagnose-RUN in --runs)"
    )
    add_threads(diagnose_parser)
    add_runs(diagnose_parser)

    fields_parser = command(commands, "fields", fields, "list an experiment's fields that can be overridden")
    fields_parser.add_argument("experiment", metavar="EXPERIMENT", help="a name in experiments/, or a .py file")

    ablate = commands.add_parser("ablate", help="run ablations, build their tables").add_subparsers(
        title="commands", required=True, metavar="COMMAND"
    )
    run_parser = command(ablate, "run", ablate_run, "run what is missing of an ablation", takes_overrides=True)
    run_parser.add_argument("ablation", metavar="NAME", help="a name in ablations/, or a .py file")
    add_base(run_parser)
    run_parser.add_argument("--rows", metavar="A,B", type=names, default=[], help="only these rows")
    run_parser.add_argument("--seeds", metavar="0,1", type=whole_numbers, default=[], help="these seeds in every row")
    add_workers(run_parser)
    add_launcher(run_parser)
    run_parser.add_argument("--dry-run", action="store_true", help="list the cells and an estimate; create nothing")
    run_parser.add_argument("--fresh", action="store_true", help="set the former results aside and begin anew")
    run_parser.add_argument("--keep-checkpoint", action="store_true", help="keep each cell's trained model, final.ckpt")
    run_parser.add_argument(
        "--retry-failed",
        metavar="N",
        nargs="?",
        type=positive,
        const=1,
        default=0,
        help="try a cell that fails again at once, up to N times (once without N), unless it diverged",
    )
    add_storage(run_parser)
    add_runs(run_parser)

    search_parser = command(
        ablate, "search", ablate_search, "look for the best values of continuous options", takes_overrides=True
    )
    search_parser.add_argument("ablation", metavar="NAME", help="a search in ablations/, or a .py file")
    add_base(search_parser)
    search_parser.add_argument(
        "--trials", metavar="N", type=positive, default=None, help="points to finish (default: the search's own)"
    )
    add_workers(search_parser)
    search_parser.add_argument("--dry-run", action="store_true", help="say what it would do; create nothing")
    search_parser.add_argument("--fresh", action="store_true", help="set the former results aside and begin anew")
    add_storage(search_parser)
    add_runs(search_parser)

    status_parser = command(ablate, "status", ablate_status, "show what is done, what runs where, what failed and why")
    status_parser.add_argument("ablation", metavar="NAME", help="a name in ablations/, a .py file, or NAME-EXPERIMENT")
    add_base(status_parser, "it was run on")
    add_storage(status_parser)
    add_runs(status_parser)

    table_parser = command(ablate, "table", ablate_table, "rebuild an ablation's table from MLflow alone")
    table_parser.add_argument("ablation", metavar="NAME", help="a name in ablations/, a .py file, or NAME-EXPERIMENT")
    add_base(table_parser, "it was run on")
    add_runs(table_parser)

    command(ablate, "list", ablate_list, "list ablations, searches and experiments")

    bench = commands.add_parser("bench", help="measure what things cost on this machine").add_subparsers(
        title="commands", required=True, metavar="COMMAND"
    )
    step_parser = command(bench, "step", bench_step, "time a training step of lazy attention beside softmax (minutes)")
    add_out(step_parser)
    grid_parser = command(bench, "grid", bench_grid, "measure queue and tracking beside training (half an hour)")
    grid_parser.add_argument(
        "--cells", type=whole_numbers, default=None, help="sizes of grids, multiples of 5 (default 100,1000,10000)"
    )
    add_out(grid_parser)
    diagnostics_parser = command(
        bench, "diagnostics", bench_diagnostics, "measure memory and time of the diagnostics (half an hour)"
    )
    add_out(diagnostics_parser)

    report_parser = command(commands, "report", report, "rebuild an ablation's report from MLflow alone")
    report_parser.add_argument("ablation", metavar="NAME", help="a name in ablations/, a .py file, or NAME-EXPERIMENT")
    add_base(report_parser, "it was run on")
    report_parser.add_argument("--ui-url", metavar="URL", help="address of MLflow's pages, to link every run there")
    report_parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write it there (default: NAME-EXPERIMENT/report.html in --runs)"
    )
    add_runs(report_parser)

    dashboard_parser = command(
        commands, "dashboard", dashboard, "serve MLflow on 127.0.0.1 and print links to the runs"
    )
    dashboard_parser.add_argument(
        "experiment",
        metavar="NAME",
        nargs="?",
        type=not_empty,
        help="print only the links of this experiment in MLflow, such as table2-backcopy, or of this ablation",
    )
    dashboard_parser.add_argument("--port", type=port, default=5000, help="port (default 5000)")
    add_runs(dashboard_parser)
    return parser


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    """`lit-lazy train`"""
    from lit_lazy.files import find, load_experiment
    from lit_lazy.overrides import apply_overrides

    path = find("experiments", options.experiment)
    cfg, _ = apply_overrides(load_experiment(path), overrides)
    from lit_lazy.train import train_tracked

    result = train_tracked(cfg, path.stem, options.runs, options.threads, options.keep_checkpoint)
    print_metrics(result.metrics)
    return 0


def evaluate(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy evaluate`"""
    from lit_lazy.evaluate import evaluate_checkpoint

    import_classes(options)
    print_metrics(evaluate_checkpoint(options.checkpoint, options.threads))
    return 0


def import_classes(options: argparse.Namespace) -> None:
    """Run the files of `--import`."""
    from lit_lazy.files import load_module, python_file

    for name in options.imports:
        load_module(python_file("--import", name))


def diagnose(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy diagnose`"""
    import torch

    from lit_lazy.diagnose import Request
    from lit_lazy.diagnose import diagnose as diagnose_checkpoint
    from lit_lazy.diagnostics import Maps

    import_classes(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    layers, heads = (None if chosen is None else tuple(chosen) for chosen in (options.layers, options.heads))
    diagnose_checkpoint(
        Request(
            checkpoint=options.checkpoint,
            data=options.data,
            lengths=tuple(options.lengths),
            maps=Maps(layers, heads),
            sequences=options.sequences,
            out=options.out,
            runs=options.runs,
        )
    )
    return 0


def print_metrics(metrics: Mapping[str, float]) -> None:
    """One a line."""
    for name, value in sorted(metrics.items()):
        print(f"{name:36} {value:.6g}")


def fields(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy fields`"""
    from lit_lazy.files import find, load_experiment
    from lit_lazy.overrides import override_parser

    override_parser(load_experiment(find("experiments", options.experiment))).print_help()
    return 0


def make_grid(options: argparse.Namespace, overrides: list[str]) -> "Grid":
    """The grid that the options of `ablate run` describe, checked whole; nothing is created."""
    from lit_lazy.config import to_dict
    from lit_lazy.files import find
    from lit_lazy.grid.ablation import definitions, expand, load_ablation, row_infos, select

    ablation_path = find("ablations", options.ablation)
    ablation = load_ablation(ablation_path)
    base_path, base_name, base, overridden = make_base(options, ablation, overrides)
    chosen = select(ablation, options.rows, options.seeds)
    cells = expand(chosen, base, overridden)
    from lit_lazy.grid.launch import Grid, command_line
    from lit_lazy.grid.plan import Plan

    # The baseline has its place in the table, missing or not, also when it is not run now.
    names_chosen = {row.name for row, _ in chosen}
    in_table = [*chosen, *(() if ablation.baseline in names_chosen else select(ablation, [ablation.baseline], []))]
    plan = Plan(
        ablation=ablation.name,
        base=base_name,
        baseline=ablation.baseline,
        command=command_line(),
        rows=tuple(row_infos(in_table, base_name)),
        columns=ablation.columns,
        contrasts=ablation.contrasts,
        axes=tuple(dict.fromkeys(name for cell in cells for name in cell.axes)),
        definitions=definitions(ablation, base),
        facts=base.data.load().info,
    )
    return Grid(
        id=f"{ablation.name}-{base_name}",
        plan=plan,
        row_order=[row.name for row in ablation.all_rows],
        cells=cells,
        base_config=to_dict(base),
        runs=options.runs,
        files=(ablation_path, base_path),
    )


def make_base(
    options: argparse.Namespace, definition: "Ablation | Search", overrides: list[str]
) -> tuple[Path, str, "RunConfig", list[str]]:
    """The experiment under an ablation or a search: its file, its name, its config, and the paths that were overridden.

    A short hash in the name keeps an overridden experiment's results apart from the experiment's own.
    """
    from lit_lazy.config import cell_key, replace_at
    from lit_lazy.files import find, load_experiment
    from lit_lazy.overrides import apply_overrides

    path = find("experiments", options.base or definition.base)
    experiment = replace_at(load_experiment(path), definition.common)
    base, overridden = apply_overrides(experiment, overrides)
    suffix = "" if base == experiment else f"-{cell_key(base, '')[:6]}"
    return path, path.stem + suffix, base, overridden


def ablate_run(options: argparse.Namespace, overrides: list[str]) -> int:
    """`lit-lazy ablate run`"""
    from rich.console import Console

    check_launcher(options)
    grid = make_grid(options, overrides)
    if options.dry_run:
        from lit_lazy.grid.estimate import print_estimate

        print_estimate(grid, options.workers or default_workers(options.threads), options.threads, Console())
        return 0
    from lit_lazy.grid.launch import Launch, run_grid

    check_places(options, grid.id)
    with places(options) as (workers, gpus):
        launch = Launch(
            workers=workers,
            threads=options.threads,
            fresh=options.fresh,
            keep_checkpoints=options.keep_checkpoint,
            storage=options.storage,
            only_these=bool(options.rows or options.seeds),
            retry_failed=options.retry_failed,
            launcher=options.launcher,
            gpus=gpus,
        )
        table, finished = run_grid(grid, launch, Console())
    tell_results(table.markdown(), grid.folder, options.runs)
    return 0 if finished else 1


def tell_results(table: str, where: Path, runs: Path) -> None:
    """The table, and where it and all else is."""
    print(f"\n{table}\n")
    print(f"table:      {where}/table.* ({', '.join(sorted(path.suffix for path in where.glob('table.*')))})")
    print(f"figures:    {' '.join(str(path) for path in sorted(where.glob('*.png')))}")
    if (report := where / "report.html").exists():
        print(f"report:     {report}")
    print(f"runs:       {where}/cells/, workers' logs {where}/worker-*.log")
    print(f"dashboard:  {shlex.join(['lit-lazy', 'dashboard', where.name, '--runs', str(runs)])}")


def make_search(options: argparse.Namespace, overrides: list[str]) -> "SearchWork":
    """The search that the options of `ablate search` describe, checked whole; nothing is created."""
    from lit_lazy.config import to_dict
    from lit_lazy.files import find
    from lit_lazy.grid.search import define, load_search

    search_path = find("ablations", options.ablation)
    search = load_search(search_path)
    base_path, base_name, base, overridden = make_base(options, search, overrides)
    definition = define(search, base, overridden)
    from lit_lazy.grid.search_run import SearchWork

    return SearchWork(
        id=f"search-{search.name}-{base_name}",
        cells=[definition.undrawn(number) for number in range(options.trials or search.trials)],
        base_config=to_dict(base),
        runs=options.runs,
        files=(search_path, base_path),
        definition=definition,
    )


def ablate_search(options: argparse.Namespace, overrides: list[str]) -> int:
    """`lit-lazy ablate search`"""
    from rich.console import Console

    work = make_search(options, overrides)
    workers = options.workers or default_workers(options.threads)
    from lit_lazy.grid.launch import Launch
    from lit_lazy.grid.search_run import print_search, run_search

    if options.dry_run:
        print_search(work, workers, options.threads, Console())
        return 0
    check_places(options, work.id)
    # Points beyond those asked for may wait in the queue, from a command that asked for more.
    launch = Launch(workers, options.threads, options.fresh, storage=options.storage, only_these=True)
    report, finished = run_search(work, launch, Console())
    tell_results(report.markdown(), work.folder, options.runs)
    return 0 if finished else 1


def check_launcher(options: argparse.Namespace) -> None:
    """Raise ValueError where an option needs Ray, or Ray is wanted and is not there."""
    if options.launcher == "local":
        for name, value in (("--gpus", options.gpus), ("--ray-address", options.ray_address)):
            if value is not None:
                raise ValueError(f"{name} {value}: has a meaning with --launcher ray only; add that, or leave it out")
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--launcher ray: {error}; pip install 'lit-lazy[ray]'") from None


@contextmanager
def places(options: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """How many cells to run at a time, and the GPUs of each; a Ray cluster is joined meanwhile.

    Raises ValueError where the cluster cannot be used.
    """
    if options.launcher == "local":
        yield options.workers or default_workers(options.threads), 0.0
        return
    from lit_lazy.grid.ray_pool import Share, joined
    from lit_lazy.tracking import default_uri

    with joined(options.ray_address or os.environ.get("RAY_ADDRESS") or "local") as cluster:
        cluster.check_stores(queue=options.storage, tracking=default_uri(options.runs))
        share = Share(options.threads, float(cluster.has_gpus) if options.gpus is None else options.gpus)
        times = cluster.times(share)
        yield options.workers or times, share.gpus


def default_workers(threads: int) -> int:
    """One worker per GPU where there are any, else as many as cores and memory carry."""
    import psutil
    import torch

    affinity = getattr(os, "sched_getaffinity", None)  # Linux only; elsewhere a process may use every core
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory = psutil.virtual_memory().available // BYTES_PER_WORKER
    return torch.cuda.device_count() or max(1, min(cores // threads, memory))


def check_places(options: argparse.Namespace, grid: str) -> None:
    """Raise ValueError, in one line, where results, queue or tracking could not be kept; nothing is created."""
    from lit_lazy.disk import writable_folder
    from lit_lazy.grid.queue import check_storage, default_storage
    from lit_lazy.tracking import check_store, default_uri

    writable_folder("--runs", options.runs)
    if options.storage or options.runs.is_dir():
        check_storage(options.storage or default_storage(options.runs), grid)
    check_store(default_uri(options.runs))


def grid_name(options: argparse.Namespace, known: Sequence[str], where: str) -> str:
    """The grid that NAME and --base mean, one of those known at a place."""
    from lit_lazy.files import find
    from lit_lazy.grid.ablation import load_ablation

    name = options.ablation
    if not known:
        raise ValueError(f"ablation {name!r}: {where} holds no such grid; it has none; `lit-lazy ablate run` makes it")
    if name in known and options.base:
        raise ValueError(f"--base {options.base!r}: {name!r} names its experiment already; leave --base out")
    if name not in known:
        ablation = load_ablation(find("ablations", name))
        name = f"{ablation.name}-{Path(options.base or ablation.base).stem}"
    if name not in known:
        raise ValueError(
            f"ablation {name!r}: {where} holds no such grid; it has {', '.join(known)}; `lit-lazy ablate run` makes it"
        )
    return name


def ablate_status(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy ablate status`"""
    from rich.console import Console

    from lit_lazy.grid.queue import Queue, default_storage, grid_names, redacted
    from lit_lazy.grid.status import print_status

    storage = options.storage or default_storage(options.runs)
    name = grid_name(options, grid_names(storage), redacted(storage))
    print_status(Queue(storage, name), Console())
    return 0


def tracked_grid(options: argparse.Namespace) -> "Tracker":
    """The MLflow experiment of the grid that NAME and --base mean."""
    from lit_lazy.databases import redacted
    from lit_lazy.tracking import Tracker, check_store, default_uri, experiment_names

    uri = default_uri(options.runs)
    check_store(uri)
    known = experiment_names(uri, kind="ablation")
    return Tracker(uri, options.runs, grid_name(options, known, f"MLflow at {redacted(uri)}"))


def ablate_table(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy ablate table`"""
    from lit_lazy.disk import writable_folder
    from lit_lazy.grid.launch import write_table
    from lit_lazy.grid.plan import newest_parent

    tracker = tracked_grid(options)
    writable_folder("--runs", options.runs)
    folder = options.runs / tracker.experiment
    folder.mkdir(parents=True, exist_ok=True)
    print(write_table(tracker, newest_parent(tracker), folder).markdown())
    return 0


def report(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy report`"""
    from lit_lazy.disk import writable_folder, write_text
    from lit_lazy.grid.plan import newest_parent
    from lit_lazy.report import REPORT, report_html

    tracker = tracked_grid(options)
    path = options.out or options.runs / tracker.experiment / REPORT
    if path.is_dir():
        raise ValueError(f"--out {str(path)!r}: is a folder; name a file in it")
    writable_folder("--out" if options.out else "--runs", path.parent)
    page = report_html(tracker, newest_parent(tracker), options.ui_url)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    print(f"report:     {path}")
    return 0


def ablate_list(_options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy ablate list`"""
    from lit_lazy.files import available, find, load_module

    listed: dict[str, list[str]] = {"ablations": [], "searches": [], "experiments": []}
    for room in ("ablations", "experiments"):
        for name in available(room):
            module = load_module(find(room, name))
            about = (module.__doc__ or "").strip().partition("\n")[0]
            kind = "searches" if room == "ablations" and hasattr(module, "search") else room
            listed[kind].append(f"  {name:16} {about}")
    for kind, lines in listed.items():
        print("\n".join([f"{kind}:", *lines]))
    return 0


def bench_step(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy bench step`"""
    from lit_lazy.bench import step

    step.bench_step(out=options.out)
    return 0


def bench_grid(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy bench grid`"""
    from lit_lazy.bench import grid

    grid.bench_grid(sizes=options.cells or grid.SIZES, out=options.out)
    return 0


def bench_diagnostics(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy bench diagnostics`"""
    from lit_lazy.bench import diagnostics

    diagnostics.bench_diagnostics(out=options.out)
    return 0


def dashboard(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy dashboard`"""
    from lit_lazy.serve import serve

    return serve(options.runs, options.port, options.experiment)


if __name__ == "__main__":
    sys.exit(main())
