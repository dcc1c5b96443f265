"""`lit-lazy ablate pack`"""

import argparse

from lit_lazy.command.grid_helpers import choose_output, open_grid_folder
from lit_lazy.command.options import Commands, add_command, add_grid, path


def add_to(commands: Commands) -> None:
    summary = "pack the finished cells of an ablation into one small file, which `ablate run --results` goes on from"
    parser = add_command(commands, "pack", ablate_pack, summary)
    add_grid(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=path,
        help="file to write: per cell its key, settings, metrics, times, backend, versions, machine and commit, as "
        "lines of JSON compressed by xz (default: cells.jsonl.xz in the grid's folder)",
    )


def ablate_pack(options: argparse.Namespace, _rest: list[str]) -> int:
    grid = open_grid_folder(options)
    from lit_lazy.grid.packed import CELLS, pack_grid
    from lit_lazy.support.disk import check_writable_file

    out = choose_output(options, grid.path / CELLS)
    check_writable_file("--out", out)
    packed, asked = pack_grid(grid, out)
    missing = asked - packed
    rest = f"; {missing} {'is' if missing == 1 else 'are'} missing" if missing else ""
    print(f"{out}: {packed} of {asked} cells of {grid.path.name}{rest}")
    return 0
