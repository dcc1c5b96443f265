"""`lit-lazy ablate table`"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lit_lazy.command.grid_helpers import choose_output, open_grid_folder
from lit_lazy.command.options import Commands, add_command, add_grid, folder, path

if TYPE_CHECKING:
    from lit_lazy.table.records import Table


def add_to(commands: Commands) -> None:
    parser = add_command(
        commands, "table", ablate_table, "rebuild an ablation's table from its cells or from a table.json"
    )
    add_grid(parser)
    parser.add_argument(
        "--from", dest="source", metavar="FILE", type=path,
        help="recompute the statistics of this table.json, by what the ablation declares now, and replace the file and "
        "the table's other files beside it",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=folder,
        help="write the table and its figures here (default: NAME-EXPERIMENT in --runs)",
    )


def ablate_table(options: argparse.Namespace, _rest: list[str]) -> int:
    table, file = _rebuild_table(options) if options.source is None else _recompute_table(options)
    from lit_lazy.support.console import text_width
    from lit_lazy.table.render import render_text

    print(render_text(table, file, text_width()))
    return 0


def _rebuild_table(options: argparse.Namespace) -> "tuple[Table, Path]":
    """The table of a grid, and the file with all of it; writes both."""
    grid = open_grid_folder(options)
    from lit_lazy.report.publish import save_table
    from lit_lazy.support.disk import check_writable_folder
    from lit_lazy.table.render import DETAILS

    place = choose_output(options, grid.path)
    check_writable_folder("--out" if options.out else "--runs", place)
    place.mkdir(parents=True, exist_ok=True)
    return save_table(grid, place), place / DETAILS


def _recompute_table(options: argparse.Namespace) -> "tuple[Table, Path]":
    """The table of a table.json, which it replaces, and its file."""
    if options.base:
        raise ValueError(f"--base {options.base}: a table.json names its experiment; leave it out with --from")
    if options.out:
        raise ValueError(f"--out {str(options.out)!r}: --from replaces the file it names; leave one of the two out")
    from lit_lazy.grid.question import load_ablation_or_question
    from lit_lazy.report.publish import recompute_table
    from lit_lazy.support.named_files import find, list_available

    name = options.ablation.partition("-")[0]  # of NAME-EXPERIMENT
    path = find("ablations", name if name in list_available("ablations") else options.ablation)
    ablation, question = load_ablation_or_question(path)
    return recompute_table(options.source, ablation, question), options.source
