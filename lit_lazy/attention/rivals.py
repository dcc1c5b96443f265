"""Rival normalisers, each with its source; formulas in docs/method.md."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from flash_lazy import Rows, RuleWeights, Stats
from lit_lazy.attention.bias import BiasTerms
from lit_lazy.attention.gate import HEAD_NORM_EPS
from lit_lazy.attention.mixer import GeneratorOf, LayerShape, SelfInitialised
from lit_lazy.attention.normaliser import (
    AttentionCall,
    FixedRule,
    Fused,
    Normaliser,
    NormaliserModule,
    SoftmaxModule,
    attend_softmax,
    find_softmax_backend,
    fused_softmax,
)
from lit_lazy.support.checked_fields import BelowOne, Bounds, NonNegativeFloat, require

__all__ = [
    "ASEntmax",
    "AffineScaled",
    "ClippedSoftmax",
    "Differential",
    "Entmax15",
    "OffByOne",
    "Relu",
    "SSMax",
    "Sigmoid",
    "SinkLogit",
    "Softpick",
    "Sparsemax",
    "Thresholded",
    "ThresholdedDifferential",
    "TopK",
]


@dataclass(frozen=True)
class OffByOne(Normaliser):
    """Softmax with 1 added to the sum, `e^s / (1 + sum e^s)`, so that a row can attend to nothing (Miller 2023)."""

    colour, spoken = "#009E73", "off by one"

    def build(self, shape: LayerShape) -> NormaliserModule:
        return _Sink(torch.zeros(shape.n_heads), learned=False)


@dataclass(frozen=True)
class SinkLogit(Normaliser):
    """Softmax with an additional learned logit per head that belongs to no key (gpt-oss, arXiv 2508.10925)."""

    colour, spoken = "#CC79A7", "sink logit"

    init: float = 0.0
    """Initial logit: 0 is OffByOne, minus infinity is Softmax."""

    def build(self, shape: LayerShape) -> NormaliserModule:
        return _Sink(torch.full((shape.n_heads,), self.init), learned=True)


class _Sink(NormaliserModule):
    """Softmax of the scores and one more logit, without the latter's weight: softmax times sigmoid(lse - sink)."""

    def __init__(self, sink: Tensor, learned: bool) -> None:
        super().__init__()
        self.sink = nn.Parameter(sink, requires_grad=learned)

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:  # noqa: ARG002
        sink = self.sink.to(scores.dtype)[:, None, None]
        return scores.softmax(-1) * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sink)

    def fused(self, call: AttentionCall) -> Fused | None:
        if call.renormalise:
            return None
        softmax = fused_softmax(call._replace(with_stats=True))

        def attend() -> tuple[Tensor, Stats | None]:
            out, stats = softmax.attend()
            assert stats is not None
            share = torch.sigmoid(stats.lse - self.sink[:, None])
            out = (out * share[..., None]).to(out.dtype)
            if not call.with_stats:
                return out, None
            mass, first_weight = (x * share.detach() for x in (stats.mass, stats.first_weight))
            return out, stats._replace(lse=stats.lse.detach(), mass=mass, first_weight=first_weight)

        return Fused(softmax.backend, attend)


@dataclass(frozen=True)
class ClippedSoftmax(FixedRule):
    """`clip((1 + g) p - g, 0, 1)` of the softmax weight p (Bondarenko et al., arXiv 2306.12929)."""

    colour, spoken = "#E69F00", "clipped softmax"

    alpha: NonNegativeFloat = 3.0
    """g is alpha divided by a length; the authors recommend 2 to 4. From 1 on nearly equal scores all become 0, so a
    layer with small initial scores starts without output and gradient."""
    length: Literal["keys", "context"] = "keys"
    """g = alpha / (keys the query sees), or, as published, alpha / (training context length)."""

    def compute(self, scores: Tensor, rows: Rows, shape: LayerShape) -> Tensor:
        g = self.alpha / (rows.n if self.length == "keys" else shape.context_length)
        return ((1 + g) * scores.softmax(-1) - g).clamp(0, 1)


@dataclass(frozen=True)
class Softpick(FixedRule):
    """`relu(e^s - 1) / sum |e^s - 1|` (Zuhri et al., arXiv 2504.20966): scores of 0 or less get no weight."""

    colour = "#56B4E9"
    EPS: ClassVar[float] = 1e-8

    def compute(self, scores: Tensor, rows: Rows, shape: LayerShape) -> Tensor:  # noqa: ARG002
        # Divided by the exponential of the row's maximum, so that nothing overflows.
        top = scores.amax(-1, keepdim=True).clamp(min=0)
        e = ((scores - top).exp() - (-top).exp()).masked_fill(~rows.visible, 0)
        return e.relu() / (e.abs().sum(-1, keepdim=True) + self.EPS)


@dataclass(frozen=True)
class Sigmoid(FixedRule):
    """`sigmoid(s - ln n)` for n visible keys (Ramapuram et al., arXiv 2409.04431): keys do not compete."""

    colour = "#882255"
    can_zero = False

    def compute(self, scores: Tensor, rows: Rows, shape: LayerShape) -> Tensor:  # noqa: ARG002
        return torch.sigmoid(scores - rows.n.log())


@dataclass(frozen=True)
class Relu(FixedRule):
    """`relu(s) / n` for n visible keys (Wortsman et al., arXiv 2309.08586; division by n: Guo, 2410.13835)."""

    colour, spoken = "#117733", "ReLU/n"

    def compute(self, scores: Tensor, rows: Rows, shape: LayerShape) -> Tensor:  # noqa: ARG002
        return scores.relu() / rows.n


@dataclass(frozen=True)
class Thresholded(Normaliser):
    """`max(s - t, 0)^2` of cosines s, `t = beta sqrt(2 ln(n + 1) / d)` for n visible keys (TRA, arXiv 2601.12145).

    Queries and keys have length 1, and d is their width: the cosine of two random directions has the variance 1 / d, so
    t follows the largest of n such cosines. Weights are not normalised.
    """

    colour = "#DDCC77"

    beta: NonNegativeFloat = 1.0
    """Factor on the threshold; fixed."""

    def build(self, shape: LayerShape) -> NormaliserModule:
        return _Thresholded(self, shape)


class _Thresholded(NormaliserModule):
    can_zero = unit_length = True

    def __init__(self, spec: Thresholded, shape: LayerShape) -> None:
        super().__init__()
        self.beta, self.width = spec.beta, shape.head_dim // self.maps
        none = f"no cosine exceeds the threshold of {shape.context_length} keys for queries of width {self.width}"
        below = self.compute_threshold(torch.tensor(float(shape.context_length), device="cpu")) < 1
        fix = f"{none}; choose a smaller beta, wider heads or a shorter context"
        require(bool(below), f"{type(spec).__name__}.beta", spec.beta, fix)

    def compute_threshold(self, n: Tensor) -> Tensor:
        """t of rows that see n keys."""
        return self.beta * (2 / self.width * (n + 1).log()).sqrt()

    def queries(self, call: AttentionCall) -> Tensor:
        return call.q * self.width**0.5  # undoes the scale of the scores

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:
        return (scores - self.compute_threshold(rows.n)).relu().square()


@dataclass(frozen=True)
class ThresholdedDifferential(Thresholded):
    """Difference of two `Thresholded` maps, `a1 - lambda a2`, then a norm per head (TDA, arXiv 2601.12145).

    Each map uses half of the head dimension. lambda, learned per layer, lies between 0 and 1 and starts at 1/2.
    """

    colour, spoken = "#EE3377", "thresholded differential"

    def build(self, shape: LayerShape) -> NormaliserModule:
        _require_even_width(self, shape)
        return _ThresholdedDifferential(self, shape)


class _ThresholdedDifferential(_Thresholded):
    maps = 2
    signed = True

    def __init__(self, spec: Thresholded, shape: LayerShape) -> None:
        super().__init__(spec, shape)
        self.logit = nn.Parameter(torch.zeros(1))
        self.norm = nn.RMSNorm(shape.head_dim, eps=HEAD_NORM_EPS)

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:
        first, second = super().weights(scores, rows).unbind(2)
        return first - self.logit.to(scores.dtype).sigmoid() * second

    def output(self, out: Tensor) -> Tensor:
        return self.norm(out.to(self.norm.weight.dtype)).to(out.dtype)


@dataclass(frozen=True)
class Entmax15(FixedRule):
    """1.5-entmax (Peters et al., arXiv 1905.05702): sparse weights that sum to 1."""

    colour, spoken = "#B07AF5", "1.5-entmax"

    def compute(self, scores: Tensor, rows: Rows, shape: LayerShape) -> Tensor:  # noqa: ARG002
        return entmax(scores, power=2)


@dataclass(frozen=True)
class Sparsemax(FixedRule):
    """Sparsemax (Martins and Astudillo, arXiv 1602.02068): projection onto the simplex; weights sum to 1."""

    colour = "#332288"

    def compute(self, scores: Tensor, rows: Rows, shape: LayerShape) -> Tensor:  # noqa: ARG002
        return entmax(scores, power=1)


NEWTON_STEPS = 100
"""Limit of a row's steps to its threshold; scores as of a trained model take 5 to 10."""


def entmax(scores: Tensor, power: Literal[1, 2]) -> Tensor:
    """Weights `max(s / power - t, 0)^power`, power = 1 / (alpha - 1); their sum of 1 determines each row's t.

    Newton's method from below finds t without sorting: the sum is convex in t, so that every step stays below. A row
    with a NaN has NaN.
    """
    x = (scores - scores.detach().amax(-1, keepdim=True)) / power
    with torch.no_grad():
        t = torch.full_like(x[..., :1], -1.0)
        for _ in range(NEWTON_STEPS):
            step = _newton_step(x, t, power)
            moves = step > 2 * torch.finfo(x.dtype).eps
            if not bool(moves.any()):
                break
            t = torch.where(moves, t + step, t)  # a row's steps must not depend on other rows
    # One more step carries the derivatives of t by the scores, those of an implicit function.
    return torch.relu(x - t - _newton_step(x, t, power)) ** power


def _newton_step(x: Tensor, t: Tensor, power: Literal[1, 2]) -> Tensor:
    rest = torch.relu(x - t)
    if power == 1:
        return (rest.sum(-1, keepdim=True) - 1) / rest.sign().sum(-1, keepdim=True)
    return (rest.square().sum(-1, keepdim=True) - 1) / (2 * rest.sum(-1, keepdim=True))


@dataclass(frozen=True)
class ASEntmax(Normaliser):
    """1.5-entmax whose scores without bias are times `1 + beta (ln(n + 1))^gamma` (Vasylenko et al., arXiv 2506.16640).

    beta = softplus(x w) and gamma = 2 tanh(x u), x the layer's normalised input of the query, w and u learned per head.
    Both vectors start at 0: beta at ln 2, gamma at 0.
    """

    colour = "#C0A0D0"

    def build(self, shape: LayerShape) -> NormaliserModule:
        return _ASEntmax(shape)


class _ASEntmax(NormaliserModule):
    can_zero = True

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.beta, self.gamma = (nn.Parameter(torch.zeros(shape.n_heads, shape.d_model)) for _ in range(2))

    def queries(self, call: AttentionCall) -> Tensor:
        beta, gamma = softplus(_read_input(call, self.beta)), 2 * torch.tanh(_read_input(call, self.gamma))
        return (call.q * (1 + beta * (call.n_seen + 1).log() ** gamma)).to(call.q.dtype)

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:  # noqa: ARG002
        return entmax(scores, power=2)


def _read_input(call: AttentionCall, weight: Tensor) -> Tensor:
    """Product of the layer's input and a vector per head: `[B, H, Lq, 1]` in the vectors' dtype, autocast or not."""
    if call.x is None:
        raise ValueError("AttentionCall.x=None: the rule depends on the layer's input; give x [B, Lq, d_model]")
    with torch.autocast(call.x.device.type, enabled=False):
        return (call.x.to(weight.dtype) @ weight.mT).mT[..., None]


@dataclass(frozen=True)
class TopK(FixedRule):
    """Softmax over the largest scores of a row (Gupta et al., arXiv 2106.06899): sparse weights without a threshold.

    The number of keys is a share of those that the query sees, not a constant as published. Equal scores stay or go
    together, so that a row does not depend on the order of its keys.
    """

    colour, spoken = "#B2DF8A", "top k"

    share: Annotated[float, Bounds(gt=0, le=1)] = 0.25
    """Share of the visible keys that keep weight, rounded up to a number of keys; 1 is Softmax."""

    def compute(self, scores: Tensor, rows: Rows, shape: LayerShape) -> Tensor:  # noqa: ARG002
        # Rounded first, because 0.07 * 100 is above 7 in binary numbers.
        k = (self.share * rows.n.double()).round(decimals=6).ceil().long().clamp(1, scores.shape[-1])
        largest = scores.detach().topk(int(k.max())).values
        least = largest.gather(-1, (k - 1).expand(*scores.shape[:-1], 1))
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1)


@dataclass(frozen=True)
class SSMax(Normaliser):
    """Scalable softmax (Nakanishi, arXiv 2501.19399): scores without bias times `s ln n`, s learned per head."""

    colour = "#999933"

    init: float = 0.43
    """Initial s; the default is the slope that the paper fitted to a trained model. 1 / 0.43 is about ln 10."""

    def build(self, shape: LayerShape) -> NormaliserModule:
        return _SSMax(shape.n_heads, self.init)


class _SSMax(SoftmaxModule):
    def __init__(self, n_heads: int, init: float) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.full((n_heads,), init))

    def queries(self, call: AttentionCall) -> Tensor:
        return (call.q * (self.s[:, None, None] * call.n_seen.log())).to(call.q.dtype)


@dataclass(frozen=True)
class AffineScaled(Normaliser):
    """`alpha p + (m - alpha) / n` of the softmax weight p, for n visible keys (Bae et al., arXiv 2602.23057).

    alpha = sigmoid(x w), x the layer's normalised input of the query and w learned per head, from 0. m is the running
    mean of alpha over the rows of the training, so that weights sum to m and alpha sets how far they are from even.
    """

    colour, spoken = "#7FB800", "affine-scaled softmax"

    momentum: BelowOne = 0.9
    """Share of m that a training step keeps; m starts at 0."""

    def build(self, shape: LayerShape) -> NormaliserModule:
        return _AffineScaled(shape, self.momentum)


class _AffineScaled(NormaliserModule):
    """Attention by softmax and even attention, mixed row by row."""

    signed = True
    mean: Tensor
    seen: Tensor

    def __init__(self, shape: LayerShape, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.alpha = nn.Parameter(torch.zeros(shape.n_heads, shape.d_model))
        self.register_buffer("mean", torch.zeros(shape.n_heads))
        # Sum of alpha over the rows of this step, and their number: a recomputed pass doubles both.
        self.register_buffer("seen", torch.zeros(shape.n_heads + 1), persistent=False)

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:  # noqa: ARG002
        """The part of the weights that scores determine: p."""
        return scores.softmax(-1)

    def compute_alpha(self, call: AttentionCall) -> Tensor:
        """`[B, H, Lq, 1]`."""
        return _read_input(call, self.alpha).sigmoid()

    def attend_by_rule(self, call: AttentionCall) -> tuple[Tensor, Stats | None]:
        return self._mix(call, super().attend_by_rule)

    def fused(self, call: AttentionCall) -> Fused | None:
        backend = find_softmax_backend(call)
        return Fused(backend, lambda: self._mix(call, partial(attend_softmax, backend=backend)))

    def _mix(
        self, call: AttentionCall, attend: Callable[[AttentionCall], tuple[Tensor, Stats | None]]
    ) -> tuple[Tensor, Stats | None]:
        even = call._replace(q=torch.zeros_like(call.q), bias=BiasTerms())
        (out, stats), (mean, mean_stats) = attend(call), attend(even)
        alpha = self.compute_alpha(call)
        if self.training and torch.is_grad_enabled():
            rows = alpha.new_tensor([alpha.shape[0] * alpha.shape[2]])
            self.seen += torch.cat((alpha.detach().sum((0, 2, 3)), rows))
        rest = (self.mean[:, None, None] - alpha) * (call._replace(evicted=None).n_seen / call.n_seen)
        mixed = (alpha * out + rest * mean).to(out.dtype)
        if stats is None or mean_stats is None:
            return mixed, None
        with torch.no_grad():
            pairs = zip(stats, mean_stats, strict=True)
            both = Stats(*(alpha[..., 0] * a + rest[..., 0] * b for a, b in pairs))
            return mixed, both._replace(lse=stats.lse, zeros=torch.zeros_like(stats.zeros))

    def compute_weights(self, call: AttentionCall) -> RuleWeights:
        found = super().compute_weights(call)
        alpha = self.compute_alpha(call)
        w = alpha * found.w + (self.mean[:, None, None] - alpha) * found.rows.visible / found.rows.n
        return found._replace(w=w, mass=w.sum(-1))

    @torch.no_grad()
    def at_progress(self, progress: float) -> None:  # noqa: ARG002
        """Move m towards the mean of the rows since the last call, those of all devices."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.seen)
        total, rows = self.seen[:-1], self.seen[-1]
        self.mean.lerp_(total / rows.clamp(min=1), (1 - self.momentum) * (rows > 0))
        self.seen.zero_()


@dataclass(frozen=True)
class Differential(Normaliser):
    """Difference of two softmax maps, `p1 - lambda p2`, then a norm per head (Ye et al., arXiv 2410.05258).

    Each map uses half of the head dimension. lambda = exp(a1.b1) - exp(a2.b2) + lambda_init with vectors a and b
    learned per layer, and lambda_init = 0.8 - 0.6 e^(-0.3 layer) for layer 0, 1, ... Heads are normalised and scaled by
    1 - lambda_init.
    """

    colour = "#661100"

    def build(self, shape: LayerShape) -> NormaliserModule:
        _require_even_width(self, shape)
        return _Differential(shape)


def lambda_init(layer: int) -> float:
    """lambda_init of layer 0, 1, ...: 0.2, 0.3555, 0.4707, ..."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class _Differential(NormaliserModule, SelfInitialised):
    maps = 2
    signed = True

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.lambda_init = lambda_init(shape.layer)
        self.vectors = nn.Parameter(torch.zeros(4, shape.head_dim // 2))  # a1, b1, a2, b2
        self.norm = nn.RMSNorm(shape.head_dim, eps=HEAD_NORM_EPS)

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        nn.init.normal_(self.vectors, std=0.1, generator=generator_of("vectors"))

    def compute_lambda(self) -> Tensor:
        a1, b1, a2, b2 = self.vectors
        return (a1 * b1).sum().exp() - (a2 * b2).sum().exp() + self.lambda_init  # autocast would round a matmul

    def weights(self, scores: Tensor, rows: Rows) -> Tensor:  # noqa: ARG002
        first, second = scores.softmax(-1).unbind(2)
        return first - self.compute_lambda().to(scores.dtype) * second

    def fused(self, call: AttentionCall) -> Fused | None:
        """Softmax attention of each map and half of the values, so that keys and values have the same width."""
        if call.renormalise:
            return None
        maps = [
            [call._replace(q=q, k=k, v=v) for v in call.v.chunk(2, -1)]
            for q, k in zip(call.q.chunk(2, -1), call.k.chunk(2, -1), strict=True)
        ]
        backend = find_softmax_backend(maps[0][0])

        def attend() -> tuple[Tensor, Stats | None]:
            found = [[attend_softmax(half, backend) for half in halves] for halves in maps]
            first, second = (torch.cat([out for out, _ in halves], -1) for halves in found)
            first_stats, second_stats = (halves[0][1] for halves in found)  # those of both halves are equal
            factor = self.compute_lambda()
            out = (first - factor * second).to(first.dtype)
            if first_stats is None or second_stats is None:
                return out, None
            with torch.no_grad():
                pairs = zip(first_stats, second_stats, strict=True)
                difference = Stats(*(a - factor * b for a, b in pairs))
                lse = torch.logaddexp(first_stats.lse, second_stats.lse)
                return out, difference._replace(lse=lse, zeros=torch.zeros_like(first_stats.zeros))

        return Fused(backend, attend)

    def output(self, out: Tensor) -> Tensor:
        normed = self.norm(out.to(self.norm.weight.dtype))
        return (normed * (1 - self.lambda_init)).to(out.dtype)


def _require_even_width(normaliser: Normaliser, shape: LayerShape) -> None:
    if shape.head_dim % 2:
        problem = f"the head dimension must be even, got {shape.head_dim}"
        raise ValueError(f"{type(normaliser).__name__}: {problem}; choose another d_model or n_heads")
