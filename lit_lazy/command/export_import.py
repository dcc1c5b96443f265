"""`lit-lazy export` and `lit-lazy import`: to and from the formats of others; the README of an exported model."""

import argparse
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_lazy.command.options import command, folder, path, prepare_process
from lit_lazy.support.error_messages import naming
from lit_lazy.support.names_to_paths import MODEL_SOURCES, is_hub_name

if TYPE_CHECKING:
    from lit_lazy.data.source_interface import SpecialTokens
    from lit_lazy.training.module import LitLM
    from lit_lazy.training.run_folder import RunResult

USE_OF_TEXT = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
ids = tokenizer("some text", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
"""
USE_OF_NUMBERS = """import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
print(model.generate(torch.tensor([[0, 1, 2]]), max_new_tokens=50))  # its tokens are not text
"""


@command(
    "export",
    "export a trained model to a folder that transformers loads without lit-lazy",
    "checkpoint",
    "--import",
    {"out OUT": ("output folder, new or empty", {"type": folder})},
)
def export(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.data.pipeline.tokeniser import begin_texts
    from lit_lazy.model.export_folder import collect_code, write
    from lit_lazy.support.disk import check_writable_folder, create_folder_atomically
    from lit_lazy.training import checkpoints

    prepare_process(options)
    if options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"OUT {str(options.out)!r}: is a folder that is not empty; name another")
    module = checkpoints.load(options.checkpoint)
    collect_code(module.cfg.model)
    prompts = checkpoints.load_prompts(options.checkpoint, module, module.cfg.data)
    tokenizer = None if prompts.tokenizer is None else begin_texts(prompts.tokenizer.to_json(), prompts.begin)
    text = format_model_card(module, read_result(options.checkpoint), tokenizer is not None)
    check_writable_folder("OUT", options.out)
    with create_folder_atomically(options.out.absolute()) as scratch:
        write(scratch, module.model, text, tokenizer, prompts.special)
    note = "" if tokenizer else f"; without a tokenizer, since {prompts.name} has no text"
    names = sorted(file.name for file in options.out.iterdir() if file.suffix != ".py")
    print(f"{options.out}: {', '.join(names)} and Python files{note}")
    return 0


def read_result(checkpoint: Path) -> "RunResult | None":
    """The result next to a checkpoint; None if there is none. Raises ValueError if it is damaged."""
    from lit_lazy.training.run_folder import RESULT, RunResult

    path = checkpoint.parent / RESULT
    try:
        return RunResult.load(path) if path.exists() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r}: {error}; remove it, or train again") from None


def format_model_card(module: "LitLM", found: "RunResult | None", has_text: bool) -> str:
    """The README of an exported model: settings, results, usage. Contains no path of this machine."""
    from lit_lazy.data.text import Text

    cfg = module.cfg
    attention = cfg.model.attention
    trained = (
        f"{cfg.train.steps:,} steps of {cfg.train.batch_size} sequences on {type(cfg.data).__name__}, seed {cfg.seed}"
    )
    if isinstance(cfg.data, Text) and not (cfg.data.path or cfg.data.hub):  # the data are only a tokeniser
        trained = "elsewhere, then imported"
    parts = {
        "normaliser": attention.normaliser,
        "bias": attention.bias,
        "position": cfg.model.position,
        "gate": attention.gate,
    }
    sizes = {
        "parameters": f"{sum(p.numel() for p in module.model.parameters()):,}",
        "width, layers": f"{cfg.model.d_model}, {cfg.model.n_layers}",
        "heads, kv heads": f"{cfg.model.n_heads}, {cfg.model.kv_heads}",
        "vocabulary, context": f"{module.hparams['vocab_size']:,}, {module.hparams['context_length']:,}",
        **{name: f"`{part!r}`" for name, part in parts.items()},
        "window": attention.window or "none",
        "trained": trained,
    }
    if found is not None:
        sizes["lit-lazy commit, torch"] = ", ".join(found.environment.get(x, "unknown") for x in ("git_sha", "torch"))
    facts = "\n".join(f"| {name} | {value} |" for name, value in sizes.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- lit-lazy
---

# A language model with {type(attention.normaliser).__name__} attention

Exported from lit-lazy, a laboratory for Lazy Attention ([arXiv 2601.00919](https://arxiv.org/abs/2601.00919)). The
Python files next to this one need only torch and transformers; if flash_lazy is installed, it computes softmax and Lazy
Attention. tau and biases stay float32 in every dtype.

| | |
|---|---|
{facts}

{format_row(found)}

```python
{USE_OF_TEXT if has_text else USE_OF_NUMBERS}```
"""


def format_row(found: "RunResult | None") -> str:
    """The run's row of a table, from one seed."""
    if found is None:
        return "The checkpoint had no result next to it, so its metrics are unknown."
    from lit_lazy.table.columns import COLUMNS

    metrics = found.metrics
    columns = [column for column in COLUMNS if column.key in metrics]
    titles = [f"{column.title} ({column.unit})" if column.unit else column.title for column in columns]
    values = [column.format(metrics[column.key]) for column in columns]
    lines = [titles, ["---:"] * len(columns), values]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"Measured on its validation data, one seed:\n\n{table}"


def find_source(text: str) -> Path:
    """Option type: a folder or a file that exists, or what can only be a name on the Hub."""
    found = path(text)
    if not found.exists() and not is_hub_name(found):
        raise ValueError(f"{text!r}: no such file or folder; give {MODEL_SOURCES}")
    return found


def digest(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError(f"{text!r} is not 64 hex digits")
    return text


@command(
    "import",
    "make a checkpoint of a published model, of the form of Llama",
    {
        "source SOURCE": (MODEL_SOURCES, {"type": find_source}),
        "out OUT": ("checkpoint to write, such as model.ckpt; tokenizer.json goes beside it", {"type": path}),
        "--unchecked": "do not compare the new model's logits with those of transformers",
        "--sha256 HEX": ("what SOURCE, one file, must have as its SHA-256", {"type": digest}),
    },
)
def import_model(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.config.key import hash_file
    from lit_lazy.config.schema import RunConfig
    from lit_lazy.data.pipeline.tokeniser import find_ends, fit_to_embedding
    from lit_lazy.data.text import Text
    from lit_lazy.model.import_compare import compare
    from lit_lazy.model.import_convert import convert
    from lit_lazy.model.import_load import load_source
    from lit_lazy.support.disk import write_text
    from lit_lazy.training import checkpoints
    from lit_lazy.training.check_before_run import check_size

    option = f"SOURCE {str(options.source)!r}"
    if options.sha256 and (found := hash_file(str(options.source), "SOURCE", "give a file")) != options.sha256:
        raise ValueError(f"{option}: its SHA-256 is {found}, should be {options.sha256}; fetch it again")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"{option}: transformers reads it, which is not installed; `pip install 'transformers>=5.23,<6'`"
        )
    with naming(option):
        model, tokenizer = load_source(options.source)
        new = convert(model)
        words, length, state = new.embedding.num_embeddings, new.context_length, new.state_dict()
        check_size(new.cfg, words, length, state=0)  # as every command that loads the checkpoint
        special = find_special_tokens(model.generation_config, words)
        tokenizer = fit_to_embedding(tokenizer, words, special.ids)
        begin, end = find_ends(tokenizer, special.ends)
        size = sum({weight.data_ptr(): weight.nbytes for weight in state.values()}.values())
    beside = options.out.with_name(checkpoints.TOKENIZER)
    check_out(options.out, beside, tokenizer, size)
    with naming(option):
        result = "not compared with transformers' model (--unchecked)" if options.unchecked else compare(model, new)
    data = Text(
        tokenizer=checkpoints.TOKENIZER,
        begin_of_text=begin,
        end_of_text=end,
        special_tokens=special,
        context_length=length,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(beside, tokenizer)
    checkpoints.write_untrained(
        options.out, RunConfig(data=data, model=new.cfg), words, length, state, options.unchecked
    )
    print(f"{options.out}: {size // 4:,} weights; {beside}: {words:,} tokens\n{result}")
    return 0


def find_special_tokens(settings: Any, words: int) -> "SpecialTokens":
    """Those of a generation_config, by which transformers generates; an id beyond the `words` tokens is none."""
    from lit_lazy.data.source_interface import SpecialTokens

    given = settings.eos_token_id
    begin, pad, *ends = (
        token if type(token) is int and 0 <= token < words else None
        for token in (settings.bos_token_id, settings.pad_token_id, *(given if isinstance(given, list) else [given]))
    )
    return SpecialTokens(begin, tuple(token for token in ends if token is not None), pad)


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
