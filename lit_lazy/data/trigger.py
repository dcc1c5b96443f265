"""Trigger-conditional averaging: a task that softmax attention cannot solve without a sink, and ReLU attention can.

Ran-Milo 2026 (arXiv 2603.11487): an attention layer returns the mean of the tokens before a trigger, and zero
elsewhere. Softmax weights sum to 1, so a layer that solves it puts nearly all weight of a row that returns zero on an
anchor.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from lit_lazy.data.base import DataConfig, DataSource, Outline
from lit_lazy.data.synthetic import AnsweredSequences, check_memory, check_sizes, draw_splits, make_source
from lit_lazy.support.checks import require, require_whole

BYTES_PER_TOKEN = 40
"""Token, target, groups and oracle, and what drawing them takes."""


@dataclass(frozen=True)
class Trigger(DataConfig):
    """Trigger-conditional averaging in tokens, a synthetic task with a known optimum.

    Token ids: the symbols are 0 .. symbols - 1, then the trigger, then BOS, which begins every sequence. All other
    tokens are independent: a trigger with probability `trigger_share`, except after BOS, otherwise any symbol alike.
    The target of a trigger is one of the symbols before it, drawn uniformly: its law is the mean of their one-hot
    vectors. The target of any other token is any symbol alike: the law of equal logits, to which attention can add
    nothing.
    A batch also holds, each `[B, L]`: `trigger` and `non_trigger` (bool), the rows of triggers and of symbols; and
    `oracle_nll` (float32, nats), the negative log-likelihood of the target under its law.
    """

    symbols: int = 64
    """Number of symbols, without trigger and BOS."""
    context_length: int = 64
    """Tokens per sequence, including BOS."""
    trigger_share: float = 0.25
    """Probability of a trigger at a position from the third on."""
    train_sequences: int = 38_400
    """Training sequences."""
    validation_sequences: int = 1_024
    """Validation sequences."""
    task_seed: int = 0
    """Seed of the sequences; the run's seed does not affect them."""

    def __post_init__(self) -> None:
        require_whole("data.symbols", self.symbols, 2)
        require_whole("data.context_length", self.context_length, 3)
        share = self.trigger_share
        require(0 < share < 1, "data.trigger_share", share, "must lie strictly between 0 and 1")
        check_sizes(self)

    @property
    def trigger(self) -> int:
        """Token id of the trigger."""
        return self.symbols

    @property
    def bos(self) -> int:
        """Token id of BOS."""
        return self.symbols + 1

    def outline(self) -> Outline:
        return Outline("trigger", self.symbols + 2, self.context_length, self.train_sequences)

    def load(self) -> DataSource:
        check_memory(self, BYTES_PER_TOKEN * self.context_length, "context_length")
        return _build_source(self)


def draw_sequences(config: Trigger, n: int, rng: np.random.Generator) -> AnsweredSequences:
    """n sequences with the row groups `trigger` and `non_trigger`."""
    shape = n, config.context_length + 1
    tokens = rng.integers(config.symbols, size=shape, dtype=np.int32)
    tokens[:, 2:][rng.random((n, shape[1] - 2)) < config.trigger_share] = config.trigger
    tokens[:, 0] = config.bos
    seen, is_trigger = tokens[:, :-1], tokens[:, :-1] == config.trigger
    targets = np.where(
        is_trigger, _draw_earlier(seen < config.symbols, seen, rng), rng.integers(config.symbols, size=seen.shape)
    )
    nll = np.where(is_trigger, _compute_trigger_nll(config, seen, targets), math.log(config.symbols))
    groups = {"trigger": is_trigger, "non_trigger": seen < config.symbols}
    return AnsweredSequences(tokens, targets.astype(np.int32), groups, nll.astype(np.float32))


def _draw_earlier(is_symbol: np.ndarray, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """For each position one of the symbols before it, drawn uniformly, int `[n, L]`; arbitrary where there is none."""
    symbols_first = np.take_along_axis(tokens, np.argsort(~is_symbol, axis=1, kind="stable"), axis=1)
    before = is_symbol.cumsum(axis=1) - is_symbol
    return np.take_along_axis(symbols_first, (rng.random(tokens.shape) * before).astype(np.int64), axis=1)


def _compute_trigger_nll(config: Trigger, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """-ln of the target's share among the symbols before each position, `[n, L]`; infinite where it is not there."""
    found = np.stack([(tokens[:, :t] == targets[:, t, None]).sum(1) for t in range(tokens.shape[1])], axis=1)
    before = (tokens < config.symbols).cumsum(axis=1)
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(before, 1)) - np.log(found)


@functools.cache
def _build_source(config: Trigger) -> DataSource:
    splits = draw_splits(config, draw_sequences)
    _, _, groups, oracle = splits[1]
    assert oracle is not None
    facts = {
        "chance_nats": math.log(config.symbols),  # of a predictor that attends to nothing
        "optimum_nats_trigger": oracle[groups["trigger"]].mean(dtype=np.float64).item(),
        "trigger_fraction": groups["trigger"].mean().item(),
    }
    return make_source("trigger", config.symbols + 2, config, splits, facts)
