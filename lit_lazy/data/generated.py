"""What generated sources share: a stream of random numbers for each part, sequences whose answers are certain."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from lit_lazy.data.base import IGNORED, TokenDataset


class GeneratedTask(Protocol):
    """What the options of a generated source have in common."""

    @property
    def train_sequences(self) -> int: ...
    @property
    def validation_sequences(self) -> int: ...
    @property
    def task_seed(self) -> int: ...


class AnsweredSequences(NamedTuple):
    """Sequences `[n, L + 1]`, whose last tokens nobody sees; their targets `[n, L]`; groups of rows, bool `[n, L]`."""

    sequences: np.ndarray
    targets: np.ndarray
    groups: dict[str, np.ndarray]

    def dataset(self) -> TokenDataset:
        """With `oracle_nll` of 0 nats: who knows the task is certain of each answer."""
        groups = {name: torch.from_numpy(rows) for name, rows in self.groups.items()}
        oracle = {"oracle_nll": torch.zeros(()).expand(self.targets.shape)}
        return TokenDataset(torch.from_numpy(self.sequences), groups | oracle, torch.from_numpy(self.targets))


AnyTask = TypeVar("AnyTask", bound=GeneratedTask)


def draw_both_parts(
    task: AnyTask, draw: Callable[[AnyTask, int, np.random.Generator], AnsweredSequences]
) -> tuple[AnsweredSequences, AnsweredSequences]:
    """Training and validation, each from a stream of its own: the size of one never changes the other."""
    train, validation = (np.random.default_rng(seed) for seed in np.random.SeedSequence(task.task_seed).spawn(2))
    return draw(task, task.train_sequences, train), draw(task, task.validation_sequences, validation)


def make_empty_targets(n: int, length: int) -> np.ndarray:
    """int32 `[n, length]`: nothing is to be predicted, until somebody writes in it."""
    return np.full((n, length), IGNORED, dtype=np.int32)


def draw_permutations(n: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """n random orders of 0 .. length - 1, int32 `[n, length]`."""
    return rng.permuted(np.tile(np.arange(length, dtype=np.int32), (n, 1)), axis=1)
