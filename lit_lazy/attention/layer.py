"""The attention layer: projections, positions, bias, normaliser and gate.

A gate is a factor on the heads' outputs, independent of the normaliser; a norm is one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flash_lazy import Stats
from lit_lazy.attention.bias import Bias, BiasModule, BiasTerms, NoBias
from lit_lazy.attention.cache import LayerCache
from lit_lazy.attention.gate import Gate, GateModule, NoGate
from lit_lazy.attention.mixer import LayerShape, Mixer, MixerModule, PassInputs
from lit_lazy.attention.normaliser import AttentionBackend, AttentionCall, Normaliser, NormaliserModule, Softmax
from lit_lazy.support.checked_fields import CheckedFields, PositiveInt


@dataclass(frozen=True)
class AttentionSpec(CheckedFields, prefix="model.attention."):
    """The attention variant of a layer."""

    normaliser: Normaliser = field(default_factory=Softmax)
    """Maps scores to weights."""
    bias: Bias = field(default_factory=NoBias)
    """Added to the scores, by distance and head."""
    window: PositiveInt | None = None
    """Most recent keys that a query sees, its own included; None for all keys up to its own."""
    full_layers: tuple[int, ...] = ()
    """Layers, counted from 0, without the window."""
    gate: Gate = field(default_factory=NoGate)
    """Multiplies the output of each head."""
    qk_norm: bool = False
    """RMSNorm each head's queries and keys before rotation, with a learned gain (after arXiv 2302.05442)."""
    qkv_bias: bool = False
    """Add a learned vector, at first 0, to queries, keys and values."""
    out_bias: bool = False
    """Add a learned vector, at first 0, to the output."""


class Attention(MixerModule):
    """Multi-head (or grouped-query) causal self-attention for any specification."""

    attends = True

    def __init__(self, spec: AttentionSpec, shape: LayerShape, backend: AttentionBackend) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = shape.n_heads, shape.n_kv_heads, shape.head_dim
        self.window = None if shape.layer in spec.full_layers else spec.window
        self.renormalise, self.backend = spec.normaliser.renormalise, backend
        self.q, self.k, self.v = (
            nn.Linear(shape.d_model, heads * shape.head_dim, bias=spec.qkv_bias)
            for heads in (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
        )
        self.out = nn.Linear(shape.n_heads * shape.head_dim, shape.d_model, bias=spec.out_bias)
        self.normaliser = spec.normaliser.build(shape)
        self.bias = spec.bias.build(shape.n_heads, shape.context_length)
        self.gate = spec.gate.build(shape)
        for part, base in (("normaliser", NormaliserModule), ("bias", BiasModule), ("gate", GateModule)):
            if not isinstance(built := getattr(self, part), base):
                result = f"{type(getattr(spec, part)).__name__}.build returns a {type(built).__name__}"
                raise ValueError(f"{result}; return a {base.__name__}")
        if self.normaliser.signed and self.renormalise:
            name = type(spec.normaliser).__name__
            raise ValueError(f"{name}.renormalise=True: weights can be negative and sum to 0; set it to False")
        self.rotary_dim = shape.head_dim // self.normaliser.maps
        self.qk_norm = spec.qk_norm
        if spec.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(self.rotary_dim, eps=shape.norm_eps) for _ in range(2))

    def backend_name(self, documents: bool = False) -> str:
        """Name of the implementation that a training step runs on the parameters' device: sdpa, chunked, triton, ..."""
        q, k = (self.q.weight.new_empty(1, heads, 1, self.head_dim) for heads in (self.n_heads, self.n_kv_heads))
        boundaries = torch.tensor([0, 1], dtype=torch.int32, device=q.device) if documents else None
        return self.normaliser.backend_name(self._make_call(q, k, k)._replace(cu_seqlens=boundaries))

    def new_cache(self) -> LayerCache:
        return LayerCache()

    def flops_per_token(self, context_length: int) -> int:
        """FLOPs of causal attention's two products: half of the full square (Chowdhery et al., arXiv 2204.02311)."""
        return 6 * context_length * self.n_heads * self.head_dim

    def compute_bias(self, n_keys: int) -> BiasTerms:
        """Terms of the bias, valid for every distance below `n_keys`. Raises ValueError if its class returns others."""
        returned, returns, heads = self.bias(n_keys), f"{type(self.bias).__name__}.forward returned", self.n_heads
        if not isinstance(returned, tuple) or len(returned) != len(BiasTerms._fields):
            give = f"give BiasTerms(table), table [heads, width], heads = {heads}"
            raise ValueError(f"{returns} a {type(returned).__name__}; {give}")
        terms = BiasTerms(*returned)
        for name, x, layout in zip(BiasTerms._fields, terms, ("[heads, width]", "[heads]"), strict=True):
            if x is not None and (x.shape[:1] != (heads,) or x.dim() != layout.count(",") + 1):
                raise ValueError(f"{returns} {name} of shape {list(x.shape)}; give {layout}, heads = {heads}")
        return terms

    def _make_call(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        bias = self.compute_bias(k.shape[2])
        return AttentionCall(q, k, v, bias, self.window, renormalise=self.renormalise, backend=self.backend)

    def forward(self, x: Tensor, inputs: PassInputs) -> tuple[Tensor, Stats | None]:
        """See `MixerModule.forward`; stats are `[B, H, L]` each."""
        q, k, v = (
            projection(x).unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
            for projection, heads in ((self.q, self.n_heads), (self.k, self.n_kv_heads), (self.v, self.n_kv_heads))
        )
        if self.qk_norm:
            # Under autocast norms are float32.
            q, k = (self._apply_per_map(x, norm).to(x.dtype) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        if self.normaliser.unit_length:
            q, k = (self._apply_per_map(x, partial(normalize, dim=-1)) for x in (q, k))
        rotate = partial(self._apply_per_map, apply=inputs.rotate)
        cache: LayerCache | None = inputs.cache
        q, (k, values) = rotate(q), (rotate(k), v) if cache is None else cache.extend(k, v, rotate)
        call = self._make_call(q, k, values)._replace(with_stats=inputs.with_stats, key_mask=inputs.key_mask, x=x)
        if inputs.cu_seqlens is None:
            out, stats = self.attend(call)
        else:
            out, stats = self._attend_documents(call._replace(cu_seqlens=inputs.cu_seqlens))
        return self.out(self.gate(out, x, v).transpose(1, 2).flatten(2)), stats

    def attend(self, call: AttentionCall) -> tuple[Tensor, Stats | None]:
        """The heads' outputs before the gate; an exported model computes them without this project's kernels."""
        return self.normaliser(call)

    def _attend_documents(self, call: AttentionCall) -> tuple[Tensor, Stats | None]:
        """Attend to the sequences concatenated into one, as the kernels take documents."""
        batch = call.q.shape[0]
        q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (call.q, call.k, call.v))
        x = None if call.x is None else call.x.flatten(0, 1)[None]
        out, stats = self.attend(call._replace(q=q, k=k, v=v, x=x))

        def split(x: Tensor) -> Tensor:  # [1, H, B * L, ...] -> [B, H, L, ...]
            return x[0].unflatten(1, (batch, -1)).transpose(0, 1)

        return split(out), None if stats is None else Stats(*(split(x) for x in stats))

    def _apply_per_map(self, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function to each map's part of the head dimension."""
        if self.normaliser.maps == 1:
            return apply(x)
        parts = x.unflatten(-1, (self.normaliser.maps, -1)).transpose(2, 3)  # [B, H, maps, L, D / maps]
        return apply(parts).transpose(2, 3).flatten(-2)


@dataclass(frozen=True)
class SelfAttention(Mixer):
    """Attention, configured by `model.attention`."""

    attends = True

    def build(
        self, shape: LayerShape, spec: AttentionSpec = AttentionSpec(), backend: AttentionBackend = "auto"
    ) -> MixerModule:
        return Attention(spec, shape, backend)
