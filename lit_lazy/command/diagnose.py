"""`lit-lazy diagnose`"""

import argparse
from functools import partial
from typing import Annotated

from lit_lazy.command.options import (
    CHANGES,
    Commands,
    add_command,
    add_options,
    folder,
    int_list,
    make_eviction,
    of_kind,
    prepare_process,
    read_list,
)
from lit_lazy.support.checks import Bounds, NonEmptyText, PositiveFloat, PositiveInt

MOST_TOKENS = 2**17
"""Maximum length of a sequence: longer ones would take very long without progress messages."""


def add_to(commands: Commands) -> None:
    summary = "measure and plot a trained model's attention: sinks, mass, sparsity, collapse"
    parser = add_command(commands, "diagnose", diagnose, summary, takes_overrides=True)
    parser.epilog = CHANGES
    add_options(parser, "checkpoint", "--import")
    parser.add_argument(
        "--data",
        metavar="EXPERIMENT",
        type=of_kind(NonEmptyText),
        help="experiment whose validation data to use, a name or a .py file (default: the data of the training)",
    )
    parser.add_argument(
        "--lengths",
        metavar="512,1024",
        type=partial(read_list, kind=Annotated[int, Bounds(ge=1, le=MOST_TOKENS)]),
        default=[],
        help="further context lengths to measure at",
    )
    add_options(parser, "--window", "--first")
    for part, default in (
        ("layers", "up to four, evenly spaced"),
        ("heads", "the one with the most weight on the first key"),
    ):
        parser.add_argument(
            f"--{part}",
            metavar="0,1",
            type=int_list,
            help=f"{part} whose attention maps to save, counted from 0 (default: {default})",
        )
    parser.add_argument(
        "--sequences",
        metavar="N",
        type=of_kind(PositiveInt),
        default=64,
        help="maximum number of validation sequences (default 64)",
    )
    parser.add_argument(
        "--rise",
        metavar="NATS",
        type=of_kind(PositiveFloat),
        help="raise tau of each head from 0, at most to 4, until the loss is so much higher; for a model that was "
        "trained without thresholds and is changed by --model.attention.normaliser=Elastic",
    )
    parser.add_argument("--out", metavar="FOLDER", type=folder, help="output folder (default: diagnose-RUN in --runs)")
    add_options(parser, "--threads", "--runs")


def diagnose(options: argparse.Namespace, overrides: list[str]) -> int:
    from lit_lazy.measure.diagnostics import Maps
    from lit_lazy.report.checkpoint import Request
    from lit_lazy.report.checkpoint import diagnose as diagnose_checkpoint

    prepare_process(options)
    layers, heads = (None if chosen is None else tuple(chosen) for chosen in (options.layers, options.heads))
    diagnose_checkpoint(
        Request(
            checkpoint=options.checkpoint,
            overrides=tuple(overrides),
            rise=options.rise,
            data=options.data,
            lengths=tuple(options.lengths),
            eviction=make_eviction(options),
            maps=Maps(layers, heads),
            sequences=options.sequences,
            out=options.out,
            runs=options.runs,
        )
    )
    return 0
