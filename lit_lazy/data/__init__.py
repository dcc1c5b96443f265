"""Data sources: each file holds one frozen config whose `load()` returns the sequences of a run.

This package gives only their shared interface, which needs nothing but torch; the sources need more.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_lazy.data.base import IGNORED, Batch, DataConfig, DataSource, TokenDataset, fingerprint

__all__ = ["IGNORED", "Batch", "DataConfig", "DataSource", "TokenDataset", "fingerprint"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is (PEP 562), so that `lit_lazy.data.facts` needs no torch."""
    if name in __all__:
        return getattr(import_module("lit_lazy.data.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
