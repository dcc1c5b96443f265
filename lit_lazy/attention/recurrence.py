"""Building blocks of layers without attention: two recurrences, short convolution, decay and cache.

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
from lit_lazy.attention.initialisation import GeneratorOf, SelfInitialised
from lit_lazy.attention.mixer import MixerModule, PassInputs

DECAY_RATES = 1.0, 16.0
"""Range of the uniform initial A."""
TIME_STEPS, LEAST_STEP = (1e-3, 1e-1), 1e-4
"""Range of the log-uniform initial softplus(dt_bias), and its lower bound."""
Operation = Literal["simple_gla", "gated_delta_rule"]


@dataclass
class RecurrentCache:
    """Recurrent state of a layer, of constant size."""

    state: Tensor | None = None
    """`[B, H, K, V]`, float32."""
    tail: Tensor | None = None
    """Last inputs of the short convolution, `[B, kernel - 1, channels]`."""
    length: int = 0
    """Number of tokens read."""
    kept: bool = True
    """Whether the state is needed for further tokens."""
    evicted: int = 0

    @property
    def nbytes(self) -> int:
        """Allocated memory in bytes."""
        return sum(tensor.nbytes for tensor in (self.state, self.tail) if tensor is not None)

    def span(self, new: int) -> tuple[int, int]:
        """Number and first of the positions of `new` tokens."""
        return new, self.length

    def split_tokens(self, tokens: Tensor) -> list[Tensor]:
        return [tokens]


class RecurrentModule(MixerModule):
    """A mixer with a recurrent state. A subclass must implement `mix` and `flops_per_token`."""

    def __init__(self, name: str) -> None:
        """name: class name of its settings. Raises ValueError if flash-linear-attention is not installed."""
        super().__init__()
        self.name = name
        require_fla(name)

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
            step.exp_().clamp_(min=LEAST_STEP)
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


def require_fla(mixer: str) -> None:
    """Raises a one-line ValueError if flash-linear-attention is not installed."""
    if fla_file("ops", "simple_gla", "naive.py") is None or importlib.util.find_spec("einops") is None:
        raise ValueError(f"model.mixer={mixer}: needs flash-linear-attention; pip install 'lit-lazy[fla]'")
