"""`python3 -m timings step|cells|grid|diagnostics|looks [--out FILE.json]`, most also by `make bench` and others."""

import argparse
import sys

from lit_lazy.command.main import main
from lit_lazy.command.options import Commands, Parser, add_command, add_options, of_kind
from lit_lazy.support.checked_fields import NonEmptyText, PositiveInt


def make_parser() -> Parser:
    """Parser of all benchmarks."""
    parser = Parser(prog="python3 -m timings", description="Benchmarks on this machine.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_step(commands)
    _add_cells(commands)
    _add_grid(commands)
    _add_diagnostics(commands)
    _add_looks(commands)
    return parser


def _add_step(commands: Commands) -> None:
    help = "time a training step of lazy attention and of softmax (minutes)"
    add_options(add_command(commands, "step", measure_step, help), "--out")


def measure_step(options: argparse.Namespace, _rest: list[str]) -> int:
    from timings.step import bench_step

    bench_step(out=options.out)
    return 0


def _add_cells(commands: Commands) -> None:
    help = "measure cells per core-hour against another commit, and attention against SDPA (an hour)"
    parser = add_command(commands, "cells", measure_cells, help)
    parser.epilog = """\
--out is written after every measurement. The same command on the same code, machine and options measures only what the
file lacks; a file of other code, another machine or other options is replaced, which it says. --sections and
--experiments may differ from call to call."""
    parser.add_argument(
        "--against",
        metavar="COMMIT",
        type=of_kind(NonEmptyText),
        default="3b7b986",
        help="commit to compare cells with; it is checked out in a temporary worktree (default 3b7b986)",
    )
    parser.add_argument(
        "--pairs",
        metavar="N",
        type=of_kind(PositiveInt),
        help="pairs of cells, 2 or more, with seeds 0, 1, ... (default 10; of stdlib_long and other experiments 3)",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=of_kind(PositiveInt),
        help="training steps of each cell (default: the experiment's)",
    )
    sections = "only these: attention, decoding, threads (two against one), cells (default all, in this order)"
    add_options(parser, {"--sections A,B": sections})
    parser.add_argument(
        "--experiments",
        metavar="A,B",
        type=of_kind(list[NonEmptyText]),
        help="of the cells (default backcopy,stdlib_small,stdlib_long)",
    )
    add_options(parser, "--out")


def measure_cells(options: argparse.Namespace, _rest: list[str]) -> int:
    from timings import cells

    experiments = options.experiments or cells.EXPERIMENTS
    pairs = {name: options.pairs or cells.FULL.pairs.get(name, min(cells.FULL.pairs.values())) for name in experiments}
    cells.bench_cells(
        sections=options.sections or cells.SECTIONS,
        experiments=experiments,
        against=options.against,
        sizes=cells.FULL._replace(pairs=pairs, steps=options.steps),
        out=options.out,
    )
    return 0


def _add_grid(commands: Commands) -> None:
    help = "measure the overhead of study and tracking over training (half an hour)"
    parser = add_command(commands, "grid", measure_grid, help)
    add_options(parser, {"--cells 0,1": "grid sizes in cells, multiples of 5 (default 100,1000,10000)"}, "--out")


def measure_grid(options: argparse.Namespace, _rest: list[str]) -> int:
    from timings import grid

    grid.bench_grid(sizes=options.cells or grid.SIZES, out=options.out)
    return 0


def _add_looks(commands: Commands) -> None:
    help = "simulate errors and power of verdicts at looks (two minutes)"
    parser = add_command(commands, "looks", simulate_looks, help)
    parser.add_argument(
        "--draws", metavar="N", type=of_kind(PositiveInt), default=20_000, help="per scenario (default 20000)"
    )
    add_options(parser, "--out")


def simulate_looks(options: argparse.Namespace, _rest: list[str]) -> int:
    from timings.looks import simulate

    simulate(options.draws, options.out)
    return 0


def _add_diagnostics(commands: Commands) -> None:
    help = "measure memory and time of the diagnostics (half an hour)"
    add_options(add_command(commands, "diagnostics", measure_diagnostics, help), "--out")


def measure_diagnostics(options: argparse.Namespace, _rest: list[str]) -> int:
    from timings.diagnostics import bench_diagnostics

    bench_diagnostics(out=options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(make_parser=make_parser))
