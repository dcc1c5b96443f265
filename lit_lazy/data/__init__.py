"""Data sources: each file holds one frozen config whose `load()` returns the sequences of a run.

This package imports only their shared interface, which needs nothing but torch; the sources need more.
"""

from lit_lazy.data.base import IGNORED, Batch, DataConfig, DataSource, TokenDataset, fingerprint

__all__ = ["IGNORED", "Batch", "DataConfig", "DataSource", "TokenDataset", "fingerprint"]
