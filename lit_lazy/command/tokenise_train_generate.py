"""`lit-lazy tokenise`, `lit-lazy train` and `lit-lazy generate`."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lit_lazy.command.options import (
    add_execution,
    append_init_from,
    command,
    make_eviction,
    make_execution,
    path,
    prepare_process,
    print_metrics,
)
from lit_lazy.support.checked_fields import Bounds, NonNegativeInt
from lit_lazy.support.error_messages import escape_controls
from lit_lazy.support.streams import is_stdout_read

if TYPE_CHECKING:
    from lit_lazy.model.generation import Generation, Prompts

MOST_TOKENS = 10**7
"""Upper bound on the tokens drawn for a prompt."""


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
    from lit_lazy.support.checked_fields import require

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
    from lit_lazy.support.names_to_paths import find

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
    from lit_lazy.training.check_before_run import outline_loads, prepare_outline

    # Mistakes are told before Lightning and MLflow are imported, which takes seconds, unless that would load the data.
    if not outline_loads(cfg.data):
        prepare_outline(cfg, execution)
    from lit_lazy.training.ranks import join_torchrun

    if (group := join_torchrun()) and group.rank:
        from lit_lazy.training.trainer import join_training

        join_training(group)
        return 0
    from lit_lazy.data import list_doubts
    from lit_lazy.tracking.tracked_training import train_tracked

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


def prompt_file(text: str) -> Path:
    """Option type: a file to read, or - for standard input."""
    if text != "-" and not path(text).is_file():
        raise ValueError(f"{text!r}: no such file; give the path of one, or - for standard input")
    return Path(text)


@command(
    "generate",
    "continue a text with a trained model",
    "checkpoint",
    "--import",
    {
        "--prompt TEXT ...": "text to continue; repeatable",
        "--prompt-file FILE ...": (
            "file with a text to continue, - for standard input; repeatable",
            {"type": prompt_file},
        ),
        "--tokens N": (
            "maximum number of tokens to add to each text (default 100)",
            {"type": Annotated[int, Bounds(ge=1, le=MOST_TOKENS)], "default": 100},
        ),
        "--temperature T": ("divide logits by T; 0 always takes the most probable token (default 1)", {"default": 1.0}),
        "--top-p P": (
            "sample from the smallest set of tokens with total probability P (default 1: all tokens)",
            {"type": Annotated[float, Bounds(gt=0, le=1)], "default": 1.0},
        ),
        "--seed N": ("seed of sampling (default 0)", {"type": NonNegativeInt, "default": 0}),
    },
    "--window",
    "--first",
    "--threads",
)
def generate(options: argparse.Namespace, _rest: list[str]) -> int:
    if not options.prompt and not options.prompt_file:
        raise ValueError("--prompt: give a text to continue, or a file with one by --prompt-file")
    from lit_lazy.measure.diagnostics import evaluation_mode
    from lit_lazy.model.generation import Generation, Sampling
    from lit_lazy.support.disk import open_file
    from lit_lazy.support.error_messages import explain, naming
    from lit_lazy.support.machine import require_memory
    from lit_lazy.training import checkpoints
    from lit_lazy.training.execution_settings import select_training_device

    evict = make_eviction(options)
    prepare_process(options)
    module = checkpoints.load(options.checkpoint)
    prompts = checkpoints.load_prompts(options.checkpoint, module, module.cfg.data)
    if options.prompt_file.count(Path("-")) > 1:
        raise ValueError("--prompt-file -: given twice; standard input is one text")
    texts = [(f"--prompt {text!r}", os.fsencode(text)) for text in options.prompt]
    for file in options.prompt_file:
        option = f"--prompt-file {str(file)!r}"
        with (
            explain(f"{option}: cannot be read", "name another file", OSError),
            nullcontext(sys.stdin.buffer) if str(file) == "-" else open_file(file) as opened,
        ):
            texts.append((option, opened.read()))
    ids = [prompts.encode(option, text) for option, text in texts]
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    model = module.model.to(select_training_device())
    with naming(f"--tokens {options.tokens}"):
        generation = Generation(model, ids, options.tokens, sampling, prompts.special.ends, evict)
    require_memory({"--tokens": options.tokens, "prompts": len(ids)}, generation.most_cache_bytes)
    try:
        with evaluation_mode(model):
            print_generation(generation, prompts, texts)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def print_generation(generation: "Generation", prompts: "Prompts", texts: list[tuple[str, bytes]]) -> None:
    """Stream the text of one prompt, or print several at the end; print time and memory on standard error."""
    started = last = time.perf_counter()
    reading = 0.0
    found: list[list[int]] = [[] for _ in texts]

    def tokens() -> Iterator[int]:
        nonlocal reading, last
        for prompt, token in generation:
            now = time.perf_counter()
            reading += 0 if found[prompt] else now - last  # its first token comes with the pass through the prompt
            last = now
            found[prompt].append(token)
            yield token

    if len(texts) == 1:
        print_pieces(prompts.decode(tokens(), generation.prompts[0]))
    else:
        for _ in tokens():
            pass
        for i, (option, _) in enumerate(texts):
            print_pieces([f"== {option}"])
            print_pieces(prompts.decode(found[i], generation.prompts[i]))
    seconds = time.perf_counter() - started - reading
    read, made = (sum(map(len, lists)) for lists in (generation.prompts, found))
    further = made - sum(map(bool, found))
    rate = f", {further / seconds:.1f} tokens/s" if further else ""
    evicted = f", {generation.evicted} tokens evicted" if generation.eviction else ""
    speed = f"{read:,} tokens read in {reading:.2f} s, {made} generated in {seconds:.2f} s{rate}"
    print(f"{speed}; cache {generation.cache_bytes:,} bytes{evicted}", file=sys.stderr)


def print_pieces(pieces: "Iterator[str] | list[str]") -> None:
    """Stream the pieces of a text and a newline; on a terminal, escape control characters."""
    escape = sys.stdout.isatty()
    for piece in pieces:
        print(escape_controls(piece) if escape else piece, end="", flush=True)
        if not is_stdout_read():  # `| head`
            break
    print(flush=True)
