"""Lazy Attention (thresholded softmax with a learned distance bias) as one PyTorch function."""

from importlib.metadata import PackageNotFoundError, version

from flash_lazy.api import Backend, attention_weights, lazy_attention, resolve_backend
from flash_lazy.inputs import Stats, Weights

try:
    __version__ = version("flash-lazy")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["Backend", "Stats", "Weights", "__version__", "attention_weights", "lazy_attention", "resolve_backend"]
