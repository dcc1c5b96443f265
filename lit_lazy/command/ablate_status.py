"""`lit-lazy ablate status`"""

import argparse
from pathlib import Path

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
    from lit_lazy.support.inside import join_name
    from lit_lazy.support.secrets import redact_url
    from lit_lazy.tracking.archive import open_readable

    given = options.storage or default_storage(options.runs)
    with open_readable(given) as storage:
        name = resolve_grid_name(options, list_grid_names(storage), redact_url(given))
        print_status(Queue(storage, name, READABLE), join_name(options.runs, name), plain_console())
        if edits := _describe_edits(options, name, storage):
            print(f"{options.ablation} was edited: {edits}")
    return 0


def _describe_edits(options: argparse.Namespace, grid: str, storage: str) -> str:
    """What a grid's file says otherwise than when the grid began; "" if nothing, or if NAME is not that file's."""
    from lit_lazy.command.ablate_run import check_settings, parse_request
    from lit_lazy.config.serialisation import flatten
    from lit_lazy.grid.queue.queue import read_states
    from lit_lazy.support.named_files import list_available
    from lit_lazy.table.stored import read_table

    if not (Path(options.ablation).is_file() or options.ablation in list_available("ablations")):
        return ""
    all_cells = {"looks": None, "rows": [], "seeds": [], "init_from": None}
    try:
        request = parse_request(argparse.Namespace(**vars(options), **all_cells), [])
        if request.grid != grid:
            return ""
        cells = [cell for _, cell in read_states(storage).get(grid, ())]
        former = {c.variant: {path: str(value) for path, value in flatten(c.config).items()} for c in cells}
        check_settings(request, former)
        file, declared = options.runs / grid / "table.json", request.declaration
        if declared is not None and file.exists():
            begun = read_table(file).declaration
            if begun is not None and begun.digest != declared.digest:
                return "its claim or rules changed since its run, so another verdict would be exploratory"
    except ValueError as error:
        return str(error)
    return ""
