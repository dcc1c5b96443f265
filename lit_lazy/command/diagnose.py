"""`lit-lazy diagnose`"""

import argparse
from functools import partial

from lit_lazy.command.options import (
    Commands,
    add_checkpoint,
    add_command,
    add_eviction,
    add_runs,
    add_threads,
    folder,
    import_classes,
    int_list,
    make_eviction,
    non_empty,
    positive_int,
)


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = add_command(
        commands, "diagnose", diagnose, "look into a trained model: sinks, mass, sparsity, collapse, with figures"
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--data",
        metavar="EXPERIMENT",
        type=non_empty,
        help="experiment whose validation data are measured: a name or a .py file (default: the model's own data)",
    )
    parser.add_argument(
        "--lengths",
        metavar="512,1024",
        type=partial(int_list, least=1),
        default=[],
        help="context lengths to measure at, beside that of the data",
    )
    add_eviction(parser)
    for part, what in (("layers", "up to four, spread"), ("heads", "the one with the strongest first key")):
        parser.add_argument(
            f"--{part}",
            metavar="0,1",
            type=int_list,
            default=None,
            help=f"{part} whose attention maps are kept, counted from 0 (default: {what})",
        )
    parser.add_argument(
        "--sequences",
        metavar="N",
        type=positive_int,
        default=64,
        help="validation sequences to measure, at most (default 64)",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=folder, help="write the results there (default: diagnose-RUN in --runs)"
    )
    add_threads(parser)
    add_runs(parser)


def diagnose(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy diagnose`"""
    import torch

    from lit_lazy.measure.diagnostics import Maps
    from lit_lazy.report.checkpoint import Request
    from lit_lazy.report.checkpoint import diagnose as diagnose_checkpoint

    import_classes(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    layers, heads = (None if chosen is None else tuple(chosen) for chosen in (options.layers, options.heads))
    diagnose_checkpoint(
        Request(
            checkpoint=options.checkpoint,
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
