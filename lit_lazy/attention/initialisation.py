"""Parts of a model that draw their own initial values."""

from collections.abc import Callable

import torch
from torch import nn

GeneratorOf = Callable[[str], torch.Generator]
"""Gives the generator of one parameter, by the parameter's name within its module."""


class SelfInitialised(nn.Module):
    """A module whose parameters, those of its submodules included, are drawn by itself."""

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        """Draw the parameters that start random, each from its own generator. The default: none does."""
