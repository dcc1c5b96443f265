"""`lit-lazy bench diagnostics`"""

import argparse

from lit_lazy.command.options import Commands, add_command, add_out


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = add_command(
        commands, "diagnostics", bench_diagnostics, "measure memory and time of the diagnostics (half an hour)"
    )
    add_out(parser)


def bench_diagnostics(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy bench diagnostics`"""
    from lit_lazy.bench import watching

    watching.bench_diagnostics(out=options.out)
    return 0
