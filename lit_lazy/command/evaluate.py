"""`lit-lazy evaluate`"""

import argparse

from lit_lazy.command.options import (
    CHANGES,
    Commands,
    add_command,
    add_options,
    of_kind,
    prepare_process,
    print_metrics,
)
from lit_lazy.support.checks import NonEmptyText


def add_to(commands: Commands) -> None:
    summary = "measure a trained model on its validation data"
    parser = add_command(commands, "evaluate", evaluate_command, summary, takes_overrides=True)
    parser.epilog = CHANGES
    add_options(parser, "checkpoint", "--import")
    parser.add_argument(
        "--evaluations",
        metavar="LIST",
        type=of_kind(NonEmptyText),
        help="measure these instead, for example 'Passkey(lengths=(512, 1024)), Int8()'",
    )
    add_options(parser, "--threads")


def evaluate_command(options: argparse.Namespace, overrides: list[str]) -> int:
    """Measure again the metrics that the run ended with, or the evaluations asked for. Creates nothing.

    Raises a one-line ValueError for a damaged checkpoint, if the data have changed since the training (which is not
    checked for evaluations: some need none of it), and for an evaluation that the model or its data do not support.
    """
    from lit_lazy.config.overrides import apply_overrides
    from lit_lazy.measure.diagnostics import measure, sample_validation
    from lit_lazy.measure.evaluation import compute_size_metrics, evaluate
    from lit_lazy.training import checkpoints
    from lit_lazy.training.devices import select_training_device
    from lit_lazy.training.prepare import check_evaluations

    prepare_process(options)
    trained = checkpoints.load(options.checkpoint)
    cfg = checkpoints.change_settings(trained.cfg, overrides)
    module = trained if cfg.model == trained.cfg.model else checkpoints.change_model(trained, cfg)
    model = module.model.to(select_training_device())
    if options.evaluations is not None:
        cfg, _ = apply_overrides(cfg, [f"--evaluations={options.evaluations}"])
        check_evaluations(cfg, model)
        for evaluation in cfg.evaluations:
            print_metrics(evaluation.measure(model, cfg.data))
        return 0
    source = checkpoints.load_data_for(options.checkpoint, trained, cfg.data)
    train = module.cfg.train
    diagnostics = measure(model, sample_validation(source), maps=None)
    print_metrics(
        evaluate(model, source, train.precision, train.batch_size) | compute_size_metrics(model) | diagnostics.scalars()
    )
    return 0
