"""Bigram-Backcopy: a generated task on which a one-layer softmax model forms an attention sink within minutes.

Task: Guo et al. 2024, "Active-Dormant Attention Heads" (arXiv 2410.13835), with a random chain in the place of their
character bigrams. A few symbols are triggers: what follows a trigger is a copy of what came before it; what follows
any other symbol is drawn from that symbol's row of a fixed bigram table. So a query on a trigger has one key to look
at, the one before it, and a query on anything else has none.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lit_lazy.data.base import DataConfig, DataSource, TokenDataset, fingerprint
from lit_lazy.support.checks import require, require_whole
from lit_lazy.support.memory import require_memory

BYTES_PER_TOKEN = 10
"""The token, the two groups its row may be in, and the oracle's loss."""


@dataclass(frozen=True)
class Backcopy(DataConfig):
    """Bigram-Backcopy, a generated probe with a known optimum.

    Token ids: the symbols are 0 .. vocab_size - 1, of which the first n_triggers are the triggers; one further id,
    vocab_size, is the BOS that begins every sequence and occurs nowhere else. `DataSource.vocab_size` is therefore
    vocab_size + 1.
    A batch also carries, each `[B, L]`: `trigger` and `non_trigger` (bool), the query positions that hold a trigger and
    those that hold another symbol, BOS in neither because it has no key but itself; and `oracle_nll` (float32, nats),
    minus the log-probability that a predictor who knows the task gives the target: 0 on triggers.
    With `fixed_token_at` = k the sequence begins with k - 1 symbols of a chain of their own, then comes BOS, then the
    rest as it would at the beginning. The symbol before BOS is in neither group: its target is BOS, at 0 nats.
    """

    vocab_size: int = 64
    """Number of symbols, triggers included, BOS not."""
    context_length: int = 64
    """Tokens in a sequence, BOS included."""
    n_triggers: int = 3
    """Number of symbols after which the symbol before them is copied."""
    trigger_mass: float = 0.25
    """Probability m that a trigger follows a non-trigger; a share m / (1 + m) of the positions then holds one."""
    concentration: float = 0.3
    """Dirichlet concentration of the bigram table's rows: the smaller, the more predictable the chain."""
    train_sequences: int = 81_920
    """Training sequences (the default is 640 batches of 128 without a repeat)."""
    validation_sequences: int = 1_024
    """Validation sequences."""
    task_seed: int = 0
    """Seed of the bigram table and of the sequences; the seed of a run changes neither."""
    fixed_token_at: int | None = None
    """Position, from 1, at which every sequence has BOS, whose key is then watched; None for the first, not watched."""

    def __post_init__(self) -> None:
        require_whole("data.n_triggers", self.n_triggers, 1)
        require_whole("data.vocab_size", self.vocab_size, 3)
        smallest = self.n_triggers + 2
        require(
            smallest <= self.vocab_size <= 4096,
            "data.vocab_size",
            self.vocab_size,
            f"must lie in {smallest} .. 4096: two symbols beside data.n_triggers={self.n_triggers}, and a table of all "
            "pairs that fits in memory",
        )
        require_whole("data.context_length", self.context_length, 3)
        require(0 < self.trigger_mass < 1, "data.trigger_mass", self.trigger_mass, "must lie strictly between 0 and 1")
        # Below 0.05 a row's probabilities span more than float64 does, and the chain may fall apart.
        require(0.05 <= self.concentration <= 1e6, "data.concentration", self.concentration, "must lie in 0.05 .. 1e6")
        require_whole("data.train_sequences", self.train_sequences, 1)
        require_whole("data.validation_sequences", self.validation_sequences, 1)
        require_whole("data.task_seed", self.task_seed, 0)
        place = self.fixed_token_at
        if place is not None:
            require_whole("data.fixed_token_at", place, 1)
            inside = f"must not exceed data.context_length={self.context_length}"
            require(place <= self.context_length, "data.fixed_token_at", place, inside)

    def load(self) -> DataSource:
        names = ("train_sequences", "validation_sequences", "context_length")
        n = self.train_sequences + self.validation_sequences
        require_memory(
            {f"data.{name}": getattr(self, name) for name in names}, BYTES_PER_TOKEN * n * self.context_length
        )
        return _load(self)


class Chain(NamedTuple):
    """The random law behind the sequences: V symbols, of which the first few are triggers."""

    transition: np.ndarray
    """`[V, V]`: P(next | symbol). A trigger's row is never used, since a copy follows a trigger."""
    start: np.ndarray
    """`[V]`: law of the symbol after BOS: zero on triggers, on the others the chain's stationary law.

    With it, the non-triggers at every position have this law, because a trigger only delays the chain by two steps.
    """


def make_chain(config: Backcopy, rng: np.random.Generator) -> Chain:
    """Rows with `trigger_mass` spread over the triggers and the rest over the others, both Dirichlet(concentration)."""
    k, others = config.n_triggers, config.vocab_size - config.n_triggers
    on_triggers = rng.dirichlet(np.full(k, config.concentration), size=config.vocab_size)
    on_others = rng.dirichlet(np.full(others, config.concentration), size=config.vocab_size)
    transition = np.hstack([config.trigger_mass * on_triggers, (1 - config.trigger_mass) * on_others])
    return Chain(transition, np.concatenate([np.zeros(k), solve_stationary(on_others[k:])]))


def solve_stationary(transition: np.ndarray) -> np.ndarray:
    """The row vector p with p @ transition = p and sum 1, for an irreducible chain `[n, n]`."""
    n = len(transition)
    # The balance equations are dependent: the last of them gives way to the sum.
    system = np.vstack([(transition.T - np.eye(n))[:-1], np.ones(n)])
    solution = np.linalg.solve(system, np.eye(n)[-1]).clip(0)
    return solution / solution.sum()


def draw_sequences(config: Backcopy, chain: Chain, n: int, rng: np.random.Generator) -> np.ndarray:
    """n sequences of `context_length` symbols and BOS among them, int32 `[n, L + 1]`."""
    before = (config.fixed_token_at or 1) - 1
    head = draw_chain(config, chain, before, n, rng)[:, 1:]
    return np.hstack([head, draw_chain(config, chain, config.context_length - before, n, rng)])


def draw_chain(config: Backcopy, chain: Chain, length: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """n times BOS and so many symbols behind it, int32 `[n, length + 1]`."""
    law = np.vstack([chain.transition, chain.start])  # BOS, the last id, is followed by the start law
    cumulative = law.cumsum(axis=1)
    cumulative /= cumulative[:, -1:]
    # Row r's cumulative law lifted by r: one sorted array, in which r + u is looked up for every sequence at once.
    lifted = (cumulative + np.arange(len(law))[:, None]).ravel()

    sequences = np.empty((length + 1, n), dtype=np.int32)
    sequences[0] = config.vocab_size
    for t in range(length):
        current = sequences[t]
        uniform = rng.integers(2**32, size=n) / 2**32  # 32 bits, so that r + u is exact and stays below r + 1
        drawn = np.searchsorted(lifted, current + uniform, side="right") - current * config.vocab_size
        sequences[t + 1] = np.where(current < config.n_triggers, sequences[t - 1], drawn)
    return np.ascontiguousarray(sequences.T)


def annotate(config: Backcopy, chain: Chain, sequences: np.ndarray) -> TokenDataset:
    """The sequences with their row groups and the nats of the best possible prediction."""
    tokens, targets = sequences[:, :-1], sequences[:, 1:]
    bos = config.vocab_size
    trigger, before_bos = tokens < config.n_triggers, targets == bos
    with np.errstate(divide="ignore"):  # the start law is zero on triggers, which never follow BOS
        nll = -np.log(np.vstack([chain.transition, chain.start]))
    certain = trigger | before_bos
    oracle_nll = np.where(certain, 0.0, nll[tokens, np.where(before_bos, 0, targets)]).astype(np.float32)
    positions = {
        "trigger": torch.from_numpy(trigger & ~before_bos),
        "non_trigger": torch.from_numpy(~certain & (tokens != bos)),
        "oracle_nll": torch.from_numpy(oracle_nll),
    }
    return TokenDataset(torch.from_numpy(sequences), positions)


@functools.cache
def _load(config: Backcopy) -> DataSource:
    # One stream for each part: the size of one never changes another.
    seeds = np.random.SeedSequence(config.task_seed).spawn(3)
    chain_rng, train_rng, validation_rng = (np.random.default_rng(seed) for seed in seeds)
    chain = make_chain(config, chain_rng)
    train = draw_sequences(config, chain, config.train_sequences, train_rng)
    validation = draw_sequences(config, chain, config.validation_sequences, validation_rng)
    annotated = annotate(config, chain, validation)
    oracle_nll, non_trigger = annotated.positions["oracle_nll"].double(), annotated.positions["non_trigger"]
    return DataSource(
        name="backcopy",
        vocab_size=config.vocab_size + 1,
        context_length=config.context_length,
        fingerprint=fingerprint([train, validation]),
        info={
            "train_tokens": config.train_sequences * config.context_length,
            "validation_tokens": config.validation_sequences * config.context_length,
            # On the validation targets, BOS rows included in the first.
            "oracle_nats": oracle_nll.mean().item(),
            "oracle_nats_non_trigger": oracle_nll[non_trigger].mean().item(),
            "trigger_fraction": annotated.positions["trigger"].double().mean().item(),
        },
        train=annotate(config, chain, train),
        validation=annotated,
        row_groups=("trigger", "non_trigger"),
        watched_key=config.fixed_token_at,
    )
