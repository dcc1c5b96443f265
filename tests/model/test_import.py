"""Import: a published model gives transformers' logits, with cache and padding, from any layout of its files."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import of transformers, so that no test uses the network

import transformers
from subwords import bpe

from lit_lazy.command.main import main
from lit_lazy.model.generation import generate
from lit_lazy.training import checkpoints
from lit_lazy.training.module import LitLM

__all__ = ["bpe"]
LENGTH = 40
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "Llama": (transformers.LlamaConfig, {"rms_norm_eps": 1e-3, "tie_word_embeddings": False}),
    "Llama 3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "Llama, linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "Mistral": (transformers.MistralConfig, {"sliding_window": 9, "head_dim": 16}),
    "SmolLM3": (transformers.SmolLM3Config, {"no_rope_layer_interval": 2}),
    "Qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "Qwen3": (transformers.Qwen3Config, {"head_dim": 16, "rms_norm_eps": 1e-2}),
}


def make_published(folder: Path, family: str, bpe: Path, words: int = 304) -> Any:
    """A random model as transformers writes it; its embedding has more rows than the tokenizer has tokens."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(vocab_size=words, **SIZES | changes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", ".bias")):  # neither 1 nor 0
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(bpe.read_bytes())
    return model


def imported(source: Path, out: Path) -> LitLM:
    assert main(["import", str(source), str(out)]) == 0
    return checkpoints.load(out)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family_gives_the_logits_of_transformers(
    family: str, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also exported again."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    theirs = make_published(tmp_path / "source", family, bpe)
    ours = imported(tmp_path / "source", tmp_path / "new" / "model.ckpt").model.eval()
    tokens = torch.randint(304, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)
    prompts = [tokens[0].tolist(), tokens[1, :7].tolist()]  # with padding on the left
    padded = torch.tensor([prompts[0], [0] * (LENGTH - 7) + prompts[1]])
    mask = torch.tensor([[1] * LENGTH, [0] * (LENGTH - 7) + [1] * 7])
    greedy = theirs.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert generate(ours, prompts, 8) == greedy[:, LENGTH:].tolist()
    assert main(["export", str(tmp_path / "new" / "model.ckpt"), str(tmp_path / "out")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=1e-5)
