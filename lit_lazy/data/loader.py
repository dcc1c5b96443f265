"""Data loaders for training and validation."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lit_lazy.data.base import Batch, DataSource
from lit_lazy.data.sampler import Portion, StepBatchSampler


def train_loader(
    source: DataSource, batch_size: int, seed: int, start_step: Callable[[], int], share: Portion | None = None
) -> DataLoader[Batch]:
    """Training batches as a function of (seed, step), or one device's share of each.

    start_step: called when iteration starts.
    """
    sampler = StepBatchSampler(len(source.train), batch_size, seed, start_step, share)
    return DataLoader(source.train, batch_sampler=sampler, collate_fn=_identity)


def validation_loader(source: DataSource, batch_size: int) -> DataLoader[Batch]:
    """The complete validation set in order."""
    return DataLoader(source.validation, batch_size=batch_size, collate_fn=_identity)


def _identity(batch: Any) -> Any:
    return batch
