"""Token mixers: attention with its normalisers, biases, gates and positions, and recurrent layers without attention."""

from flash_lazy import Rows
from lit_lazy.attention import rivals
from lit_lazy.attention.bias import Alibi, Bias, BiasModule, BiasTerms, Fire, KerpleLog, LearnedBias, NoBias, T5Bias
from lit_lazy.attention.cache import Cache, Eviction, LayerCache, StreamingCache
from lit_lazy.attention.gate import Gate, GateModule, HeadNorm, NoGate, OutputGate, ValueGate
from lit_lazy.attention.layer import Attention, AttentionSpec, SelfAttention
from lit_lazy.attention.mixer import LayerShape, Mixer, MixerModule, PassInputs
from lit_lazy.attention.normaliser import AttentionCall, Elastic, Normaliser, NormaliserModule, Softmax
from lit_lazy.attention.position import LearnedAbsolute, NoPosition, Position, PositionModule, Rope
from lit_lazy.attention.recurrence import GatedDeltaNet, Mamba2, RetNet
from lit_lazy.attention.rivals import *  # noqa: F403

__all__ = [
    "Alibi",
    "Attention",
    "AttentionCall",
    "AttentionSpec",
    "Bias",
    "BiasModule",
    "BiasTerms",
    "Cache",
    "Elastic",
    "Eviction",
    "Fire",
    "Gate",
    "GateModule",
    "GatedDeltaNet",
    "HeadNorm",
    "KerpleLog",
    "LayerCache",
    "LayerShape",
    "LearnedAbsolute",
    "LearnedBias",
    "Mamba2",
    "Mixer",
    "MixerModule",
    "NoBias",
    "NoGate",
    "NoPosition",
    "Normaliser",
    "NormaliserModule",
    "OutputGate",
    "PassInputs",
    "Position",
    "PositionModule",
    "RetNet",
    "Rope",
    "Rows",
    "SelfAttention",
    "Softmax",
    "StreamingCache",
    "T5Bias",
    "ValueGate",
]
__all__ += rivals.__all__
