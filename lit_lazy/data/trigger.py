"""Trigger-conditional averaging: a task that softmax attention cannot solve without a sink, and ReLU attention can.

Ran-Milo 2026 (arXiv 2603.11487): an attention layer returns the mean of the tokens before a trigger, and zero
elsewhere. Softmax weights sum to 1, so a layer that solves it puts nearly all weight of a row that returns zero on an
anchor.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lit_lazy.data.source_interface import Outline
from lit_lazy.data.synthetic_task import ORACLE, Splits, SyntheticTask, make_dataset
from lit_lazy.data.token_dataset import TokenDataset
from lit_lazy.support.checked_fields import Bounds, NonNegativeInt, PositiveInt

BYTES_PER_TOKEN = 40
"""Token, target, groups and oracle, and what drawing them takes."""


@dataclass(frozen=True)
class Trigger(SyntheticTask):
    """Trigger-conditional averaging in tokens, a synthetic task with a known optimum.

    Token ids: the symbols are 0 .. symbols - 1; with `symbols` added, the same symbols as triggers; then BOS, which
    begins every sequence. Any symbol alike stands at every other position, from the third on as a trigger with
    probability `trigger_share`. The target of a trigger is one of the symbols before it, drawn uniformly over their
    positions: its law is the mean of their one-hot vectors. The target of any other token is any symbol alike: the law
    of equal logits, to which attention can add nothing. A trigger counts as a symbol for later ones, so that no token
    but BOS is without a part in some mean.
    A batch also holds, each `[B, L]`: `trigger` and `non_trigger` (bool), the rows of triggers and of plain symbols;
    and `oracle_nll` (float32, nats), the negative log-likelihood of the target under its law.
    """

    symbols: Annotated[int, Bounds(ge=2)] = 32
    """Number of symbols."""
    context_length: Annotated[int, Bounds(ge=3)] = 32
    """Tokens per sequence, including BOS."""
    trigger_share: Annotated[float, Bounds(gt=0, lt=1)] = 0.25
    """Probability of a trigger at a position from the third on."""
    train_sequences: PositiveInt = 76_800
    """Training sequences."""
    validation_sequences: PositiveInt = 1_024
    """Validation sequences."""
    task_seed: NonNegativeInt = 0
    """Seed of the sequences; the run's seed does not affect them."""

    @property
    def bos(self) -> int:
        """Token id of BOS, the last."""
        return 2 * self.symbols

    def outline(self) -> Outline:
        return Outline("trigger", self.bos + 1, self.context_length, self.train_sequences)

    def draw(self) -> tuple[Splits, dict[str, float]]:
        self.check_memory(BYTES_PER_TOKEN * self.context_length, "context_length")
        splits = self.draw_splits()
        trigger, oracle = (splits[1].positions[name].numpy() for name in ("trigger", ORACLE))
        return splits, {
            "chance_nats": math.log(self.symbols),  # of a predictor that attends to nothing
            "optimum_nats_trigger": oracle[trigger].mean(dtype=np.float64).item(),
            "trigger_fraction": trigger.mean().item(),
        }

    def draw_split(self, n: int, rng: np.random.Generator) -> TokenDataset:
        length = self.context_length
        symbols = rng.integers(self.symbols, size=(n, length + 1), dtype=np.int32)
        is_trigger = rng.random((n, length + 1)) < self.trigger_share
        is_trigger[:, :2] = False
        sequences = symbols + self.symbols * is_trigger
        sequences[:, 0] = self.bos
        symbols, is_trigger = symbols[:, :-1], is_trigger[:, :-1]

        before = np.maximum(np.arange(length) - 1, 0)  # symbols before each position: all but BOS
        place = 1 + (rng.random((n, length)) * before).astype(np.int64)
        copied, drawn = np.take_along_axis(symbols, place, axis=1), rng.integers(self.symbols, size=(n, length))
        targets = np.where(is_trigger, copied, drawn).astype(np.int32)
        there = [(symbols[:, 1:t] == targets[:, t, None]).sum(1) for t in range(length)]
        share = np.where(is_trigger, np.stack(there, axis=1) / np.maximum(before, 1), 1 / self.symbols)
        groups = {"trigger": is_trigger, "non_trigger": ~is_trigger & (np.arange(length) > 0)}
        return make_dataset(sequences, targets, groups, -np.log(share).astype(np.float32))
