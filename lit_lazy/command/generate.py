"""`lit-lazy generate`"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lit_lazy.command.options import command, make_eviction, path, prepare_process
from lit_lazy.support.checks import Bounds, NonNegativeInt
from lit_lazy.support.errors import escape_controls
from lit_lazy.support.process import is_stdout_read

if TYPE_CHECKING:
    from lit_lazy.data.prompts import Prompts
    from lit_lazy.model.generation import Generation

MOST_TOKENS = 10**7
"""Upper bound on the tokens drawn for a prompt."""


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
    from lit_lazy.support.errors import explain, naming
    from lit_lazy.support.process import require_memory
    from lit_lazy.training import checkpoints
    from lit_lazy.training.execution import select_training_device

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
