"""Recall with absent keys: key-value pairs, then queries, half of which ask for a key that has no pair.

A query with a present key has one useful token, a query with an absent key has none: the task shows how much attention
mass each keeps. Pairs are stacked as in zoology's continuous recall (Arora et al., arXiv 2312.04927): one token holds
key and value, so that one layer suffices.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lit_lazy.data.source_interface import Outline
from lit_lazy.data.synthetic_task import PairVocabulary, Splits, SyntheticTask, draw_permutations, make_dataset
from lit_lazy.data.token_dataset import IGNORED, TokenDataset
from lit_lazy.support.checked_fields import Bounds, NonNegativeInt, PositiveInt, check_value, require


@dataclass(frozen=True)
class Recall(SyntheticTask):
    """Recall with absent keys, a synthetic task that shows the behaviour of a row without a useful key.

    A sequence is `pairs` tokens, each a key and its value, with distinct keys; then `queries` tokens with distinct
    keys, half of which have a pair. The target of a query is the value of its key, or NULL if the key is absent;
    nothing else is predicted. Token ids are those of `PairVocabulary`.
    A batch also holds, each `[B, L]`: `present` and `absent` (bool), the two kinds of queries; and `oracle_nll`
    (float32): 0, since every answer is certain.
    Vocabulary and task do not depend on the number of pairs, so a model can be evaluated with more pairs than it was
    trained on: `dataclasses.replace(config, pairs=...)`.
    """

    row_contrast = ("present", "absent")

    pairs: int = 8
    """Pairs per sequence, at its start."""
    queries: Annotated[int, Bounds(ge=2)] = 16
    """Queries per sequence, after the pairs: an even number, half of them for absent keys."""
    keys: int = 72
    """Number of keys."""
    values: Annotated[int, Bounds(ge=2)] = 4
    """Number of values."""
    train_sequences: PositiveInt = 38_400
    """Training sequences."""
    validation_sequences: PositiveInt = 1_024
    """Validation sequences."""
    task_seed: NonNegativeInt = 0
    """Seed of the sequences; the run's seed does not affect them."""

    def __post_init__(self) -> None:
        fix = "must be even: half of the queries ask for absent keys"
        require(self.queries % 2 == 0, "data.queries", self.queries, fix)
        half = self.queries // 2
        check_value("data.pairs", self.pairs, Annotated[int, Bounds(ge=half)])
        check_value("data.keys", self.keys, Annotated[int, Bounds(ge=self.pairs + half)])

    @property
    def vocabulary(self) -> PairVocabulary:
        """Meaning of the token ids."""
        return PairVocabulary(self.keys, self.values)

    @property
    def context_length(self) -> int:
        return self.pairs + self.queries

    def outline(self) -> Outline:
        return Outline("recall", self.vocabulary.vocab_size, self.context_length, self.train_sequences)

    def draw(self) -> tuple[Splits, dict[str, float]]:
        self.check_memory(8 * self.keys + 16 * self.queries, "pairs", "queries", "keys")
        # A predictor without attention: NULL with probability 1/2, the values share the rest.
        return self.draw_splits(), {"chance_nats": math.log(2) + math.log(self.values) / 2}

    def draw_split(self, n: int, rng: np.random.Generator) -> TokenDataset:
        vocabulary, pairs, half = self.vocabulary, self.pairs, self.queries // 2
        keys, values = draw_permutations(n, self.keys, rng), rng.integers(self.values, size=(n, pairs), dtype=np.int32)
        # Keys are in random order: the queries are the first keys with a pair and the first keys without.
        query_keys = np.concatenate([keys[:, :half], keys[:, pairs : pairs + half]], axis=1)
        answers = np.concatenate(
            [vocabulary.encode_answer(values[:, :half]), np.full((n, half), vocabulary.null)], axis=1
        )
        order, place = draw_permutations(n, self.queries, rng), draw_permutations(n, pairs, rng)

        sequences = np.full((n, self.context_length + 1), vocabulary.null, dtype=np.int32)
        sequences[:, :pairs] = np.take_along_axis(vocabulary.encode_pair(keys[:, :pairs], values), place, axis=1)
        sequences[:, pairs:-1] = vocabulary.encode_query(np.take_along_axis(query_keys, order, axis=1))
        targets = self.make_ignored_targets(n)
        targets[:, pairs:] = np.take_along_axis(answers, order, axis=1)
        absent = targets == vocabulary.null
        return make_dataset(sequences, targets, {"present": (targets != IGNORED) & ~absent, "absent": absent})
