"""Settings of published families of models as this project's."""

from collections.abc import Mapping
from typing import Any

from lit_lazy.attention import AttentionSpec, Rope
from lit_lazy.attention.position import LinearScaling, Llama3Scaling, NoScaling, RopeScaling
from lit_lazy.config.schema import ModelConfig
from lit_lazy.support.checks import require_whole
from lit_lazy.support.errors import one_line, short_repr

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
    try:
        return _make_model_config(config, tied)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"config.json: has a value of another kind ({one_line(error)})") from None


def _make_model_config(config: Mapping[str, Any], tied: bool) -> ModelConfig:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r}: not known; there are {', '.join(FAMILIES)}")
    for name, value in config.items():
        if value and name not in READ | WITHOUT_EFFECT:
            raise ValueError(
                f"{name}={short_repr(value)}: not known of {family}; remove it from config.json if it has no effect"
            )
    if missing := [name for name in (*SIZES, "vocab_size", "max_position_embeddings") if config.get(name) is None]:
        raise ValueError(f"{missing[0]}: is missing in config.json")
    for name in ("vocab_size", "max_position_embeddings"):
        require_whole(name, config[name], 1)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act={activation!r}: not known; only 'silu' is")
    if types := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"layer_types: {min(types)!r} is not known; only models whose layers are all of one kind")
    sizes = {ours: config[name] for name, ours in SIZES.items()}
    heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    window = config.get("sliding_window") if family == "mistral" else None
    return ModelConfig(
        **sizes,
        n_kv_heads=None if heads == sizes["n_heads"] else heads,
        head_dim=None if head_dim is None or head_dim * sizes["n_heads"] == sizes["d_model"] else head_dim,
        attention=AttentionSpec(window=window, qk_norm=family == "qwen3", qkv_bias=family == "qwen2"),
        position=_make_rope(config),
        tie_embeddings=config.get("tie_word_embeddings", tied),
    )


def _make_rope(config: Mapping[str, Any]) -> Rope:
    # transformers from 5 on has all in rope_parameters.
    theta = config.get("rope_theta")
    settings = {"rope_theta": 10000.0 if theta is None else theta, **(config.get("rope_scaling") or {})}
    settings |= config.get("rope_parameters") or {}
    rotated = config.get("no_rope_layers") or [1]
    skip = rotated.index(0) + 1 if 0 in rotated else None
    if rotated != [int(skip is None or (layer + 1) % skip > 0) for layer in range(len(rotated))]:
        raise ValueError(f"no_rope_layers={short_repr(rotated)}: not known; only one of every so many layers is")
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
