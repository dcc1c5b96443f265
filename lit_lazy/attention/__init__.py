"""The attention mechanism: specifications, normalisers, biases, positions, and the module that joins them."""

from lit_lazy.attention.bias import Alibi, Bias, BiasTerms, Fire, KerpleLog, LearnedBias, NoBias, T5Bias
from lit_lazy.attention.module import Attention, AttentionSpec, LayerCache
from lit_lazy.attention.normaliser import Elastic, Normaliser, Softmax
from lit_lazy.attention.position import LearnedAbsolute, NoPosition, Position, Rope

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
