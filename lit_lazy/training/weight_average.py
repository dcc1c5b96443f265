"""The exponential moving average of a model's weights. Only torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """m_1 = w_1, m_t = decay m_(t-1) + (1 - decay) w_t over the finished steps t, for trainable parameters.

    Parameters that are never trained, such as frozen ones and a tau that only follows its ramp, are not averaged; they
    keep the value of their step. Without a decay nothing is averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if decay and p.requires_grad}
        self._update = get_ema_multi_avg_fn(decay)
        self.values: dict[str, Tensor] = {}
        """By parameter name; empty before the first step."""

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        current = [parameter.detach() for parameter in self._parameters.values()]
        if self.values:
            # A checkpoint is read before the model moves to its device.
            self.values = {name: value.to(self._parameters[name].device) for name, value in self.values.items()}
            self._update([*self.values.values()], current, 0)
        else:
            self.values = dict(zip(self._parameters, (value.clone() for value in current), strict=True))

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Restore the average from a checkpoint."""
        self.values = {name: value.clone() for name, value in values.items()}

    def apply(self) -> None:
        """Replace the weights by their average for good, and end averaging."""
        self._set_weights(self.values)
        self._parameters, self.values = {}, {}

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Replace the weights by their average in the block."""
        weights = {name: self._parameters[name].detach().clone() for name in self.values}
        self._set_weights(self.values)
        try:
            yield
        finally:
            self._set_weights(weights)

    @torch.no_grad()
    def _set_weights(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parameters[name].copy_(value)
