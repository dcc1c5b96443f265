"""Normalisers: how scores become the weights that values are multiplied with.

A normaliser is a frozen dataclass (its settings) whose `build` makes the module that holds its parameters. All that the
module must have is `weights`: one function of a block of scores. `flash_lazy.rules` makes attention of it, with every
bias, window and mask, decoding, statistics, and memory linear in the length.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from flash_lazy import Backend, Rows, RuleWeights, Stats, lazy_attention, resolve_backend, rule_attention, rule_weights
from flash_lazy.call import compute_dtype
from lit_lazy.attention.bias import BiasTerms
from lit_lazy.attention.rule_checks import probe_attention, probe_weights

Threshold = Literal["per_query", "seq_len", "per_token", "constant"]


@dataclass(frozen=True)
class LayerShape:
    """The layer that a mixer, a normaliser or a gate is built for."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_model: int
    context_length: int
    layer: int = 0
    """From 0, of n_layers."""
    n_layers: int = 1


class AttentionCall(NamedTuple):
    """What a layer asks of its normaliser: causal attention, queries aligned to the end of the keys.

    q `[B, H, Lq, D]`; k, v `[B, Hkv, Lk, D]`; key_mask bool `[B, Lk]`, False hides a key; cu_seqlens int32 `[n + 1]`,
    the boundaries of documents that do not see each other, where B = 1 and Lq = Lk.
    evicted: None where n counts the keys that a query sees. Otherwise n and position are those of the text, in which so
    many keys came before k, and hidden ones count too: what a threshold was before anything was forgotten.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: BiasTerms = BiasTerms()
    window: int | None = None
    key_mask: Tensor | None = None
    renormalise: bool = False
    backend: Backend = "auto"
    with_stats: bool = False
    cu_seqlens: Tensor | None = None
    evicted: int | None = None

    @property
    def n_seen(self) -> Tensor:
        """The n of each query, at least 1: `[B or 1, 1, Lq, 1]`, float32 (float64 for float64 queries)."""
        end = torch.arange(self.k.shape[2] - self.q.shape[2], self.k.shape[2], device=self.q.device) + 1
        n = end
        if self.cu_seqlens is not None:
            starts = self.cu_seqlens.long()
            n = end - starts[torch.searchsorted(starts, end) - 1]
        n = n + (self.evicted or 0)
        n = n if self.window is None else n.clamp(max=self.window)
        if self.key_mask is not None and self.evicted is None:
            counts = pad(self.key_mask.cumsum(-1), (1, 0))
            n = counts[:, end] - counts[:, end - n]
        return n.clamp(min=1).view(-1, 1, len(end), 1).to(compute_dtype(self.q))


class Fused(NamedTuple):
    """A faster path to the same output: the name of its backend, and what runs it."""

    backend: str
    attend: Callable[[], tuple[Tensor, Stats | None]]


class NormaliserModule(nn.Module, ABC):
    """Parameters of a normaliser. `weights` is all that a new one has to have.

    lr_scale: factor on the learning rate of the module's own parameters.
    maps: score maps per head; q and k are cut into as many parts along D.
    can_zero: whether a visible key can get a weight of exactly 0, so that there is a sparsity.
    signed: whether weights can be negative: entropy, sparsity and shares have no meaning then.
    relative: whether `rows.position` is not used, so that left padding changes nothing and prompts of unequal lengths
    are decoded together.
    """

    lr_scale: float = 1.0
    maps: int = 1
    can_zero: bool = False
    signed: bool = False
    relative: bool = False
    _probed = False

    @abstractmethod
    def weights(self, scores: Tensor, rows: Rows) -> Tensor:
        """Weights `[B, H, R, C]` of a block of rows, before any renormalising; 0 at hidden keys.

        scores: `[B, H, R, C]`, or `[B, H, maps, R, C]` where maps > 1; bias included, float32 (float64 for float64
        queries), finite where a key is hidden.
        """

    def queries(self, call: AttentionCall) -> Tensor:
        """The queries `[B, H, Lq, D]` that scores are made of; `call.n_seen` has the keys that each sees."""
        return call.q

    def output(self, out: Tensor) -> Tensor:
        """What becomes of the weighted values `[B, H, Lq, D]`."""
        return out

    def at_progress(self, progress: float) -> None:
        """Set what follows a schedule. progress: the finished part of the training, 0 to 1."""

    def theta(self, rows: Rows) -> Tensor | None:  # noqa: ARG002
        """`[B or 1, H, R, 1]` where weights are max(softmax - theta, 0): then there is a null model of the sparsity."""
        return None

    def fused(self, call: AttentionCall) -> Fused | None:  # noqa: ARG002
        """A faster path for a call whose queries are ready; None where there is none."""
        return None

    def forward(self, call: AttentionCall) -> tuple[Tensor, Stats | None]:
        """Output `[B, H, Lq, D]`, and `Stats` of `[B, H, Lq]` where asked.

        Raises ValueError, in one line, at the first call where `weights` breaks what it promises.
        """
        if not (self._probed or call.q.device.type == "meta" or torch.compiler.is_compiling()):
            self.probe(call.q.shape[1], call.q.shape[3], call.q.device, compute_dtype(call.q))
            self._probed = True
        out, stats = self._attend(call)
        return self.output(out), stats

    def _attend(self, call: AttentionCall) -> tuple[Tensor, Stats | None]:
        """The weighted values by the fastest path."""
        call = call._replace(q=self.queries(call))
        fused = self.fused(call) if call.evicted is None else None
        return self.attend_by_rule(call) if fused is None else fused.attend()

    def compute_weights(self, call: AttentionCall) -> RuleWeights:
        """The weights of a call, for diagnostics: `[B, H, Lq, Lk]` in memory."""
        table = call.bias.table
        return rule_weights(self.weights, self.queries(call), call.k, table, maps=self.maps, **_settings(call))

    def compute_key_weight(self, call: AttentionCall, key: int) -> Tensor:
        """What each query gives the key at position `key`, from 1: `[B, H, Lq]`, in memory linear in the length.

        It is what attention gives where the value of that key is 1 and all others are 0.
        """
        v = torch.zeros_like(call.v)
        v[:, :, key - 1] = 1
        return self._attend(call._replace(v=v, with_stats=False))[0][..., 0]

    def backend_name(self, call: AttentionCall) -> str:
        """The implementation that runs a call, as the table names it.

        Raises ValueError where the backend that is asked for cannot.
        """
        fused = self.fused(call)
        return fused.backend if fused is not None else self._rule_backend(call)

    def _rule_backend(self, call: AttentionCall) -> str:
        if call.backend == "triton":
            raise ValueError(f"backend is 'triton', for which {type(self).__name__} has no kernel; choose 'auto'")
        return "reference" if call.backend == "reference" else "rules"

    def attend_by_rule(self, call: AttentionCall) -> tuple[Tensor, Stats | None]:
        """The weighted values of a call whose queries are ready, by `weights` alone."""
        rule = (
            self.weights
            if call.evicted is None
            else partial(self._weights_at_text_positions, call.evicted, call.window)
        )
        attend = partial(
            rule_attention,
            *(rule, call.q, call.k, call.v, call.bias.table),
            parameters=[p for p in self.parameters() if p.requires_grad],
            maps=self.maps,
            backend="reference" if self._rule_backend(call) == "reference" else "chunked",
            **_options(call),
        )
        return _attend_as_pair(attend, call.with_stats)

    def _weights_at_text_positions(self, evicted: int, window: int | None, scores: Tensor, rows: Rows) -> Tensor:
        """`weights` of rows whose n and position are those of the text."""
        position = rows.position + evicted
        n = position if window is None else position.clamp(max=window)
        return self.weights(scores, Rows(rows.visible, n.to(rows.n.dtype), position))

    def probe(self, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Raise ValueError, in one line with the fix, where the module breaks a promise (`attention/probe.py`)."""
        name = type(self).__name__
        if not isinstance(self.maps, int) or self.maps < 1 or head_dim % self.maps:
            raise ValueError(
                f"{name}.maps={self.maps!r}: must be a whole number that divides the head dimension {head_dim}"
            )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            call = AttentionCall(q, k, v)
            return self.output(self.attend_by_rule(call._replace(q=self.queries(call)))[0])

        trained = {parameter: p for parameter, p in self.named_parameters() if p.requires_grad}
        # Whatever the first call is made under: a rule runs without autocast, and inference mode makes no gradients.
        with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
            probe_weights(self.weights, heads, self.maps, self.can_zero, self.signed, device, dtype)
            probe_attention(name, trained, attend, heads, head_dim, device, dtype)


def _attend_as_pair(attend: Callable[..., Any], with_stats: bool) -> tuple[Tensor, Stats | None]:
    """What `lazy_attention` or `rule_attention` returns, its result always a pair."""
    return attend(return_stats=True) if with_stats else (attend(), None)


def _options(call: AttentionCall) -> dict[str, Any]:
    return _settings(call) | {"cu_seqlens": call.cu_seqlens}


def _settings(call: AttentionCall) -> dict[str, Any]:
    return {
        "slopes": call.bias.slopes,
        "renormalise": call.renormalise,
        "key_mask": call.key_mask,
        "window": call.window,
    }


@dataclass(frozen=True, kw_only=True)
class Normaliser(ABC):
    """Settings of a normaliser."""

    renormalise: bool = False
    """Divide the weights of each row by their sum (the paper does not)."""

    @abstractmethod
    def build(self, shape: LayerShape) -> NormaliserModule: ...


@dataclass(frozen=True)
class Softmax(Normaliser):
    """Softmax attention. Without bias and window it runs PyTorch's SDPA, otherwise `lazy_attention` at tau = 0."""

    def build(self, shape: LayerShape) -> NormaliserModule:  # noqa: ARG002
        return _Softmax()


class _Softmax(NormaliserModule):
    relative = True

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:  # noqa: ARG002
        return scores.softmax(-1)

    def fused(self, call: AttentionCall) -> Fused | None:
        return fused_softmax(call)


def fused_softmax(call: AttentionCall) -> Fused:
    """Softmax attention by the fastest path; renormalising changes nothing."""
    whole = call.window is None and call.key_mask is None and call.cu_seqlens is None
    bare = call.backend == "auto" and call.bias == BiasTerms() and whole
    if bare and not call.with_stats:
        return Fused("sdpa", lambda: (sdpa(call.q, call.k, call.v), None))
    tau = torch.zeros(call.q.shape[1], device=call.q.device)
    return fused_lazy(call._replace(renormalise=False), tau)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's causal softmax attention with queries aligned to the end of the keys."""
    gqa = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    mask = None if q.shape[2] == 1 else causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


def fused_lazy(
    call: AttentionCall, tau: Tensor, threshold: Threshold = "per_query", context_length: int | None = None
) -> Fused:
    """`lazy_attention` on a call."""
    attend = partial(
        lazy_attention,
        *(call.q, call.k, call.v, tau, call.bias.table),
        threshold=threshold,
        context_length=context_length,
        backend=call.backend,
        **_options(call),
    )
    return Fused(
        resolve_backend(call.backend, call.q, call.key_mask), partial(_attend_as_pair, attend, call.with_stats)
    )


@dataclass(frozen=True)
class Elastic(Normaliser):
    """Elastic-Softmax (arXiv 2601.00919): `max(p - theta, 0)`, p the softmax weight, theta from a learned tau per head.

    docs/method.md gives the formula of each threshold.
    """

    tau_init: float = 1.0
    """Initial offset parameter. Positive values are subtracted: the paper's sign, and its initial value."""
    threshold: Threshold = "per_query"
    """theta: tau / (keys the query sees) | tau / (context length) | tau[position] / (keys seen) | tau."""
    learn_tau: bool = True
    """Train tau; otherwise it keeps its initial value."""
    tau_lr_scale: float = 1.0
    """Factor on the learning rate of tau."""
    tau_ramp: float = 0.0
    """Part of the training over which tau goes linearly from tau_init to tau_final, in place of being trained."""
    tau_final: float = 1.0
    """Where tau stays after tau_ramp."""

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
        self._check_ramp()

    def _check_ramp(self) -> None:
        """Raise ValueError where tau cannot be ramped as asked."""
        if not 0 <= self.tau_ramp <= 1:
            raise ValueError(f"Elastic.tau_ramp={self.tau_ramp}: must be a part of the training, 0 to 1")
        highest = 1.0 if self.threshold == "constant" and self.tau_ramp > 0 else math.inf
        if not (math.isfinite(self.tau_final) and self.tau_final < highest):
            below = "finite" if highest == math.inf else "below 1 with Elastic.threshold='constant'"
            raise ValueError(f"Elastic.tau_final={self.tau_final}: must be {below}")

    def build(self, shape: LayerShape) -> NormaliserModule:
        return _Elastic(self, shape.n_heads, shape.context_length)


class _Elastic(NormaliserModule):
    can_zero = True

    def __init__(self, spec: Elastic, n_heads: int, context_length: int) -> None:
        super().__init__()
        self.spec, self.threshold, self.lr_scale = spec, spec.threshold, spec.tau_lr_scale
        self.relative = spec.threshold != "per_token"
        self.context_length = context_length if spec.threshold == "seq_len" else None
        shape = (n_heads, context_length) if spec.threshold == "per_token" else (n_heads,)
        trained = spec.learn_tau and spec.tau_ramp == 0
        self.tau = nn.Parameter(torch.full(shape, spec.tau_init, dtype=torch.float32), requires_grad=trained)

    @torch.no_grad()
    def at_progress(self, progress: float) -> None:
        if self.spec.tau_ramp > 0:
            done = min(1.0, progress / self.spec.tau_ramp)
            self.tau.fill_((1 - done) * self.spec.tau_init + done * self.spec.tau_final)

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:
        # Below a negative threshold the ReLU alone would give hidden keys weight.
        return torch.relu(scores.softmax(-1) - self.theta(rows)).masked_fill(~rows.visible, 0)

    def theta(self, rows: Rows) -> Tensor:
        tau = self.tau.to(rows.n.dtype)
        if self.threshold == "per_token":
            entry = (rows.position[:, 0, :, 0] - 1).clamp(max=tau.shape[1] - 1)
            return tau[:, entry].movedim(0, 1)[..., None] / rows.n
        divisor = {"per_query": rows.n, "seq_len": self.context_length or 1, "constant": 1}[self.threshold]
        return (tau[:, None, None] / divisor).expand(len(rows.n), -1, rows.n.shape[2], 1)

    def fused(self, call: AttentionCall) -> Fused | None:
        return fused_lazy(call, self.tau, self.threshold, self.context_length)
