"""Distractors: key and distance together determine the answer, neither suffices, and errors are one line."""

import dataclasses
import re

import pytest
import torch

from lit_lazy.data.base import IGNORED
from lit_lazy.data.distractors import Distractors, _build_source

CONFIG = Distractors(train_sequences=2_000, validation_sequences=500)
CORNERS = [
    Distractors(queries=4, lags=2, keys=4, values=2, train_sequences=60, validation_sequences=60),
    Distractors(queries=6, lags=5, keys=9, values=3, train_sequences=60, validation_sequences=60),
]


def read(config, data):
    """The batch; keys and values of the pairs `[n, 1, C]`; query keys and answers `[n, Q, 1]`; distances."""
    batch = data.__getitems__(list(range(len(data))))
    pairs, queries = batch["tokens"].split([config.lags * config.queries, config.queries], 1)
    answers = batch["targets"][:, pairs.shape[1] :, None] - config.vocabulary.encode_answer(0)
    asked = queries[:, :, None] - config.vocabulary.encode_query(0)
    distance = torch.arange(pairs.shape[1], config.context_length)[:, None] - torch.arange(pairs.shape[1])
    return batch, pairs[:, None] // config.values, pairs[:, None] % config.values, asked, answers, distance


@pytest.mark.parametrize("config", [CONFIG, *CORNERS], ids=str)
def test_exactly_one_token_of_the_key_is_at_a_lag_and_has_the_answer(config):
    source = config.load()
    for data in (source.train, source.validation):
        batch, keys, values, asked, answers, distance = read(config, data)
        assert batch["tokens"].shape == batch["targets"].shape == (len(data), config.context_length)
        assert batch["tokens"].max() < source.vocab_size == config.vocabulary.vocab_size
        assert (batch["targets"][:, : config.lags * config.queries] == IGNORED).all()
        lags = (distance % config.queries == 0) & (distance <= config.lags * config.queries)
        there = (keys == asked) & lags
        assert (there.sum(-1) == 1).all()
        assert ((values == answers) | ~there).all()
        assert (asked[..., 0].sort(1).values.diff(dim=1) > 0).all()
        assert (keys == asked).any(1).all()  # every key belongs to a query
        several = (keys == asked).sum(-1) > 1
        assert several.any(1).all()
        assert (several.sum(1) <= config.queries // 2).all()
        for group, rows in (("distracted", several), ("alone", ~several)):
            assert torch.equal(batch[group][:, config.lags * config.queries :], rows)
            assert not batch[group][:, : config.lags * config.queries].any()
        assert (batch["oracle_nll"] == 0).all()


def test_neither_key_nor_distance_suffices():
    """Each of m tokens of the key is equally likely, so a guess by content is right in about 1 / m; lags likewise."""
    config = dataclasses.replace(CONFIG, validation_sequences=4_000)
    source = config.load()
    batch, keys, values, asked, answers, distance = read(config, source.validation)
    rows = batch["distracted"][:, config.lags * config.queries :]
    matches = (keys == asked) & rows[..., None]
    number = matches.sum(-1)[rows].double()
    # One of m tokens has the answer, the others have it by chance.
    share = ((values == answers) & matches).sum(-1)[rows] / number
    expected = (1 + (number - 1) / config.values) / number
    error = (share - expected).std() / len(share) ** 0.5
    assert abs((share - expected).mean()) < 5 * error
    assert source.info["content_nats_distracted"] == pytest.approx(-share.log().mean().item(), rel=1e-6)
    assert share.mean() < 0.35
    lag = distance.expand_as(matches)[(keys == asked) & (distance % config.queries == 0)]
    counts = torch.bincount(lag // config.queries)[1:].double()
    assert len(counts) == config.lags
    assert ((counts - counts.mean()) / counts.mean().sqrt()).abs().max() < 5


def test_the_task_seed_determines_everything():
    config, other = (Distractors(train_sequences=20, validation_sequences=20, task_seed=seed) for seed in (0, 1))
    assert config.load() is config.load()
    assert _build_source.__wrapped__(config).fingerprint == config.load().fingerprint != other.load().fingerprint
    longer = dataclasses.replace(config, train_sequences=30).load()
    assert torch.equal(longer.validation.sequences, config.load().validation.sequences)
    outline = config.outline()
    assert (outline.vocab_size, outline.context_length) == (longer.vocab_size, longer.context_length)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": 7}, "data.queries=7: must be even: half of the queries have distractors"),
        ({"keys": 7}, "data.keys=7: must be a whole number of at least 8"),
        ({"lags": 10**9}, "data.train_sequences=38400, "),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as error:
        Distractors(**options).load()
    assert "\n" not in str(error.value)
