"""The attention mechanism: specifications, normalisers, biases, positions, and the module that joins them.

Every module of this package is imported here, so that a normaliser or bias put into a new file is found by its
class name (in configs, on the command line, in checkpoints) without editing anything else.
"""

import importlib
import pkgutil

from lit_lazy.attention.bias import Alibi, Bias, BiasTerms, Fire, KerpleLog, LearnedBias, NoBias, T5Bias
from lit_lazy.attention.module import Attention, AttentionSpec, LayerCache
from lit_lazy.attention.normaliser import Elastic, Normaliser, Softmax
from lit_lazy.attention.position import LearnedAbsolute, NoPosition, Position, Rope

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Alibi",
    "Attention",
    "AttentionSpec",
    "Bias",
    "BiasTerms",
    "Elastic",
    "Fire",
    "KerpleLog",
    "LayerCache",
    "LearnedAbsolute",
    "LearnedBias",
    "NoBias",
    "NoPosition",
    "Normaliser",
    "Position",
    "Rope",
    "Softmax",
    "T5Bias",
]
