"""`lit-lazy bench step`"""

import argparse

from lit_lazy.command.options import Commands, add_command, add_out


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = add_command(
        commands, "step", bench_step, "time a training step of lazy attention beside softmax (minutes)"
    )
    add_out(parser)


def bench_step(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy bench step`"""
    from lit_lazy.bench import step

    step.bench_step(out=options.out)
    return 0
