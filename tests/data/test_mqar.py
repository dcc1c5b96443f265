"""MQAR: the rules of zoology's generator, its power law, and one-line errors."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from lit_lazy.data.base import IGNORED
from lit_lazy.data.mqar import Mqar, _build_source, draw_gaps

TINY = Mqar(vocab_size=20, context_length=16, pairs=3, train_sequences=300, validation_sequences=40)
CONFIGS = [
    TINY,
    dataclasses.replace(TINY, random_fillers=True, power=1.0),
    Mqar(vocab_size=11, context_length=4, pairs=1, train_sequences=50, validation_sequences=50),
    Mqar(vocab_size=8_192, context_length=64, pairs=4, train_sequences=50, validation_sequences=50),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rules(config):
    """The target of a repeated key is the value after it among the pairs; there is no other target."""
    source = config.load()
    assert source.vocab_size == config.vocab_size
    for data in (source.train, source.validation):
        batch = data.__getitems__(list(range(len(data))))
        tokens, targets, query = batch["tokens"], batch["targets"], batch["query"]
        assert tokens.shape == targets.shape == (len(data), config.context_length)
        assert 0 <= tokens.min() <= tokens.max() < config.vocab_size
        keys, values = tokens[:, 0 : 2 * config.pairs : 2], tokens[:, 1 : 2 * config.pairs : 2]
        assert 1 <= keys.min() <= keys.max() < config.vocab_size // 2 <= values.min()
        for drawn in (keys, values):
            assert (drawn.sort(1).values.diff(dim=1) > 0).all()
        assert torch.equal(query, targets != IGNORED)
        assert (query.sum(1) == config.pairs).all()
        asked, answers = (part[query].view(-1, config.pairs, 1) for part in (tokens, targets))
        match = asked == keys[:, None]
        assert (match.sum(-1) == 1).all()
        assert (match.sum(1) == 1).all()
        assert ((answers == values[:, None]) | ~match).all()
        assert not query[:, : 2 * config.pairs].any()
        assert not query[:, 1::2].any()
        if not config.random_fillers:
            assert (tokens[:, 2 * config.pairs :][~query[:, 2 * config.pairs :]] == 0).all()
        assert (batch["oracle_nll"] == 0).all()


def test_keys_and_values_are_all_drawn():
    batch = TINY.load().train.__getitems__(list(range(300)))
    assert batch["tokens"][:, 0:6:2].unique().tolist() == list(range(1, 10))
    assert batch["tokens"][:, 1:6:2].unique().tolist() == list(range(10, 20))


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_are_drawn_without_replacement_by_the_power_law(power):
    """The first follows the law, the second the law without the first."""
    config, space, n = dataclasses.replace(TINY, pairs=2, power=power), 4, 20_000
    found = draw_gaps(space, config, n, np.random.default_rng(0))
    law = np.arange(1, space + 1) ** (power - 1)
    law /= law.sum()
    second = sum(law[first] * np.where(np.arange(space) == first, 0, law) / (1 - law[first]) for first in range(space))
    for draw, expected in ((found[:, 0], law), (found[:, 1], second)):
        share = np.bincount(draw, minlength=space) / n
        assert (np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / n)).all()


def test_the_task_seed_determines_everything():
    other = dataclasses.replace(TINY, task_seed=1)
    assert TINY.load() is TINY.load()
    assert _build_source.__wrapped__(TINY).fingerprint == TINY.load().fingerprint != other.load().fingerprint
    longer = dataclasses.replace(TINY, train_sequences=310).load()
    assert torch.equal(longer.validation.sequences, TINY.load().validation.sequences)
    assert TINY.outline().sequences == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 254}, "data.context_length=254: must be a whole number of at least 256"),
        ({"context_length": 257}, "data.context_length=257: must be even: a pair has two tokens"),
        ({"vocab_size": 128}, "data.vocab_size=128: must be a whole number of at least 130"),
        ({"train_sequences": 10**12}, "data.train_sequences=1000000000000, "),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as error:
        Mqar(**options).load()
    assert "\n" not in str(error.value)
