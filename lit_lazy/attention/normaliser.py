"""Normalisers: how scores become the weights of the values.

A normaliser is a frozen dataclass (its settings) whose `build` returns the module that holds its parameters. The module
needs only `weights`, a function of a block of scores. `flash_lazy.rules` turns it into attention with every bias,
window and mask, decoding, statistics, and memory linear in the length.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from flash_lazy import Backend, Rows, RuleWeights, Stats, Threshold, resolve_backend
from flash_lazy.api import run
from flash_lazy.call import Call, compute_dtype, prepare
from flash_lazy.rules import HIDDEN, compute_rule_weights, run_rule
from lit_lazy.attention.bias import BiasTerms
from lit_lazy.attention.custom_rule_check import probe_attention, probe_weights
from lit_lazy.attention.mixer import Drawn, LayerShape
from lit_lazy.support.checked_fields import MOST_FACTOR, Bounds, Share, require

AttentionBackend = Literal[Backend, "sdpa"]
"""The backends of `flash_lazy`, and PyTorch's own softmax attention."""


class AttentionCall(NamedTuple):
    """A layer's call of its normaliser: causal attention with queries aligned to the end of the keys.

    q `[B, H, Lq, D]`; k, v `[B, Hkv, Lk, D]`; key_mask bool `[B, Lk]`, False hides a key; cu_seqlens int32 `[n + 1]`,
    boundaries of documents that do not see each other, with B = 1 and Lq = Lk.
    evicted: None if n counts the keys that a query sees. Otherwise n and position are those of the full text, in which
    this many keys precede k, and hidden keys count too: the thresholds as they were before any eviction.
    x: the layer's normalised input `[B, Lq, d_model]`, of the queries' tokens, for rules that depend on it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: BiasTerms = BiasTerms()
    window: int | None = None
    key_mask: Tensor | None = None
    renormalise: bool = False
    backend: AttentionBackend = "auto"
    with_stats: bool = False
    cu_seqlens: Tensor | None = None
    evicted: int | None = None
    x: Tensor | None = None

    @property
    def n_seen(self) -> Tensor:
        """n of each query, at least 1: `[B or 1, 1, Lq, 1]`, float32 (float64 for float64 queries)."""
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

    def to_kernel(
        self, tau: Tensor | None = None, threshold: Threshold = "per_query", context_length: int | None = None
    ) -> Call:
        """The arguments as `flash_lazy` takes them; tau is 0 by default."""
        return Call(
            *(self.q, self.k, self.v),
            torch.zeros(self.q.shape[1], device=self.q.device) if tau is None else tau,
            *self.bias,
            cu_seqlens=self.cu_seqlens,
            key_mask=self.key_mask,
            threshold=threshold,
            context_length=context_length,
            renormalise=self.renormalise,
            window=self.window,
        )


class LazyThreshold(NamedTuple):
    """Arguments of `lazy_attention` that give a normaliser's weights; tau None: 0."""

    tau: Tensor | None = None
    threshold: Threshold = "per_query"
    context_length: int | None = None


class Fused(NamedTuple):
    """A faster path to the same output: the name of its backend, and the function that runs it."""

    backend: str
    attend: Callable[[], tuple[Tensor, Stats | None]]


class NormaliserModule(nn.Module, ABC):
    """Parameters of a normaliser. A subclass must implement only `weights`.

    lr_scale: factor on the learning rate of the module's direct parameters.
    maps: score maps per head; q and k are split into this many parts along D.
    can_zero: whether a visible key can get a weight of exactly 0, so that sparsity is defined.
    signed: whether weights can be negative, so that entropy, sparsity and shares are undefined.
    unit_length: whether the layer scales queries and keys of each map to length 1.
    """

    lr_scale: float = 1.0
    maps: int = 1
    can_zero: bool = False
    signed: bool = False
    unit_length: bool = False
    _probed = False

    @abstractmethod
    def weights(self, scores: Tensor, rows: Rows) -> Tensor:
        """Weights `[B, H, R, C]` of a block of rows, before any renormalising; 0 at hidden keys.

        scores: `[B, H, R, C]`, or `[B, H, maps, R, C]` if maps > 1; bias included, float32 (float64 for float64
        queries), finite at hidden keys.
        """

    def queries(self, call: AttentionCall) -> Tensor:
        """The queries `[B, H, Lq, D]` of the scores; `call.n_seen` is the number of keys that each sees."""
        return call.q

    def output(self, out: Tensor) -> Tensor:
        """Transform the weighted values `[B, H, Lq, D]`."""
        return out

    def at_progress(self, progress: float) -> None:
        """Update scheduled parameters. progress: finished share of the training, 0 to 1."""

    def theta(self, rows: Rows) -> Tensor | None:  # noqa: ARG002
        """Threshold `[B or 1, H, R, 1]` if weights are max(softmax - theta, 0), whose sparsity has a null model."""
        return None

    def lazy_threshold(self) -> LazyThreshold | None:
        """The threshold, if the weights are those of `lazy_attention` for the module's own queries and output."""
        return None

    def fused(self, call: AttentionCall) -> Fused | None:  # noqa: ARG002
        """A faster path for a call whose q is already `queries`; None without one."""
        return None

    def forward(self, call: AttentionCall, attend: Callable | None = None) -> tuple[Tensor, Any]:
        """Output `[B, H, Lq, D]`, and `Stats` of `[B, H, Lq]` if requested.

        attend: an exported model's own computation, which needs a call too: before one, hooks load offloaded weights.
        The first call raises a one-line ValueError if the module violates its contract (`probe`).
        """
        if attend is not None:
            return attend(call)
        if not (self._probed or call.q.device.type == "meta" or torch.compiler.is_compiling()):
            width = call.q.shape[1] * call.q.shape[3] if call.x is None else call.x.shape[-1]
            self.probe(call.q.shape[1], call.q.shape[3], width, call.q.device, compute_dtype(call.q))
            self._probed = True
        out, stats = self._attend(call)
        return self.output(out), stats

    def _attend(self, call: AttentionCall) -> tuple[Tensor, Stats | None]:
        """The weighted values by the fastest path."""
        call = call._replace(q=self.queries(call))
        fused = self.fused(call) if call.evicted is None else None
        return self.attend_by_rule(call) if fused is None else fused.attend()

    def compute_weights(self, call: AttentionCall) -> RuleWeights:
        """The weight matrix of a call, for diagnostics: `[B, H, Lq, Lk]` in memory, 0 on keys of other documents."""
        if call.cu_seqlens is None:
            kernel_call = call._replace(q=self.queries(call), v=call.k).to_kernel()
            return compute_rule_weights(self.weights, kernel_call, self.maps)
        documents = [slice(*ends) for ends in pairwise(dict.fromkeys(call.cu_seqlens.tolist()))]
        found = [NormaliserModule.compute_weights(self, _select_document(call, rows)) for rows in documents]

        def join(parts: Sequence[Tensor], hidden: float) -> Tensor:
            size = call.q.shape[2]
            whole = parts[0].new_full((*parts[0].shape[:-2], size, size), hidden)
            for rows, part in zip(documents, parts, strict=True):
                whole[..., rows, rows] = part
            return whole

        n, position = (torch.cat([getattr(part.rows, name) for part in found], 2) for name in ("n", "position"))
        rows = Rows(join([part.rows.visible for part in found], False), n, position)
        scores, w = join([part.scores for part in found], HIDDEN), join([part.w for part in found], 0)
        return RuleWeights(scores, w, torch.cat([part.mass for part in found], 2), rows)

    def compute_key_weight(self, call: AttentionCall, key: int) -> Tensor:
        """Weight of the key at 1-based position `key` for each query: `[B, H, Lq]`, in memory linear in the length.

        Computed as the output of attention to values that are 1 at that key and 0 elsewhere.
        """
        v = torch.zeros_like(call.v)
        v[:, :, key - 1] = 1
        return self._attend(call._replace(v=v, with_stats=False))[0][..., 0]

    def backend_name(self, call: AttentionCall) -> str:
        """Name, as in the tables, of the implementation that runs a call.

        Raises ValueError if the requested backend does not support the call.
        """
        fused = self.fused(call)
        return fused.backend if fused is not None else self._rule_backend(call)

    def _rule_backend(self, call: AttentionCall) -> str:
        if call.backend in ("cpu", "triton", "sdpa"):
            raise ValueError(f"backend is {call.backend!r}, for which this rule has no kernel; choose 'auto'")
        return "reference" if call.backend == "reference" else "rules"

    def attend_by_rule(self, call: AttentionCall) -> tuple[Tensor, Stats | None]:
        """Weighted values of a call whose q is already `queries`, computed from `weights` only."""
        rule = self.weights
        if call.evicted is not None:
            hidden = 0 if call.key_mask is None else (~call.key_mask).sum(1)
            rule = partial(self._weights_at_text_positions, call.evicted + hidden, call.window)
        parameters = [p for p in self.parameters() if p.requires_grad]
        backend = "reference" if self._rule_backend(call) == "reference" else "chunked"
        return run_rule(rule, call.to_kernel(), call.with_stats, parameters, self.maps, backend)

    def _weights_at_text_positions(
        self, before: int | Tensor, window: int | None, scores: Tensor, rows: Rows
    ) -> Tensor:
        """`weights` with n and position of the full text, which begins with `before` more keys, a number or `[B]`."""
        if isinstance(before, Tensor):
            before = before[rows.sequences].view(-1, *[1] * (rows.position.dim() - 1))
        position = rows.position + before
        n = position if window is None else position.clamp(max=window)
        return self.weights(scores, replace(rows, n=n.to(rows.n.dtype), position=position))

    def probe(
        self, heads: int, head_dim: int, d_model: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """Raises a one-line ValueError with the fix if the module violates its contract (`custom_rule_check`)."""
        name = type(self).__name__
        divides = isinstance(self.maps, int) and self.maps >= 1 and head_dim % self.maps == 0
        fix = f"must be a whole number that divides the head dimension {head_dim}"
        require(divides, f"{name}.maps", self.maps, fix)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            x = pad(q.transpose(1, 2).flatten(2), (0, d_model - heads * head_dim))
            call = AttentionCall(q, k, v, x=x)
            return self.output(self.attend_by_rule(call._replace(q=self.queries(call)))[0])

        trained = {parameter: p for parameter, p in self.named_parameters() if p.requires_grad}
        # The first call may run under autocast, which rules run without, in inference mode, which has no gradients, or
        # in a checkpointed block, which would recompute the block for these gradients.
        plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        training = self.training
        self.eval()  # so that a rule that counts what it trains on does not count these
        try:
            with torch.inference_mode(False), torch.autocast(device.type, enabled=False), plain:
                probe_weights(self.weights, heads, self.maps, self.can_zero, self.signed, device, dtype)
                probe_attention(name, trained, attend, heads, head_dim, device, dtype)
        finally:
            self.train(training)


def _select_document(call: AttentionCall, rows: slice) -> AttentionCall:
    q, k, v = (x[:, :, rows] for x in (call.q, call.k, call.v))
    mask, x = (None if whole is None else whole[:, rows] for whole in (call.key_mask, call.x))
    return call._replace(q=q, k=k, v=v, key_mask=mask, x=x, cu_seqlens=None)


def find_lazy_threshold(normaliser: NormaliserModule) -> LazyThreshold | None:
    """The threshold that a module's class declares, not one that it inherits: a subclass may compute other weights."""
    return normaliser.lazy_threshold() if "lazy_threshold" in vars(type(normaliser)) else None


@dataclass(frozen=True, kw_only=True)
class Normaliser(Drawn, ABC):
    """Settings of a normaliser."""

    renormalise: bool = False
    """Divide the weights of each row by their sum (the paper does not)."""

    @abstractmethod
    def build(self, shape: LayerShape) -> NormaliserModule: ...


class FixedRule(Normaliser, ABC):
    """Settings of a rule without parameters and positions, which compute its weights themselves."""

    can_zero: ClassVar[bool] = True

    @abstractmethod
    def compute(self, scores: Tensor, rows: Rows, shape: LayerShape) -> Tensor:
        """`NormaliserModule.weights` in a layer of this shape."""

    def build(self, shape: LayerShape) -> NormaliserModule:
        return _FixedRule(self, shape)


class _FixedRule(NormaliserModule):
    def __init__(self, spec: FixedRule, shape: LayerShape) -> None:
        super().__init__()
        self.spec, self.shape, self.can_zero = spec, shape, spec.can_zero

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:
        return self.spec.compute(scores, rows, self.shape)


@dataclass(frozen=True)
class Softmax(Normaliser):
    """Softmax attention by `lazy_attention` at tau = 0, or PyTorch's SDPA without bias and window if faster."""

    colour = "#D55E00"

    def build(self, shape: LayerShape) -> NormaliserModule:  # noqa: ARG002
        return SoftmaxModule()


class SoftmaxModule(NormaliserModule):
    """Softmax of the scores."""

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:  # noqa: ARG002
        return scores.softmax(-1)

    def lazy_threshold(self) -> LazyThreshold | None:
        return LazyThreshold()

    def fused(self, call: AttentionCall) -> Fused | None:
        return fused_softmax(call)


def fused_softmax(call: AttentionCall) -> Fused:
    """Softmax attention by the fastest path; renormalising changes nothing."""
    backend = find_softmax_backend(call)
    return Fused(backend, partial(attend_softmax, call, backend))


def find_softmax_backend(call: AttentionCall) -> str:
    """Name of the implementation that `attend_softmax` runs for a call.

    Raises ValueError if the backend is "sdpa", which takes plain calls only; "auto" computes their statistics.
    """
    plain = call.window is None and call.key_mask is None and call.cu_seqlens is None and call.bias == BiasTerms()
    if call.backend == "sdpa" and not plain:
        raise ValueError("backend is 'sdpa', which takes no bias, window, mask and documents; choose 'auto'")
    backend = resolve_backend("auto" if call.backend == "sdpa" else call.backend, call.q, call.key_mask)
    if not plain or call.with_stats:
        return backend
    # The compiled backend takes half of SDPA's time on a CPU; on a GPU SDPA has the better kernels.
    return "sdpa" if call.backend == "sdpa" or (call.backend == "auto" and backend != "cpu") else backend


def attend_softmax(call: AttentionCall, backend: str) -> tuple[Tensor, Stats | None]:
    """Softmax attention on the implementation that `find_softmax_backend` returned."""
    if backend == "sdpa":
        return sdpa(call.q, call.k, call.v), None
    return run(prepare(call._replace(renormalise=False).to_kernel()), backend, call.with_stats)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's causal softmax attention with queries aligned to the end of the keys."""
    gqa = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    if q.shape[2] == 1:
        return scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
    from torch.nn.attention.bias import causal_lower_right  # it imports torch.compile, which takes a second

    return scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]), enable_gqa=gqa)


@dataclass(frozen=True)
class Elastic(Normaliser):
    """Elastic-Softmax (arXiv 2601.00919): `max(p - theta, 0)`, p the softmax weight, theta from a learned tau per head.

    docs/method.md gives the formula of each threshold.
    """

    colour = "#0072B2"
    first_values = ("tau_init", "tau_lr_scale", "tau_ramp", "tau_final", "learn_after_ramp")

    tau_init: float = 1.0
    """Initial offset parameter. Positive values are subtracted: the paper's sign, and its initial value."""
    threshold: Threshold = "per_query"
    """theta: tau / (keys the query sees) | tau / (context length) | tau[position] / (keys seen) | tau."""
    learn_tau: bool = True
    """Train tau; otherwise it keeps its initial value."""
    tau_lr_scale: Annotated[float, Bounds(gt=0, le=MOST_FACTOR)] = 1.0
    """Factor on the learning rate of tau."""
    tau_ramp: Share = 0.0
    """Share of the training over which tau moves linearly from tau_init to tau_final. It is not trained, nor afterwards
    unless learn_after_ramp."""
    tau_final: float = 1.0
    """Value of tau after tau_ramp."""
    learn_after_ramp: bool = False
    """Train tau after tau_ramp, from its value at the ramp's last step: tau_final if the ramp is a whole number of
    steps."""

    def __post_init__(self) -> None:
        ramps = self.tau_ramp > 0
        why = "no weight exceeds 1, so output and every gradient would stay zero"
        for name in ("tau_init", "tau_final") if ramps else ("tau_init",):
            value, fix = getattr(self, name), f"must be below 1 with Elastic.threshold='constant', such as 0.01: {why}"
            require(self.threshold != "constant" or value < 1, f"Elastic.{name}", value, fix)
        moves = self.tau_init != self.tau_final or self.learn_after_ramp
        other = f"needs a tau_init other than tau_final={self.tau_final}, or learn_after_ramp"
        require(not ramps or moves, "Elastic.tau_ramp", self.tau_ramp, f"{other}; learn_tau=False freezes tau")
        trained = self.learn_tau and (not ramps or self.learn_after_ramp)
        for name, used, need in (
            ("tau_final", ramps, "a ramp: Elastic.tau_ramp above 0"),
            ("learn_after_ramp", ramps, "a ramp: Elastic.tau_ramp above 0"),
            ("learn_after_ramp", self.learn_tau, "Elastic.learn_tau=True"),
            ("tau_lr_scale", trained, "a tau that is trained"),
        ):
            value = getattr(self, name)
            require(used or value == getattr(Elastic, name), f"Elastic.{name}", value, f"needs {need}; leave it out")

    def build(self, shape: LayerShape) -> NormaliserModule:
        return _Elastic(self, shape.n_heads, shape.context_length)


class _Elastic(NormaliserModule):
    can_zero = True

    def __init__(self, spec: Elastic, n_heads: int, context_length: int) -> None:
        super().__init__()
        self.spec, self.threshold, self.lr_scale = spec, spec.threshold, spec.tau_lr_scale
        self.context_length = context_length if spec.threshold == "seq_len" else None
        shape = (n_heads, context_length) if spec.threshold == "per_token" else (n_heads,)
        trained = spec.learn_tau and (spec.tau_ramp == 0 or spec.learn_after_ramp)
        self.tau = nn.Parameter(torch.full(shape, spec.tau_init, dtype=torch.float32), requires_grad=trained)

    @torch.no_grad()
    def at_progress(self, progress: float) -> None:
        if self.spec.tau_ramp > 0 and not (self.spec.learn_after_ramp and progress > self.spec.tau_ramp):
            done = min(1.0, progress / self.spec.tau_ramp)
            self.tau.fill_((1 - done) * self.spec.tau_init + done * self.spec.tau_final)

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:
        # With a negative threshold the ReLU would give hidden keys weight.
        return torch.relu(scores.softmax(-1) - self.theta(rows)).masked_fill(~rows.visible, 0)

    def theta(self, rows: Rows) -> Tensor:
        tau = self.tau.to(rows.n.dtype)
        if self.threshold == "per_token":
            entry = (rows.position[:, 0, :, 0] - 1).clamp(max=tau.shape[1] - 1)
            return tau[:, entry].movedim(0, 1)[..., None] / rows.n
        divisor = {"per_query": rows.n, "seq_len": self.context_length or 1, "constant": 1}[self.threshold]
        return (tau[:, None, None] / divisor).expand(len(rows.n), -1, rows.n.shape[2], 1)

    def lazy_threshold(self) -> LazyThreshold | None:
        return LazyThreshold(self.tau, self.threshold, self.context_length)

    def fused(self, call: AttentionCall) -> Fused | None:
        if call.backend == "sdpa":
            raise ValueError("backend is 'sdpa', which computes softmax attention alone; choose 'auto'")
        backend = resolve_backend(call.backend, call.q, call.key_mask)
        kernel_call = call.to_kernel(self.tau, self.threshold, self.context_length)
        return Fused(backend, lambda: run(prepare(kernel_call), backend, call.with_stats))
