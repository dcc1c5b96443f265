"""`lit-lazy tokenise`"""

import argparse

from lit_lazy.command.options import Commands, add_command, positive_int


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = add_command(
        commands,
        "tokenise",
        tokenise,
        "make the tokens of an experiment's text, before a training",
        takes_overrides=True,
    )
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a name in experiments/, or a .py file")
    parser.add_argument(
        "--processes",
        metavar="N",
        type=positive_int,
        default=None,
        help="processes that tokenise files side by side, at most one per file (default: as many as cores; small "
        "corpora are tokenised by the command itself)",
    )


def tokenise(options: argparse.Namespace, overrides: list[str]) -> int:
    """`lit-lazy tokenise`"""
    from lit_lazy.config.files import find, load_experiment
    from lit_lazy.config.overrides import apply_overrides
    from lit_lazy.support.checks import require

    cfg, _ = apply_overrides(load_experiment(find("experiments", options.experiment)), overrides)
    folder = cfg.data.tokenise(options.processes)
    kind = type(cfg.data).__name__
    require(folder is not None, "data", kind, "its tokens are made in memory whenever they are needed; just train")
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


def format_passes(needed: int, there: int) -> str:
    """How often a training goes through the tokens there are."""
    if needed <= there:
        return f"{needed / there:.0%} of what is there"
    return f"{needed / there:.2f} passes through what is there; {needed - there:,} more tokens would make it one"
