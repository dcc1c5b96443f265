"""`lit-lazy dashboard`"""

import argparse

from lit_lazy.command.options import Commands, add_command, add_runs, non_empty, port


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = add_command(commands, "dashboard", dashboard, "serve MLflow on 127.0.0.1 and print links to the runs")
    parser.add_argument(
        "experiment",
        metavar="NAME",
        nargs="?",
        type=non_empty,
        help="print only the links of this experiment in MLflow, such as table2-backcopy, or of this ablation",
    )
    parser.add_argument("--port", type=port, default=5000, help="port (default 5000)")
    add_runs(parser)


def dashboard(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy dashboard`"""
    from lit_lazy.tracking.serve import serve

    return serve(options.runs, options.port, options.experiment)
