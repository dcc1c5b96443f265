"""`python3 -m timings step|grid|diagnostics [--out FILE.json]`, also run by `make bench` and `make bench-grid`."""

import argparse
import sys

from lit_lazy.command.main import main
from lit_lazy.command.options import Commands, Parser, add_command, add_out, int_list


def make_parser() -> Parser:
    """Parser of all benchmarks."""
    parser = Parser(prog="python3 -m timings", description="Benchmarks on this machine.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_step(commands)
    _add_grid(commands)
    _add_diagnostics(commands)
    return parser


def _add_step(commands: Commands) -> None:
    help = "time a training step of lazy attention and of softmax (minutes)"
    add_out(add_command(commands, "step", measure_step, help))


def measure_step(options: argparse.Namespace, _rest: list[str]) -> int:
    from timings.step import bench_step

    bench_step(out=options.out)
    return 0


def _add_grid(commands: Commands) -> None:
    help = "measure the overhead of queue and tracking over training (half an hour)"
    parser = add_command(commands, "grid", measure_grid, help)
    parser.add_argument(
        "--cells", type=int_list, default=None, help="grid sizes in cells, multiples of 5 (default 100,1000,10000)"
    )
    add_out(parser)


def measure_grid(options: argparse.Namespace, _rest: list[str]) -> int:
    from timings import grid

    grid.bench_grid(sizes=options.cells or grid.SIZES, out=options.out)
    return 0


def _add_diagnostics(commands: Commands) -> None:
    help = "measure memory and time of the diagnostics (half an hour)"
    add_out(add_command(commands, "diagnostics", measure_diagnostics, help))


def measure_diagnostics(options: argparse.Namespace, _rest: list[str]) -> int:
    from timings.diagnostics import bench_diagnostics

    bench_diagnostics(out=options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(make_parser=make_parser))
