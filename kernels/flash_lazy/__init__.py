"""Lazy Attention (thresholded softmax with a learned distance bias) as one PyTorch function."""

from importlib.metadata import PackageNotFoundError, version

from .api import attention_weights, lazy_attention, lazy_attention_varlen, resolve_backend
from .call import Backend, Stats, Threshold, Weights
from .layer import KeyValueCache, LazyAttention
from .rules import Rows, Rule, RuleWeights, rule_attention, rule_weights

try:
    __version__ = version("flash-lazy")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0.0.0"

__all__ = [
    "Backend",
    "KeyValueCache",
    "LazyAttention",
    "Rows",
    "Rule",
    "RuleWeights",
    "Stats",
    "Threshold",
    "Weights",
    "__version__",
    "attention_weights",
    "lazy_attention",
    "lazy_attention_varlen",
    "resolve_backend",
    "rule_attention",
    "rule_weights",
]
