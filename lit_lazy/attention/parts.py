"""Bases of exchangeable parts: how figures show them, and how modules initialise themselves."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from lit_lazy.support.checks import CheckedFields


class Drawn(CheckedFields):
    """A part whose class figures show by a colour and a name. Both are the class's own, not its subclasses'."""

    colour: ClassVar[str] = ""
    """Hexadecimal; figures choose one where it is empty. The project's are Okabe and Ito's, then Tol's muted ones, for
    positions his high-contrast ones: they are also distinguishable with common colour blindness."""
    spoken: ClassVar[str] = ""
    """How people write its name, where that is not the name of the class."""


GeneratorOf = Callable[[str], torch.Generator]
"""Returns the generator of a parameter, by the parameter's name within its module."""


class SelfInitialised(nn.Module):
    """A module that initialises its parameters, those of its submodules included."""

    def init_parameters(self, generator_of: GeneratorOf) -> None:
        """Draw the random initial parameters, each from its own generator; by default there are none."""
