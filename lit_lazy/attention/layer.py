"""The attention layer: projections, positions, bias, normaliser and gate.

A gate is a factor on the heads' outputs, independent of the normaliser; a norm is one of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flash_lazy import Stats
from lit_lazy.attention.bias import Bias, BiasModule, BiasTerms, NoBias
from lit_lazy.attention.mixer import LayerCache, LayerShape, Mixer, MixerModule, PassInputs, SelfInitialised
from lit_lazy.attention.normaliser import (
    AttentionBackend,
    AttentionCall,
    Normaliser,
    NormaliserModule,
    Softmax,
)
from lit_lazy.support.checks import CheckedFields, PositiveInt

Per = Literal["element", "head"]
HEAD_NORM_EPS = 1e-5
"""Of the norm of a head's output, as published for Differential Attention."""


class GateModule(nn.Module):
    """Parameters of a gate; this base class gates nothing."""

    def forward(self, out: Tensor, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        """Gate the heads' outputs `[B, H, L, D]`.

        x `[B, L, d_model]` is the layer's normalised input and v `[B, Hkv, L, D]` the values, both of the queries'
        tokens.
        """
        return out


class Gate(CheckedFields, ABC):
    """Settings of a gate."""

    @abstractmethod
    def build(self, shape: LayerShape) -> GateModule: ...


@dataclass(frozen=True)
class NoGate(Gate):
    """No gate."""

    def build(self, shape: LayerShape) -> GateModule:  # noqa: ARG002
        return GateModule()


@dataclass(frozen=True)
class OutputGate(Gate):
    """`sigmoid(x W)` on the output of each head, x the layer's normalised input (Qiu et al., arXiv 2505.06708, G1)."""

    per: Per = "element"
    """One gate per element of a head's output, or one per head."""
    starts_open: bool = False
    """A factor of 2, and W = 0 at first, which changes nothing: for a model that was trained without the gate."""

    def build(self, shape: LayerShape) -> GateModule:
        return _OutputGate(shape, self, shape.d_model)


class _OutputGate(GateModule):
    def __init__(self, shape: LayerShape, spec: OutputGate, inputs: int) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        width = shape.head_dim if spec.per == "element" else 1
        self.scale = 2.0 if spec.starts_open else 1.0
        self.linear = (_ZeroLinear if spec.starts_open else nn.Linear)(inputs, shape.n_heads * width, bias=False)

    def forward(self, out: Tensor, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        gate = self.scale * torch.sigmoid(self.linear(x))
        return out * gate.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


class _ZeroLinear(nn.Linear, SelfInitialised):
    """A linear layer whose weights start at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


@dataclass(frozen=True)
class ValueGate(OutputGate):
    """`sigmoid(v W)` on the output of each head, v the values of the query's own token (arXiv 2510.09017)."""

    def build(self, shape: LayerShape) -> GateModule:
        return _ValueGate(shape, self, shape.n_kv_heads * shape.head_dim)


class _ValueGate(_OutputGate):
    def forward(self, out: Tensor, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return super().forward(out, v.transpose(1, 2).flatten(2), v)


@dataclass(frozen=True)
class HeadNorm(Gate):
    """RMSNorm of each head's output, with a learned gain that the heads share (Li et al., arXiv 2605.06611)."""

    def build(self, shape: LayerShape) -> GateModule:
        return _HeadNorm(shape)


class _HeadNorm(GateModule):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.head_dim, eps=HEAD_NORM_EPS)

    def forward(self, out: Tensor, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return self.norm(out.to(self.norm.weight.dtype)).to(out.dtype)


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
