"""Recall with absent keys: pairs of keys and values, then queries, of which half ask for a key that is not there.

A query whose key is there has one token to look at, a query whose key is absent has none: the mass that either keeps
is what the task is made to show. Pairs are stacked as in zoology's continuous recall (Arora et al., arXiv 2312.04927):
a token holds key and value together, so that one layer suffices.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from lit_lazy.data.base import IGNORED, DataConfig, DataSource, Outline, TokenDataset, fingerprint
from lit_lazy.data.pairs import Pairs
from lit_lazy.support.checks import require, require_whole
from lit_lazy.support.memory import require_room


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
        require_room({f"data.{name}": getattr(self, name) for name in names}, n * (8 * self.keys + 16 * self.queries))
        return _load(self)


def draw(config: Recall, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """n sequences, int32 `[n, L + 1]` with a token at the end that nobody sees, and their targets, int32 `[n, L]`."""
    vocabulary, pairs, half = config.vocabulary, config.pairs, config.queries // 2
    order = rng.permuted(np.tile(np.arange(config.keys, dtype=np.int32), (n, 1)), axis=1)
    values = rng.integers(config.values, size=(n, pairs), dtype=np.int32)
    # Keys come in random order: the first `half` of the pairs, and the first that are in none.
    asked = np.concatenate([order[:, :half], order[:, pairs : pairs + half]], axis=1)
    answers = np.concatenate([vocabulary.answer(values[:, :half]), np.full((n, half), vocabulary.null)], axis=1)
    shuffled = rng.permuted(np.tile(np.arange(config.queries), (n, 1)), axis=1)
    place = rng.permuted(np.tile(np.arange(pairs), (n, 1)), axis=1)

    found = vocabulary.pair(order[:, :pairs], values)
    sequences = np.full((n, config.context_length + 1), vocabulary.null, dtype=np.int32)
    sequences[:, :pairs] = np.take_along_axis(found, place, axis=1)
    sequences[:, pairs:-1] = vocabulary.query(np.take_along_axis(asked, shuffled, axis=1))
    targets = np.full((n, config.context_length), IGNORED, dtype=np.int32)
    targets[:, pairs:] = np.take_along_axis(answers, shuffled, axis=1)
    return sequences, targets


def annotate(config: Recall, sequences: np.ndarray, targets: np.ndarray) -> TokenDataset:
    """The sequences with their row groups and the nats of the best possible prediction."""
    wanted, known = torch.from_numpy(targets), torch.from_numpy(sequences)
    absent = wanted == config.vocabulary.null
    positions = {
        "present": (wanted != IGNORED) & ~absent,
        "absent": absent,
        "oracle_nll": torch.zeros(wanted.shape),
    }
    return TokenDataset(known, positions, wanted)


@functools.cache
def _load(config: Recall) -> DataSource:
    # One stream for each part: the size of one never changes another.
    seeds = np.random.SeedSequence(config.task_seed).spawn(2)
    train, validation = (
        draw(config, n, np.random.default_rng(seed))
        for n, seed in zip((config.train_sequences, config.validation_sequences), seeds, strict=True)
    )
    return DataSource(
        name="recall",
        vocab_size=config.vocabulary.vocab_size,
        context_length=config.context_length,
        fingerprint=fingerprint([*train, *validation]),
        info={
            "train_tokens": config.train_sequences * config.context_length,
            "validation_tokens": config.validation_sequences * config.context_length,
            # Of a predictor that looks at nothing: NULL half of the time, each value otherwise.
            "blind_nats": float(np.log(2) + np.log(config.values) / 2),
        },
        train=annotate(config, *train),
        validation=annotate(config, *validation),
        row_groups=("present", "absent"),
        row_contrast=("present", "absent"),
    )
