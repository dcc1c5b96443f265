"""`lit-lazy ablate status`"""

import argparse

from lit_lazy.command.grid_helpers import require_results, resolve_grid_name
from lit_lazy.command.options import Commands, add_command, add_grid, add_runs, add_storage


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "status", ablate_status, "show finished, running and failed cells, with reasons")
    add_grid(parser)
    add_storage(parser)
    add_runs(parser)


def ablate_status(options: argparse.Namespace, _rest: list[str]) -> int:
    if not options.storage:
        require_results(options.runs, options.ablation)
    from lit_lazy.grid.jobs.status import print_status
    from lit_lazy.grid.queue.queue import Queue
    from lit_lazy.grid.queue.storage import READABLE, default_storage, list_grid_names
    from lit_lazy.support.console import plain_console
    from lit_lazy.support.secrets import redact_url
    from lit_lazy.tracking.archive import open_readable

    given = options.storage or default_storage(options.runs)
    with open_readable(given) as storage:
        name = resolve_grid_name(options, list_grid_names(storage), redact_url(given))
        print_status(Queue(storage, name, READABLE), options.runs / name, plain_console())
    return 0
