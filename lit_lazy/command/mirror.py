"""`lit-lazy mirror`"""

import argparse

from lit_lazy.command.grid_helpers import open_grid_folder
from lit_lazy.command.options import Commands, add_command, add_grid


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "mirror", mirror, "send what MLflow lacks of an ablation, as after an outage")
    add_grid(parser)


def mirror(options: argparse.Namespace, _rest: list[str]) -> int:
    grid = open_grid_folder(options)
    from lit_lazy.grid.mirror import GridMirror
    from lit_lazy.support.secrets import redact_url
    from lit_lazy.tracking.check_store import check_store
    from lit_lazy.tracking.store import default_uri

    check_store(default_uri(options.runs))
    GridMirror(grid.path).sync(final=True)
    print(f"MLflow at {redact_url(default_uri(options.runs))} shows {grid.path.name}")
    return 0
