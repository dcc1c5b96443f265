"""`lit-lazy tokenise` and `lit-lazy train`."""

import argparse
import logging
from collections.abc import Mapping

from lit_lazy.command.options import add_execution, append_init_from, command, make_execution, print_metrics


@command(
    "tokenise",
    "tokenise an experiment's text ahead of training",
    "experiment",
    {
        "--processes N": "parallel processes, at most one per file (default: one per core, and only this process for a "
        "small corpus)"
    },
    takes_overrides=True,
    resumes=True,
)
def tokenise(options: argparse.Namespace, overrides: list[str]) -> int:
    from lit_lazy.config.overrides import apply_overrides
    from lit_lazy.config.user_files import experiment
    from lit_lazy.support.checks import require

    cfg, _ = apply_overrides(experiment(options.experiment), overrides)
    folder = cfg.data.tokenise(options.processes)
    if folder is None:
        raise ValueError(f"data={type(cfg.data).__name__!r}: has its tokens in memory; train without this command")
    source = cfg.data.load()
    size = sum(path.stat().st_size for path in folder.iterdir())
    length, info = source.context_length, source.info
    needed = cfg.train.steps * cfg.train.batch_size * length
    windows, per_step = len(source.train), cfg.train.batch_size
    require(per_step <= windows, "train.batch_size", per_step, f"must not exceed the {windows} training sequences")
    available = windows * length
    passes = f"{needed / available:.2f} passes through the tokens; {needed - available:,} more would make it one pass"
    if needed <= available:
        passes = f"{needed / available:.0%} of the available tokens"
    lines = {
        "where": f"{folder}, {size / 1e6:,.1f} MB",
        "training": f"{info['train_documents']:,} documents, {info['train_tokens']:,} tokens, {windows:,} windows of "
        f"{length:,}",
        "validation": f"{info['validation_documents']:,} documents, {info['validation_tokens']:,} tokens in "
        f"{len(source.validation):,} windows",
        "vocabulary": f"{source.vocab_size:,} tokens, {info['bytes_per_token']:.3f} bytes per token",
        "fingerprint": source.fingerprint,
        "the recipe": f"{cfg.train.steps:,} steps of {per_step:,} x {length:,} see {needed:,} tokens: {passes}",
    }
    for name, text in lines.items():
        print(f"{name:12} {text}")
    return 0


@command(
    "train",
    "train one experiment",
    "experiment",
    "--threads",
    {
        "--keep-checkpoint": (
            "keep the trained model, final.ckpt in the run folder (default; if given, a finished run without one is an "
            "error)",
            {"action": argparse.BooleanOptionalAction},
        ),
        "--dry-run": "print the expected cost; create nothing",
        "--gpu GPU": "with --dry-run: the GPU to assume, such as h100 (default: this machine's, or h200)",
        "--verbose": "print all final metrics instead of a selection",
    },
    "--logger",
    "--runs",
    "--init-from",
    add_execution,
    takes_overrides=True,
    resumes=True,
)
def train(options: argparse.Namespace, overrides: list[str]) -> int:
    from lit_lazy.training.logger_kinds import check_logger_kinds

    check_logger_kinds(options.loggers)
    from lit_lazy.config.overrides import apply_overrides
    from lit_lazy.config.user_files import load_experiment
    from lit_lazy.support.named_files import find

    path = find("experiments", options.experiment)
    cfg, _ = apply_overrides(load_experiment(path), append_init_from(options, overrides))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lit_lazy.training").setLevel(logging.INFO)
    execution = make_execution(options)
    if options.gpu is not None and not options.dry_run:
        raise ValueError(f"--gpu {options.gpu}: is assumed by --dry-run only; add that, or leave --gpu out")
    if options.dry_run:
        from lit_lazy.training.cost_estimate import format_dry_run

        print("\n".join([*format_dry_run(path.stem, cfg, execution, options.gpu), "Nothing was created."]))
        return 0
    from lit_lazy.training.prepare import outline_loads, prepare_outline

    # Mistakes are told before Lightning and MLflow are imported, which takes seconds, unless that would load the data.
    if not outline_loads(cfg.data):
        prepare_outline(cfg, execution)
    from lit_lazy.training.ranks import join_torchrun

    if (group := join_torchrun()) and group.rank:
        from lit_lazy.training.rank_process import join_training

        join_training(group)
        return 0
    from lit_lazy.data import list_doubts
    from lit_lazy.tracking.tracked_run import train_tracked

    trained = train_tracked(
        cfg, path.stem, options.runs, options.threads, options.keep_checkpoint, execution, options.loggers
    )
    data = trained.result.data
    print("\n".join([f"{trained.name}: {trained.state}", format_data(data), *list_doubts(data), ""]))
    if options.verbose:
        print_metrics(trained.metrics)
    else:
        print("\n".join(format_summary(trained.metrics, trained.result.before)))
        print_metrics({name: trained.metrics[name] for names in trained.result.evaluations.values() for name in names})
    try:
        checkpoint = str(trained.checkpoint)
    except ValueError as error:
        checkpoint = str(error)
    places = {"run": trained.folder, "checkpoint": checkpoint, "dashboard": trained.dashboard}
    print("\n".join(["", *(f"{name + ':':12}{place}" for name, place in places.items())]))
    return 0


def format_data(data: Mapping[str, str | int | float]) -> str:
    """`data: 538 files, 9,081,920 tokens; validation losses: trigram 2.561, unigram 4.348 bits/byte`."""
    counts = [
        f"{data[f'train_{noun}']:,} {noun}" for noun in ("files", "documents", "tokens") if f"train_{noun}" in data
    ]
    for unit, form in (("bits/byte", "{}_bits_per_byte"), ("nats", "{}_nats")):
        names = [name for name in ("optimum", "trigram", "unigram", "chance") if form.format(name) in data]
        if names:
            marks = ", ".join(f"{name} {data[form.format(name)]:.3f}" for name in names)
            return f"data: {', '.join(counts)}; validation losses: {marks} {unit}"
    return f"data: {', '.join(counts)}"


def format_summary(metrics: dict[str, float], start: str) -> list[str]:
    """Lines with the validation loss and the plotted metrics, next to those before the training, named by `start`."""
    from lit_lazy.table.columns import COLUMNS

    lines = {"validation loss (nats) ↓": f"{metrics['loss/val']:.4f}, {start} {metrics['init/loss/val']:.4f}"}
    for column in (column for column in COLUMNS if column.plotted and column.key in metrics):
        before = metrics.get(f"init/{column.key}")
        begun = "" if before is None else f", {start} {column.format(before)}"
        lines.setdefault(column.heading, f"{column.format(metrics[column.key])}{begun}")
    width = max(map(len, lines))
    return [f"{heading:{width}}  {text}" for heading, text in lines.items()]
