"""`lit-lazy generate`"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lit_lazy.command.options import (
    Commands,
    add_checkpoint,
    add_command,
    add_eviction,
    add_threads,
    import_classes,
    make_eviction,
    non_negative_int,
    parse_int,
    path,
)

if TYPE_CHECKING:
    from lit_lazy.data.prompts import Prompts
    from lit_lazy.model.generation import Generation

MOST_TOKENS = 10**7
"""To draw for a prompt."""


def add_to(commands: Commands) -> None:
    """The command and its options."""
    parser = add_command(commands, "generate", generate, "let a trained model continue a text")
    add_checkpoint(parser)
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", default=[], help="text to be continued; may be given again"
    )
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        type=prompt_file,
        action="append",
        default=[],
        help="file with a text to be continued, - for standard input; may be given again",
    )
    parser.add_argument(
        "--tokens", metavar="N", type=new_tokens, default=100, help="tokens to add to each text, at most (default 100)"
    )
    parser.add_argument(
        "--temperature",
        type=non_negative_float,
        default=1.0,
        help="what logits are divided by; 0 takes the most probable token each time (default 1)",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=probability,
        default=1.0,
        help="draw from the fewest tokens with this probability together (default 1: from all)",
    )
    parser.add_argument("--seed", metavar="N", type=non_negative_int, default=0, help="seed of the draws (default 0)")
    add_eviction(parser)
    add_threads(parser)


def prompt_file(text: str) -> Path:
    """An option that is a file to be read, or standard input."""
    if text != "-" and not path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: no such file; give the path of one, or - for standard input")
    return Path(text)


def new_tokens(text: str) -> int:
    """An option that is a number of tokens to draw."""
    if (number := parse_int(text, least=1, most=MOST_TOKENS)) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 to {MOST_TOKENS}")
    return number


def non_negative_float(text: str) -> float:
    """An option that is a finite number from 0 on."""
    return _parse_number(text, lambda x: 0 <= x < float("inf"), "a number of at least 0")


def probability(text: str) -> float:
    """An option that is a probability above 0."""
    return _parse_number(text, lambda x: 0 < x <= 1, "a number above 0 and at most 1")


def _parse_number(text: str, fits: Callable[[float], bool], what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not fits(number):
        raise argparse.ArgumentTypeError(f"{text!r}: must be {what}")
    return number


def generate(options: argparse.Namespace, _rest: list[str]) -> int:
    """`lit-lazy generate`"""
    import torch

    from lit_lazy.data.prompts import Prompts
    from lit_lazy.measure.diagnostics import evaluation_mode
    from lit_lazy.model.generation import Generation, Sampling
    from lit_lazy.support.errors import one_line
    from lit_lazy.support.memory import require_memory
    from lit_lazy.training import checkpoints
    from lit_lazy.training.devices import select_training_device

    import_classes(options)
    evict = make_eviction(options)
    if not options.prompt and not options.prompt_file:
        raise ValueError("--prompt: give a text to be continued, or a file with one by --prompt-file")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    module = checkpoints.load(options.checkpoint)
    prompts = Prompts(module.cfg.data, module.hparams["vocab_size"])
    texts = read_prompts(options)
    ids = [prompts.encode(option, text) for option, text in texts]
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    model = module.model.to(select_training_device())
    try:
        generation = Generation(model, ids, options.tokens, sampling, prompts.end, evict)
    except ValueError as error:
        raise ValueError(f"--tokens {options.tokens}: {one_line(error)}") from None
    require_memory({"--tokens": options.tokens, "prompts": len(ids)}, generation.most_cache_bytes)
    try:
        with evaluation_mode(model):
            print_generation(generation, prompts, texts)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `| head`: whatever Python still has to write goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def read_prompts(options: argparse.Namespace) -> list[tuple[str, bytes]]:
    """The texts to be continued, each with the option that it came by. Raises ValueError where one cannot be read."""
    from lit_lazy.support.disk import open_file

    if options.prompt_file.count(Path("-")) > 1:
        raise ValueError("--prompt-file -: given twice; standard input is one text")
    texts = [(f"--prompt {text!r}", os.fsencode(text)) for text in options.prompt]
    for file in options.prompt_file:
        option = f"--prompt-file {str(file)!r}"
        try:
            if str(file) == "-":
                texts.append((option, sys.stdin.buffer.read()))
            else:
                with open_file(file) as opened:
                    texts.append((option, opened.read()))
        except OSError as error:
            raise ValueError(f"{option}: cannot be read ({error.strerror})") from None
    return texts


def print_generation(generation: "Generation", prompts: "Prompts", texts: list[tuple[str, bytes]]) -> None:
    """Print the text as it comes, that of several prompts when all are done, and what it took on standard error."""
    started, count = time.perf_counter(), 0
    found: list[list[int]] = [[] for _ in texts]

    def tokens() -> Iterator[int]:
        nonlocal count
        for prompt, token in generation:
            count += 1
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
    seconds = time.perf_counter() - started
    evicted = f", {generation.evicted} tokens evicted" if generation.eviction else ""
    speed = f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s"
    print(f"{speed}; cache {generation.cache_bytes:,} bytes{evicted}", file=sys.stderr)


def print_pieces(pieces: "Iterator[str] | list[str]") -> None:
    """Print the pieces of a text as they come, and a line end; to a terminal no character that would steer it."""
    steers = sys.stdout.isatty()
    for piece in pieces:
        plain = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in piece) if steers else piece
        print(plain, end="", flush=True)
    print(flush=True)
