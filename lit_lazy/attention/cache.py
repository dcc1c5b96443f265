"""Caches for decoding: the keys and values of a layer, all of them or the first few and the newest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Turn = Callable[[Tensor], Tensor]
"""Turns keys `[B, Hkv, L, D]` by their positions; of fewer than it knows positions for, these are the last ones."""


@dataclass(frozen=True)
class Eviction:
    """Which tokens a streaming cache keeps: the first and the newest (Xiao et al., arXiv 2309.17453)."""

    first: int
    """Tokens kept from the beginning on, 0 or more."""
    window: int
    """Newest tokens kept, the one at hand included; at least 1."""

    def __post_init__(self) -> None:
        if self.first < 0 or self.window < 1:
            raise ValueError(
                f"Eviction(first={self.first}, window={self.window}): first must be 0 or more, window at least 1"
            )

    @property
    def capacity(self) -> int:
        """Tokens in a full cache."""
        return self.first + self.window


class LayerCache:
    """Keys, turned by their position, and values of one layer, `[B, Hkv, L, D]`, grown as tokens are decoded.

    Memory is doubled when it is used up, so that a token does not copy all those before it.
    """

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []
        self.length = 0
        """Tokens cached."""
        self.evicted = 0
        """Tokens dropped."""

    @property
    def k(self) -> Tensor:
        """The keys so far."""
        return self._rooms[0][:, :, : self.length]

    @property
    def v(self) -> Tensor:
        """The values so far."""
        return self._rooms[1][:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Memory taken, that of tokens to come included."""
        return sum(room.nbytes for room in self._rooms)

    def split_tokens(self, tokens: Tensor) -> Sequence[Tensor]:
        """Tokens `[B, L]` in the parts that the model is to read them in."""
        return [tokens]

    def span(self, new: int) -> tuple[int, int]:
        """How many positions, and from which on, `extend` turns keys by when so many tokens come; they end there."""
        return new, self.length

    def extend(self, k: Tensor, v: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Append keys, not turned yet, and values; return all to attend to, their keys turned."""
        self._rooms = self._rooms or [k[:, :, :0], v[:, :, :0]]
        self._rooms = [self._append(*pair) for pair in zip(self._rooms, (turn(k), v), strict=True)]
        self.length += k.shape[2]
        return self.k, self.v

    def _append(self, room: Tensor, new: Tensor) -> Tensor:
        if new.requires_grad:  # what a backward pass needs is not to be written to
            return torch.cat((room[:, :, : self.length], new), 2)
        end = self.length + new.shape[2]
        if end > room.shape[2]:
            larger = new.new_empty(*new.shape[:2], max(end, 2 * self.length), new.shape[3])
            larger[:, :, : self.length] = room[:, :, : self.length]
            room = larger
        room[:, :, self.length : end] = new
        return room


class StreamingCache(LayerCache):
    """The first and the newest tokens; keys are kept as they are and turned by their place in the cache.

    So a position is never greater than those the model was trained with, however long the text. Tokens come one at a
    time once the cache is full: each has to see the cache as it is at its time.
    """

    def __init__(self, eviction: Eviction) -> None:
        super().__init__()
        self.eviction = eviction

    def split_tokens(self, tokens: Tensor) -> Sequence[Tensor]:
        """At once what there is room for, the rest one by one."""
        room = max(0, self.eviction.capacity - self.length)
        return [part for part in (tokens[:, :room], *tokens[:, room:].split(1, 1)) if part.shape[1]]

    def span(self, new: int) -> tuple[int, int]:
        return min(self.length + new, self.eviction.capacity), 0

    def extend(self, k: Tensor, v: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        new, room = k.shape[2], self.eviction.capacity
        evicted = max(0, self.length + new - room)
        if evicted and new > 1:
            raise ValueError(
                f"{new} tokens at once into a streaming cache of {self.length} of {room}; give them singly"
            )
        self._rooms = self._rooms or [k[:, :, :0], v[:, :, :0]]
        self._rooms = [self._evict_and_append(evicted, *pair) for pair in zip(self._rooms, (k, v), strict=True)]
        self.length += new - evicted
        self.evicted += evicted
        return turn(self.k), self.v

    def _evict_and_append(self, evicted: int, kept: Tensor, new: Tensor) -> Tensor:
        first = self.eviction.first
        return torch.cat((kept[:, :, :first], kept[:, :, first + evicted :], new), 2)
