"""Recall with absent keys: pairs of keys and values, then queries, of which half ask for a key that is not there.

A query whose key is there has one token to look at, a query whose key is absent has none: the mass that either keeps
is what the task is made to show. Pairs are stacked as in zoology's continuous recall (Arora et al., arXiv 2312.04927):
a token holds key and value together, so that one layer suffices.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from lit_lazy.data.base import IGNORED, DataConfig, DataSource, Outline, fingerprint
from lit_lazy.data.generated import AnsweredSequences, draw_both_parts, draw_permutations, make_empty_targets
from lit_lazy.data.pairs import Pairs
from lit_lazy.support.checks import require, require_whole
from lit_lazy.support.memory import require_memory


@dataclass(frozen=True)
class Recall(DataConfig):
    """Recall with absent keys, a generated probe: what a row does that has nothing to look at.

    A sequence is `pairs` tokens, each a key and its value, keys distinct; then `queries` tokens, each a key, distinct,
    half of them in the pairs. The target of a query is the value of its key, or NULL where the key is absent; nothing
    else is predicted. Token ids are those of `Pairs`.
    A batch also carries, each `[B, L]`: `present` and `absent` (bool), the queries of either kind; and `oracle_nll`
    (float32): 0, since the answer is always certain.
    Vocabulary and task do not depend on the number of pairs: a model may be evaluated at more of them than it was
    trained on, on `dataclasses.replace(config, pairs=...)`.
    """

    pairs: int = 8
    """Pairs in a sequence, at its beginning."""
    queries: int = 16
    """Queries in a sequence, behind the pairs: an even number, half of them of absent keys."""
    keys: int = 72
    """Number of keys."""
    values: int = 4
    """Number of values."""
    train_sequences: int = 38_400
    """Training sequences."""
    validation_sequences: int = 1_024
    """Validation sequences."""
    task_seed: int = 0
    """Seed of the sequences; the seed of a run does not change them."""

    def __post_init__(self) -> None:
        require_whole("data.queries", self.queries, 2)
        require(self.queries % 2 == 0, "data.queries", self.queries, "must be even: half of them are of absent keys")
        half = self.queries // 2
        require_whole("data.pairs", self.pairs, half)
        require_whole("data.keys", self.keys, self.pairs + half)
        require_whole("data.values", self.values, 2)
        require_whole("data.train_sequences", self.train_sequences, 1)
        require_whole("data.validation_sequences", self.validation_sequences, 1)
        require_whole("data.task_seed", self.task_seed, 0)

    @property
    def vocabulary(self) -> Pairs:
        """What its token ids mean."""
        return Pairs(self.keys, self.values)

    @property
    def context_length(self) -> int:
        """Tokens in a sequence."""
        return self.pairs + self.queries

    def outline(self) -> Outline:
        return Outline("recall", self.vocabulary.vocab_size, self.context_length, self.train_sequences)

    def load(self) -> DataSource:
        names = ("train_sequences", "validation_sequences", "pairs", "queries", "keys")
        n = self.train_sequences + self.validation_sequences
        require_memory({f"data.{name}": getattr(self, name) for name in names}, n * (8 * self.keys + 16 * self.queries))
        return _load(self)


def draw(config: Recall, n: int, rng: np.random.Generator) -> AnsweredSequences:
    """n sequences, the groups `present` and `absent`."""
    vocabulary, pairs, half = config.vocabulary, config.pairs, config.queries // 2
    keys, values = draw_permutations(n, config.keys, rng), rng.integers(config.values, size=(n, pairs), dtype=np.int32)
    # Keys are in random order: asked for are the first of those that get a pair, and the first of the others.
    asked = np.concatenate([keys[:, :half], keys[:, pairs : pairs + half]], axis=1)
    answers = np.concatenate([vocabulary.encode_answer(values[:, :half]), np.full((n, half), vocabulary.null)], axis=1)
    order, place = draw_permutations(n, config.queries, rng), draw_permutations(n, pairs, rng)

    sequences = np.full((n, config.context_length + 1), vocabulary.null, dtype=np.int32)
    sequences[:, :pairs] = np.take_along_axis(vocabulary.encode_pair(keys[:, :pairs], values), place, axis=1)
    sequences[:, pairs:-1] = vocabulary.encode_query(np.take_along_axis(asked, order, axis=1))
    targets = make_empty_targets(n, config.context_length)
    targets[:, pairs:] = np.take_along_axis(answers, order, axis=1)
    absent = targets == vocabulary.null
    return AnsweredSequences(sequences, targets, {"present": (targets != IGNORED) & ~absent, "absent": absent})


@functools.cache
def _load(config: Recall) -> DataSource:
    train, validation = draw_both_parts(config, draw)
    return DataSource(
        name="recall",
        vocab_size=config.vocabulary.vocab_size,
        context_length=config.context_length,
        fingerprint=fingerprint([*train[:2], *validation[:2]]),
        info={
            "train_tokens": config.train_sequences * config.context_length,
            "validation_tokens": config.validation_sequences * config.context_length,
            # Of a predictor that looks at nothing: NULL half of the time, each value otherwise.
            "blind_nats": math.log(2) + math.log(config.values) / 2,
        },
        train=train.dataset(),
        validation=validation.dataset(),
        row_groups=("present", "absent"),
        row_contrast=("present", "absent"),
    )
