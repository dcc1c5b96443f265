"""lit-lazy: train, run ablations, look at results.

Options are read here; everything else is imported late, so that help is instant.
"""

import argparse
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lit_lazy import __version__
from lit_lazy.errors import UnfinishedError

if TYPE_CHECKING:
    from lit_lazy.config import RunConfig
    from lit_lazy.grid.launch import Grid

BYTES_PER_WORKER = 3 * 2**29
"""1.5 GB: torch, lightning and mlflow take 0.9 GB before a small model is trained."""

OVERRIDES = """\
Any field of the experiment can be overridden, for example
  --model.d_model=128 --train.steps=200 --model.attention.normaliser=Elastic --model.attention.normaliser.tau_init=2
`lit-lazy fields EXPERIMENT` lists them all with their meaning."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status: 0 done, 1 some cell failed, 2 wrong input, 130 interrupted."""
    options, rest = make_parser().parse_known_args(argv)
    if rest and not options.takes_overrides:
        return wrong(f"unknown argument {rest[0]!r}; see `lit-lazy {options.name} --help`")
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


def wrong(message: str) -> int:
    """Tell a user's mistake in one line."""
    print(f"lit-lazy: {message}", file=sys.stderr)
    return 2


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="lit-lazy", description="Reference laboratory for Lazy Attention.")
    parser.add_argument("--version", action="version", version=f"lit-lazy {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train_parser = command(commands, "train", train, "train one experiment", takes_overrides=True)
    train_parser.add_argument("experiment", metavar="EXPERIMENT", help="a name in experiments/, or a .py file")
    train_parser.add_argument(
        "--threads", type=positive, default=None, help="CPU threads (default: torch's own choice)"
    )
    train_parser.add_argument(
        "--keep-checkpoint", action="store_true", help="keep the trained model, final.ckpt in the run folder"
    )
    add_runs(train_parser)

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
    run_parser.add_argument(
        "--workers",
        type=positive,
        default=None,
        help="processes (default: one per GPU, else as many as cores and memory carry)",
    )
    run_parser.add_argument("--threads", type=positive, default=1, help="CPU threads of each worker (default 1)")
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

    status_parser = command(ablate, "status", ablate_status, "show what is done, what runs where, what failed and why")
    status_parser.add_argument("ablation", metavar="NAME", help="a name in ablations/, a .py file, or NAME-EXPERIMENT")
    add_base(status_parser)
    add_storage(status_parser)
    add_runs(status_parser)

    table_parser = command(ablate, "table", ablate_table, "rebuild an ablation's table from MLflow alone")
    table_parser.add_argument("ablation", metavar="NAME", help="a name in ablations/, a .py file, or NAME-EXPERIMENT")
    add_base(table_parser)
    add_runs(table_parser)

    command(ablate, "list", ablate_list, "list ablations and experiments")

    dashboard_parser = command(
        commands, "dashboard", dashboard, "serve MLflow on 127.0.0.1 and print links to the runs"
    )
    dashboard_parser.add_argument("--port", type=positive, default=5000, help="port (default 5000)")
    add_runs(dashboard_parser)
    return parser


def command(commands, name, function, text, takes_overrides=False) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=OVERRIDES if takes_overrides else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=function, takes_overrides=takes_overrides, name=name)
    return parser


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=folder, default=Path("runs"), help="folder of all results (default: runs)")


def add_base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base", metavar="EXPERIMENT", help="experiment to run on: a name or a .py file (default: the ablation's own)"
    )


def add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage",
        metavar="URL",
        default=os.environ.get("LIT_LAZY_STORAGE"),
        help="database of the queue, which all machines share: postgresql://USER:PASSWORD@HOST/DATABASE "
        "(default: $LIT_LAZY_STORAGE, else queue.db in the runs folder)",
    )


def positive(text: str) -> int:
    """An option that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def names(text: str) -> list[str]:
    """An option that is a list of names separated by commas."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: must be names separated by commas, for example lazy,softmax")
    return found


def folder(text: str) -> Path:
    """An option that is a folder, there or to be made."""
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: is a file, must be a folder")
    return Path(text)


def whole_numbers(text: str) -> list[int]:
    """An option that is a list of whole numbers separated by commas."""
    if not text or not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers separated by commas, for example 0,1,2")
    return [int(part) for part in text.split(",")]


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    """`lit-lazy train`"""
    from lit_lazy.files import find, load_experiment
    from lit_lazy.overrides import apply_overrides

    path = find("experiments", options.experiment)
    cfg, _ = apply_overrides(load_experiment(path), overrides)
    from lit_lazy.train import train_tracked

    result = train_tracked(cfg, path.stem, options.runs, options.threads, options.keep_checkpoint)
    for name, value in sorted(result.metrics.items()):
        print(f"{name:36} {value:.6g}")
    return 0


def fields(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy fields`"""
    from lit_lazy.files import find, load_experiment
    from lit_lazy.overrides import override_parser

    override_parser(load_experiment(find("experiments", options.experiment))).print_help()
    return 0


def make_grid(options: argparse.Namespace, overrides: list[str]) -> "Grid":
    """The grid that the options of `ablate run` describe, checked whole; nothing is created."""
    from lit_lazy.config import replace_at, to_dict
    from lit_lazy.files import find, load_experiment
    from lit_lazy.grid.ablation import definitions, expand, load_ablation, row_infos, select
    from lit_lazy.overrides import apply_overrides

    ablation_path = find("ablations", options.ablation)
    ablation = load_ablation(ablation_path)
    base_path = find("experiments", options.base or ablation.base)
    experiment = replace_at(load_experiment(base_path), ablation.common)
    base, overridden = apply_overrides(experiment, overrides)
    chosen = select(ablation, options.rows, options.seeds)
    cells = expand(chosen, base, overridden)
    from lit_lazy.grid.launch import Grid, command_line
    from lit_lazy.grid.plan import Plan

    base_name = base_path.stem + overrides_suffix(experiment, base)
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


def overrides_suffix(experiment: "RunConfig", base: "RunConfig") -> str:
    """Keeps an overridden experiment's results apart from the experiment's own: "" or "-" and a short hash."""
    from lit_lazy.config import cell_key

    return "" if base == experiment else f"-{cell_key(base, '')[:6]}"


def ablate_run(options: argparse.Namespace, overrides: list[str]) -> int:
    """`lit-lazy ablate run`"""
    from rich.console import Console

    grid = make_grid(options, overrides)
    if options.dry_run:
        from lit_lazy.grid.estimate import print_estimate

        print_estimate(grid, options.workers or default_workers(options.threads), options.threads, Console())
        return 0
    from lit_lazy.grid.launch import Launch, run_grid

    workers = options.workers or default_workers(options.threads)
    launch = Launch(
        workers=workers,
        threads=options.threads,
        fresh=options.fresh,
        keep_checkpoints=options.keep_checkpoint,
        storage=options.storage,
        only_these=bool(options.rows or options.seeds),
        retry_failed=options.retry_failed,
    )
    check_places(options)
    table, finished = run_grid(grid, launch, Console())
    print(f"\n{table.markdown()}")
    where = grid.folder
    print(f"\ntable:      {where}/table.md (also .csv, .tex, .json, .html), figure {where}/effects.png")
    print(f"runs:       {where}/cells/, workers' logs {where}/worker-*.log")
    print(f"dashboard:  {shlex.join(['lit-lazy', 'dashboard', '--runs', str(options.runs)])}")
    return 0 if finished else 1


def default_workers(threads: int) -> int:
    """One worker per GPU where there are any, else as many as cores and memory carry."""
    import psutil
    import torch

    affinity = getattr(os, "sched_getaffinity", None)  # Linux only; elsewhere a process may use every core
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory = psutil.virtual_memory().available // BYTES_PER_WORKER
    return torch.cuda.device_count() or max(1, min(cores // threads, memory))


def check_places(options: argparse.Namespace) -> None:
    """Raise ValueError, in one line, where results, queue or tracking could not be kept; nothing is created."""
    from lit_lazy.disk import writable_folder
    from lit_lazy.grid.queue import check_storage
    from lit_lazy.tracking import check_store, default_uri

    writable_folder("--runs", options.runs)
    if options.storage:
        check_storage(options.storage)
    check_store(default_uri(options.runs))


def grid_name(options: argparse.Namespace, known: Sequence[str], where: str) -> str:
    """The grid that NAME and --base mean, one of those known at a place."""
    from lit_lazy.files import find
    from lit_lazy.grid.ablation import load_ablation

    name = options.ablation
    if name not in known:
        ablation = load_ablation(find("ablations", name))
        name = f"{ablation.name}-{Path(options.base or ablation.base).stem}"
    if name not in known:
        raise ValueError(f"ablation {name!r}: {where} holds no such grid; it has {', '.join(known) or 'none'}")
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


def ablate_table(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy ablate table`"""
    from lit_lazy.disk import writable_folder
    from lit_lazy.grid.launch import write_table
    from lit_lazy.grid.plan import newest_parent
    from lit_lazy.tracking import Tracker, check_store, default_uri, experiment_names

    uri = default_uri(options.runs)
    check_store(uri)
    name = grid_name(options, experiment_names(uri), f"MLflow at {uri}")
    writable_folder("--runs", options.runs)
    tracker = Tracker(uri, options.runs, name)
    folder = options.runs / name
    folder.mkdir(parents=True, exist_ok=True)
    print(write_table(tracker, newest_parent(tracker), folder).markdown())
    return 0


def ablate_list(_options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy ablate list`"""
    from lit_lazy.files import available, find, load_module

    for room in ("ablations", "experiments"):
        print(f"{room}:")
        for name in available(room):
            about = (load_module(find(room, name)).__doc__ or "").strip().partition("\n")[0]
            print(f"  {name:16} {about}")
    return 0


def dashboard(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy dashboard`"""
    from lit_lazy.serve import serve

    return serve(options.runs, options.port)


if __name__ == "__main__":
    sys.exit(main())
