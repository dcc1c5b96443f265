"""The exponential moving average of the weights that are trained (after Polyak and Juditsky 1992)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """m_1 = w_1, m_t = decay m_(t-1) + (1 - decay) w_t over the finished steps t, of what is trained.

    What follows a schedule (a ramped tau) is not averaged: it stays what it is at its step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._update = get_ema_multi_avg_fn(decay)
        self.values: dict[str, Tensor] = {}
        """By the parameter's name; empty before the first step."""

    @torch.no_grad()
    def update(self) -> None:
        """After a step."""
        current = [parameter.detach() for parameter in self._own.values()]
        if self.values:
            # Those of a checkpoint are read before the model moves to its device.
            self.values = {name: value.to(self._own[name].device) for name, value in self.values.items()}
            self._update([*self.values.values()], current, 0)
        else:
            self.values = dict(zip(self._own, (value.clone() for value in current), strict=True))

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """What a checkpoint holds."""
        self.values = {name: value.clone() for name, value in values.items()}

    @torch.no_grad()
    def apply(self) -> None:
        """Put the average in the place of the weights, for good."""
        for name, value in self.values.items():
            self._own[name].copy_(value)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """The average in the place of the weights, for a while."""
        weights = {name: self._own[name].detach().clone() for name in self.values}
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in weights.items():
                    self._own[name].copy_(value)
