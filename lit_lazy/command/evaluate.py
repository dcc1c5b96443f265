"""`lit-lazy evaluate`"""

import argparse
from pathlib import Path

from lit_lazy.command.options import Commands, add_checkpoint, add_command, add_threads, import_classes, print_metrics


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = add_command(commands, "evaluate", evaluate_command, "measure a trained model on its own validation data")
    add_checkpoint(parser)
    add_threads(parser)


def evaluate_command(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy evaluate`"""
    import_classes(options)
    print_metrics(evaluate_checkpoint(options.checkpoint, options.threads))
    return 0


def evaluate_checkpoint(path: Path, threads: int | None = None) -> dict[str, float]:
    """The metrics that the run itself ended with, measured again. Creates nothing.

    Raises ValueError, in one line, for what is no checkpoint, and where the data are no longer those of its training.
    """
    import torch

    from lit_lazy.measure.diagnostics import measure, sample_validation
    from lit_lazy.measure.evaluation import compute_size_metrics, evaluate
    from lit_lazy.training import checkpoints
    from lit_lazy.training.devices import select_training_device

    if threads is not None:
        torch.set_num_threads(threads)
    module = checkpoints.load(path)
    source = checkpoints.load_training_data(path, module)
    model = module.model.to(select_training_device())
    train = module.cfg.train
    diagnostics = measure(model, sample_validation(source), maps=None)
    return (
        evaluate(model, source, train.precision, train.batch_size) | compute_size_metrics(model) | diagnostics.scalars()
    )
