"""Shared code of the synthetic tasks: options, one random stream per split, sequences with their answers, token ids."""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch

from lit_lazy.data.source_interface import DataConfig, DataSource, fingerprint
from lit_lazy.data.token_dataset import IGNORED, TokenDataset
from lit_lazy.support.machine import require_memory

ORACLE = "oracle_nll"
"""Name in a batch of the loss of a predictor that knows the task."""
Splits = tuple[TokenDataset, TokenDataset]
"""Training and validation sequences."""


class SyntheticTask(DataConfig, ABC):
    """Options that every synthetic task has, and its data source."""

    row_contrast: ClassVar[tuple[str, str] | None] = None
    """As of `DataSource`."""
    streams: ClassVar[int] = 0
    """Number of random streams before those of the splits."""

    @property
    def train_sequences(self) -> int: ...
    @property
    def validation_sequences(self) -> int: ...
    @property
    def task_seed(self) -> int: ...
    @property
    def context_length(self) -> int: ...

    @property
    def watched_key(self) -> int | None:
        """As of `DataSource`."""
        return None

    @abstractmethod
    def draw_split(self, n: int, rng: np.random.Generator) -> TokenDataset:
        """n sequences with their row groups."""

    @abstractmethod
    def draw(self) -> tuple[Splits, dict[str, float]]:
        """The sequences, and facts about the validation's, such as the losses of weak predictors."""

    def draw_splits(self) -> Splits:
        """Each split from its own random stream: neither split's size affects the other."""
        seeds = np.random.SeedSequence(self.task_seed).spawn(self.streams + 2)
        train, validation = (np.random.default_rng(seed) for seed in seeds[-2:])
        return self.draw_split(self.train_sequences, train), self.draw_split(self.validation_sequences, validation)

    def load(self) -> DataSource:
        return _build_source(self)

    def check_memory(self, bytes_per_sequence: int, *sizes: str) -> None:
        """Raises a one-line ValueError, which names the options `sizes`, if the sequences do not fit in memory."""
        names = ("train_sequences", "validation_sequences", *sizes)
        n = self.train_sequences + self.validation_sequences
        require_memory({f"data.{name}": getattr(self, name) for name in names}, n * bytes_per_sequence)

    def make_ignored_targets(self, n: int) -> np.ndarray:
        """int32 `[n, L]`, every target ignored."""
        return np.full((n, self.context_length), IGNORED, dtype=np.int32)


@functools.cache
def _build_source(task: SyntheticTask) -> DataSource:
    outline, (splits, facts) = task.outline(), task.draw()
    train, validation = splits
    drawn = [part for split in splits for part in (split.sequences, split.targets) if part is not None]
    return DataSource(
        name=outline.name,
        vocab_size=outline.vocab_size,
        context_length=task.context_length,
        fingerprint=fingerprint([part.numpy() for part in drawn]),
        info={
            "train_tokens": task.train_sequences * task.context_length,
            "validation_tokens": task.validation_sequences * task.context_length,
            "optimum_nats": validation.positions[ORACLE].numpy().mean(dtype=np.float64).item(),
            **facts,
        },
        train=train,
        validation=validation,
        row_groups=tuple(name for name in train.positions if name != ORACLE),
        row_contrast=task.row_contrast,
        watched_key=task.watched_key,
    )


def make_dataset(
    sequences: np.ndarray, targets: np.ndarray | None, groups: dict[str, np.ndarray], oracle: np.ndarray | None = None
) -> TokenDataset:
    """Dataset of sequences `[n, L + 1]`, targets `[n, L]`, None for the next tokens, and row groups, bool `[n, L]`.

    oracle: float32 `[n, L]`, loss in nats of a predictor that knows the task; None if it is certain of each answer.
    """
    positions = {name: torch.from_numpy(rows) for name, rows in groups.items()}
    certain = torch.zeros(()).expand(len(sequences), sequences.shape[1] - 1)
    positions[ORACLE] = certain if oracle is None else torch.from_numpy(oracle)
    return TokenDataset(torch.from_numpy(sequences), positions, None if targets is None else torch.from_numpy(targets))


def draw_permutations(n: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """n random permutations of 0 .. length - 1, int32 `[n, length]`."""
    return rng.permuted(np.tile(np.arange(length, dtype=np.int32), (n, 1)), axis=1)


Ids = TypeVar("Ids", int, np.ndarray)


@dataclass(frozen=True)
class PairVocabulary:
    """Token ids: the pair of key k and value v is k * values + v; then the queries, one per key, then the answers.

    There is one answer per value, and a last one, `null`, for a key that has no pair.
    """

    keys: int
    values: int

    def encode_pair(self, key: Ids, value: Ids) -> Ids:
        """Token that holds the key and its value."""
        return key * self.values + value

    def encode_query(self, key: Ids) -> Ids:
        """Token that asks for the value of a key."""
        return self.keys * self.values + key

    def encode_answer(self, value: Ids) -> Ids:
        """Target that names a value; it never occurs in a sequence."""
        return self.keys * (self.values + 1) + value

    @property
    def null(self) -> int:
        """Answer to a query whose key has no pair."""
        return self.encode_answer(self.values)

    @property
    def vocab_size(self) -> int:
        """Number of pairs, queries and answers."""
        return self.null + 1
