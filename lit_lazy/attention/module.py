"""The attention layer: projections, positions, bias and normaliser, with a cache for decoding."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flash_lazy import Backend, Stats
from lit_lazy.attention.bias import Bias, NoBias
from lit_lazy.attention.normaliser import Normaliser, Softmax


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention computes."""

    normaliser: Normaliser = field(default_factory=Softmax)
    """How scores become weights."""
    bias: Bias = field(default_factory=NoBias)
    """What is added to the scores by distance and head."""
    window: int | None = None
    """Keys a query can see, itself included; None for all that are not in its future."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"AttentionSpec.window={self.window}: must be at least 1, or None for no window")


@dataclass
class LayerCache:
    """Keys and values of one layer, `[B, Hkv, L, D]`, grown as tokens are decoded."""

    k: Tensor | None = None
    v: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens cached."""
        return 0 if self.k is None else self.k.shape[2]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append and return all keys and values so far."""
        if self.k is not None and self.v is not None:
            k, v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.k, self.v = k, v
        return k, v


class Attention(nn.Module):
    """Multi-head (or grouped-query) causal self-attention for any specification."""

    def __init__(
        self,
        spec: AttentionSpec,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        context_length: int,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, d_model // n_heads
        self.window, self.backend = spec.window, backend
        self.q = nn.Linear(d_model, n_heads * self.head_dim, bias=False)
        self.k = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(n_heads * self.head_dim, d_model, bias=False)
        self.normaliser = spec.normaliser.build(n_heads, context_length)
        self.bias = spec.bias.build(n_heads, context_length)

    @property
    def backend_name(self) -> str:
        """The implementation that a training step runs where the parameters are: sdpa, chunked, triton, ..."""
        q = self.q.weight.new_empty(0, self.head_dim)
        return self.normaliser.backend_name(q, self.bias(1), self.window, self.backend)

    def forward(
        self,
        x: Tensor,
        rotate: Callable[[Tensor], Tensor],
        cache: LayerCache | None = None,
        with_stats: bool = False,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Stats | None]:
        """x `[B, L, d_model]`: the newest L tokens. Returns the same shape, and the stats `[B, H, L]` where asked.

        key_mask: bool `[B, Lk]`, False hides a key from every query.
        """
        q, k, v = (
            projection(x).unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
            for projection, heads in ((self.q, self.n_heads), (self.k, self.n_kv_heads), (self.v, self.n_kv_heads))
        )
        q, k = rotate(q), rotate(k)
        if cache is not None:
            k, v = cache.extend(k, v)
        masked = {} if key_mask is None else {"key_mask": key_mask}
        out, stats = self.normaliser(q, k, v, self.bias(k.shape[2]), self.window, self.backend, with_stats, **masked)
        return self.out(out.transpose(1, 2).flatten(2)), stats
