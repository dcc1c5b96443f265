"""Data sources: each is a frozen config whose `load()` gives the train and validation sequences of a run.

Every module of this package is imported here, so that a source put into a new file is found by its class name.
"""

import importlib
import pkgutil

from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.base import DataConfig, DataSource
from lit_lazy.data.sampler import StepBatchSampler
from lit_lazy.data.stdlib import Stdlib
from lit_lazy.data.text import Text

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Backcopy", "DataConfig", "DataSource", "Stdlib", "StepBatchSampler", "Text"]
