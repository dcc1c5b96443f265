"""What mixes the tokens of a layer: attention, or a layer that keeps a state in place of keys and values.

A mixer is a frozen dataclass (its settings) whose `build` makes the module that holds its parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from flash_lazy import Stats
from lit_lazy.attention.normaliser import LayerShape


class Cache(Protocol):
    """What a layer keeps of the tokens that it has seen, to continue them."""

    evicted: int
    """Tokens dropped."""

    @property
    def length(self) -> int:
        """Number of tokens kept."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        ...

    def split_tokens(self, tokens: Tensor) -> Sequence[Tensor]:
        """Tokens `[B, L]` in parts that can be read at once."""
        ...

    def span(self, new: int) -> tuple[int, int]:
        """How many positions, and from which on, are needed when so many tokens come; they end there."""
        ...


class MixerModule(nn.Module, ABC):
    """Parameters of a mixer.

    attends: whether it is attention, with weights to be measured and keys that can be hidden.
    rotary_dim: the width that the model's position turns.
    """

    attends: bool = False
    rotary_dim: int

    @abstractmethod
    def backend_name(self, documents: bool = False) -> str:
        """The implementation that a training step runs where the parameters are.

        documents: on data whose attention is kept within documents.
        """

    @abstractmethod
    def new_cache(self) -> Cache:
        """What it keeps of the tokens seen, before the first."""

    @abstractmethod
    def flops_per_token(self, context_length: int) -> int:
        """Training FLOPs per token, but for those of the weights of linear layers."""

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        rotate: Callable[[Tensor], Tensor],
        cache: Any = None,
        with_stats: bool = False,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Stats | None]:
        """x `[B, L, d_model]`: the newest L tokens. Returns the same shape, and attention's stats where asked.

        rotate: turns heads `[B, H, L, rotary_dim]` by their position. cache: of `new_cache`; the tokens continue those
        in it. key_mask: bool `[B, Lk]`, False hides a key. cu_seqlens: int32 `[n + 1]`, where documents begin among the
        tokens of all sequences, which see their own document alone.
        """


class Mixer(ABC):
    """Settings of what mixes the tokens of a layer."""

    attends: ClassVar[bool] = False
    """Whether it is attention; then `model.attention` describes it, and it is not built by itself."""

    @abstractmethod
    def build(self, shape: LayerShape) -> MixerModule | None:
        """The module of one layer; None for attention, which `model.attention` describes."""


@dataclass(frozen=True)
class SelfAttention(Mixer):
    """Attention, as `model.attention` describes it."""

    attends = True

    def build(self, shape: LayerShape) -> None:  # noqa: ARG002
        return None
