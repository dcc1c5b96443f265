"""Interface of the token mixers: attention, or a layer with a recurrent state in place of keys and values.

A mixer is a frozen dataclass (its settings) whose `build` returns the module that holds its parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from flash_lazy import Stats
from lit_lazy.attention.drawn import Drawn
from lit_lazy.attention.normaliser import LayerShape


class Cache(Protocol):
    """State of a layer between the passes of decoding."""

    evicted: int
    """Number of evicted tokens."""

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        ...

    @property
    def nbytes(self) -> int:
        """Allocated memory in bytes."""
        ...

    def split_tokens(self, tokens: Tensor) -> Sequence[Tensor]:
        """Split tokens `[B, L]` into parts that the model can read in one pass each."""
        ...

    def span(self, new: int) -> tuple[int, int]:
        """Number and first of the positions that a pass over `new` tokens needs; the new tokens have the last ones."""
        ...


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
