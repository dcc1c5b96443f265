"""Data sources: each is a frozen config in a file of its own, whose `load()` gives the sequences of a run.

Only their contract is imported here: it needs torch alone, the sources need more.
"""

from lit_lazy.data.base import IGNORED, Batch, DataConfig, DataSource, TokenDataset, fingerprint

__all__ = ["IGNORED", "Batch", "DataConfig", "DataSource", "TokenDataset", "fingerprint"]
