"""Import of forty classes of transformers, each with three odd configurations: right, or refused, and none wrong."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from published import SIZES, transformers
from subwords import bpe

from lit_lazy.command.main import main
from lit_lazy.training import checkpoints

__all__ = ["bpe"]
ROOT = Path(__file__).parents[2]
CLASSES = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Phi3", "Granite", "InternLM3", "SeedOss", "Ministral"),
    *("Olmo2", "Gemma2", "StableLm", "GPTNeoX", "Cohere", "MiniCPM3", "Gemma", "Gemma3Text", "Olmo", "Olmo3"),
    *("Arcee", "Ministral3", "Cohere2", "Exaone4", "Glm", "Glm4", "Helium", "HunYuanDenseV1", "Ernie4_5", "Starcoder2"),
    *("Phi", "GPT2", "Mixtral", "Qwen2Moe", "GptOss", "DiffLlama", "Nemotron", "Apertus", "HyperCLOVAX", "Cwm"),
)
"""Names of the configurations; MiniCPM's multipliers are Granite's, and MiniCPM3 has another attention."""
SHORT = {"Llama", "Qwen2", "SmolLM3", "Phi3", "Granite", "InternLM3", "Gemma2", "StableLm", "Cohere", "Ministral3"}
"""Those that wait for no `make test-all`."""
SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "yarn", **SCALED},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
    {"rope_type": "linear", "factor": 3.0},
]
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0], **SCALED}
"""Of a rotation of half of a head of eight dimensions."""
PARTIAL = ("Phi3", "StableLm", "GPTNeoX", "Nemotron", "Phi", "Glm", "Glm4")
"""Those that can rotate a part of a head."""
LENGTH = 90


def make_odd(name):
    """Settings that differ from the class's defaults; those that it does not have are left out."""
    biases = ("attention_bias", "attention_out_bias", "mlp_bias", "bias", "qkv_bias", "use_qkv_bias", "use_bias")
    heads = {
        "num_key_value_heads": 2 if name == "DiffLlama" else 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-2,
    }
    scaling = SCALINGS[CLASSES.index(name) % len(SCALINGS)] if name != "Phi3" else LONGROPE
    scaling = {"rope_theta": 100.0, "partial_rotary_factor": 0.5 if name in PARTIAL else 1.0, **scaling}
    rotation = {"rope_parameters": scaling, "original_max_position_embeddings": 16, "no_rope_layers": [1, 0, 0, 1]}
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    windows = {"sliding_window": 9, "use_sliding_window": True, "layer_types": kinds, "max_window_layers": 2}
    multipliers = {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0}
    return {
        "heads and biases": dict.fromkeys(biases, True) | heads,
        "rotation": rotation,
        "windows and multipliers": windows | multipliers | {"logits_scaling": 2.0},
    }


def make_model(folder, name, kind, bpe):
    """A random model; its norms and biases are neither 1 nor 0."""
    config_class = getattr(transformers, f"{name}Config")
    known = {field.name for field in dataclasses.fields(config_class)}
    sizes = SIZES | {"bos_token_id": 0, "pad_token_id": 0} | ({"head_dim": 8} if "head_dim" in known else {})
    odd = {key: value for key, value in make_odd(name)[kind].items() if key in known}
    config = config_class(**{"vocab_size": 304, **sizes, **odd})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(bpe.read_bytes())


def import_model(folder, capsys):
    """`imported`, `WRONG by ...`, or the reason of the refusal."""
    capsys.readouterr()
    status = main(["import", str(folder / "source"), str(folder / "out" / "model.ckpt")])
    printed = capsys.readouterr()
    if status:
        assert status == 2
        assert not (folder / "out").exists()
        (line,) = printed.err.strip().splitlines()
        if named := re.search(r"': (?:\S+\.)?(\w+?)(?:\.weight|\.bias)?: (has no place|is missing)", line):
            return f"refused: `{named[1]}` {named[2]}"
        return f"refused: {'other logits' if ': the logits differ' in line else 'another form'}"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "source", attn_implementation="eager")
    ours = checkpoints.load(folder / "out" / "model.ckpt").model.eval()
    tokens = torch.randint(304, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = float((ours(tokens) - expected).abs().max() / expected.std())
    return "imported" if difference <= 1e-4 else f"WRONG by {difference:.2g}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in CLASSES]
)
def test_an_import_is_right_or_refused_as_adapt_md_says(name, bpe, tmp_path, capsys):
    """Within 1e-4 of the logits' spread, on a text longer than every window, context and trained length."""
    found = {}
    for kind in make_odd(name):
        make_model(tmp_path / kind / "source", name, kind, bpe)
        found[kind] = import_model(tmp_path / kind, capsys)
    assert not any(result.startswith("WRONG") for result in found.values()), found
    results = "; ".join(dict.fromkeys(found.values()))
    rows = re.findall(r"^\| .* \|$", (ROOT / "docs" / "adapt.md").read_text(), re.MULTILINE)
    assert f"| {name} | {results} |" in rows
