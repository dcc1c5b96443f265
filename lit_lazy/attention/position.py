"""Positional encodings of embeddings, queries and keys; biases on the scores are in `bias`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn

from lit_lazy.attention.mixer import Drawn, GeneratorOf, SelfInitialised
from lit_lazy.support.checked_fields import Bounds, CheckedFields, NonNegativeFloat, PositiveFloat, PositiveInt, require

ENDLESS = 2**62
"""Length of a text that is longer than any."""


class PositionModule(nn.Module):
    """Adds positions to embeddings (`embed`) and rotates queries and keys (`rotation`); the default does neither.

    relative: whether the model's output depends only on distances between tokens, not on absolute positions. Then
    prompts of unequal lengths can be decoded together, and a cache may evict tokens.
    places: 0-based position of each token, int64 `[B, L]`; None for consecutive positions from `offset`.
    """

    relative: bool = False

    def forward(self, x: Tensor, length: int, offset: int, *places: Tensor) -> tuple[Tensor, Callable]:
        """`embed` of x, the last of `length` tokens from `offset` on, and `rotation`; hooks load weights for a call."""
        return self.embed(x, offset + length - x.shape[1], *places), self.rotation(length, offset, *places)

    def embed(self, x: Tensor, offset: int, places: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Add positions to x `[B, L, d_model]`, whose first token has the 0-based position `offset`."""
        return x

    def rotation(self, length: int, offset: int, places: Tensor | None = None) -> Callable[[Tensor], Tensor]:  # noqa: ARG002
        """The rotation of queries and keys `[B, H, R, D]` of the last R <= length tokens before `offset + length`."""
        return lambda x: x

    def rotates(self, layer: int) -> bool:  # noqa: ARG002
        """Whether `rotation` is applied in a layer, counted from 0."""
        return True

    def keeps_rotation(self, shorter: int, longer: int) -> bool:  # noqa: ARG002
        """Whether texts of these lengths are rotated alike, so that a cache of the one serves the other."""
        return True

    def compute_angles(self, length: int) -> Tensor | None:
        """Angles `[length, D / 2]` by which `rotation` turns dimensions (m, m + D / 2) of the first tokens.

        `[length, 0]` if it turns none, None if it does anything else.
        """
        return torch.empty(length, 0) if type(self).rotation is PositionModule.rotation else None


class Position(Drawn, ABC):
    """Settings of a positional encoding."""

    @abstractmethod
    def build(self, d_model: int, head_dim: int, context_length: int) -> PositionModule: ...


@dataclass(frozen=True)
class NoPosition(Position):
    """No positional encoding, only the causal mask and the bias, if any."""

    colour, spoken = "#BB5566", "no position"

    def build(self, d_model: int, head_dim: int, context_length: int) -> PositionModule:  # noqa: ARG002
        return _NoPosition()


class _NoPosition(PositionModule):
    relative = True


class RopeScaling(CheckedFields, ABC):
    """Settings that slow the rotation down, so that a model reads longer texts than it was trained on."""

    @abstractmethod
    def scale(self, frequency: Tensor, length: int = 0) -> Tensor:
        """The frequencies `[D / 2]` of a text of `length` tokens, 0 for a short one; in radians per token, float64."""


@dataclass(frozen=True)
class NoScaling(RopeScaling):
    """The frequencies as they are."""

    def scale(self, frequency: Tensor, length: int = 0) -> Tensor:  # noqa: ARG002
        return frequency


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Divides every frequency by the same factor (Chen et al., arXiv 2306.15595)."""

    factor: PositiveFloat = 2.0
    """How much slower."""

    def scale(self, frequency: Tensor, length: int = 0) -> Tensor:  # noqa: ARG002
        return frequency / self.factor


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Divides low frequencies by a factor, leaves high ones, and interpolates between them, as Llama 3.1 does."""

    factor: PositiveFloat = 8.0
    """How much slower low frequencies are."""
    low: PositiveFloat = 1.0
    """Frequencies of at most so many turns in the trained length are low."""
    high: float = 4.0
    """Frequencies of at least so many turns are high."""
    trained_length: PositiveInt = 8192
    """Context length, in tokens, before the scaling."""

    def __post_init__(self) -> None:
        require(self.low < self.high, "Llama3Scaling.low", self.low, f"must be below high={self.high}")

    def scale(self, frequency: Tensor, length: int = 0) -> Tensor:  # noqa: ARG002
        turns = self.trained_length * frequency / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * frequency + (1 - kept) * frequency / self.factor


@dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """Raises the base for texts longer than the trained ones, by their length (NTK-aware, as in transformers)."""

    factor: PositiveFloat = 2.0
    """How much longer texts are to be read."""
    trained_length: PositiveInt = 8192
    """Length, in tokens, up to which the frequencies are as they are."""

    def scale(self, frequency: Tensor, length: int = 0) -> Tensor:
        if not length:
            return frequency
        growth = self.factor * max(length, self.trained_length) / self.trained_length - (self.factor - 1)
        pair = torch.arange(len(frequency), dtype=torch.float64, device=frequency.device)
        return frequency * growth ** -(pair / max(len(frequency) - 1, 1))


@dataclass(frozen=True)
class GivenFrequencies(RopeScaling):
    """Frequencies of a model that was trained elsewhere, whatever their formula, in place of the base's."""

    frequencies: tuple[float, ...] = ()
    """In radians per token, one for every two dimensions of a head."""
    long: tuple[float, ...] = ()
    """Those of texts longer than trained_length; empty for the same."""
    trained_length: PositiveInt = 8192
    """Longest text, in tokens, that has the first frequencies."""

    def scale(self, frequency: Tensor, length: int = 0) -> Tensor:
        given = self.long if self.long and length > self.trained_length else self.frequencies
        if len(given) != len(frequency):
            give = f"give {len(frequency)}, half the head dimension"
            raise ValueError(f"GivenFrequencies.frequencies: has {len(given)} numbers; {give}")
        return torch.tensor(given, dtype=torch.float64, device=frequency.device)


@dataclass(frozen=True)
class Rope(Position):
    """Rotary positions (Su et al., arXiv 2104.09864): rotates dimensions (m, m + D/2) by `position * base^(-2m/D)`."""

    colour, spoken = "#004488", "RoPE"

    base: Annotated[float, Bounds(gt=1)] = 10000.0
    """Base of the wavelengths. The paper uses a "larger base B" without giving its value."""
    scaling: RopeScaling = field(default_factory=NoScaling)
    """Change of the frequencies for texts longer than the trained ones."""
    skip_every: PositiveInt | None = None
    """Every layer whose number, from 1, is a multiple of it does not rotate (arXiv 2501.18795); None rotates in all."""
    skip_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that do not rotate."""

    def build(self, d_model: int, head_dim: int, context_length: int) -> PositionModule:  # noqa: ARG002
        if head_dim % 2:
            fix = "choose another d_model or n_heads"
            raise ValueError(f"Rope: the head dimension must be even, got {head_dim}; {fix}")
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        return _Rope(self, self.base**-exponent)


class _Rope(PositionModule):
    frequency: Tensor

    def __init__(self, cfg: Rope, unscaled: Tensor) -> None:
        super().__init__()
        self.cfg, self.unscaled = cfg, unscaled
        of_short, of_endless = (cfg.scaling.scale(unscaled, length) for length in (0, ENDLESS))
        self.relative = torch.equal(of_short, of_endless)
        self.register_buffer("frequency", of_short.float().to(torch.get_default_device()), persistent=False)

    def keeps_rotation(self, shorter: int, longer: int) -> bool:
        return torch.equal(*(self.cfg.scaling.scale(self.unscaled, length) for length in (shorter, longer)))

    def rotates(self, layer: int) -> bool:
        every = self.cfg.skip_every
        return layer not in self.cfg.skip_layers and (every is None or (layer + 1) % every > 0)

    def compute_angles(self, length: int) -> Tensor | None:
        skips = self.cfg.skip_every or self.cfg.skip_layers
        return None if skips else self._turn(torch.arange(length, device=self.frequency.device), length)

    def _turn(self, position: Tensor, length: int) -> Tensor:
        frequency = self.frequency
        if not self.relative:
            frequency = self.cfg.scaling.scale(self.unscaled, length).float().to(frequency.device)
        return position[..., None].float() * frequency

    def rotation(self, length: int, offset: int, places: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        position = torch.arange(offset, offset + length, device=self.frequency.device) if places is None else places
        last = offset + length if places is None or self.relative else int(places.max()) + 1
        angle = self._turn(position, last)
        cos, sin = torch.cat((angle.cos(), angle.cos()), dim=-1), angle.sin()
        signed_sin = torch.cat((-sin, sin), dim=-1)

        def rotate(x: Tensor) -> Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            first, second = wide.chunk(2, dim=-1)
            start = length - x.shape[-2]
            # Axes of heads and score maps are between those of sequences and tokens.
            factors = (t[..., start:, :] for t in (cos, signed_sin))
            by_cos, by_sin = (t.view(-1, *[1] * (x.dim() - 3), *t.shape[-2:]) for t in factors)
            return (wide * by_cos + torch.cat((second, first), dim=-1) * by_sin).to(x.dtype)

        return rotate


@dataclass(frozen=True)
class LearnedAbsolute(Position):
    """A learned vector per position, added to the embeddings; raises ValueError beyond the context length."""

    colour, spoken = "#DDAA33", "learned absolute"
    first_values = ("init_std",)

    init_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial vectors. Whether the model can tell the first keys from others depends on its
    ratio to that of the token embeddings."""

    def build(self, d_model: int, head_dim: int, context_length: int) -> PositionModule:  # noqa: ARG002
        return _LearnedAbsolute(d_model, context_length, self.init_std)


class _LearnedAbsolute(PositionModule, SelfInitialised):
    def __init__(self, d_model: int, context_length: int, init_std: float) -> None:
        super().__init__()
        self.init_std = init_std
        self.embedding = nn.Embedding(context_length, d_model)

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        nn.init.normal_(self.embedding.weight, std=self.init_std, generator=generator_of("embedding.weight"))

    def embed(self, x: Tensor, offset: int, places: Tensor | None = None) -> Tensor:
        end, learned = offset + x.shape[1], self.embedding.num_embeddings
        if places is None and end > learned:
            fix = "use Rope or NoPosition for longer sequences"
            raise ValueError(f"LearnedAbsolute: {end} positions requested, {learned} learned; {fix}")
        return x + self.embedding(torch.arange(offset, end, device=x.device) if places is None else places)
