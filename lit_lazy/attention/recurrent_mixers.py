"""The paper's baselines without attention: RetNet, Mamba2, Gated DeltaNet.

Each docstring lists what the layer shares with its paper. None of them has been run on a GPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_lazy.attention.mixer import Mixer
from lit_lazy.attention.normaliser import LayerShape
from lit_lazy.attention.recurrence import (
    Decay,
    RecurrentCache,
    RecurrentModule,
    ShortConvolution,
    decayed_sum,
    gated_delta,
)
from lit_lazy.support.checks import PositiveInt

NORM_EPS = 1e-5
MOST_HEAD_DIM, MOST_STATE = 64, 128
"""Defaults of Mamba2's paper."""
LENGTH_EPS = 1e-6
"""Added to the squared norm of queries and keys, as in the code of Gated DeltaNet's authors."""
KEY_SHARE = 3, 4
"""Numerator and denominator: Gated DeltaNet's key width relative to the residual stream's."""


@dataclass(frozen=True)
class RetNet(Mixer):
    """Multi-scale retention (Sun et al., arXiv 2307.08621): a state with a fixed decay per head.

    Shared with the paper: decays 1 - 2^(-5-h) of the heads h = 0, 1, ...; values twice as wide as keys; queries and
    keys rotated by their positions, keys divided by sqrt(head width); a group norm over each head; a swish gate; an MLP
    narrower by the parameters that the mixer has more than attention. Not shared: the number of heads, here that of the
    attention rows (the paper's heads are 256 wide); positions from `model.position` (RoPE), not xPos with its decay; an
    affine group norm; no normalisation of decay and rows, which the group norm undoes up to its epsilon; this project's
    initialisation.
    """

    colour = "#8C6D00"

    def build(self, shape: LayerShape) -> RecurrentModule:
        return _RetNet(shape)


class _RetNet(RecurrentModule):
    log_decay: Tensor

    def __init__(self, shape: LayerShape) -> None:
        super().__init__("RetNet")
        self.n_heads, self.head_dim = shape.n_heads, shape.head_dim
        self.rotary_dim = shape.head_dim
        width = shape.d_model
        self.q, self.k = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.v, self.gate = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.norm = nn.GroupNorm(shape.n_heads, 2 * width, eps=NORM_EPS)
        self.out = nn.Linear(2 * width, width, bias=False)
        decay = 1 - 2 ** (-5 - torch.arange(shape.n_heads, dtype=torch.float64))
        self.register_buffer("log_decay", decay.log().float(), persistent=False)

    def flops_per_token(self, context_length: int) -> int:  # noqa: ARG002
        return state_flops(self.n_heads, self.head_dim, 2 * self.head_dim, products=2)

    def mix(self, x: Tensor, rotate: Callable[[Tensor], Tensor], cache: RecurrentCache) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.n_heads, -1)) for part in (self.q, self.k, self.v))
        q, k = (rotate(part.transpose(1, 2)).transpose(1, 2) for part in (q, k))
        g = self.log_decay.expand(*x.shape[:2], -1)
        out = decayed_sum(q, k / math.sqrt(self.head_dim), v, g, cache)
        rows = out.to(self.norm.weight.dtype).flatten(2).flatten(0, 1)
        return self.out(self.norm(rows).view(*x.shape[:2], -1) * F.silu(self.gate(x)))


@dataclass(frozen=True)
class Mamba2(Mixer):
    """State space duality (Dao and Gu, arXiv 2405.21060): a state with a decay that depends on the token.

    Shared with the paper: one projection to z, x, B, C and dt; expansion 2; a short convolution with bias and SiLU over
    x, B and C; dt = softplus(. + dt_bias), A per head stored as its logarithm, decay e^(-A dt), input dt x; one B and
    one C for all heads; a skip D per head, initially 1; RMSNorm of y silu(z); initial A in 1 to 16 and dt in 0.001 to
    0.1. Not shared: an MLP in each block, which the paper's stack has not; a state of at most the width of the model;
    this project's initial projections. `model.n_heads` and `model.position` have no effect.
    """

    colour = "#FF6F91"

    state: PositiveInt | None = None
    """State per value; None for 128, or the width of the model if smaller."""
    head_dim: PositiveInt | None = None
    """Values per head; None for the greatest common divisor of 64 and twice the width of the model."""
    kernel: PositiveInt = 4
    """Kernel size of the short convolution, in tokens."""

    def build(self, shape: LayerShape) -> RecurrentModule:
        width = 2 * shape.d_model
        head_dim = self.head_dim or math.gcd(width, MOST_HEAD_DIM)
        if width % head_dim:
            raise ValueError(f"Mamba2.head_dim={head_dim}: must divide 2 * model.d_model={width}")
        return _Mamba2(shape, self.state or min(MOST_STATE, shape.d_model), head_dim, self.kernel)


class _Mamba2(RecurrentModule):
    def __init__(self, shape: LayerShape, state: int, head_dim: int, kernel: int) -> None:
        super().__init__("Mamba2")
        self.rotary_dim = shape.head_dim
        self.width, self.state, self.head_dim = 2 * shape.d_model, state, head_dim
        self.n_heads = self.width // head_dim
        self.project = nn.Linear(shape.d_model, 2 * self.width + 2 * state + self.n_heads, bias=False)
        self.convolution = ShortConvolution(self.width + 2 * state, kernel, bias=True)
        self.decay = Decay(self.n_heads)
        self.skip = nn.Parameter(torch.ones(self.n_heads))
        self.norm = nn.RMSNorm(self.width, eps=NORM_EPS)
        self.out = nn.Linear(self.width, shape.d_model, bias=False)

    def flops_per_token(self, context_length: int) -> int:  # noqa: ARG002
        convolution = 6 * self.convolution.weight.numel()
        return convolution + state_flops(self.n_heads, self.state, self.head_dim, products=2)

    def mix(self, x: Tensor, rotate: Callable[[Tensor], Tensor], cache: RecurrentCache) -> Tensor:  # noqa: ARG002
        z, convolved, dt = self.project(x).split((self.width, self.width + 2 * self.state, self.n_heads), -1)
        convolved = F.silu(self.convolution(convolved, cache))
        values, *state = convolved.split((self.width, self.state, self.state), -1)
        values = values.unflatten(-1, (self.n_heads, self.head_dim))
        k, q = (part[:, :, None].expand(-1, -1, self.n_heads, -1) for part in state)
        dt, g = self.decay(dt)
        out = decayed_sum(q, k, (values * dt[..., None]).to(values.dtype), g, cache)
        out = (out + self.skip[:, None] * values).flatten(2) * F.silu(z)
        return self.out(self.norm(out))


@dataclass(frozen=True)
class GatedDeltaNet(Mixer):
    """Gated delta rule (Yang et al., arXiv 2412.06464): a token replaces the value that the state holds for its key.

    Shared with the paper: short convolutions with SiLU on queries, keys and values; queries and keys of norm 1, queries
    divided by sqrt(head width); beta = sigmoid of a projection; the decay of Mamba2, with its initial A and dt; keys
    0.75 and values 1.5 times as wide as the model; RMSNorm of each head, then a SiLU gate. Not shared: the number of
    heads, here that of the attention rows (the paper's heads are 256 wide); this project's initial projections.
    `model.position` has no effect.
    """

    colour, spoken = "#44AA99", "Gated DeltaNet"

    kernel: PositiveInt = 4
    """Kernel size of the short convolutions, in tokens."""

    def build(self, shape: LayerShape) -> RecurrentModule:
        return _GatedDeltaNet(shape, self.kernel)


class _GatedDeltaNet(RecurrentModule):
    def __init__(self, shape: LayerShape, kernel: int) -> None:
        super().__init__("GatedDeltaNet")
        self.rotary_dim = shape.head_dim
        self.n_heads = shape.n_heads
        self.key_dim = max(1, KEY_SHARE[0] * shape.head_dim // KEY_SHARE[1])
        keys, values = shape.n_heads * self.key_dim, 2 * shape.n_heads * self.key_dim
        self.q, self.k = (nn.Linear(shape.d_model, keys, bias=False) for _ in range(2))
        self.v, self.gate = (nn.Linear(shape.d_model, values, bias=False) for _ in range(2))
        self.beta, self.dt = (nn.Linear(shape.d_model, shape.n_heads, bias=False) for _ in range(2))
        self.convolution = ShortConvolution(2 * keys + values, kernel, bias=False)
        self.decay = Decay(shape.n_heads)
        self.norm = nn.RMSNorm(2 * self.key_dim, eps=NORM_EPS)
        self.out = nn.Linear(values, shape.d_model, bias=False)

    def flops_per_token(self, context_length: int) -> int:  # noqa: ARG002
        convolution = 6 * self.convolution.weight.numel()
        return convolution + state_flops(self.n_heads, self.key_dim, 2 * self.key_dim, products=3)

    def mix(self, x: Tensor, rotate: Callable[[Tensor], Tensor], cache: RecurrentCache) -> Tensor:  # noqa: ARG002
        projected = torch.cat([part(x) for part in (self.q, self.k, self.v)], -1)
        convolved = F.silu(self.convolution(projected, cache)).unflatten(-1, (-1, self.key_dim))
        q, k, v = convolved.split((self.n_heads, self.n_heads, 2 * self.n_heads), 2)
        q, k = (l2_normalise(part) for part in (q, k))
        q, v = q / math.sqrt(self.key_dim), v.flatten(2).unflatten(-1, (self.n_heads, -1))
        _, g = self.decay(self.dt(x))
        out = gated_delta(q, k, v, g, torch.sigmoid(self.beta(x)), cache)
        gate = F.silu(self.gate(x)).unflatten(-1, (self.n_heads, -1))
        return self.out((self.norm(out.to(self.norm.weight.dtype)) * gate).flatten(2))


def l2_normalise(x: Tensor) -> Tensor:
    """x `[..., D]` divided by its norm, computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPS)).to(x.dtype)


def state_flops(n_heads: int, keys: int, values: int, products: int) -> int:
    """Training FLOPs per token of products of vectors with a state `[n_heads, keys, values]`, token by token.

    6 per state entry and product, as for a weight; the additional work of chunked kernels is not counted.
    """
    return 6 * products * n_heads * keys * values
