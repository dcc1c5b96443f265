"""Settings of published families of models as this project's."""

from collections.abc import Mapping
from typing import Any

from lit_lazy.attention import AttentionSpec, Rope
from lit_lazy.attention.position import LinearScaling, Llama3Scaling, NoScaling, RopeScaling
from lit_lazy.config.schema import ModelConfig

FAMILIES = ("llama", "mistral", "smollm3", "qwen2", "qwen3")
"""Values of `model_type`; SmolLM2's is llama."""
SIZES = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "rms_norm_eps": "norm_eps",
}
READ = {
    *SIZES,
    *("model_type", "vocab_size", "max_position_embeddings", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "no_rope_layers", "sliding_window", "hidden_act", "layer_types"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Settings that are read here, or with the tokeniser."""
WITHOUT_EFFECT = {
    *("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache", "return_dict"),
    *("initializer_range", "pretraining_tp", "attention_dropout", "max_window_layers", "no_rope_layer_interval"),
    *("is_llama_config", "transformers.js_config", "id2label", "label2id", "chunk_size_feed_forward"),
}
"""Settings that do not change what trained weights compute, or repeat one that is read."""


def make_model_config(config: Mapping[str, Any], tied: bool) -> ModelConfig:
    """The model of a config.json. tied: whether the output head is the embedding, where the settings do not say it.

    Raises a one-line ValueError that names what is missing or not known.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r}: not known; there are {', '.join(FAMILIES)}")
    for name, value in config.items():
        if value and name not in READ | WITHOUT_EFFECT:
            raise ValueError(f"{name}={value!r}: not known of {family}; remove it from config.json if it has no effect")
    if missing := [name for name in (*SIZES, "vocab_size", "max_position_embeddings") if config.get(name) is None]:
        raise ValueError(f"{missing[0]}: is missing in config.json")
    _require(config, "hidden_act", "silu", "silu")
    if types := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"layer_types: {min(types)!r} is not known; only models whose layers are all of one kind")
    sizes = {ours: config[name] for name, ours in SIZES.items()}
    width, heads = sizes["d_model"] // sizes["n_heads"], config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    window = config.get("sliding_window") if family == "mistral" else None
    return ModelConfig(
        **sizes,
        n_kv_heads=None if heads == sizes["n_heads"] else heads,
        head_dim=None if head_dim == width and sizes["d_model"] % sizes["n_heads"] == 0 else head_dim,
        attention=AttentionSpec(window=window, qk_norm=family == "qwen3", qkv_bias=family == "qwen2"),
        position=_make_rope(config),
        tie_embeddings=config.get("tie_word_embeddings", tied),
    )


def _require(config: Mapping[str, Any], name: str, known: object, default: object) -> None:
    if (value := config.get(name, default)) != known:
        raise ValueError(f"{name}={value!r}: not known; only {known!r} is")


def _make_rope(config: Mapping[str, Any]) -> Rope:
    # transformers from 5 on has all in rope_parameters.
    settings = {"rope_theta": config.get("rope_theta") or 10000.0, **(config.get("rope_scaling") or {})}
    settings |= config.get("rope_parameters") or {}
    rotated = config.get("no_rope_layers") or [1]
    skip = rotated.index(0) + 1 if 0 in rotated else None
    if rotated != [int(skip is None or (layer + 1) % skip > 0) for layer in range(len(rotated))]:
        raise ValueError(f"no_rope_layers={rotated}: not known; only one of every so many layers is")
    return Rope(float(settings.pop("rope_theta")), _make_scaling(settings), skip)


def _make_scaling(settings: dict[str, Any]) -> RopeScaling:
    kind = settings.pop("rope_type", None) or settings.pop("type", "default")
    settings.pop("type", None)
    fields = {
        "default": (NoScaling, {}),
        "linear": (LinearScaling, {"factor": "factor"}),
        "llama3": (
            Llama3Scaling,
            {
                "factor": "factor",
                "low_freq_factor": "low",
                "high_freq_factor": "high",
                "original_max_position_embeddings": "trained_length",
            },
        ),
    }
    if kind not in fields:
        raise ValueError(f"rope_scaling: {kind!r} is not known; there are {', '.join(fields)}")
    scaling, names = fields[kind]
    if settings.keys() != names.keys():
        odd = min(settings.keys() ^ names.keys())
        raise ValueError(f"rope_scaling: {odd} is {'not known' if odd in settings else 'missing'} for {kind!r}")
    return scaling(**{names[name]: value for name, value in settings.items()})
