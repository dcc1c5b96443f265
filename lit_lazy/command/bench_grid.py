"""`lit-lazy bench grid`"""

import argparse

from lit_lazy.command.options import Commands, add_command, add_out, int_list


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = add_command(commands, "grid", bench_grid, "measure queue and tracking beside training (half an hour)")
    parser.add_argument(
        "--cells", type=int_list, default=None, help="sizes of grids, multiples of 5 (default 100,1000,10000)"
    )
    add_out(parser)


def bench_grid(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy bench grid`"""
    from lit_lazy.bench import grid

    grid.bench_grid(sizes=options.cells or grid.SIZES, out=options.out)
    return 0
