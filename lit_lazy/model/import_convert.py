"""A model of transformers as this project's decoder, on the same weights where nothing has to be folded into them.

Sizes are read from the tensors, and what a layer's attention does from a call of it. Nothing here knows a family: what
the decoder cannot express has a tensor without a place, or is refused by `compare`.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lit_lazy.attention import AttentionSpec, NoPosition, Position, Rope
from lit_lazy.attention.position import DynamicScaling, GivenFrequencies, RopeScaling
from lit_lazy.config.schema import ModelConfig
from lit_lazy.model.decoder import DecoderLM, build_empty
from lit_lazy.support.error_messages import describe_exception

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARTS = {
    "embed_tokens": "embedding",
    "norm": "norm",
    "lm_head": "head",
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.qkv_proj": "attention.q attention.k attention.v",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.gate_up_proj": "mlp.gate mlp.up",
    "mlp.down_proj": "mlp.down",
}
"""Part of a tensor's name in transformers -> this project's; several for a fused one, in the order of its rows."""
LAST = 2**31 - 1
"""Beyond the last position of any text: windows and frequencies are asked for there."""
NAME = re.compile(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")


class AttentionSeen(NamedTuple):
    """What one layer's attention did. scale: of scores. window: keys that a query sees, None for all."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    rotates: bool
    window: int | None


def find_parts(model: "PreTrainedModel") -> dict[str, list[str]]:
    """This project's names of each tensor of a model, several of a fused one.

    Raises a one-line ValueError, in transformers' names, unless they are those of a decoder of this project.
    """
    parts: dict[str, list[str]] = {}
    for name in model.state_dict():
        found = NAME.fullmatch(name)
        layer, part, kind = found.groups() if found else (None, "", "")
        block = "" if layer is None else f"blocks.{layer}."
        parts[name] = [f"{block}{ours}.{kind}" for ours in PARTS.get(part, "").split()]
    ours = {name for found in parts.values() for name in found}
    layers = 1 + max((int(name.split(".")[1]) for name in ours if name.startswith("blocks.")), default=0)
    small = ModelConfig(d_model=2, n_layers=layers, d_ff=2, **_find_options(ours))
    expected = build_empty(small, 1, 1).state_dict()
    kind = type(model).__name__
    if surplus := [name for name, found in parts.items() if not (found and expected.keys() >= set(found))]:
        raise ValueError(f"{surplus[0]}: has no place in this decoder, one of {len(surplus)} tensors of {kind}")
    if missing := [name for name in expected if name not in ours]:
        stem, _, suffix = re.sub(r"^blocks\.\d+\.", "", missing[0]).rpartition(".")
        theirs = next(part for part, name in PARTS.items() if name == stem)
        where = re.sub(r"^blocks", "layers", missing[0].removesuffix(f"{stem}.{suffix}"))
        raise ValueError(f"model.{where}{theirs}.{suffix}: is missing in {kind}; this decoder needs it")
    return parts


def _find_options(names: Container[str]) -> dict[str, Any]:
    """The optional parts of a decoder, by the names of its tensors."""
    tensors = ("attention.q_norm.weight", "attention.q.bias", "attention.out.bias", "mlp.down.bias")
    qk_norm, qkv_bias, out_bias, mlp_bias = (f"blocks.0.{name}" in names for name in tensors)
    return {"attention": AttentionSpec(qk_norm=qk_norm, qkv_bias=qkv_bias, out_bias=out_bias), "mlp_bias": mlp_bias}


@torch.no_grad()
def convert(model: "PreTrainedModel") -> DecoderLM:
    """Raises a one-line ValueError, in transformers' names, for a model that is no decoder of this project's form."""
    parts = find_parts(model)
    for name, value in model.state_dict().items():
        if not torch.stack(value.aminmax()).isfinite().all():  # unlike value.isfinite(), without a copy
            raise ValueError(f"{name}: is not finite")
    try:
        return _convert(model, parts)
    except (AttributeError, LookupError, TypeError, RuntimeError, ArithmeticError) as error:
        name = type(model).__name__
        raise ValueError(f"{name}: has another form than this decoder ({describe_exception(error)})") from None


def _convert(model: "PreTrainedModel", parts: dict[str, list[str]]) -> DecoderLM:
    settings, base = model.config, cast(Any, model.base_model)
    length = settings.max_position_embeddings
    layers = observe_attention(model)
    n_heads, n_kv_heads, head_dim = layers[0][:3]
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        shares = {1: [1], 2: [1, 1], 3: [n_heads, n_kv_heads, n_kv_heads]}[len(parts[name])]
        state |= zip(parts[name], value.split([len(value) // sum(shares) * share for share in shares]), strict=True)
    tied = state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    windows = {layer.window for layer in layers if layer.window}
    if len(windows) > 1:
        raise ValueError(f"sliding_window: layers with windows of {sorted(windows)} keys; this decoder has one window")
    position, order, gain = _make_position(base, settings, layers)
    _order_and_scale_heads(state, layers, order, gain)
    _fold_multipliers(state, settings, tied)
    width = state["embedding.weight"].shape[1]
    options = _find_options(state)
    full = tuple(index for index, layer in enumerate(layers) if windows and layer.window is None)
    options["attention"] = replace(options["attention"], window=min(windows, default=None), full_layers=full)
    cfg = ModelConfig(
        d_model=width,
        n_layers=len(layers),
        n_heads=n_heads,
        n_kv_heads=None if n_kv_heads == n_heads else n_kv_heads,
        head_dim=None if head_dim * n_heads == width else head_dim,
        d_ff=len(state["blocks.0.mlp.gate.weight"]),
        norm_eps=float(base.norm.variance_epsilon if hasattr(base.norm, "variance_epsilon") else base.norm.eps),
        position=position,
        tie_embeddings=tied,
        **options,
    )
    return build(cfg, state, length)


def build(cfg: ModelConfig, state: dict[str, Tensor], context_length: int) -> DecoderLM:
    """The decoder on these tensors themselves."""
    model = build_empty(cfg, len(state["embedding.weight"]), context_length)
    model.load_state_dict(state, assign=True)
    model.position = cfg.position.build(cfg.d_model, model.mixers[0].rotary_dim, context_length)
    return model.eval()


def observe_attention(model: "PreTrainedModel") -> list[AttentionSeen]:
    """What the attention of each layer does with two equal embeddings, by functions that transformers lets it call."""
    from transformers import AttentionInterface, AttentionMaskInterface

    seen: list[AttentionSeen] = []

    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **__: Any) -> tuple[Tensor, None]:
        rotates = not torch.allclose(q[:, :, 0], q[:, :, 1])
        seen.append(AttentionSeen(q.shape[1], k.shape[1], q.shape[3], float(scaling), rotates, int(mask) or None))
        return q.new_zeros(1, 2, q.shape[1], v.shape[3]), None

    def mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> Tensor:
        def sees(key: int) -> bool:
            return bool(mask_function(*map(torch.tensor, (0, 0, LAST, key))))

        oldest = bisect_left(range(LAST), True, key=sees)  # that the query at LAST sees
        return torch.tensor(LAST - oldest + 1 if oldest else 0)  # 0: no window

    own, name = str(model.config._attn_implementation), "lit_lazy"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    width = cast(nn.Embedding, model.get_input_embeddings()).embedding_dim
    try:
        model.set_attn_implementation(name)
        random = torch.randn(width, generator=torch.Generator().manual_seed(0))
        model(inputs_embeds=random.expand(1, 2, -1), use_cache=False)
    finally:
        model.set_attn_implementation(own)
    return seen


def _make_position(base: Any, settings: Any, layers: list[AttentionSeen]) -> tuple[Position, Tensor, Tensor]:
    """The rotation; the order of a head's dimensions that it has; and the factor of scores by dimension."""
    width = layers[0].head_dim
    order, gain = torch.arange(width), torch.ones(width)
    if not any(layer.rotates for layer in layers):
        return NoPosition(), order, gain
    rotary, length, scaled = base.rotary_emb, settings.max_position_embeddings, settings.rope_parameters
    turned = 2 * len(rotary.inv_freq)
    gain[:turned] = float(rotary.attention_scaling) ** 2
    parts = order[:turned].tensor_split(2), order[turned:].tensor_split(2)
    order = torch.cat([part[half] for half in range(2) for part in parts])
    short, long = (_find_frequencies(rotary, width, count) for count in (1, LAST))
    skipped = tuple(index for index, layer in enumerate(layers) if not layer.rotates)
    rope = Rope(float(scaled["rope_theta"]), skip_layers=skipped)
    scaling: RopeScaling = rope.scaling
    if not torch.equal(short, long) and scaled["rope_type"] == "dynamic":
        scaling = DynamicScaling(scaled["factor"], length)
    elif not torch.equal(short, long):
        trained = scaled["original_max_position_embeddings"]
        scaling = GivenFrequencies(tuple(short.tolist()), tuple(long.tolist()), trained)
    elif not torch.equal(short, compute_their_frequencies(rope, width)):
        scaling = GivenFrequencies(tuple(short.tolist()))
    return replace(rope, scaling=scaling), order, gain


def compute_their_frequencies(rope: Rope, width: int) -> Tensor:
    """Those of a base, `[width / 2]`, as transformers rounds them: in float32, where ours are computed in float64."""
    return 1 / rope.base ** (torch.arange(0, width, 2).float() / width)


def _find_frequencies(rotary: Any, width: int, length: int) -> Tensor:
    """Those of a text of a length, with zeros for dimensions that are not rotated: `[width / 2]`."""
    rotary(torch.zeros(1), torch.tensor([[length - 1]]))
    return nn.functional.pad(rotary.inv_freq, (0, width // 2 - len(rotary.inv_freq)))


def _order_and_scale_heads(
    state: dict[str, Tensor], layers: list[AttentionSeen], order: Tensor, rotated_gain: Tensor
) -> None:
    """Put dimensions in the order in which the decoder rotates them, and fold the factor of scores into queries."""
    for index, layer in enumerate(layers):
        gain = layer.scale * layer.head_dim**0.5 * (rotated_gain if layer.rotates else torch.ones(layer.head_dim))
        prefix = f"blocks.{index}.attention."
        queries = "q_norm." if f"{prefix}q_norm.weight" in state else "q."
        for name in [name for name in state if re.match(rf"{re.escape(prefix)}[qk](_norm)?\.", name)]:
            heads = state[name].unflatten(0, (-1, layer.head_dim))
            if name.startswith(prefix + queries) and not torch.allclose(gain, torch.ones(()), rtol=1e-6):
                heads = heads * gain.view(-1, *[1] * (heads.dim() - 2))
            if not torch.equal(order, order.sort().values):
                heads = heads[:, order]
            state[name] = heads.flatten(0, 1)


def _fold_multipliers(state: dict[str, Tensor], settings: Any, tied: bool) -> None:
    """Fold Granite's factors of embeddings, of what a block adds, and of logits into the weights."""
    names = "embedding_multiplier", "residual_multiplier", "logits_scaling"
    embedding, added, logits = (float(getattr(settings, name, 1.0)) for name in names)
    factors = {
        r"embedding\.weight": embedding,
        r"norm\.weight": 1 / (logits * (embedding if tied else 1)),
        r"blocks\.\d+\.(attention\.out|mlp\.down)\.(weight|bias)": added,
    }
    for pattern, factor in factors.items():
        if factor != 1:
            state |= {name: value * factor for name, value in state.items() if re.fullmatch(pattern, name)}
    if tied:
        state["head.weight"] = state["embedding.weight"]
