"""The grid that a command line asks for."""

from collections.abc import Sequence

from lit_lazy.command.ablate_run import make_grid, parse_request
from lit_lazy.command.main import make_parser
from lit_lazy.grid.work_records import Grid


def ask_for_grid(words: Sequence[str], overrides: Sequence[str] = ()) -> Grid:
    options = make_parser().parse_args([*words])
    return make_grid(options, parse_request(options, [*overrides]))
