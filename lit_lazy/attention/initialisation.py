"""Modules with custom initialisation."""

from collections.abc import Callable

import torch
from torch import nn

GeneratorOf = Callable[[str], torch.Generator]
"""Returns the generator of a parameter, by the parameter's name within its module."""


class SelfInitialised(nn.Module):
    """A module that initialises its parameters, those of its submodules included."""

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        """Draw the random initial parameters, each from its own generator; by default there are none."""
