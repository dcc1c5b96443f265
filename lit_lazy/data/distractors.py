"""Distractors: the key that a query asks for stands at several distances, and its distance tells which one counts.

Content alone finds the key's tokens and cannot tell them apart; distance alone finds as many tokens as there are lags,
of different keys. Only both together give the answer, which is what a bias by distance beside RoPE is claimed to help
with (arXiv 2601.00919).
"""

import functools
from dataclasses import dataclass

import numpy as np

from lit_lazy.data.base import DataConfig, DataSource, Outline, fingerprint
from lit_lazy.data.generated import AnsweredSequences, draw_both_parts, draw_permutations, make_empty_targets
from lit_lazy.data.pairs import Pairs
from lit_lazy.support.checks import require, require_whole
from lit_lazy.support.memory import require_memory


@dataclass(frozen=True)
class Distractors(DataConfig):
    """Recall by key and distance, a generated probe: the target's key also stands at distances that do not count.

    A sequence is `lags * queries` tokens, each a key and a value; then `queries` tokens, each a key, distinct. The
    lags are the multiples of `queries` up to that length, so no token is at a lag from two queries. Each query's key
    stands at one of its lags, drawn at random: its value there is the target, and nothing else is predicted. All other
    tokens hold the keys of some of the queries, never at a lag from them: half of the queries are drawn to be those.
    Token ids are those of `Pairs`, but for the answer NULL.
    A batch also carries, each `[B, L]`: `distracted` and `alone` (bool), the queries whose key stands elsewhere too,
    and those whose key does not; and `oracle_nll` (float32): 0, since the answer is always certain.
    """

    queries: int = 8
    """Queries in a sequence, behind the pairs: an even number, half of them with distractors."""
    lags: int = 4
    """Number of distances that count: queries, 2 * queries, ..."""
    keys: int = 16
    """Number of keys."""
    values: int = 8
    """Number of values."""
    train_sequences: int = 38_400
    """Training sequences."""
    validation_sequences: int = 1_024
    """Validation sequences."""
    task_seed: int = 0
    """Seed of the sequences; the seed of a run does not change them."""

    def __post_init__(self) -> None:
        require_whole("data.queries", self.queries, 4)
        require(self.queries % 2 == 0, "data.queries", self.queries, "must be even: half of them have distractors")
        require_whole("data.lags", self.lags, 2)
        require_whole("data.keys", self.keys, self.queries)
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
        return (self.lags + 1) * self.queries

    def outline(self) -> Outline:
        return Outline("distractors", self.vocabulary.vocab_size, self.context_length, self.train_sequences)

    def load(self) -> DataSource:
        names = ("train_sequences", "validation_sequences", "lags", "queries", "keys")
        n = self.train_sequences + self.validation_sequences
        needed = n * (4 * self.keys + 30 * self.context_length)
        require_memory({f"data.{name}": getattr(self, name) for name in names}, needed)
        return _load(self)


def draw(config: Distractors, n: int, rng: np.random.Generator) -> AnsweredSequences:
    """n sequences, the groups `distracted` and `alone`."""
    vocabulary, queries, half = config.vocabulary, config.queries, config.queries // 2
    pairs = config.lags * queries
    asked, each = draw_permutations(n, config.keys, rng)[:, :queries], np.arange(queries)
    # Token b * queries + j is at a lag from query j, and from no other: `holder` is whose key it has, `[n, lags, j]`.
    chosen = draw_permutations(n, queries, rng)  # the first half are distracted
    rank = chosen.argsort(axis=1)[:, None]
    others = rng.integers(half - (rank < half), size=(n, config.lags, queries))
    holder = np.take_along_axis(chosen, (others + (others >= rank)).reshape(n, pairs), axis=1)
    place = rng.integers(config.lags, size=(n, queries)) * queries + each
    np.put_along_axis(holder, place, np.broadcast_to(each, (n, queries)), axis=1)
    values = rng.integers(config.values, size=(n, pairs), dtype=np.int32)

    sequences = np.full((n, config.context_length + 1), vocabulary.null, dtype=np.int32)
    sequences[:, :pairs] = vocabulary.encode_pair(np.take_along_axis(asked, holder, axis=1), values)
    sequences[:, pairs:-1] = vocabulary.encode_query(asked)
    targets = make_empty_targets(n, config.context_length)
    targets[:, pairs:] = vocabulary.encode_answer(np.take_along_axis(values, place, axis=1))
    found = np.stack([(holder == query).sum(axis=1) for query in each], axis=1)
    groups = {name: np.zeros(targets.shape, dtype=bool) for name in ("distracted", "alone")}
    groups["distracted"][:, pairs:], groups["alone"][:, pairs:] = found > 1, found == 1
    return AnsweredSequences(sequences, targets, groups)


def content_nats(config: Distractors, drawn: AnsweredSequences) -> float:
    """The loss at distracted queries of who sees which keys and values there are, and not where: the best there is.

    Each token of the key may be the one that counts; so the share of the target's value among them is its probability.
    """
    pairs = config.lags * config.queries
    keys, values = np.divmod(drawn.sequences[:, None, :pairs], config.values)
    asked = drawn.sequences[:, pairs:-1, None] - config.vocabulary.encode_query(0)
    right = values == drawn.targets[:, pairs:, None] - config.vocabulary.encode_answer(0)
    share = ((keys == asked) & right).sum(-1) / (keys == asked).sum(-1)
    return float(-np.log(share[drawn.groups["distracted"][:, pairs:]]).mean())


@functools.cache
def _load(config: Distractors) -> DataSource:
    train, validation = draw_both_parts(config, draw)
    return DataSource(
        name="distractors",
        vocab_size=config.vocabulary.vocab_size,
        context_length=config.context_length,
        fingerprint=fingerprint([*train[:2], *validation[:2]]),
        info={
            "train_tokens": config.train_sequences * config.context_length,
            "validation_tokens": config.validation_sequences * config.context_length,
            "content_nats_distracted": content_nats(config, validation),
        },
        train=train.dataset(),
        validation=validation.dataset(),
        row_groups=("distracted", "alone"),
    )
