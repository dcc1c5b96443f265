"""Bigram-Backcopy: a synthetic task on which a one-layer softmax model forms an attention sink within minutes.

Task: Guo et al. 2024, "Active-Dormant Attention Heads" (arXiv 2410.13835), with a random chain instead of their
character bigrams. A few symbols are triggers. After a trigger, the symbol before it is repeated; after any other
symbol, the next one is drawn from that symbol's row of a fixed bigram table. So a query on a trigger has one useful
key, the one before it, and any other query has none.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from lit_lazy.data.source_interface import Outline
from lit_lazy.data.synthetic_task import ORACLE, Splits, SyntheticTask, make_dataset
from lit_lazy.data.token_dataset import TokenDataset
from lit_lazy.support.checked_fields import Bounds, NonNegativeInt, PositiveInt, check_value

BYTES_PER_TOKEN = 10
"""One token, its two row-group flags, and the oracle's loss."""


@dataclass(frozen=True)
class Backcopy(SyntheticTask):
    """Bigram-Backcopy, a synthetic task with a known optimum.

    Token ids: the symbols are 0 .. vocab_size - 1, the first n_triggers of them triggers. The id vocab_size is BOS,
    which begins every sequence and occurs nowhere else; so `DataSource.vocab_size` is vocab_size + 1.
    A batch also holds, each `[B, L]`: `trigger` and `non_trigger` (bool), the query positions with a trigger and those
    with another symbol (BOS is in neither: its only key is itself); and `oracle_nll` (float32, nats), the negative
    log-likelihood of the target under the true law, 0 on triggers.
    With `fixed_token_at` = k the sequence starts with k - 1 symbols of a separate chain; BOS follows, then an ordinary
    sequence. The symbol before BOS is in neither group: its target is BOS, at 0 nats.
    """

    streams = 1  # of the chain

    vocab_size: Annotated[int, Bounds(ge=3, le=4096)] = 64
    """Number of symbols, including triggers, excluding BOS."""
    context_length: Annotated[int, Bounds(ge=3)] = 64
    """Tokens per sequence, including BOS."""
    n_triggers: PositiveInt = 3
    """Number of trigger symbols; after one, the symbol before it is repeated."""
    trigger_mass: Annotated[float, Bounds(gt=0, lt=1)] = 0.25
    """Probability m of a trigger after a non-trigger; triggers then hold a share m / (1 + m) of the positions."""
    # Below 0.05 a row's probabilities exceed the range of float64, and the chain may become reducible.
    concentration: Annotated[float, Bounds(ge=0.05, le=1e6)] = 0.3
    """Dirichlet concentration of the bigram table's rows; smaller values make the chain more predictable."""
    train_sequences: PositiveInt = 81_920
    """Training sequences (the default is 640 batches of 128 without repetition)."""
    validation_sequences: PositiveInt = 1_024
    """Validation sequences."""
    task_seed: NonNegativeInt = 0
    """Seed of the bigram table and the sequences; the run's seed affects neither."""
    fixed_token_at: PositiveInt | None = None
    """Position of BOS in every sequence, from 1; its key is then watched. None: first position, not watched."""

    def __post_init__(self) -> None:
        check_value("data.vocab_size", self.vocab_size, Annotated[int, Bounds(ge=self.n_triggers + 2)])
        check_value("data.fixed_token_at", self.fixed_token_at, Annotated[int, Bounds(le=self.context_length)] | None)

    @property
    def watched_key(self) -> int | None:
        return self.fixed_token_at

    def outline(self) -> Outline:
        return Outline("backcopy", self.vocab_size + 1, self.context_length, self.train_sequences)

    def draw(self) -> tuple[Splits, dict[str, float]]:
        """Facts: losses of known predictors, and the share of triggers; `optimum_nats` includes the rows of BOS.

        `chance_nats` is the lowest loss of one that knows the chain, but of a sequence only the current token: on a
        trigger t it predicts a symbol by the law of the symbols before t, P(s | t) proportional to
        `start[s] * transition[s, t]`. Everywhere else the oracle needs no more than it has.
        """
        self.check_memory(BYTES_PER_TOKEN * self.context_length, "context_length")
        splits, chain = self.draw_splits(), make_chain(self)
        sequences, positions = splits[1].sequences.numpy(), splits[1].positions
        before = chain.start[:, None] * chain.transition[:, : self.n_triggers]
        with np.errstate(divide="ignore"):  # log 0: symbols that never precede the trigger
            nll = -np.log(before / before.sum(axis=0)).T
        rows, oracle = positions["trigger"].numpy(), positions[ORACLE].double()
        surprise = nll[sequences[:, :-1][rows], sequences[:, 1:][rows]].sum() / rows.size
        optimum = oracle.mean().item()
        return splits, {
            "optimum_nats": optimum,
            "optimum_nats_non_trigger": oracle[positions["non_trigger"]].mean().item(),
            "chance_nats": optimum + float(surprise),
            "trigger_fraction": rows.mean().item(),
        }

    def draw_split(self, n: int, rng: np.random.Generator) -> TokenDataset:
        law = make_chain(self).law
        before = (self.fixed_token_at or 1) - 1
        head = draw_chain(self, law, before, n, rng)[:, 1:]
        sequences = np.hstack([head, draw_chain(self, law, self.context_length - before, n, rng)])
        tokens, targets = sequences[:, :-1], sequences[:, 1:]
        bos = self.vocab_size
        trigger, before_bos = tokens < self.n_triggers, targets == bos
        with np.errstate(divide="ignore"):  # log 0: triggers never follow BOS
            nll = -np.log(law)
        certain = trigger | before_bos
        oracle_nll = np.where(certain, 0.0, nll[tokens, np.where(before_bos, 0, targets)]).astype(np.float32)
        groups = {"trigger": trigger & ~before_bos, "non_trigger": ~certain & (tokens != bos)}
        return make_dataset(sequences, None, groups, oracle_nll)


class Chain(NamedTuple):
    """Distribution of the sequences over V symbols, the first few of them triggers."""

    transition: np.ndarray
    """`[V, V]`: P(next | symbol). A trigger's row is never used: a copy follows a trigger."""
    start: np.ndarray
    """`[V]`: law of the symbol after BOS: zero on triggers, elsewhere the stationary law of the chain.

    The non-triggers at every later position have the same law, because a trigger only delays the chain by two steps.
    """

    @property
    def law(self) -> np.ndarray:
        """`[V + 1, V]`: the transitions, and the row of BOS, the last id."""
        return np.vstack([self.transition, self.start])


@functools.lru_cache(maxsize=1)
def make_chain(config: Backcopy) -> Chain:
    """Draw a chain whose rows split `trigger_mass` over triggers and the rest over others, both by Dirichlet laws."""
    rng = np.random.default_rng(np.random.SeedSequence(config.task_seed).spawn(1)[0])
    k, others = config.n_triggers, config.vocab_size - config.n_triggers
    on_triggers = rng.dirichlet(np.full(k, config.concentration), size=config.vocab_size)
    on_others = rng.dirichlet(np.full(others, config.concentration), size=config.vocab_size)
    transition = np.hstack([config.trigger_mass * on_triggers, (1 - config.trigger_mass) * on_others])
    return Chain(transition, np.concatenate([np.zeros(k), solve_stationary(on_others[k:])]))


def solve_stationary(transition: np.ndarray) -> np.ndarray:
    """Row vector p `[n]` with p @ transition = p and sum 1, for an irreducible chain `[n, n]`."""
    n = len(transition)
    # The balance equations are linearly dependent: the sum condition replaces the last one.
    system = np.vstack([(transition.T - np.eye(n))[:-1], np.ones(n)])
    solution = np.linalg.solve(system, np.eye(n)[-1]).clip(0)
    return solution / solution.sum()


def draw_chain(config: Backcopy, law: np.ndarray, length: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """n times BOS followed by `length` symbols, int32 `[n, length + 1]`."""
    cumulative = law.cumsum(axis=1)
    cumulative /= cumulative[:, -1:]
    # Row r's cumulative law plus r: a single sorted array, so one search of r + u serves all sequences.
    lifted = (cumulative + np.arange(len(law))[:, None]).ravel()

    sequences = np.empty((length + 1, n), dtype=np.int32)
    sequences[0] = config.vocab_size
    for t in range(length):
        current = sequences[t]
        uniform = rng.integers(2**32, size=n) / 2**32  # 32 bits, so that r + u is exact and stays below r + 1
        drawn = np.searchsorted(lifted, current + uniform, side="right") - current * config.vocab_size
        sequences[t + 1] = np.where(current < config.n_triggers, sequences[t - 1], drawn)
    return np.ascontiguousarray(sequences.T)
