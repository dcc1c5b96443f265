"""What layers without attention are made of: two recurrences, the short convolution, the decay, and what they keep.

Both recurrences are flash-linear-attention's: its kernels on a GPU, its plain torch functions elsewhere. They have a
state `S` `[B, H, K, V]`, 0 before the first token, and per token q and k `[K]`, v `[V]` and a decay g <= 0:
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
"""Range of the initial A, uniform."""
TIME_STEPS, LEAST_STEP = (1e-3, 1e-1), 1e-4
"""Range of softplus(dt_bias) at first, log-uniform, and what it is at least."""
Operation = Literal["simple_gla", "gated_delta_rule"]


@dataclass
class RecurrentCache:
    """What a layer keeps of the tokens that it has seen; its size does not grow with them."""

    state: Tensor | None = None
    """`[B, H, K, V]`, float32."""
    tail: Tensor | None = None
    """The last inputs of the short convolution, `[B, kernel - 1, channels]`."""
    length: int = 0
    """Number of tokens seen."""
    kept: bool = True
    """Whether there are tokens to come."""
    evicted: int = 0

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return sum(tensor.nbytes for tensor in (self.state, self.tail) if tensor is not None)

    def span(self, new: int) -> tuple[int, int]:
        """How many positions, and from which on, the new tokens have."""
        return new, self.length

    def split_tokens(self, tokens: Tensor) -> list[Tensor]:
        """All tokens at once."""
        return [tokens]


class RecurrentModule(MixerModule):
    """A mixer that keeps a state. `mix` is all that a new one has to have, beside what it counts."""

    def __init__(self, name: str) -> None:
        """name: what its settings are called. Raises ValueError where flash-linear-attention is not installed."""
        super().__init__()
        self.name = name
        require_fla(name)

    def backend_name(self, documents: bool = False) -> str:  # noqa: ARG002
        return "fla" if next(self.parameters()).is_cuda else "fla, plain torch"

    def new_cache(self) -> RecurrentCache:
        return RecurrentCache()

    @abstractmethod
    def mix(self, x: Tensor, rotate: Callable[[Tensor], Tensor], cache: RecurrentCache) -> Tensor:
        """x `[B, L, d_model]` to the same shape; the state and the tail of the cache are read, and replaced."""

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
    """A causal convolution of each channel over its last tokens. Initial values as torch's own convolutions have."""

    def __init__(self, channels: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, kernel))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        for name, parameter in self.named_parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator_of(name))

    def forward(self, x: Tensor, cache: RecurrentCache) -> Tensor:
        """x `[B, L, channels]`, the tokens after those in the cache; the same shape back."""
        kernel, length = self.weight.shape[1], x.shape[1]
        before = x.new_zeros(len(x), kernel - 1, x.shape[2]) if cache.tail is None else cache.tail
        x = torch.cat((before, x), 1)
        cache.tail = x[:, length:]
        # Products in place of a library's convolution: the same bits whatever comes later, and each time.
        out = x[:, :length] * self.weight[:, 0]
        for at in range(1, kernel):
            out = out + x[:, at : at + length] * self.weight[:, at]
        return (out if self.bias is None else out + self.bias).to(x.dtype)


class Decay(SelfInitialised):
    """The time step `dt = softplus(x + dt_bias)` and the decay `g = -A dt` of each head, A kept as its logarithm.

    Initial A uniform in 1 to 16, softplus(dt_bias) log-uniform in 0.001 to 0.1, as Mamba2 has them.
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
        """x `[B, L, H]`; dt and g of the same shape, at least float32."""
        dt = F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)) + self.dt_bias)
        return dt, -self.A_log.exp() * dt


def decayed_sum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, cache: RecurrentCache) -> Tensor:
    """q and k `[B, L, H, K]`, v `[B, L, H, V]`, g `[B, L, H]`; the output has the shape and dtype of v."""
    return _recur("simple_gla", cache, q=q, k=k, v=v, g=g)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cache: RecurrentCache) -> Tensor:
    """As `decayed_sum`; beta `[B, L, H]`, the share of what k finds in the state that v replaces."""
    return _recur("gated_delta_rule", cache, q=q, k=k, v=v, g=g, beta=beta)


def _recur(operation: Operation, cache: RecurrentCache, **inputs: Tensor) -> Tensor:
    v = inputs["v"]
    of_many, of_one = (_kernels if v.is_cuda else _plain_functions)(operation)
    recur = of_one if cache.kept and v.shape[1] == 1 else of_many  # the kernels for one have no gradients
    with torch.autocast(v.device.type, enabled=False):
        out, state = recur(**inputs, scale=1.0, initial_state=cache.state, output_final_state=cache.kept)
    cache.state = state
    return out.to(v.dtype)


Recurrence = Callable[..., tuple[Tensor, Any]]


def _kernels(operation: Operation) -> tuple[Recurrence, Recurrence]:
    """For many tokens, and for one."""
    functions = importlib.import_module(f"fla.ops.{operation}")
    return getattr(functions, f"chunk_{operation}"), getattr(functions, f"fused_recurrent_{operation}")


def _plain_functions(operation: Operation) -> tuple[Recurrence, Recurrence]:
    """For many tokens, and for one; both compute in float32."""
    functions = _import_plain_module(operation)
    return getattr(functions, f"naive_chunk_{operation}"), getattr(functions, f"naive_recurrent_{operation}")


@functools.cache
def _import_plain_module(operation: Operation) -> ModuleType:
    """The file of the plain functions alone: the package's own import takes seconds, of kernels that need a GPU."""
    name = f"fla.ops.{operation}.naive"
    spec = importlib.util.spec_from_file_location(name, fla_file("ops", operation, "naive.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fla_file(*parts: str) -> Path | None:
    """A file of flash-linear-attention; None where it is not installed. Imports nothing."""
    spec = importlib.util.find_spec("fla")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders if (path := Path(folder, *parts)).is_file()), None)


def require_fla(mixer: str) -> None:
    """Raise ValueError, in one line, where flash-linear-attention is not installed."""
    if fla_file("ops", "simple_gla", "naive.py") is None or importlib.util.find_spec("einops") is None:
        raise ValueError(f"model.mixer={mixer}: needs flash-linear-attention; pip install 'lit-lazy[fla]'")
