"""A model of transformers as settings and weights of this project's decoder.

Sizes are read from the tensors, and what a layer's attention does from a call of it. Nothing here knows a family: what
the decoder cannot express has a tensor without a place, or is refused by `compare`.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lit_lazy.attention import AttentionSpec, NoPosition, Position, Rope
from lit_lazy.attention.position import DynamicScaling, GivenFrequencies, RopeScaling
from lit_lazy.config.schema import ModelConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.errors import describe_exception

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
NAME = re.compile(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")


class AttentionSeen(NamedTuple):
    """What one layer's attention did. scale: of scores. window: keys that a query sees, None for all."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    rotates: bool
    window: int | None


class Converted(NamedTuple):
    """state: of a `DecoderLM`, float32; tensors that need no change are the source's."""

    cfg: ModelConfig
    context_length: int
    state: dict[str, Tensor]

    @property
    def vocab_size(self) -> int:
        return len(self.state["embedding.weight"])


def find_parts(model: "PreTrainedModel") -> dict[str, list[str]]:
    """This project's names of each tensor of a model, several of a fused one.

    Raises a one-line ValueError, in transformers' names, unless they are those of a decoder of this project.
    """
    parts = {name: _rename(name) for name in model.state_dict()}
    theirs = {ours: name for name, found in parts.items() for ours in found}
    layers = 1 + max((int(name.split(".")[1]) for name in theirs if name.startswith("blocks.")), default=-1)
    if layers < 1:
        raise ValueError(
            f"{next(iter(parts))}: has no place in this decoder, nor has any layer of {type(model).__name__}"
        )
    with torch.device("meta"):
        small = ModelConfig(d_model=2, n_layers=layers, d_ff=2, **_find_options(theirs))
        expected = DecoderLM(small, 1, 1, seed=None).state_dict()
    surplus = [name for name, found in parts.items() if not (found and expected.keys() >= set(found))]
    if surplus:
        raise ValueError(
            f"{surplus[0]}: has no place in this decoder, one of {len(surplus)} tensors of {type(model).__name__}"
        )
    if missing := [name for name in expected if name not in theirs]:
        name = missing[0]
        raise ValueError(f"{_rename_back(name)}: is missing in {type(model).__name__}; this decoder needs it")
    return parts


def _rename(name: str) -> list[str]:
    found = NAME.fullmatch(name)
    layer, part, kind = found.groups() if found else (None, "", "")
    prefix = "" if layer is None else f"blocks.{layer}."
    return [f"{prefix}{ours}.{kind}" for ours in PARTS.get(part, "").split()]


def _rename_back(name: str) -> str:
    stem, _, kind = re.sub(r"^blocks\.\d+\.", "", name).rpartition(".")
    layer = name.removesuffix(f"{stem}.{kind}").replace("blocks", "layers")
    return f"model.{layer}{next(theirs for theirs, ours in PARTS.items() if ours == stem)}.{kind}"


def _find_options(names: Container[str]) -> dict[str, Any]:
    """The optional parts of a decoder, by the names of its tensors."""
    qk_norm, qkv_bias, out_bias, mlp_bias = (
        f"blocks.0.{name}" in names
        for name in ("attention.q_norm.weight", "attention.q.bias", "attention.out.bias", "mlp.down.bias")
    )
    spec = AttentionSpec(qk_norm=qk_norm, qkv_bias=qkv_bias, out_bias=out_bias)
    return {"attention": spec, "mlp_bias": mlp_bias}


@torch.no_grad()
def convert(model: "PreTrainedModel") -> Converted:
    """Raises a one-line ValueError, in transformers' names, for a model that is no decoder of this project's form."""
    parts = find_parts(model)
    try:
        new = _convert(model, parts)
    except (AttributeError, LookupError, TypeError, RuntimeError, ArithmeticError) as error:
        name = type(model).__name__
        raise ValueError(f"{name}: has another form than this decoder ({describe_exception(error)})") from None
    theirs = {ours: name for name, found in parts.items() for ours in found}
    with torch.device("meta"):
        expected = DecoderLM(new.cfg, new.vocab_size, new.context_length, seed=None).state_dict()
    for name, value in new.state.items():
        if value.shape != expected[name].shape:
            shape = list(expected[name].shape)
            raise ValueError(f"{theirs[name]}: has shape {list(value.shape)}, in this decoder {shape}")
        if not torch.stack(value.aminmax()).isfinite().all():  # unlike value.isfinite(), without a copy
            raise ValueError(f"{theirs[name]}: is not finite")
    return new


def _convert(model: "PreTrainedModel", parts: Mapping[str, list[str]]) -> Converted:
    settings, base = model.config, cast(Any, model.base_model)
    layers = observe_attention(model, 2 * settings.max_position_embeddings)
    first = layers[0]
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        heads = (first.n_heads, first.n_kv_heads, first.n_kv_heads) if len(parts[name]) == 3 else (1, 1)
        rows = [len(value) * share // sum(heads) for share in heads] if len(parts[name]) > 1 else [len(value)]
        state |= zip(parts[name], value.split(rows), strict=True)
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
        n_heads=first.n_heads,
        n_kv_heads=None if first.n_kv_heads == first.n_heads else first.n_kv_heads,
        head_dim=None if first.head_dim * first.n_heads == width else first.head_dim,
        d_ff=len(state["blocks.0.mlp.gate.weight"]),
        norm_eps=float(base.norm.variance_epsilon if hasattr(base.norm, "variance_epsilon") else base.norm.eps),
        position=position,
        tie_embeddings=tied,
        **options,
    )
    return Converted(cfg, settings.max_position_embeddings, state)


def observe_attention(model: "PreTrainedModel", last: int) -> list[AttentionSeen]:
    """What the attention of each layer does with two equal embeddings.

    last: the last position that its mask is asked about. Raises a one-line ValueError if that is no causal window.
    """
    seen: list[AttentionSeen] = []

    def attend(
        _: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        rotates = not torch.allclose(q[:, :, 0], q[:, :, 1])
        window = int(mask)
        seen.append(AttentionSeen(q.shape[1], k.shape[1], q.shape[3], float(scaling), rotates, window or None))
        return q.new_zeros(*q.shape[:1], q.shape[2], q.shape[1], v.shape[3]), None

    def mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> Tensor:
        return torch.tensor(find_window(lambda q, k: bool(mask_function(*map(torch.tensor, (0, 0, q, k)))), last) or 0)

    with _attention_of(model, attend, mask):
        width = cast(nn.Embedding, model.get_input_embeddings()).embedding_dim
        model(
            inputs_embeds=torch.randn(width, generator=torch.Generator().manual_seed(0)).expand(1, 2, -1),
            use_cache=False,
        )
    return seen


@contextmanager
def _attention_of(model: "PreTrainedModel", attend: Callable[..., Any], mask: Callable[..., Tensor]) -> Iterator[None]:
    """Lets a model compute its attention by other functions, as transformers offers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    own, name = str(model.config._attn_implementation), "lit_lazy"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(own)


def find_window(visible: Callable[[int, int], bool], last: int) -> int | None:
    """Number of newest keys that a query sees, None for all; visible: whether query i sees key j.

    Raises a one-line ValueError if it sees others.
    """
    oldest, newest = 0, last
    while oldest < newest:
        middle = (oldest + newest) // 2
        oldest, newest = (oldest, middle) if visible(last, middle) else (middle + 1, newest)
    window = last - oldest + 1
    for query in {0, 1, min(window - 1, last), min(window, last), last // 2, last}:
        for key in {0, 1, query - window, query - window + 1, query - 1, query, query + 1, last}:
            if key >= 0 and visible(query, key) != (query - window < key <= query):
                raise ValueError(
                    f"attention: query {query} {'sees' if visible(query, key) else 'does not see'} key {key}"
                )
    return window if oldest else None


def _make_position(base: Any, settings: Any, layers: list[AttentionSeen]) -> tuple[Position, Tensor, Tensor]:
    """The rotation; the order of a head's dimensions that it has; and the factor of scores by dimension."""
    width = layers[0].head_dim
    order, gain = torch.arange(width), torch.ones(width)
    if not any(layer.rotates for layer in layers):
        return NoPosition(), order, gain
    rotary, length = base.rotary_emb, settings.max_position_embeddings
    short, long = (_find_frequencies(rotary, width, count) for count in (1, 2 * length))
    turned = 2 * len(rotary.inv_freq)
    gain[:turned] = float(rotary.attention_scaling) ** 2
    parts = order[:turned].tensor_split(2), order[turned:].tensor_split(2)
    order = torch.cat([part[half] for half in range(2) for part in parts])
    skipped = tuple(index for index, layer in enumerate(layers) if not layer.rotates)
    rope = Rope(float(settings.rope_parameters["rope_theta"]), skip_layers=skipped)
    scaling: RopeScaling = rope.scaling
    unscaled = rope.build(0, width, 0).get_buffer("frequency")
    if not torch.equal(short, long):
        if settings.rope_parameters["rope_type"] == "dynamic":
            scaling = DynamicScaling(settings.rope_parameters["factor"], length)
        else:
            trained = settings.rope_parameters["original_max_position_embeddings"]
            scaling = GivenFrequencies(tuple(short.tolist()), tuple(long.tolist()), trained)
    elif not torch.allclose(short, unscaled, rtol=1e-5, atol=0):
        scaling = GivenFrequencies(tuple(short.tolist()))
    return Rope(rope.base, scaling, skip_layers=skipped), order, gain


def _find_frequencies(rotary: Any, width: int, length: int) -> Tensor:
    """Those of a text of a length, with zeros for dimensions that are not rotated: `[width / 2]`."""
    rotary(torch.zeros(1), torch.tensor([[length - 1]]))
    return nn.functional.pad(rotary.inv_freq, (0, width // 2 - len(rotary.inv_freq)))


def _order_and_scale_heads(
    state: dict[str, Tensor], layers: list[AttentionSeen], order: Tensor, rotated_gain: Tensor
) -> None:
    for index, layer in enumerate(layers):
        gain = layer.scale * layer.head_dim**0.5 * (rotated_gain if layer.rotates else torch.ones(layer.head_dim))
        scaled = "q_norm" if f"blocks.{index}.attention.q_norm.weight" in state else "q"
        for part in ("q", "k", "q_norm", "k_norm"):
            for name in (f"blocks.{index}.attention.{part}.{kind}" for kind in ("weight", "bias")):
                if name not in state:
                    continue
                heads = state[name].unflatten(0, (-1, layer.head_dim))
                if part == scaled and not torch.allclose(gain, torch.ones(()), rtol=1e-6):
                    heads = heads * gain.view(-1, *[1] * (heads.dim() - 2))
                if not torch.equal(order, order.sort().values):
                    heads = heads[:, order]
                state[name] = heads.flatten(0, 1)


def _fold_multipliers(state: dict[str, Tensor], settings: Any, tied: bool) -> None:
    """Fold Granite's factors of embeddings, of what a block adds, and of logits into the weights."""
    embedding, added, logits = (
        float(getattr(settings, name, 1.0))
        for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    )
    factors = {r"embedding\.weight": embedding, r"norm\.weight": 1 / (logits * (embedding if tied else 1))}
    factors[r"blocks\.\d+\.(attention\.out|mlp\.down)\.(weight|bias)"] = added
    for pattern, factor in factors.items():
        if factor != 1:
            state |= {name: value * factor for name, value in state.items() if re.fullmatch(pattern, name)}
    if tied:
        state["head.weight"] = state["embedding.weight"]
