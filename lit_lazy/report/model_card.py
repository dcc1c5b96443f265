"""The README of an exported model: its settings, results and use."""

from pathlib import Path

from lit_lazy.data.text import Text
from lit_lazy.table.columns import COLUMNS
from lit_lazy.training.module import LitLM
from lit_lazy.training.run_folder import RESULT, RunResult


def read_result(checkpoint: Path) -> RunResult | None:
    """The result next to a checkpoint; None if there is none. Raises ValueError if it is damaged."""
    path = checkpoint.parent / RESULT
    try:
        return RunResult.load(path) if path.exists() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r}: {error}; remove it, or train again") from None


def format_model_card(module: LitLM, found: RunResult | None, has_text: bool) -> str:
    """The README of an exported model: settings, results, usage. Contains no path of this machine."""
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


def format_row(found: RunResult | None) -> str:
    """The run's row of a table, from one seed."""
    if found is None:
        return "The checkpoint had no result next to it, so its metrics are unknown."
    metrics = found.metrics
    columns = [column for column in COLUMNS if column.key in metrics]
    titles = [f"{column.title} ({column.unit})" if column.unit else column.title for column in columns]
    values = [column.format(metrics[column.key]) for column in columns]
    lines = [titles, ["---:"] * len(columns), values]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"Measured on its validation data, one seed:\n\n{table}"
