"""Positional encodings of embeddings, queries and keys; biases on the scores are in `bias`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_lazy.attention.initialisation import GeneratorOf, SelfInitialised


class PositionModule(nn.Module):
    """Adds positions to embeddings (`embed`) and rotates queries and keys (`rotation`); the default does neither.

    relative: whether the model's output depends only on distances between tokens, not on absolute positions. Then
    prompts of unequal lengths can be decoded together, and a cache may evict tokens.
    places: 0-based position of each token, int64 `[B, L]`; None for consecutive positions from `offset`.
    """

    relative: bool = False

    def embed(self, x: Tensor, offset: int, places: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Add positions to x `[B, L, d_model]`, whose first token has the 0-based position `offset`."""
        return x

    def rotation(
        self,
        length: int,  # noqa: ARG002
        offset: int,  # noqa: ARG002
        places: Tensor | None = None,  # noqa: ARG002
    ) -> Callable[[Tensor], Tensor]:
        """The rotation of queries and keys `[B, H, R, D]` of the last R <= length tokens before `offset + length`."""
        return lambda x: x

    def compute_angles(self, length: int) -> Tensor | None:
        """Angles `[length, D / 2]` by which `rotation` turns dimensions (m, m + D / 2) of the first tokens.

        `[length, 0]` if it turns none, None if it does anything else.
        """
        return torch.empty(length, 0) if type(self).rotation is PositionModule.rotation else None


class Position(ABC):
    """Settings of a positional encoding."""

    @abstractmethod
    def build(self, d_model: int, head_dim: int, context_length: int) -> PositionModule: ...


@dataclass(frozen=True)
class NoPosition(Position):
    """No positional encoding, only the causal mask and the bias, if any."""

    def build(self, d_model: int, head_dim: int, context_length: int) -> PositionModule:  # noqa: ARG002
        return _NoPosition()


class _NoPosition(PositionModule):
    relative = True


@dataclass(frozen=True)
class Rope(Position):
    """Rotary positions (Su et al., arXiv 2104.09864): rotates dimensions (m, m + D/2) by `position * base^(-2m/D)`."""

    base: float = 10000.0
    """Base of the wavelengths. The paper uses a "larger base B" without giving its value."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.base) and self.base > 1):
            raise ValueError(f"Rope.base={self.base}: must be finite and above 1")

    def build(self, d_model: int, head_dim: int, context_length: int) -> PositionModule:  # noqa: ARG002
        if head_dim % 2:
            raise ValueError(
                f"Rope: the head dimension must be even, got {head_dim}; choose another d_model or n_heads"
            )
        return _Rope(self.base, head_dim)


class _Rope(PositionModule):
    relative = True
    frequency: Tensor

    def __init__(self, base: float, head_dim: int) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("frequency", (base**-exponent).float(), persistent=False)

    def compute_angles(self, length: int) -> Tensor | None:
        return self._turn(torch.arange(length, device=self.frequency.device))

    def _turn(self, position: Tensor) -> Tensor:
        return position[..., None].float() * self.frequency

    def rotation(self, length: int, offset: int, places: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        position = torch.arange(offset, offset + length, device=self.frequency.device) if places is None else places
        angle = self._turn(position)
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

    init_std: float = 0.02
    """Standard deviation of the initial vectors. Whether the model can tell the first keys from others depends on its
    ratio to that of the token embeddings."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.init_std) and self.init_std >= 0):
            raise ValueError(f"LearnedAbsolute.init_std={self.init_std}: must be finite and 0 or more")

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
        if places is not None:
            return x + self.embedding(places)
        end = offset + x.shape[1]
        if end > self.embedding.num_embeddings:
            raise ValueError(
                f"LearnedAbsolute: {end} positions requested, {self.embedding.num_embeddings} learned; "
                "use Rope or NoPosition for longer sequences"
            )
        return x + self.embedding.weight[offset:end]
