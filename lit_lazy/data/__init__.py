"""Data sources: each is a frozen config whose `load()` gives the train and validation sequences of a run."""

from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.base import DataConfig, DataSource
from lit_lazy.data.sampler import StepBatchSampler
from lit_lazy.data.stdlib import Stdlib

__all__ = ["Backcopy", "DataConfig", "DataSource", "Stdlib", "StepBatchSampler"]
