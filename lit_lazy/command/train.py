"""`lit-lazy train`"""

import argparse
import logging

from lit_lazy.command.options import (
    Commands,
    add_execution,
    add_init_from,
    add_runs,
    add_threads,
    command,
    execution_of,
    print_metrics,
    with_init,
)


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = command(commands, "train", train, "train one experiment", takes_overrides=True)
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a name in experiments/, or a .py file")
    add_threads(parser)
    parser.add_argument(
        "--keep-checkpoint", action="store_true", help="keep the trained model, final.ckpt in the run folder"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what it will take; create nothing")
    parser.add_argument(
        "--logger",
        metavar="KIND",
        dest="loggers",
        action="append",
        choices=("csv", "tensorboard", "wandb"),
        default=[],
        help="log to csv, tensorboard or wandb too, in the run folder; may be given again (MLflow is always there)",
    )
    add_runs(parser)
    add_init_from(parser)
    add_execution(parser)


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    """`lit-lazy train`"""
    from lit_lazy.config.files import find, load_experiment
    from lit_lazy.config.overrides import apply_overrides

    path = find("experiments", options.experiment)
    cfg, _ = apply_overrides(load_experiment(path), with_init(options, overrides))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lit_lazy.training").setLevel(logging.INFO)
    from lit_lazy.tracking.tracked import train_tracked

    execution = execution_of(options)
    if options.dry_run:
        from lit_lazy.training.cost import report

        print("\n".join([*report(path.stem, cfg, execution), "Nothing was created."]))
        return 0
    from lit_lazy.training.ranks import launched

    if (group := launched()) and group.rank:
        from lit_lazy.training.rank import take_part

        take_part(group)
        return 0
    trained = train_tracked(
        cfg, path.stem, options.runs, options.threads, options.keep_checkpoint, execution, options.loggers
    )
    print_metrics(trained.metrics)
    return 0
