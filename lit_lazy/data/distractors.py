"""Distractors: a query's key occurs at several distances, and the distance decides which occurrence counts.

Content finds all tokens with the key but cannot distinguish them; distance finds one token per lag, with different
keys. Only the two together give the answer. A distance bias in addition to RoPE is claimed to help with this
(arXiv 2601.00919).
"""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lit_lazy.data.source_interface import Outline
from lit_lazy.data.synthetic_task import PairVocabulary, Splits, SyntheticTask, draw_permutations, make_dataset
from lit_lazy.data.token_dataset import TokenDataset
from lit_lazy.support.checked_fields import Bounds, NonNegativeInt, PositiveInt, check_value, require


@dataclass(frozen=True)
class Distractors(SyntheticTask):
    """Recall by key and distance, a synthetic task: the target's key also occurs at distances that do not count.

    A sequence is `lags * queries` tokens, each a key and a value; then `queries` tokens with distinct keys. The lags
    are the multiples of `queries` up to that length, so no token is at a lag from two queries. Each query's key occurs
    at exactly one of its lags, drawn at random; the value there is the target, and nothing else is predicted. All other
    tokens hold the keys of a random half of the queries, never at a lag from that query.
    Token ids are those of `PairVocabulary`; the answer NULL is never a target.
    A batch also holds, each `[B, L]`: `distracted` and `alone` (bool), the queries whose key also occurs elsewhere and
    those whose key does not; and `oracle_nll` (float32): 0, since every answer is certain.
    """

    queries: Annotated[int, Bounds(ge=4)] = 8
    """Queries per sequence, after the pairs: an even number, half of them with distractors."""
    lags: Annotated[int, Bounds(ge=2)] = 4
    """Number of distances that count: queries, 2 * queries, ..."""
    keys: int = 16
    """Number of keys."""
    values: Annotated[int, Bounds(ge=2)] = 8
    """Number of values."""
    train_sequences: PositiveInt = 38_400
    """Training sequences."""
    validation_sequences: PositiveInt = 1_024
    """Validation sequences."""
    task_seed: NonNegativeInt = 0
    """Seed of the sequences; the run's seed does not affect them."""

    def __post_init__(self) -> None:
        fix = "must be even: half of the queries have distractors"
        require(self.queries % 2 == 0, "data.queries", self.queries, fix)
        check_value("data.keys", self.keys, Annotated[int, Bounds(ge=self.queries)])

    @property
    def vocabulary(self) -> PairVocabulary:
        """Meaning of the token ids."""
        return PairVocabulary(self.keys, self.values)

    @property
    def context_length(self) -> int:
        return (self.lags + 1) * self.queries

    def outline(self) -> Outline:
        return Outline("distractors", self.vocabulary.vocab_size, self.context_length, self.train_sequences)

    def draw(self) -> tuple[Splits, dict[str, float]]:
        self.check_memory(4 * self.keys + 30 * self.context_length, "lags", "queries", "keys")
        splits, pairs = self.draw_splits(), self.lags * self.queries
        # The lowest loss at distracted queries for a predictor that sees the pairs but not their positions: each token
        # with the key may be the one that counts, so P(value) is the share of these tokens that hold it.
        _, drawn = splits
        assert drawn.targets is not None
        sequences, targets = drawn.sequences.numpy(), drawn.targets.numpy()
        keys, values = np.divmod(sequences[:, None, :pairs], self.values)
        query_keys = sequences[:, pairs:-1, None] - self.vocabulary.encode_query(0)
        right = values == targets[:, pairs:, None] - self.vocabulary.encode_answer(0)
        share = ((keys == query_keys) & right).sum(-1) / (keys == query_keys).sum(-1)
        content = float(-np.log(share[drawn.positions["distracted"].numpy()[:, pairs:]]).mean())
        return splits, {"chance_nats": math.log(self.values), "content_nats_distracted": content}

    def draw_split(self, n: int, rng: np.random.Generator) -> TokenDataset:
        vocabulary, queries, half = self.vocabulary, self.queries, self.queries // 2
        pairs = self.lags * queries
        query_keys, index = draw_permutations(n, self.keys, rng)[:, :queries], np.arange(queries)
        # Token b * queries + j is at a lag from query j and from no other. `owner` is the query whose key it holds.
        order = draw_permutations(n, queries, rng)  # the first half are distracted
        rank = order.argsort(axis=1)[:, None]
        others = rng.integers(half - (rank < half), size=(n, self.lags, queries))
        owner = np.take_along_axis(order, (others + (others >= rank)).reshape(n, pairs), axis=1)
        answer_at = rng.integers(self.lags, size=(n, queries)) * queries + index
        np.put_along_axis(owner, answer_at, np.broadcast_to(index, (n, queries)), axis=1)
        values = rng.integers(self.values, size=(n, pairs), dtype=np.int32)

        sequences = np.full((n, self.context_length + 1), vocabulary.null, dtype=np.int32)
        sequences[:, :pairs] = vocabulary.encode_pair(np.take_along_axis(query_keys, owner, axis=1), values)
        sequences[:, pairs:-1] = vocabulary.encode_query(query_keys)
        targets = self.make_ignored_targets(n)
        targets[:, pairs:] = vocabulary.encode_answer(np.take_along_axis(values, answer_at, axis=1))
        occurrences = np.stack([(owner == query).sum(axis=1) for query in index], axis=1)
        groups = {name: np.zeros(targets.shape, dtype=bool) for name in ("distracted", "alone")}
        groups["distracted"][:, pairs:], groups["alone"][:, pairs:] = occurrences > 1, occurrences == 1
        return make_dataset(sequences, targets, groups)
