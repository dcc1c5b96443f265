"""`lit-lazy train`"""

import argparse

from lit_lazy.command.options import (
    Commands,
    add_execution,
    add_runs,
    add_threads,
    command,
    execution_of,
    print_metrics,
)


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = command(commands, "train", train, "train one experiment", takes_overrides=True)
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a name in experiments/, or a .py file")
    add_threads(parser)
    parser.add_argument(
        "--keep-checkpoint", action="store_true", help="keep the trained model, final.ckpt in the run folder"
    )
    add_runs(parser)
    add_execution(parser)


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    """`lit-lazy train`"""
    from lit_lazy.config.files import find, load_experiment
    from lit_lazy.config.overrides import apply_overrides

    path = find("experiments", options.experiment)
    cfg, _ = apply_overrides(load_experiment(path), overrides)
    from lit_lazy.tracking.tracked import train_tracked

    execution = execution_of(options)
    from lit_lazy.training.ranks import launched

    if (group := launched()) and group.rank:
        from lit_lazy.training.rank import take_part

        take_part(group)
        return 0
    result = train_tracked(cfg, path.stem, options.runs, options.threads, options.keep_checkpoint, execution)
    print_metrics(result.metrics)
    return 0
