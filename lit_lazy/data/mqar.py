"""Multi-query associative recall in the settings of zoology (Arora et al., arXiv 2312.04927)."""

import functools
import math
from dataclasses import dataclass

import numpy as np

from lit_lazy.data.base import IGNORED, DataConfig, DataSource, Outline, fingerprint
from lit_lazy.data.generated import AnsweredSequences, draw_both_parts, make_empty_targets
from lit_lazy.support.checks import require, require_whole
from lit_lazy.support.memory import require_memory


@dataclass(frozen=True)
class Mqar(DataConfig):
    """Multi-query associative recall (MQAR), generated as zoology does.

    A sequence is `pairs` times a key and its value, then each key once more among fillers; the target of a key is its
    value, and nothing else is predicted. Token 0 fills, keys are the other tokens of the vocabulary's first half,
    values those of its second; in a sequence keys are distinct and so are values. A key stands 2 g tokens behind the
    last pair, g from 0 drawn without replacement with probabilities in proportion to (g + 1)^(power - 1).
    A batch also carries, each `[B, L]`: `query` (bool), where a key is asked for; and `oracle_nll` (float32): 0.
    """

    vocab_size: int = 8_192
    """Number of tokens: the filler, keys, and values."""
    context_length: int = 512
    """Tokens in a sequence."""
    pairs: int = 64
    """Pairs in a sequence, at its beginning."""
    power: float = 0.01
    """How late keys are asked for: 1 makes every place as likely, less prefers the first."""
    random_fillers: bool = False
    """Fill with random tokens instead of token 0."""
    train_sequences: int = 100_000
    """Training sequences."""
    validation_sequences: int = 3_000
    """Validation sequences."""
    task_seed: int = 0
    """Seed of the sequences; the seed of a run does not change them."""

    def __post_init__(self) -> None:
        require_whole("data.pairs", self.pairs, 1)
        require_whole("data.context_length", self.context_length, 4 * self.pairs)
        require(
            self.context_length % 2 == 0, "data.context_length", self.context_length, "must be even: pairs have two"
        )
        require_whole("data.vocab_size", self.vocab_size, 2 * self.pairs + 2)
        require(0 < self.power < math.inf, "data.power", self.power, "must be finite and above 0")
        require_whole("data.train_sequences", self.train_sequences, 1)
        require_whole("data.validation_sequences", self.validation_sequences, 1)
        require_whole("data.task_seed", self.task_seed, 0)

    def outline(self) -> Outline:
        return Outline("mqar", self.vocab_size, self.context_length, self.train_sequences)

    def load(self) -> DataSource:
        names = ("train_sequences", "validation_sequences", "context_length")
        n = self.train_sequences + self.validation_sequences
        require_memory({f"data.{name}": getattr(self, name) for name in names}, 16 * n * self.context_length)
        return _load(self)


def draw(config: Mqar, n: int, rng: np.random.Generator) -> AnsweredSequences:
    """n sequences, the group `query`."""
    pairs, first_value, context = config.pairs, config.vocab_size // 2, 2 * config.pairs
    keys = 1 + draw_distinct(n, first_value - 1, pairs, rng)
    values = first_value + draw_distinct(n, config.vocab_size - first_value, pairs, rng)
    place = context + 2 * draw_gaps((config.context_length - context) // 2, config, n, rng)

    sequences = np.zeros((n, config.context_length + 1), dtype=np.int32)
    if config.random_fillers:
        sequences[:] = rng.integers(config.vocab_size, size=sequences.shape, dtype=np.int32)
    sequences[:, 0:context:2], sequences[:, 1:context:2] = keys, values
    np.put_along_axis(sequences, place, keys, axis=1)
    targets = make_empty_targets(n, config.context_length)
    np.put_along_axis(targets, place, values, axis=1)
    return AnsweredSequences(sequences, targets, {"query": targets != IGNORED})


def draw_distinct(n: int, of: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """n times as many of 0 .. of - 1, none twice, in random order: int32 `[n, count]`."""
    found = np.empty((n, count), dtype=np.int32)
    for row in found:  # numpy draws one row at a time without making the other numbers
        row[:] = rng.choice(of, count, replace=False)
    return found


def draw_gaps(space: int, config: Mqar, n: int, rng: np.random.Generator) -> np.ndarray:
    """n times `pairs` of 0 .. space - 1, drawn one after the other without replacement by the power law, `[n, pairs]`.

    The largest of logarithms with Gumbel noise are such a draw (Vieira 2014; Kool et al., arXiv 1903.06059).
    """
    logarithm = (config.power - 1) * np.log(np.arange(1, space + 1, dtype=np.float32))
    found = np.empty((n, config.pairs), dtype=np.int64)
    for row in found:
        noisy = logarithm + rng.gumbel(size=space)
        row[:] = np.argsort(-noisy)[: config.pairs]
    return found


@functools.cache
def _load(config: Mqar) -> DataSource:
    train, validation = draw_both_parts(config, draw)
    return DataSource(
        name="mqar",
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        fingerprint=fingerprint([*train[:2], *validation[:2]]),
        info={
            "train_tokens": config.train_sequences * config.context_length,
            "validation_tokens": config.validation_sequences * config.context_length,
            # Of a predictor that knows the values of the sequence, and not which is whose.
            "guess_nats": math.log(config.pairs),
        },
        train=train.dataset(),
        validation=validation.dataset(),
        row_groups=("query",),
    )
