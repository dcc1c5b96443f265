"""`lit-lazy dashboard` and `lit-lazy mirror`."""

import argparse
from typing import Annotated

from lit_lazy.command.grid_helpers import open_grid_folder
from lit_lazy.command.options import Commands, add_command, add_grid
from lit_lazy.support.checks import Bounds, NonEmptyText


def add_to(commands: Commands) -> None:
    name = "print only the links of this MLflow experiment, such as table2-backcopy, or of this ablation"
    port = {"type": Annotated[int, Bounds(ge=1, le=65535)], "default": 5000}
    add_command(
        commands,
        "dashboard",
        dashboard,
        "serve the MLflow UI on 127.0.0.1, with links to the runs",
        {
            "experiment NAME": (name, {"type": NonEmptyText, "nargs": "?"}),
            "--port N": ("port (default 5000)", port),
        },
        "--open",
        "--runs",
    )
    add_grid(add_command(commands, "mirror", mirror, "send what MLflow lacks of an ablation, as after an outage"))


def dashboard(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.tracking.serve import serve

    return serve(options.runs, options.port, options.experiment, options.open)


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
