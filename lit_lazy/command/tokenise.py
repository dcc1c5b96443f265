"""`lit-lazy tokenise`"""

import argparse

from lit_lazy.command.options import Commands, add_command, add_options, of_kind
from lit_lazy.support.checks import PositiveInt


def add_to(commands: Commands) -> None:
    summary = "tokenise an experiment's text ahead of training"
    parser = add_command(commands, "tokenise", tokenise, summary, takes_overrides=True, resumes=True)
    add_options(parser, "experiment")
    parser.add_argument(
        "--processes",
        metavar="N",
        type=of_kind(PositiveInt),
        help="parallel processes, at most one per file (default: one per core, and only this process for a small "
        "corpus)",
    )


def tokenise(options: argparse.Namespace, overrides: list[str]) -> int:
    from lit_lazy.config.overrides import apply_overrides
    from lit_lazy.config.user_files import load_experiment
    from lit_lazy.support.checks import require
    from lit_lazy.support.named_files import find

    cfg, _ = apply_overrides(load_experiment(find("experiments", options.experiment)), overrides)
    folder = cfg.data.tokenise(options.processes)
    kind = type(cfg.data).__name__
    require(folder is not None, "data", kind, "has its tokens in memory; train without this command")
    assert folder is not None
    source = cfg.data.load()
    size = sum(path.stat().st_size for path in folder.iterdir())
    length, info = source.context_length, source.info
    needed = cfg.train.steps * cfg.train.batch_size * length
    windows, per_step = len(source.train), cfg.train.batch_size
    require(per_step <= windows, "train.batch_size", per_step, f"must not exceed the {windows} training sequences")
    lines = {
        "where": f"{folder}, {size / 1e6:,.1f} MB",
        "training": f"{info['train_documents']:,} documents, {info['train_tokens']:,} tokens, {windows:,} windows of "
        f"{length:,}",
        "validation": f"{info['validation_documents']:,} documents, {info['validation_tokens']:,} tokens in "
        f"{len(source.validation):,} windows",
        "vocabulary": f"{source.vocab_size:,} tokens, {info['bytes_per_token']:.3f} bytes per token",
        "fingerprint": source.fingerprint,
        "the recipe": f"{cfg.train.steps:,} steps of {per_step:,} x {length:,} see {needed:,} tokens: "
        f"{format_passes(needed, windows * length)}",
    }
    for name, text in lines.items():
        print(f"{name:12} {text}")
    return 0


def format_passes(needed: int, available: int) -> str:
    """The number of passes of a training through the available tokens."""
    if needed <= available:
        return f"{needed / available:.0%} of the available tokens"
    return f"{needed / available:.2f} passes through the tokens; {needed - available:,} more would make it one pass"
