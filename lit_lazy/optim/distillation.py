"""Loss terms that compare a model with its teacher: the model of `init_from` as it was, under its own attention.

A term is a frozen dataclass (its settings) with one function of the two models' passes over the same batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_lazy.support.checks import CheckedFields, PositiveFloat


class Passes(NamedTuple):
    """The passes of a model and of its teacher over the same tokens.

    mixed: what each layer's attention adds to the residual stream, `[B, L, d_model]`: the model's and the teacher's;
    empty unless the term `reads_attention`.
    average_logits: mean over the predicted tokens of a function that takes the model's and the teacher's logits
    `[N, V]`, float32, and gives `[N]`. They are computed in blocks of tokens, again in the backward pass, so that all
    logits are never in memory.
    """

    mixed: Sequence[tuple[Tensor, Tensor]]
    average_logits: Callable[[Callable[[Tensor, Tensor], Tensor]], Tensor]


class Distillation(CheckedFields, ABC):
    """Settings of a term, which is added to the loss."""

    active: ClassVar[bool] = True
    """Whether there is a teacher."""
    reads_attention: ClassVar[bool] = False
    """Whether the term compares the outputs of attention, layer by layer."""

    @abstractmethod
    def compute(self, passes: Passes) -> Tensor:
        """The term, a scalar, its weight included: a mean over sequences, so that micro-batches do not change it."""


@dataclass(frozen=True)
class NoDistillation(Distillation):
    """No teacher."""

    active = False

    def compute(self, passes: Passes) -> Tensor:
        raise NotImplementedError("there is no teacher")


@dataclass(frozen=True)
class Logits(Distillation):
    """T^2 KL(teacher || model) of the next token's distribution at temperature T, in nats (Hinton et al. 2015)."""

    weight: PositiveFloat = 1.0
    """Factor of the term."""
    temperature: PositiveFloat = 1.0
    """T, which divides the logits of both."""

    def compute(self, passes: Passes) -> Tensor:
        def compute_divergence(model: Tensor, teacher: Tensor) -> Tensor:
            own, expected = ((logits / self.temperature).log_softmax(-1) for logits in (model, teacher))
            return F.kl_div(own, expected, reduction="none", log_target=True).sum(-1)

        return self.weight * self.temperature**2 * passes.average_logits(compute_divergence)


@dataclass(frozen=True)
class AttentionOutputs(Distillation):
    """Squared error of each layer's attention output relative to the teacher's square, averaged over the layers.

    Both squares are means over a sequence.
    """

    weight: PositiveFloat = 1.0
    """Factor of the term."""

    reads_attention = True

    def compute(self, passes: Passes) -> Tensor:
        errors = [
            (model.float() - teacher.float()).square().mean((1, 2)) / teacher.float().square().mean((1, 2))
            for model, teacher in passes.mixed
        ]
        return self.weight * torch.stack(errors).mean()
