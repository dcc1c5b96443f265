"""Lazy Attention as a layer: projections, rotary positions, tau and bias, and a cache for decoding."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .api import lazy_attention
from .call import BACKENDS, THRESHOLDS, Backend, Threshold, check_choice, check_type, show

PRECISE = (torch.float32, torch.float64)


@dataclass
class KeyValueCache:
    """Keys and values of the tokens so far, `[B, Hkv, L, D]`; None before the first.

    dropped: number of tokens that were cut off at the beginning of both; whoever cuts them off adds them here.
    layer: the layer that has filled it, which no other may. A copy or pickle has none: it is for the next that uses it.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    dropped: int = 0
    layer: nn.Module | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.dropped + (0 if self.keys is None else self.keys.shape[2])

    def join(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The cached keys and values followed by new ones, which the cache does not take."""
        before = self.keys, self.values
        pairs = zip(before, (keys, values), strict=True)
        keys, values = (new if old is None else torch.cat([old, new], dim=2) for old, new in pairs)
        return keys, values

    def __getstate__(self) -> dict[str, Tensor | int | None]:
        return {"keys": self.keys, "values": self.values, "dropped": self.dropped}


class LazyAttention(nn.Module):
    """Causal self-attention with a learned threshold and distance bias per head (Fu et al., arXiv 2601.00919).

    tau and bias stay float32 (or wider) in a module of half precision, also when a state_dict of half precision is
    loaded: their updates are smaller than its resolution. Exclude them from weight decay: `no_weight_decay` names them.

    Args:
        width: features of the input and output.
        heads: query heads.
        kv_heads: heads of keys and values, a divisor of `heads`; as many as heads by default.
        head_dim: features of a head; width / heads by default.
        reach: distances with a learned bias, 0 .. reach - 1; 0 for no bias.
        rope_base: base of the rotary embedding (pairs are a half of the head apart, as in Llama); None for none.
        tau: initial tau of every head.
        threshold: "per_query", "per_token", "seq_len" or "constant", as in `lazy_attention`.
        context_length: the training context; needed by "seq_len" and, as the number of its taus, by "per_token".
        renormalise, window, backend: as in `lazy_attention`.
        device, dtype: of the projections; tau and bias are at least float32.

    Raises:
        ValueError: an argument is invalid; the message names it, its value and the fix.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        reach: int = 512,
        rope_base: float | None = 10000.0,
        tau: float = 1.0,
        threshold: Threshold = "per_query",
        context_length: int | None = None,
        renormalise: bool = False,
        window: int | None = None,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(reach, int) or reach < 0:
            raise ValueError(f"reach is {show(reach)}; give a whole number, 0 for no bias")
        if not isinstance(tau, (int, float)):
            raise ValueError(f"tau is {show(tau)}; give a number")
        counts = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, value in (counts | {"context_length": context_length}).items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {show(value)}; give a whole number, at least 1")
        check_choice("threshold", threshold, THRESHOLDS)
        check_choice("backend", backend, BACKENDS)
        if head_dim is None and width % heads:
            raise ValueError(f"heads is {heads}; give a divisor of width, {width}, or head_dim")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, head_dim or width // heads
        if heads % self.kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}; give a divisor of heads, {heads}")
        if rope_base is not None and self.head_dim % 2:
            raise ValueError(f"rope_base is {rope_base} and head_dim {self.head_dim}; give an even head_dim, or None")
        if threshold == "constant" and tau >= 1:
            raise ValueError(f"tau is {tau} and threshold 'constant'; give less than 1, which no weight exceeds")
        if (context_length is None) != (threshold not in ("seq_len", "per_token")):
            fix = "seq_len and per_token need one, no other"
            raise ValueError(f"threshold is {threshold!r} and context_length {context_length}; {fix}")
        self.width, self.rope_base, self.initial_tau = width, rope_base, tau
        self.settings = {"threshold": threshold, "renormalise": renormalise, "window": window, "backend": backend}
        if threshold == "seq_len":
            self.settings["context_length"] = context_length
        make = partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.q_proj = make(width, heads * self.head_dim)
        self.k_proj, self.v_proj = (make(width, self.kv_heads * self.head_dim) for _ in range(2))
        self.o_proj = make(heads * self.head_dim, width)
        per_head = (heads, context_length) if threshold == "per_token" and context_length else (heads,)
        self.tau = nn.Parameter(torch.empty(per_head, device=device, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(heads, reach, device=device, dtype=torch.float32)) if reach else None
        self.register_load_state_dict_pre_hook(_widen_state)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters: projections as torch does, tau as given, the bias to zero."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.reset_parameters()
        nn.init.constant_(self.tau, self.initial_tau)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def no_weight_decay(self) -> set[str]:
        """Names of this module's parameters that weight decay would pull to softmax attention."""
        return {"tau", "bias"} if self.bias is not None else {"tau"}

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, key_mask: Tensor | None = None) -> Tensor:
        """Attend from each token of x `[B, L, width]` to itself, those before it and those in the cache.

        cache: is extended by x's tokens; the same object is given with the next tokens. A layer that a model calls
            twice in a pass (shared weights) needs a cache for each call: one cache would take the second call's tokens
            for the next ones, which nothing detects.
        key_mask: bool `[B, tokens of cache and x]`, False hides a token, as in a left-padded batch.

        Raises TypeError if x is no tensor, and ValueError if a shape is wrong. The cache is then as it was.
        """
        check_type("x", x)
        if x.ndim != 3 or x.shape[2] != self.width:
            raise ValueError(f"x is {list(x.shape)}; give [batch, tokens, {self.width}]")
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise ValueError(f"cache is {type(cache).__name__}; give a flash_lazy.KeyValueCache")
        if cache is not None and cache.keys is not None and cache.layer is not None and cache.layer is not self:
            raise ValueError("cache is another layer's; give each layer its own")
        if cache is not None and cache.dropped and self.settings["threshold"] == "per_token":
            raise ValueError(f"cache has dropped {cache.dropped} tokens; threshold 'per_token' needs all of them")
        if cache is not None and cache.keys is not None and len(cache.keys) != len(x):
            raise ValueError(f"cache has a batch of {len(cache.keys)} and x of {len(x)}; give each batch its own cache")
        q, k, v = (self._split_heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        first = 0 if cache is None else cache.length
        if self.rope_base is not None:
            angles = make_angles(first, x.shape[1], self.head_dim, self.rope_base, x.device)
            q, k = rotate(q, angles), rotate(k, angles)
        keys, values = (k, v) if cache is None else cache.join(k, v)
        out = lazy_attention(q, keys, values, self.tau, self.bias, key_mask=key_mask, **self.settings)
        if cache is not None:
            cache.keys, cache.values, cache.layer = keys, values, self
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        """The settings that the projections do not show."""
        reach = 0 if self.bias is None else self.bias.shape[1]
        shown = {"heads": self.heads, "kv_heads": self.kv_heads, "reach": reach, "rope_base": self.rope_base}
        return ", ".join(f"{name}={value}" for name, value in (shown | self.settings).items())

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LazyAttention":
        """As every move or cast of a module, but tau and bias keep their precision."""
        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(partial(_keep_precision, fn), recurse=False)


def _widen_state(layer: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    assert isinstance(layer, LazyAttention)
    for name in (f"{prefix}{name}" for name in layer.no_weight_decay()):
        if name in state_dict and state_dict[name].dtype not in PRECISE:
            state_dict[name] = state_dict[name].float()


def _keep_precision(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    moved = fn(x)
    return moved if moved.dtype in PRECISE else x.to(moved.device, torch.float32)


def make_angles(first: int, count: int, width: int, base: float, device: torch.device) -> Tensor:
    """Rotary angles of the positions first .. first + count - 1, float32 `[count, width / 2]` (arXiv 2104.09864)."""
    frequencies = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    return torch.arange(first, first + count, device=device, dtype=torch.float32)[:, None] * frequencies


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x `[..., L, D]` by angles `[L, D / 2]`, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(wide).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
