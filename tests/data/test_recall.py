"""Recall with absent keys: the sequences satisfy their rules, the answers follow from them, errors are one line."""

import dataclasses
import re

import pytest
import torch

from lit_lazy.data.base import IGNORED
from lit_lazy.data.recall import Recall, _build_source

CONFIG = Recall(train_sequences=2_000, validation_sequences=500)
CORNERS = [
    Recall(pairs=1, queries=2, keys=2, values=2, train_sequences=40, validation_sequences=40),
    Recall(pairs=9, queries=4, keys=11, values=3, train_sequences=40, validation_sequences=40),
]


def whole(data):
    return data.__getitems__(list(range(len(data))))


@pytest.mark.parametrize("config", [CONFIG, *CORNERS], ids=str)
def test_rules(config):
    """Keys are distinct, half of the queries have a pair, and the answers are its values, or NULL."""
    source, v = config.load(), config.vocabulary
    assert source.vocab_size == v.vocab_size == config.keys * (config.values + 1) + config.values + 1
    for data in (source.train, source.validation):
        batch = whole(data)
        assert batch["tokens"].shape == batch["targets"].shape == (len(data), config.context_length)
        pairs, queries = batch["tokens"].split([config.pairs, config.queries], 1)
        keys, values = pairs // config.values, pairs % config.values
        asked = queries - config.keys * config.values
        assert 0 <= keys.min() <= keys.max() < config.keys
        assert 0 <= asked.min() <= asked.max() < config.keys
        for drawn in (keys, asked):
            assert (drawn.sort(1).values.diff(dim=1) > 0).all()
        match = asked[:, :, None] == keys[:, None]
        assert (match.any(-1).sum(1) == config.queries // 2).all()
        answer = v.encode_answer((match * values[:, None]).sum(-1))
        expected = torch.where(match.any(-1), answer, v.null)
        assert torch.equal(batch["targets"][:, config.pairs :], expected)
        assert (batch["targets"][:, : config.pairs] == IGNORED).all()
        assert torch.equal(batch["present"][:, config.pairs :], match.any(-1))
        assert torch.equal(batch["absent"][:, config.pairs :], ~match.any(-1))
        assert not (batch["present"] | batch["absent"])[:, : config.pairs].any()
        assert (batch["oracle_nll"] == 0).all()


def test_keys_positions_and_values_are_uniform():
    """Chi-square per cell: keys among pairs, queries among present keys, positions, values."""
    batch = whole(Recall(train_sequences=20_000).load().train)
    pairs, queries = batch["tokens"].split([CONFIG.pairs, CONFIG.queries], 1)
    keys, asked = pairs // CONFIG.values, queries - CONFIG.keys * CONFIG.values
    place = (asked[:, :, None] == keys[:, None])[batch["present"][:, CONFIG.pairs :]].int().argmax(-1)
    present = batch["present"][:, CONFIG.pairs :].int().argmax(1)  # the first present query: P(0) = 1/2
    for drawn, cells in ((keys, CONFIG.keys), (asked, CONFIG.keys), (pairs % CONFIG.values, CONFIG.values)):
        counts = torch.bincount(drawn.flatten(), minlength=cells).double()
        mean = counts.mean()
        assert ((counts - mean) / mean.sqrt()).abs().max() < 5
    assert torch.bincount(place, minlength=CONFIG.pairs).double().std() < 0.02 * len(place) / CONFIG.pairs
    assert abs((present == 0).double().mean() - 0.5) < 5 * 0.5 / len(present) ** 0.5


def test_more_pairs_keep_the_vocabulary():
    more = dataclasses.replace(CONFIG, pairs=8 * CONFIG.pairs, train_sequences=1)
    assert more.vocabulary == CONFIG.vocabulary
    assert more.load().context_length == 8 * CONFIG.pairs + CONFIG.queries
    assert more.load().row_groups == CONFIG.load().row_groups
    assert CONFIG.outline() == dataclasses.replace(more.outline(), context_length=24, sequences=2_000)


def test_the_task_seed_determines_everything():
    config, other = (Recall(train_sequences=20, validation_sequences=20, task_seed=seed) for seed in (0, 1))
    assert config.load() is config.load()
    assert _build_source.__wrapped__(config).fingerprint == config.load().fingerprint != other.load().fingerprint
    longer = dataclasses.replace(config, train_sequences=30).load()
    assert torch.equal(longer.validation.sequences, config.load().validation.sequences)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": 3}, "data.queries=3: must be even: half of the queries ask for absent keys"),
        ({"pairs": 7}, "data.pairs=7: must be a whole number of at least 8"),
        ({"pairs": 65}, "data.keys=72: must be a whole number of at least 73"),
        ({"train_sequences": 10**13}, "data.train_sequences=10000000000000"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as error:
        Recall(**options).load()
    assert "\n" not in str(error.value)
