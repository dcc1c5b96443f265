"""`lit-lazy dashboard`"""

import argparse
from typing import Annotated

from lit_lazy.command.options import Commands, add_command, add_options, of_kind
from lit_lazy.support.checks import Bounds, NonEmptyText


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "dashboard", dashboard, "serve the MLflow UI on 127.0.0.1, with links to the runs")
    add_options(
        parser,
        {
            "experiment NAME": (
                "print only the links of this MLflow experiment, such as table2-backcopy, or of this ablation",
                {"type": of_kind(NonEmptyText), "nargs": "?"},
            ),
            "--port N": (
                "port (default 5000)",
                {"type": of_kind(Annotated[int, Bounds(ge=1, le=65535)]), "default": 5000},
            ),
        },
        "--open",
        "--runs",
    )


def dashboard(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.tracking.serve import serve

    return serve(options.runs, options.port, options.experiment, options.open)
