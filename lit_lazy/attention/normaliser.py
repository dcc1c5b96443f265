"""Normalisers: how scores become the weights that values are multiplied with.

A normaliser is a frozen dataclass (its settings) whose `build` makes the module that holds its parameters.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from flash_lazy import Backend, Stats, Weights, attention_weights, lazy_attention, resolve_backend
from lit_lazy.attention.bias import BiasTerms

Threshold = Literal["per_query", "seq_len", "per_token", "constant"]


class NormaliserModule(nn.Module, ABC):
    """Parameters of a normaliser.

    lr_scale: factor on the learning rate of the module's own parameters.
    """

    lr_scale: float = 1.0

    @abstractmethod
    def backend_name(self, q: Tensor, bias: BiasTerms, window: int | None, backend: Backend) -> str:
        """The implementation that a training step runs on queries like q, as the table names it."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: BiasTerms,
        window: int | None,
        backend: Backend,
        with_stats: bool,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Stats | None]:
        """Causal attention, queries aligned to the end of the keys.

        q `[B, H, Lq, D]`; k, v `[B, Hkv, Lk, D]`; key_mask bool `[B, Lk]`, False hides a key (diagnostics alone ask for
        it). Returns `[B, H, Lq, D]`, and `Stats` of `[B, H, Lq]` where asked.
        """

    def weights(self, q: Tensor, k: Tensor, bias: BiasTerms, window: int | None) -> Weights:
        """The weights of queries aligned to the end of the keys, for diagnostics; shapes as in `forward`.

        None is negative, and `mass` is what they sum to before any renormalising.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method weights(q, k, bias, window); diagnostics need it"
        )


class Normaliser(ABC):
    """Settings of a normaliser."""

    @abstractmethod
    def build(self, n_heads: int, context_length: int) -> NormaliserModule: ...


@dataclass(frozen=True)
class Softmax(Normaliser):
    """Softmax attention. Without bias and window it runs PyTorch's SDPA, otherwise `lazy_attention` at tau = 0."""

    def build(self, n_heads: int, context_length: int) -> NormaliserModule:  # noqa: ARG002
        return _Softmax(n_heads)


class _Softmax(NormaliserModule):
    tau: Tensor

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.register_buffer("tau", torch.zeros(n_heads), persistent=False)

    @staticmethod
    def _runs_sdpa(bias: BiasTerms, window: int | None, backend: Backend) -> bool:
        return backend == "auto" and bias == BiasTerms() and window is None

    def backend_name(self, q: Tensor, bias: BiasTerms, window: int | None, backend: Backend) -> str:
        return "sdpa" if self._runs_sdpa(bias, window, backend) else resolve_backend(backend, q)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: BiasTerms,
        window: int | None,
        backend: Backend,
        with_stats: bool,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Stats | None]:
        if not with_stats and key_mask is None and self._runs_sdpa(bias, window, backend):
            return sdpa(q, k, v), None
        return attend(q, k, v, self.tau, bias, window, backend, with_stats, key_mask=key_mask)

    def weights(self, q: Tensor, k: Tensor, bias: BiasTerms, window: int | None) -> Weights:
        return attention_weights(q, k, self.tau, bias.table, slopes=bias.slopes, window=window)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's causal softmax attention with queries aligned to the end of the keys."""
    gqa = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    mask = None if q.shape[2] == 1 else causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


@dataclass(frozen=True)
class Elastic(Normaliser):
    """Elastic-Softmax (arXiv 2601.00919): `max(p - theta, 0)`, p the softmax weight, theta from a learned tau per head.

    docs/method.md gives the formula of each threshold.
    """

    tau_init: float = 1.0
    """Initial offset parameter. Positive values are subtracted: the paper's sign, and its initial value."""
    threshold: Threshold = "per_query"
    """theta: tau / (keys the query sees) | tau / (context length) | tau[position] / (keys seen) | tau."""
    renormalise: bool = False
    """Divide the weights of each row by their sum (the paper does not)."""
    learn_tau: bool = True
    """Train tau; otherwise it keeps its initial value."""
    tau_lr_scale: float = 1.0
    """Factor on the learning rate of tau."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.tau_init):
            raise ValueError(f"Elastic.tau_init={self.tau_init}: must be finite")
        allowed = get_args(Threshold)
        if self.threshold not in allowed:
            raise ValueError(f"Elastic.threshold={self.threshold!r}: must be one of {', '.join(allowed)}")
        if self.threshold == "constant" and self.tau_init >= 1:
            raise ValueError(
                f"Elastic.tau_init={self.tau_init} with Elastic.threshold='constant': no weight exceeds 1, so output "
                "and every gradient would stay zero for ever; take a value below 1, for example 0.01"
            )
        if not (math.isfinite(self.tau_lr_scale) and self.tau_lr_scale > 0):
            raise ValueError(
                f"Elastic.tau_lr_scale={self.tau_lr_scale}: must be finite and above 0 (learn_tau=False freezes tau)"
            )

    def build(self, n_heads: int, context_length: int) -> NormaliserModule:
        return _Elastic(self, n_heads, context_length)


class _Elastic(NormaliserModule):
    def __init__(self, spec: Elastic, n_heads: int, context_length: int) -> None:
        super().__init__()
        self.spec, self.context_length, self.lr_scale = spec, context_length, spec.tau_lr_scale
        shape = (n_heads, context_length) if spec.threshold == "per_token" else (n_heads,)
        self.tau = nn.Parameter(torch.full(shape, spec.tau_init, dtype=torch.float32), requires_grad=spec.learn_tau)

    def backend_name(self, q: Tensor, bias: BiasTerms, window: int | None, backend: Backend) -> str:  # noqa: ARG002
        return resolve_backend(backend, q)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: BiasTerms,
        window: int | None,
        backend: Backend,
        with_stats: bool,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Stats | None]:
        return attend(q, k, v, self.tau, bias, window, backend, with_stats, key_mask=key_mask, **self._options)

    def weights(self, q: Tensor, k: Tensor, bias: BiasTerms, window: int | None) -> Weights:
        return attention_weights(q, k, self.tau, bias.table, slopes=bias.slopes, window=window, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        context_length = self.context_length if self.spec.threshold == "seq_len" else None
        return {
            "threshold": self.spec.threshold,
            "context_length": context_length,
            "renormalise": self.spec.renormalise,
        }


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: BiasTerms,
    window: int | None,
    backend: Backend,
    with_stats: bool,
    *,
    threshold: Threshold = "per_query",
    context_length: int | None = None,
    renormalise: bool = False,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Stats | None]:
    """`lazy_attention` on bias terms, its result always a pair."""
    call = partial(
        lazy_attention,
        *(q, k, v, tau, bias.table),
        slopes=bias.slopes,
        threshold=threshold,
        context_length=context_length,
        renormalise=renormalise,
        key_mask=key_mask,
        window=window,
        backend=backend,
    )
    if with_stats:
        return cast(tuple[Tensor, Stats], call(return_stats=True))
    return cast(Tensor, call()), None
