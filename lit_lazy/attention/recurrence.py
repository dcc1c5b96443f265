"""The paper's baselines without attention, RetNet, Mamba2 and Gated DeltaNet, and what they are built of.

Each layer's docstring lists what it shares with its paper. None of them has been run on a GPU.
Both recurrences are flash-linear-attention's: its kernels on a GPU, its plain torch functions elsewhere. They have a
state `S` `[B, H, K, V]`, initially 0, and per token q and k `[K]`, v `[V]` and a decay g <= 0:
`decayed_sum`: `S = e^g S + k v^T`, output `S^T q`;
`gated_delta`: `S = e^g S`, then `S = S + beta k (v - S^T k)^T`, output `S^T q`.
"""

import functools
import importlib
import importlib.util
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_lazy import Stats
from lit_lazy.attention.cache import Cache
from lit_lazy.attention.mixer import GeneratorOf, LayerShape, Mixer, MixerModule, PassInputs, SelfInitialised
from lit_lazy.support.checked_fields import PositiveInt

DECAY_RATES = 1.0, 16.0
"""Range of the uniform initial A."""
TIME_STEPS = 1e-3, 1e-1
"""Range of the log-uniform initial softplus(dt_bias)."""
Operation = Literal["simple_gla", "gated_delta_rule"]


@dataclass
class RecurrentCache(Cache):
    """Recurrent state of a layer, of constant size."""

    state: Tensor | None = None
    """`[B, H, K, V]`, float32."""
    tail: Tensor | None = None
    """Last inputs of the short convolution, `[B, kernel - 1, channels]`."""
    kept: bool = True
    """Whether the state is needed for further tokens."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.state, self.tail) if tensor is not None)


class RecurrentModule(MixerModule):
    """A mixer with a recurrent state. A subclass must implement `mix` and `flops_per_token`."""

    def __init__(self, name: str) -> None:
        """name: class name of its settings. Raises ValueError if flash-linear-attention is not installed."""
        super().__init__()
        self.name = name
        if fla_file("ops", "simple_gla", "naive.py") is None or importlib.util.find_spec("einops") is None:
            raise ValueError(f"model.mixer={name}: needs flash-linear-attention; pip install 'lit-lazy[fla]'")

    def backend_name(self, documents: bool = False) -> str:  # noqa: ARG002
        return "fla" if next(self.parameters()).is_cuda else "fla, plain torch"

    def new_cache(self) -> RecurrentCache:
        return RecurrentCache()

    @abstractmethod
    def mix(self, x: Tensor, rotate: Callable[[Tensor], Tensor], cache: RecurrentCache) -> Tensor:
        """Mix x `[B, L, d_model]`, returns the same shape; reads and replaces the cache's state and tail."""

    def forward(self, x: Tensor, inputs: PassInputs) -> tuple[Tensor, Stats | None]:
        """See `MixerModule.forward`; there are no stats. Raises ValueError for a key_mask or documents."""
        if inputs.key_mask is not None:
            raise ValueError(f"key_mask: {self.name} keeps a state, not keys that could be hidden; give full sequences")
        if inputs.cu_seqlens is not None:
            raise ValueError(f"cu_seqlens: {self.name} carries its state across documents; leave it out")
        cache = RecurrentCache(kept=False) if inputs.cache is None else inputs.cache
        out = self.mix(x, inputs.rotate, cache)
        cache.length += x.shape[1]
        return out, None


class ShortConvolution(SelfInitialised):
    """A causal depthwise convolution, initialised as torch's own convolutions."""

    def __init__(self, channels: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, kernel))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        for name, parameter in self.named_parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator_of(name))

    def forward(self, x: Tensor, cache: RecurrentCache) -> Tensor:
        """Convolve x `[B, L, channels]`, the tokens after those in the cache."""
        kernel, length = self.weight.shape[1], x.shape[1]
        before = x.new_zeros(len(x), kernel - 1, x.shape[2]) if cache.tail is None else cache.tail
        x = torch.cat((before, x), 1)
        cache.tail = x[:, length:]
        # A library's convolution is not deterministic, nor independent of later tokens, to the bit.
        out = x[:, :length] * self.weight[:, 0]
        for i in range(1, kernel):
            out = out + x[:, i : i + length] * self.weight[:, i]
        return (out if self.bias is None else out + self.bias).to(x.dtype)


class Decay(SelfInitialised):
    """Time step `dt = softplus(x + dt_bias)` and decay `g = -A dt` of each head, with A stored as its logarithm.

    Initial A is uniform in 1 to 16, softplus(dt_bias) log-uniform in 0.001 to 0.1, as in Mamba2.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(n_heads))
        self.dt_bias = nn.Parameter(torch.zeros(n_heads))

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        with torch.no_grad():
            self.A_log.uniform_(*DECAY_RATES, generator=generator_of("A_log")).log_()
            step = self.dt_bias.uniform_(*map(math.log, TIME_STEPS), generator=generator_of("dt_bias"))
            step.exp_()
            step += torch.log(-torch.expm1(-step))  # the inverse of softplus

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """dt and g of x `[B, L, H]`, in its shape and at least float32."""
        dt = F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)) + self.dt_bias)
        return dt, -self.A_log.exp() * dt


def decayed_sum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, cache: RecurrentCache) -> Tensor:
    """Output, in the shape and dtype of v, for q and k `[B, L, H, K]`, v `[B, L, H, V]` and g `[B, L, H]`."""
    return _recur("simple_gla", cache, q=q, k=k, v=v, g=g)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cache: RecurrentCache) -> Tensor:
    """As `decayed_sum`; beta `[B, L, H]` is the share of the state's value under k that v replaces."""
    return _recur("gated_delta_rule", cache, q=q, k=k, v=v, g=g, beta=beta)


def _recur(operation: Operation, cache: RecurrentCache, **inputs: Tensor) -> Tensor:
    v = inputs["v"]
    chunked, stepwise = (_kernels if v.is_cuda else _plain_functions)(operation)
    recur = stepwise if cache.kept and v.shape[1] == 1 else chunked  # the kernels for one token have no gradients
    with torch.autocast(v.device.type, enabled=False):
        out, state = recur(**inputs, scale=1.0, initial_state=cache.state, output_final_state=cache.kept)
    cache.state = state
    return out.to(v.dtype)


Recurrence = Callable[..., tuple[Tensor, Any]]


def _kernels(operation: Operation) -> tuple[Recurrence, Recurrence]:
    """The kernels for many tokens and for one."""
    functions = importlib.import_module(f"fla.ops.{operation}")
    return getattr(functions, f"chunk_{operation}"), getattr(functions, f"fused_recurrent_{operation}")


def _plain_functions(operation: Operation) -> tuple[Recurrence, Recurrence]:
    """The torch functions for many tokens and for one; both compute in float32."""
    functions = _import_plain_module(operation)
    return getattr(functions, f"naive_chunk_{operation}"), getattr(functions, f"naive_recurrent_{operation}")


@functools.cache
def _import_plain_module(operation: Operation) -> ModuleType:
    """Import only the file of the plain functions: the package's import of its GPU kernels takes seconds."""
    name = f"fla.ops.{operation}.naive"
    spec = importlib.util.spec_from_file_location(name, fla_file("ops", operation, "naive.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fla_file(*parts: str) -> Path | None:
    """Path of a file of flash-linear-attention, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec("fla")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders if (path := Path(folder, *parts)).is_file()), None)


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
