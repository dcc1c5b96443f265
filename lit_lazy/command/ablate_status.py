"""`lit-lazy ablate status`"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lit_lazy.command.grid_helpers import open_grid_folder
from lit_lazy.command.options import Commands, add_command, add_grid

if TYPE_CHECKING:
    from lit_lazy.grid.plan import GridFolder


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "status", ablate_status, "show finished, running and failed cells, with reasons")
    add_grid(parser)


def ablate_status(options: argparse.Namespace, _rest: list[str]) -> int:
    grid = open_grid_folder(options)
    from lit_lazy.grid.status import print_status
    from lit_lazy.support.console import plain_console

    print_status(grid, plain_console())
    if edits := _describe_edits(options, grid):
        print(f"{options.ablation} was edited: {edits}")
    return 0


def _describe_edits(options: argparse.Namespace, grid: "GridFolder") -> str:
    """What a grid's file says otherwise than when the grid began; "" if nothing, or if NAME is not that file's."""
    from lit_lazy.command.ablate_run import check_settings, parse_request
    from lit_lazy.grid.packed import describe_settings
    from lit_lazy.support.named_files import list_available

    if not (Path(options.ablation).is_file() or options.ablation in list_available("ablations")):
        return ""
    all_cells = {"looks": None, "rows": [], "baseline": None, "seeds": [], "init_from": None}
    try:
        request = parse_request(argparse.Namespace(**vars(options), **all_cells), [])
        if request.grid != grid.path.name:
            return ""
        check_settings(
            request, {cell.variant: describe_settings(cell.settings) for cell in grid.cells if cell.settings}
        )
        begun, declared = grid.plan.declaration, request.declaration
        if begun is not None and declared is not None and begun.digest != declared.digest:
            return "its claim or rules changed since its run, so another verdict would be exploratory"
    except ValueError as error:
        return str(error)
    return ""
