"""The folder of an exported model: supported settings, and its files."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from lit_lazy.config.schema import ModelConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.config.user_classes import iter_classes
from lit_lazy.data.source_interface import SpecialTokens
from lit_lazy.model.decoder import DecoderLM, build_empty
from lit_lazy.model.export_sources import collect_sources
from lit_lazy.support.checked_fields import require

FIELDS = {
    *("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "mlp_bias", "norm_eps", "tie_embeddings"),
    *("attention", "position"),
    *("init_std", "embedding_init_std", "backend", "residual_dropout"),  # unused once there are weights
    "mixer",  # attention only
}
"""Model settings that the export handles."""


def collect_code(cfg: ModelConfig) -> dict[str, str]:
    """The Python files of an exported model, by name. Raises a one-line ValueError if it cannot be exported."""
    if not cfg.mixer.attends:
        raise ValueError(f"model.mixer={type(cfg.mixer).__name__}: the exported modelling file supports only attention")
    for field in dataclasses.fields(cfg):
        value, handled = getattr(cfg, field.name), field.name in FIELDS
        fix = "not supported by the exported modelling file"
        require(handled or value == field.default, f"model.{field.name}", value, fix)
    return collect_sources([*iter_classes(cfg.attention), *iter_classes(cfg.position)])


def make_config(model: DecoderLM, tokens: SpecialTokens) -> dict[str, Any]:
    """Content of config.json."""
    cfg = model.cfg
    return {
        "architectures": ["LitLazyForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_lit_lazy.LitLazyConfig",
            "AutoModelForCausalLM": "modeling_lit_lazy.LitLazyForCausalLM",
        },
        "model_type": "lit_lazy",
        "dtype": "float32",
        "vocab_size": model.embedding.num_embeddings,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_width,
        "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": model.context_length,
        "attention": to_dict(cfg.attention),
        "position": to_dict(cfg.position),
        "mlp_bias": cfg.mlp_bias,
        "tie_word_embeddings": cfg.tie_embeddings,
        **make_token_ids(tokens),
    }


def make_token_ids(tokens: SpecialTokens) -> dict[str, int | list[int]]:
    """Special token ids under transformers' names."""
    ends = tokens.ends[0] if len(tokens.ends) == 1 else list(tokens.ends)
    ids = {"bos_token_id": tokens.begin, "eos_token_id": ends, "pad_token_id": tokens.pad}
    return {name: token for name, token in ids.items() if token not in (None, [])}  # type: ignore[misc]


def write(folder: Path, model: DecoderLM, card: str, tokenizer: str | None, tokens: SpecialTokens) -> None:
    """Write an exported model to a folder. Raises ValueError as `collect_code` and `build_empty` do.

    card: content of README.md. tokenizer: content of a file of the `tokenizers` library; tokens: of those that it has.
    """
    code = collect_code(model.cfg)
    build_empty(model.cfg, model.embedding.num_embeddings, model.context_length)  # as transformers will
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())  # a tied weight once, and all constants
    state = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    files: dict[str, Mapping[str, Any]] = {
        "config.json": make_config(model, tokens),
        "generation_config.json": make_token_ids(tokens),
    }
    if tokenizer is not None and tokens.ends:
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        files["tokenizer_config.json"] = make_tokenizer_config(tokenizer, tokens, model.context_length)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, text in {**code, "README.md": card}.items():
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copymode(folder / "README.md", folder / "model.safetensors")  # which safetensors lets only its user read


def make_tokenizer_config(tokenizer: str, tokens: SpecialTokens, context_length: int) -> dict[str, Any]:
    """Content of tokenizer_config.json, which leaves to the tokenizer what begins a text."""
    content = json.loads(tokenizer)
    vocabulary = content["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # pairs of a token and its score, by id
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    names = {i: token for token, i in vocabulary.items()}
    names |= {token["id"]: token["content"] for token in content["added_tokens"]}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({} if tokens.begin is None else {"bos_token": names[tokens.begin]}),
        "eos_token": names[tokens.ends[0]],
        "pad_token": names[tokens.ends[0] if tokens.pad is None else tokens.pad],
        "padding_side": "left",  # where it has no effect, also on what is generated after it
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
