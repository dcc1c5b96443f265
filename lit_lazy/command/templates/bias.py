"""My bias: what is added to a score for the distance of its key; this one falls with a power of the distance.

`lit-lazy train my_bias.py` trains it under Lazy Attention's rule.
"""

from dataclasses import dataclass

import torch

from lit_lazy.attention import Bias, BiasTerms, Elastic
from lit_lazy.attention.bias import BiasModule
from lit_lazy.config import RunConfig, experiment


@dataclass(frozen=True)
class MyBias(Bias):
    # Each field is an option, --model.attention.bias.FIELD.
    power: float = 0.5

    def build(self, n_heads: int, context_length: int) -> BiasModule:
        return MyBiasModule(n_heads, self.power)


class MyBiasModule(BiasModule):
    def __init__(self, n_heads: int, power: float) -> None:
        super().__init__()
        self.power = power
        self.slope = torch.nn.Parameter(torch.ones(n_heads, 1))

    def forward(self, n_keys: int) -> BiasTerms:
        """A table `[heads, distances]`, at most `n_keys` wide; beyond its end the bias is 0."""
        # Change from here on.
        return BiasTerms(table=-self.slope * torch.arange(n_keys, device=self.slope.device) ** self.power)


def config() -> RunConfig:
    # The experiment to train it in, with further changes by dotted path; this one takes seconds and says nothing.
    changes = {"model.attention.normaliser": Elastic(), "model.attention.bias": MyBias()}
    return experiment("backcopy_tiny", changes)
