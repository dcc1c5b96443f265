"""Interface of the token mixers, attention or a recurrent layer, and of their parts; the key-value caches of attention.

A mixer is a frozen dataclass (its settings) whose `build` returns the module that holds its parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from flash_lazy import Stats
from lit_lazy.support.checks import CheckedFields, NonNegativeInt, PositiveInt


class Drawn(CheckedFields):
    """A part whose class figures show by a colour and a name. Both are the class's own, not its subclasses'."""

    colour: ClassVar[str] = ""
    """Hexadecimal; figures choose one where it is empty. The project's are Okabe and Ito's, then Tol's muted ones, for
    positions his high-contrast ones: they are also distinguishable with common colour blindness."""
    spoken: ClassVar[str] = ""
    """How people write its name, where that is not the name of the class."""


GeneratorOf = Callable[[str], torch.Generator]
"""Returns the generator of a parameter, by the parameter's name within its module."""


class SelfInitialised(nn.Module):
    """A module that initialises its parameters, those of its submodules included."""

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        """Draw the random initial parameters, each from its own generator; by default there are none."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of the layer that a mixer, normaliser or gate is built for."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_model: int
    context_length: int
    layer: int = 0
    """Index of the layer, from 0 to n_layers - 1."""
    n_layers: int = 1
    norm_eps: float = 1e-6
    """Of the RMSNorm of queries and keys."""


class Cache(ABC):
    """State of a layer between the passes of decoding."""

    length: int = 0
    """Number of tokens read, without evicted ones."""
    evicted: int = 0
    """Number of evicted tokens."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Allocated memory in bytes, including room for future tokens."""

    def split_tokens(self, tokens: Tensor) -> Sequence[Tensor]:
        """Split tokens `[B, L]` into parts that the model can read in one pass each."""
        return [tokens]

    def span(self, new: int) -> tuple[int, int]:
        """Number and first of the positions that a pass over `new` tokens needs; the new tokens have the last ones."""
        return new, self.length


class PassInputs(NamedTuple):
    """Inputs of a layer in one forward pass, besides the residual stream.

    rotate: rotates heads `[B, H, L, rotary_dim]` by their positions.
    cache: the layer's cache, created by `new_cache`; the tokens continue those in it.
    with_stats: whether attention returns its `Stats`.
    key_mask: bool `[B, Lk]`, False hides a key from all queries.
    cu_seqlens: int32 `[n + 1]`, boundaries of the documents in the B * L tokens, which see only their own document;
        without cache and key_mask.
    dropout_keys: int64 `[B]`, seeds of the residual dropout (`sequence_keys`); None for no dropout.
    """

    rotate: Callable[[Tensor], Tensor]
    cache: Any = None
    with_stats: bool = False
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    dropout_keys: Tensor | None = None


class MixerModule(nn.Module, ABC):
    """Parameters of a mixer.

    attends: whether the mixer is attention, with measurable weights and maskable keys.
    rotary_dim: the width that the model's position rotates.
    """

    attends: bool = False
    rotary_dim: int

    @abstractmethod
    def backend_name(self, documents: bool = False) -> str:
        """Name of the implementation that a training step runs on the parameters' device.

        documents: whether attention is restricted to documents.
        """

    @abstractmethod
    def new_cache(self) -> Cache:
        """Create an empty cache."""

    @abstractmethod
    def flops_per_token(self, context_length: int) -> int:
        """Training FLOPs per token, without those of linear layers."""

    @abstractmethod
    def forward(self, x: Tensor, inputs: PassInputs) -> tuple[Tensor, Stats | None]:
        """Mix the newest L tokens x `[B, L, d_model]`; returns the same shape, and attention's stats if requested."""


class Mixer(Drawn, ABC):
    """Settings of a token mixer."""

    attends: ClassVar[bool] = False
    """Whether the mixer is attention, configured by `model.attention`."""

    @abstractmethod
    def build(self, shape: LayerShape) -> MixerModule:
        """Build the module of one layer."""


Rotate = Callable[[Tensor], Tensor]
"""Rotates keys `[B, Hkv, L, D]` by their positions; fewer keys than positions have the last positions."""


@dataclass(frozen=True)
class Eviction(CheckedFields):
    """Eviction policy of a streaming cache: keep the first and the newest tokens (Xiao et al., arXiv 2309.17453)."""

    first: NonNegativeInt
    """Number of first tokens to keep."""
    window: PositiveInt
    """Number of newest tokens to keep, the current one included."""

    @property
    def capacity(self) -> int:
        """Number of tokens in a full cache."""
        return self.first + self.window


class LayerCache(Cache):
    """Keys, rotated by their positions, and values of one layer, `[B, Hkv, L, D]`.

    Buffers double when they are full, so that a new token does not copy all previous ones.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @property
    def k(self) -> Tensor:
        """The cached keys."""
        return self._buffers[0][:, :, : self.length]

    @property
    def v(self) -> Tensor:
        """The cached values."""
        return self._buffers[1][:, :, : self.length]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def extend(self, k: Tensor, v: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """Append unrotated keys and values; returns all cached keys, rotated, and values."""
        self._buffers = self._buffers or [k[:, :, :0], v[:, :, :0]]
        self._buffers = [self._append(*pair) for pair in zip(self._buffers, (rotate(k), v), strict=True)]
        self.length += k.shape[2]
        return self.k, self.v

    def _append(self, buffer: Tensor, new: Tensor) -> Tensor:
        if new.requires_grad:  # a backward pass needs the buffer unchanged
            return torch.cat((buffer[:, :, : self.length], new), 2)
        end = self.length + new.shape[2]
        if end > buffer.shape[2]:
            larger = new.new_empty(*new.shape[:2], max(end, 2 * self.length), new.shape[3])
            larger[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = larger
        buffer[:, :, self.length : end] = new
        return buffer


class StreamingCache(LayerCache):
    """A cache of the first and the newest tokens, whose keys are rotated by their index in the cache.

    Positions therefore never exceed those of the training, however long the text. Once the cache is full, tokens are
    read one at a time, because each evicts another.
    """

    def __init__(self, eviction: Eviction) -> None:
        super().__init__()
        self.eviction = eviction

    def split_tokens(self, tokens: Tensor) -> Sequence[Tensor]:
        free = max(0, self.eviction.capacity - self.length)
        return [part for part in (tokens[:, :free], *tokens[:, free:].split(1, 1)) if part.shape[1]]

    def span(self, new: int) -> tuple[int, int]:
        return min(self.length + new, self.eviction.capacity), 0

    def extend(self, k: Tensor, v: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        new, capacity = k.shape[2], self.eviction.capacity
        evicted = max(0, self.length + new - capacity)
        if evicted and new > 1:
            held = f"a streaming cache that holds {self.length} of {capacity}"
            raise ValueError(f"{new} tokens for {held}; append them one at a time")
        first, kept = self.eviction.first, self._buffers or [k[:, :, :0], v[:, :, :0]]
        pairs = zip(kept, (k, v), strict=True)
        self._buffers = [torch.cat((old[:, :, :first], old[:, :, first + evicted :], x), 2) for old, x in pairs]
        self.length += new - evicted
        self.evicted += evicted
        return rotate(self.k), self.v
