"""Positional biases: terms added to the scores by distance d = i - j >= 0 and head.

A bias is a frozen dataclass (its settings) whose `build` returns the module that holds its parameters. The module
returns `BiasTerms`, the bias and slopes of `flash_lazy.lazy_attention`. All parameters are fp32.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from lit_lazy.attention.mixer import GeneratorOf, SelfInitialised
from lit_lazy.support.checked_fields import Bounds, CheckedFields, NonNegativeFloat, PositiveFloat, PositiveInt, require


class BiasTerms(NamedTuple):
    """Terms of a bias; None for an absent term.

    table: `[H, W]`, added at distance d < W. Keys beyond stay visible, with bias 0.
    slopes: `[H]`, `slopes[h] * d` is subtracted at every distance.
    """

    table: Tensor | None = None
    slopes: Tensor | None = None


class BiasModule(SelfInitialised, ABC):
    """Parameters of a bias. `forward(n_keys)` returns terms that are valid for every distance below `n_keys`.

    A table may be shorter or longer: keys beyond its end stay visible, with bias 0, and columns that no key needs have
    no effect.
    """

    decays = False

    @abstractmethod
    def forward(self, n_keys: int) -> BiasTerms: ...

    def probe(self, n_keys: int) -> None:
        """Raises a one-line ValueError if a term is not finite."""
        if not all(term.isfinite().all() for term in self(n_keys) if term is not None):
            fix = "give finite numbers at every distance from 0"
            raise ValueError(f"{type(self).__name__} gives a term that is not finite; {fix}")


class Bias(CheckedFields, ABC):
    """Settings of a positional bias. Keys beyond the end of its table stay visible, with bias 0 (`BiasModule`)."""

    @abstractmethod
    def build(self, n_heads: int, context_length: int) -> BiasModule: ...


@dataclass(frozen=True)
class NoBias(Bias):
    """No bias."""

    def build(self, n_heads: int, context_length: int) -> BiasModule:  # noqa: ARG002
        return _FixedBias(None)


class _FixedBias(BiasModule):
    slopes: Tensor | None

    def __init__(self, slopes: list[float] | None) -> None:
        super().__init__()
        self.register_buffer("slopes", None if slopes is None else torch.tensor(slopes), persistent=False)

    def forward(self, n_keys: int) -> BiasTerms:  # noqa: ARG002
        return BiasTerms(slopes=self.slopes)


@dataclass(frozen=True)
class LearnedBias(Bias):
    """A learned table per head over the first `length` distances (the paper's positional discrimination across heads).

    Keys beyond the table stay visible, with bias 0: `length` is no window.
    """

    first_values = ("init_std",)

    length: PositiveInt | None = None
    """Distances in the table; None for the context length. The authors' configurations use 512 or 1024."""
    init_std: NonNegativeFloat = 0.0
    """Standard deviation of the initial table: 0 (the authors' Triton example) or 0.001 (their PyTorch code)."""

    def build(self, n_heads: int, context_length: int) -> BiasModule:
        return _LearnedBias(n_heads, self.length or context_length, self.init_std)


class _LearnedBias(BiasModule):
    def __init__(self, n_heads: int, length: int, init_std: float) -> None:
        super().__init__()
        self.init_std = init_std
        self.table = nn.Parameter(torch.zeros(n_heads, length))

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        if self.init_std:
            nn.init.normal_(self.table, std=self.init_std, generator=generator_of("table"))

    def forward(self, n_keys: int) -> BiasTerms:
        return BiasTerms(table=self.table[:, :n_keys])


@dataclass(frozen=True)
class Alibi(Bias):
    """ALiBi (Press et al., arXiv 2108.12409): `-m_h * d` with fixed slopes, not scaled by 1/sqrt(head dim)."""

    slopes: Annotated[tuple[float, ...], Bounds(min_length=1)] | None = None
    """One slope for all heads, or one per head; None for 2^(-8h/H), which is only 2^-8 for a single head."""

    def build(self, n_heads: int, context_length: int) -> BiasModule:  # noqa: ARG002
        slopes = alibi_slopes(n_heads) if self.slopes is None else list(self.slopes)
        fix = f"has {len(slopes)} slopes; give one, or one per head (model.n_heads={n_heads})"
        require(len(slopes) in (1, n_heads), "Alibi.slopes", self.slopes, fix)
        return _FixedBias(slopes if len(slopes) == n_heads else slopes * n_heads)


def alibi_slopes(n_heads: int) -> list[float]:
    """Slopes of H = `n_heads` heads: 2^(-8h/H) for h = 1..H if H is a power of two.

    Otherwise the slopes of the next lower power of two, followed by every other slope of the next higher one.
    """
    power = 2 ** int(math.log2(n_heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    if power == n_heads:
        return slopes
    return slopes + alibi_slopes(2 * power)[::2][: n_heads - power]


@dataclass(frozen=True)
class T5Bias(Bias):
    """T5's causal relative bias (Raffel et al., arXiv 1910.10683): one learned value per head and log-spaced bucket.

    Half of the buckets hold one distance each; the others grow logarithmically up to `max_distance`. The last one also
    holds all distances beyond.
    """

    n_buckets: Annotated[int, Bounds(ge=2)] = 32
    """Number of buckets."""
    max_distance: int = 128
    """Distance from which all keys share the last bucket."""

    def __post_init__(self) -> None:
        fix = f"must be a whole number above {self.n_buckets // 2}"
        require(self.max_distance > self.n_buckets // 2, "T5Bias.max_distance", self.max_distance, fix)

    def build(self, n_heads: int, context_length: int) -> BiasModule:  # noqa: ARG002
        return _T5Bias(n_heads, self.n_buckets, self.max_distance)


def t5_buckets(n_distances: int, n_buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance 0..n_distances-1, causal variant: int64 `[n_distances]`."""
    exact = n_buckets // 2
    distance = torch.arange(n_distances)
    position = torch.log(distance.clamp(min=1).double() / exact) / math.log(max_distance / exact)
    logarithmic = (exact + (position * (n_buckets - exact)).long()).clamp(max=n_buckets - 1)
    return torch.where(distance < exact, distance, logarithmic)


class _T5Bias(BiasModule):
    def __init__(self, n_heads: int, n_buckets: int, max_distance: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.values = nn.Parameter(torch.zeros(n_heads, n_buckets))

    def forward(self, n_keys: int) -> BiasTerms:
        buckets = t5_buckets(n_keys, self.values.shape[1], self.max_distance).to(self.values.device)
        return BiasTerms(table=self.values[:, buckets])


@dataclass(frozen=True)
class KerpleLog(Bias):
    """KERPLE, logarithmic form (Chi et al., arXiv 2205.09921): `-r1 * ln(1 + r2 * d)`, r1 and r2 learned per head.

    r1 is initialised from U(0, 2) and r2 from U(0, 1); both are clamped to at least 0.01.
    """

    def build(self, n_heads: int, context_length: int) -> BiasModule:  # noqa: ARG002
        return _KerpleLog(n_heads)


class _KerpleLog(BiasModule):
    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.r1 = nn.Parameter(torch.ones(n_heads, 1))
        self.r2 = nn.Parameter(torch.full((n_heads, 1), 0.5))

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        nn.init.uniform_(self.r1, 0, 2, generator=generator_of("r1"))
        nn.init.uniform_(self.r2, 0, 1, generator=generator_of("r2"))

    def forward(self, n_keys: int) -> BiasTerms:
        distance = torch.arange(n_keys, device=self.r1.device)
        r1, r2 = (_clamp_straight_through(parameter, 0.01) for parameter in (self.r1, self.r2))
        return BiasTerms(table=-r1 * torch.log1p(r2 * distance))


def _clamp_straight_through(parameter: Tensor, least: float) -> Tensor:
    """Clamp to at least `least`, with the gradient of the unclamped parameter, so that it can grow back."""
    return parameter.detach().clamp(min=least) + (parameter - parameter.detach())


@dataclass(frozen=True)
class Fire(Bias):
    """FIRE (Li et al., arXiv 2310.04418): `f(psi(d) / psi(max(L, i)))`, psi(x) = ln(c x + 1), f an MLP 1 -> width -> H.

    For positions i <= L this is a table over distances, as the kernels need; longer sequences raise ValueError. c is
    learned, L is fixed.
    """

    first_values = ("c_init",)

    length: PositiveInt | None = None
    """L, the length up to which positions are not rescaled; None for the context length."""
    width: PositiveInt = 32
    """Hidden width of f."""
    c_init: PositiveFloat = 0.1
    """Initial c of psi."""

    def build(self, n_heads: int, context_length: int) -> BiasModule:
        return _Fire(n_heads, self.length or context_length, self.width, self.c_init)


class _Fire(BiasModule):
    def __init__(self, n_heads: int, length: int, width: int, c_init: float) -> None:
        super().__init__()
        self.length = length
        self.c = nn.Parameter(torch.tensor(c_init, dtype=torch.float32))
        self.hidden = nn.Linear(1, width)
        self.out = nn.Linear(width, n_heads)

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        for name, layer in (("hidden", self.hidden), ("out", self.out)):
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator_of(f"{name}.weight"))
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator_of(f"{name}.bias"))

    def forward(self, n_keys: int) -> BiasTerms:
        why = "since FIRE depends on more than the distance beyond its length"
        fix = f"cannot serve {n_keys} keys, {why}; give a length of at least {n_keys}"
        require(n_keys <= self.length, "Fire.length", self.length, fix)
        # Without autocast: the MLP is tiny, and its output is added to fp32 scores.
        with torch.autocast(self.c.device.type, enabled=False):
            distance = torch.arange(n_keys, device=self.c.device, dtype=self.c.dtype)
            c = self.c.abs()
            ratio = torch.log1p(c * distance) / torch.log1p(c * self.length)
            table = self.out(torch.relu(self.hidden(ratio[:, None]))).T
        return BiasTerms(table=table.contiguous())
