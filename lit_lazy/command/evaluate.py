"""`lit-lazy evaluate`"""

import argparse

from lit_lazy.command.options import Commands, add_checkpoint, add_command, add_threads, prepare_process, print_metrics


def add_to(commands: Commands) -> None:
    summary = "measure a trained model on its validation data"
    parser = add_command(commands, "evaluate", evaluate_command, summary, takes_overrides=True)
    add_checkpoint(parser)
    add_threads(parser)


def evaluate_command(options: argparse.Namespace, overrides: list[str]) -> int:
    """Measure again the metrics that the run ended with. Creates nothing.

    Raises a one-line ValueError for a damaged checkpoint, and if the data have changed since the training.
    """
    from lit_lazy.measure.diagnostics import measure, sample_validation
    from lit_lazy.measure.evaluation import compute_size_metrics, evaluate
    from lit_lazy.training import checkpoints
    from lit_lazy.training.devices import select_training_device

    prepare_process(options)
    trained = checkpoints.load(options.checkpoint)
    cfg = checkpoints.change_settings(trained.cfg, overrides)
    module = trained if cfg.model == trained.cfg.model else checkpoints.change_model(trained, cfg)
    source = checkpoints.load_data_for(options.checkpoint, trained, cfg.data)
    model = module.model.to(select_training_device())
    train = module.cfg.train
    diagnostics = measure(model, sample_validation(source), maps=None)
    print_metrics(
        evaluate(model, source, train.precision, train.batch_size) | compute_size_metrics(model) | diagnostics.scalars()
    )
    return 0
