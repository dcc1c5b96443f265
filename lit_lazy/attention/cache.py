"""What a layer keeps between the passes of decoding: a cache of keys and values, whole or with eviction."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_lazy.support.checked_fields import CheckedFields, NonNegativeInt, PositiveInt


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
