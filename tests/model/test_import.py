"""Import: a published model gives transformers' logits, with cache and padding, from any layout of its files."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import of transformers, so that no test uses the network

import transformers
from subwords import bpe
from tokenizers import Regex, Tokenizer, pre_tokenizers

from lit_lazy.command.main import main
from lit_lazy.data.prompts import Prompts
from lit_lazy.model.generation import generate
from lit_lazy.training import checkpoints
from lit_lazy.training.module import LitLM

__all__ = ["bpe"]
LENGTH = 40
Q8 = gguf.GGMLQuantizationType.Q8_0
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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


def write_gguf(file: Path, folder: Path, kind: str, pre: str) -> None:
    """The model of a folder as llama.cpp's converter writes it; matrices of 32 columns are quantised to eight bits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    cfg, content = model.config, json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, kind)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_rope_freq_base(cfg.rope_parameters["rope_theta"])
    writer.add_key_length(getattr(cfg, "head_dim", 8))
    ids = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    unused = [f"[PAD{number}]" for number in range(len(ids), cfg.vocab_size)]
    special = {token["content"] for token in content["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in ids]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*ids, *unused])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED for _ in unused]])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], cfg.num_hidden_layers)
    for name, value in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        heads = {"q_proj": cfg.num_attention_heads, "k_proj": cfg.num_key_value_heads}.get(stem.split(".")[-1])
        if kind == "llama" and heads:  # as LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py
            value = value.view(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        if (name, cfg.tie_word_embeddings) != ("lm_head.weight", True):
            stored_as = Q8 if value.ndim == 2 and value.shape[1] == 32 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(
                f"{names.get_name(stem)}.{suffix}", gguf.quantize(value.numpy(), stored_as), None, stored_as
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


TEXT = "It's 2026: don't\n\n\tcount to 12345 <|endoftext|> naïve ✓  "
BY_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"), BY_BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"), BY_BYTES],
}
GGUFS = [
    ("Llama", "llama", "smollm"),
    ("Llama", "llama", "llama-bpe"),
    ("Qwen2", "qwen2", "qwen2"),
    ("Qwen3", "qwen3", "qwen2"),
]


@pytest.mark.parametrize(("family", "kind", "pre"), GGUFS)
@torch.no_grad()
def test_a_gguf_gives_what_its_numbers_say_and_the_tokens_of_its_kind(
    family: str, kind: str, pre: str, bpe: Path, tmp_path: Path
) -> None:
    theirs = make_published(tmp_path / "source", family, bpe)
    write_gguf(tmp_path / "model.gguf", tmp_path / "source", kind, pre)
    module = imported(tmp_path / "model.gguf", tmp_path / "model.ckpt")
    assert module.cfg.model == imported(tmp_path / "source", tmp_path / "other" / "model.ckpt").cfg.model
    for value in theirs.state_dict().values():
        if value.ndim == 2 and value.shape[1] == 32:
            value.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(value.numpy(), Q8), Q8)))
    tokens = torch.randint(304, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(module.model.eval()(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    reference = Tokenizer.from_file(str(bpe))
    reference.no_truncation()
    reference.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[pre])
    prompts = Prompts(module.cfg.data, 304)
    assert prompts.encode("x", TEXT.encode()) == reference.encode(TEXT, add_special_tokens=False).ids
    assert (prompts.begin, prompts.end) == (0, 1)


@torch.no_grad()
def test_shards_and_another_place_give_the_same_bytes(bpe: Path, tmp_path: Path) -> None:
    model = make_published(tmp_path / "one", "Qwen3", bpe).bfloat16()
    for name, size in (("one", "1GB"), ("many", "20KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        (tmp_path / name / "tokenizer.json").write_bytes(bpe.read_bytes())
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    found = []
    for source, out in (("one", "a/x.ckpt"), ("one", "b/y.ckpt"), ("many", "c/z.ckpt")):
        module = imported(tmp_path / source, tmp_path / out)
        assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
        found.append([file.read_bytes() for file in sorted((tmp_path / out).parent.iterdir(), key=lambda x: x.suffix)])
    assert found[0] == found[1] == found[2]
