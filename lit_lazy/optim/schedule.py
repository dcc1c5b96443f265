"""Learning rate schedules after the warm-up.

A schedule is a frozen dataclass (its settings) with one function of the finished share of the steps.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from lit_lazy.support.checked_fields import CheckedFields
from lit_lazy.support.checks import Bounds

Decay = Literal["linear", "sqrt"]


class Schedule(CheckedFields, ABC):
    """Settings of a schedule."""

    falls: ClassVar[bool] = True
    """Whether the schedule ends at `train.final_lr_fraction`, which has no effect otherwise."""

    @abstractmethod
    def factor(self, progress: float, final: float) -> float:
        """Factor on the peak learning rate.

        progress: finished share of the steps after the warm-up, 0 to 1. final: factor at the end.
        """


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from the peak to `train.final_lr_fraction` of it (Loshchilov and Hutter, arXiv 1608.03983)."""

    def factor(self, progress: float, final: float) -> float:
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WSD(Schedule):
    """Warm-up, stable, decay: the peak, then a fall to `train.final_lr_fraction` (Hu et al., arXiv 2404.06395)."""

    decay_share: Annotated[float, Bounds(gt=0, le=1)] = 0.2
    """Share of the steps after the warm-up in which the rate decays."""
    decay: Decay = "sqrt"
    """Form of the decay: linear, or sqrt, 1 - sqrt(u) for the finished share u (Hägele et al., arXiv 2405.18392)."""

    def factor(self, progress: float, final: float) -> float:
        fallen = max(0.0, 1 - (1 - progress) / self.decay_share)
        return 1 - (1 - final) * (math.sqrt(fallen) if self.decay == "sqrt" else fallen)


@dataclass(frozen=True)
class Constant(Schedule):
    """The peak learning rate until the end."""

    falls = False

    def factor(self, progress: float, final: float) -> float:  # noqa: ARG002
        return 1.0
