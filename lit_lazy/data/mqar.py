"""Multi-query associative recall with the settings of zoology (Arora et al., arXiv 2312.04927)."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lit_lazy.data.source_interface import Outline
from lit_lazy.data.synthetic_task import Splits, SyntheticTask, make_dataset
from lit_lazy.data.token_dataset import IGNORED, TokenDataset
from lit_lazy.support.checked_fields import Bounds, NonNegativeInt, PositiveFloat, PositiveInt, check_value, require


@dataclass(frozen=True)
class Mqar(SyntheticTask):
    """Multi-query associative recall (MQAR), generated as in zoology.

    A sequence is `pairs` keys, each followed by its value, then each key once more among fillers. The target of a
    repeated key is its value; nothing else is predicted. Token 0 is the filler, keys are the other tokens of the
    vocabulary's first half, values those of its second half; keys are distinct within a sequence, and so are values.
    A repeated key is 2 g tokens after the last pair, with g >= 0 drawn without replacement with probability
    proportional to (g + 1)^(power - 1).
    A batch also holds, each `[B, L]`: `query` (bool), the repeated keys; and `oracle_nll` (float32): 0.
    """

    vocab_size: int = 8_192
    """Number of token ids: the filler, keys and values."""
    context_length: int = 512
    """Tokens per sequence."""
    pairs: PositiveInt = 64
    """Pairs per sequence, at its start."""
    power: PositiveFloat = 0.01
    """Position of the queries: 1 is uniform, less prefers early positions."""
    random_fillers: bool = False
    """Fill with random tokens instead of token 0."""
    train_sequences: PositiveInt = 100_000
    """Training sequences."""
    validation_sequences: PositiveInt = 3_000
    """Validation sequences."""
    task_seed: NonNegativeInt = 0
    """Seed of the sequences; the run's seed does not affect them."""

    def __post_init__(self) -> None:
        length = self.context_length
        check_value("data.context_length", length, Annotated[int, Bounds(ge=4 * self.pairs)])
        require(length % 2 == 0, "data.context_length", length, "must be even: a pair has two tokens")
        check_value("data.vocab_size", self.vocab_size, Annotated[int, Bounds(ge=2 * self.pairs + 2)])

    def outline(self) -> Outline:
        return Outline("mqar", self.vocab_size, self.context_length, self.train_sequences)

    def draw(self) -> tuple[Splits, dict[str, float]]:
        self.check_memory(16 * self.context_length, "context_length")
        # Predictors that know all values, and the sequence's values, but not which key each belongs to.
        values = self.vocab_size - self.vocab_size // 2
        return self.draw_splits(), {"chance_nats": math.log(values), "guess_nats": math.log(self.pairs)}

    def draw_split(self, n: int, rng: np.random.Generator) -> TokenDataset:
        pairs, first_value, context = self.pairs, self.vocab_size // 2, 2 * self.pairs
        keys = 1 + draw_distinct(n, first_value - 1, pairs, rng)
        values = first_value + draw_distinct(n, self.vocab_size - first_value, pairs, rng)
        query_at = context + 2 * draw_gaps((self.context_length - context) // 2, self, n, rng)

        sequences = np.zeros((n, self.context_length + 1), dtype=np.int32)
        if self.random_fillers:
            sequences[:] = rng.integers(self.vocab_size, size=sequences.shape, dtype=np.int32)
        sequences[:, 0:context:2], sequences[:, 1:context:2] = keys, values
        np.put_along_axis(sequences, query_at, keys, axis=1)
        targets = self.make_ignored_targets(n)
        np.put_along_axis(targets, query_at, values, axis=1)
        return make_dataset(sequences, targets, {"query": targets != IGNORED})


def draw_distinct(n: int, limit: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """n rows of `count` distinct numbers from 0 .. limit - 1, in random order: int32 `[n, count]`."""
    drawn = np.empty((n, count), dtype=np.int32)
    for row in drawn:  # row by row: `choice` then needs no permutation of all `limit` numbers
        row[:] = rng.choice(limit, count, replace=False)
    return drawn


def draw_gaps(space: int, config: Mqar, n: int, rng: np.random.Generator) -> np.ndarray:
    """n rows of `pairs` numbers from 0 .. space - 1, drawn without replacement by the power law, int64 `[n, pairs]`.

    The top log-probabilities after adding Gumbel noise are such a draw (Vieira 2014; Kool et al., arXiv 1903.06059).
    """
    logarithm = (config.power - 1) * np.log(np.arange(1, space + 1, dtype=np.float32))
    gaps = np.empty((n, config.pairs), dtype=np.int64)
    for row in gaps:
        noisy = logarithm + rng.gumbel(size=space)
        row[:] = np.argsort(-noisy)[: config.pairs]
    return gaps
