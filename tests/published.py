"""Random models of published families, in the files that others write."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import of transformers, so that no test uses the network

import transformers

Q8 = gguf.GGMLQuantizationType.Q8_0
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


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **more}


SIXTEEN = {"original_max_position_embeddings": 16}
LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **SIXTEEN)
LONGROPE = rope("longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.5], long_factor=[2.0, 5.0], **SIXTEEN)
"""Half of the dimensions of a head of eight are rotated."""
GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "Llama": (transformers.LlamaConfig, {"rms_norm_eps": 1e-3, "tie_word_embeddings": False}),
    "Llama 3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "Llama, linear": (transformers.LlamaConfig, {"rope_parameters": rope("linear", rope_theta=1e4)}),
    "Llama, biases, yarn": (
        transformers.LlamaConfig,
        {"rope_parameters": rope("yarn", **SIXTEEN), "attention_bias": True, "mlp_bias": True},
    ),
    "Llama, dynamic": (transformers.LlamaConfig, {"rope_parameters": rope("dynamic"), "max_position_embeddings": 16}),
    "Phi-3": (transformers.Phi3Config, {"rope_parameters": LONGROPE, **SIXTEEN}),
    "Granite": (transformers.GraniteConfig, {"tie_word_embeddings": True, **GRANITE}),
    "Mistral": (transformers.MistralConfig, {"sliding_window": 9, "head_dim": 16}),
    "SmolLM3": (transformers.SmolLM3Config, {"no_rope_layer_interval": 2}),
    "Qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "Qwen2, windows": (transformers.Qwen2Config, WINDOWS),
    "Qwen3": (transformers.Qwen3Config, {"head_dim": 16, "rms_norm_eps": 1e-2}),
}


def make_published(folder: Path, family: str, bpe: Path, words: int = 304, **sizes: int) -> Any:
    """A random model as transformers writes it; its embedding has more rows than the tokenizer has tokens."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(vocab_size=words, **SIZES | changes | sizes)).eval()
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
