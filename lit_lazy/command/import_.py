"""`lit-lazy import`"""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_lazy.command.options import Commands, add_command, path
from lit_lazy.model.import_.kinds import KINDS, is_hub_name


def add_to(commands: Commands) -> None:
    parser = add_command(
        commands, "import", import_model, "make a checkpoint of a published model: Llama, Mistral, SmolLM, Qwen2, Qwen3"
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=find_source,
        help=KINDS,
    )
    parser.add_argument(
        "out", metavar="OUT", type=path, help="checkpoint to write, such as model.ckpt; tokenizer.json goes beside it"
    )
    parser.add_argument("--sha256", metavar="HEX", type=digest, help="what SOURCE, one file, must have as its SHA-256")


def find_source(text: str) -> Path:
    """Option type: a folder or a file that exists, or what can only be a name on the Hub."""
    found = path(text)
    if not found.exists() and not is_hub_name(found):
        raise argparse.ArgumentTypeError(f"{text!r}: no such file or folder; give {KINDS}")
    return found


def digest(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 64 hex digits")
    return text


def import_model(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.config.key import hash_file
    from lit_lazy.config.schema import RunConfig
    from lit_lazy.data.pipeline.imported_tokeniser import find_ends, fit_to_embedding
    from lit_lazy.data.text import Text
    from lit_lazy.model.import_ import families, weights
    from lit_lazy.model.import_.read import read_model
    from lit_lazy.support.disk import write_text
    from lit_lazy.training import checkpoints
    from lit_lazy.training.prepare import check_size

    option = f"SOURCE {str(options.source)!r}"
    if options.sha256 and (found := hash_file(str(options.source), "SOURCE", "give a file")) != options.sha256:
        raise ValueError(f"{option}: its SHA-256 is {found}, should be {options.sha256}; fetch it again")
    with naming(option):
        source = read_model(options.source)
        cfg = families.make_model_config(source.config, tied=weights.HEAD not in source.weights)
        words, length = source.config["vocab_size"], source.config["max_position_embeddings"]
        weights.check_weights(source, cfg, words, length)
        check_size(cfg, words, length, state=0)  # as every command that loads the checkpoint
        tokenizer = fit_to_embedding(source.tokenizer, words)
        begin, end = find_ends(tokenizer, source.config.get("eos_token_id"))
    beside = options.out.with_name(checkpoints.TOKENIZER)
    check_out(options.out, beside, tokenizer, weights.count_bytes(source))
    with naming(option):
        state = weights.read_weights(source, cfg)
    data = Text(tokenizer=checkpoints.TOKENIZER, begin_of_text=begin, end_of_text=end, context_length=length)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(beside, tokenizer)
    checkpoints.write_untrained(options.out, RunConfig(data=data, model=cfg), words, length, state)
    print(f"{options.out}: {weights.count_bytes(source) // 4:,} weights; {beside}: {words:,} tokens")
    return 0


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Names the option in a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def check_out(out: Path, beside: Path, tokenizer: str, size: int) -> None:
    """Raise a one-line ValueError unless a checkpoint of `size` bytes, and the tokenizer beside it, can be written."""
    from lit_lazy.support.disk import check_writable_file, describe_shortage

    if out == beside:
        raise ValueError(f"OUT {str(out)!r}: is the name of the tokenizer; name the checkpoint model.ckpt")
    check_writable_file("OUT", out)
    check_writable_file("OUT", beside)
    if out.exists():
        raise ValueError(f"OUT {str(out)!r}: exists already; name another file, or remove it first")
    if beside.exists() and beside.read_bytes() != tokenizer.encode():
        raise ValueError(f"OUT {str(out)!r}: {beside} is another model's; name a file in another folder")
    there = next(folder for folder in out.absolute().parents if folder.exists())
    if lack := describe_shortage(there, size + len(tokenizer.encode())):
        raise ValueError(f"OUT {str(out)!r}: the disk lacks {lack}; free some, or name a file on another")
