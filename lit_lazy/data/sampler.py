"""The order in which a run sees its data, and the loaders of training and validation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

from lit_lazy.data.source_interface import DataSource
from lit_lazy.data.token_dataset import Batch
from lit_lazy.support.checked_fields import require


@dataclass(frozen=True)
class Portion:
    """One device's share of every batch: `parts` of the devices * parts into which the batch is split."""

    device: int = 0
    devices: int = 1
    parts: int = 1

    @property
    def n(self) -> int:
        return self.devices * self.parts

    @property
    def own(self) -> range:
        """Indices of this device's parts, in the order in which it processes them."""
        return range(self.device, self.n, self.devices)


class StepBatchSampler(Sampler[list[int]]):
    """Endless batches of item indices; batch s is a function of (seed, s) only.

    Each pass over the items is a permutation drawn from (seed, pass number). Batches are slices of the concatenated
    passes: every item occurs once per pass, and a batch may span two passes.
    Iteration starts at batch `start_step()`, read when the iterator is created. With the trainer's global step, a run
    resumed in the middle of a pass sees exactly the batches it would have seen.
    With `share`, iteration yields that device's parts of each batch, all of one size, one after the other.
    """

    def __init__(
        self, n_items: int, batch_size: int, seed: int, start_step: Callable[[], int], share: Portion | None = None
    ):
        require(batch_size <= n_items, "batch_size", batch_size, f"must not exceed the {n_items} items")
        self.n_items = n_items
        self.batch_size = batch_size
        self.seed = seed
        self.start_step = start_step
        self.share = share or Portion()
        require(batch_size % self.share.n == 0, "batch_size", batch_size, f"must be a multiple of {self.share.n} parts")

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self.start_step())  # here, because a generator would read it only at its first batch

    def _batches(self, step: int) -> Iterator[list[int]]:
        number, start = divmod(step * self.batch_size, self.n_items)
        order = self._draw_order(number)
        while True:
            batch = order[start : start + self.batch_size]
            start += self.batch_size
            if start >= self.n_items:
                number, start = number + 1, start - self.n_items
                order = self._draw_order(number)
                batch = np.concatenate([batch, order[:start]])
            yield from (batch[part :: self.share.n].tolist() for part in self.share.own)

    def _draw_order(self, number: int) -> np.ndarray:
        """Order of the items in pass `number`, `[n_items]`."""
        source = np.random.SeedSequence(self.seed, spawn_key=(number,))
        return np.random.default_rng(source).permutation(self.n_items)


def pick_evenly(n: int, k: int) -> np.ndarray:
    """k evenly spaced numbers from 0 .. n - 1, for k <= n."""
    return np.arange(k) * n // k


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
