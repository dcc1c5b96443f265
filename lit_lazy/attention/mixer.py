"""Interface of the token mixers, attention or a recurrent layer, and of their parts.

A mixer is a frozen dataclass (its settings) whose `build` returns the module that holds its parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from flash_lazy import Stats
from lit_lazy.attention.cache import Cache
from lit_lazy.support.checked_fields import CheckedFields


class Drawn(CheckedFields):
    """A part whose class figures show by a colour and a name. Both are the class's own, not its subclasses'."""

    colour: ClassVar[str] = ""
    """Hexadecimal; figures choose one where it is empty. Most of the project's are Okabe and Ito's or Tol's, which
    are also distinguishable with common colour blindness."""
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
