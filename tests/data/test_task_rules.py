"""Each synthetic task obeys its rule and its laws, and its oracle cannot be beaten."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from test_tasks import TASKS, read

from lit_lazy.data.backcopy import Backcopy, make_chain
from lit_lazy.data.distractors import Distractors
from lit_lazy.data.mqar import Mqar, draw_gaps
from lit_lazy.data.recall import Recall
from lit_lazy.data.source_interface import DataConfig
from lit_lazy.data.token_dataset import IGNORED
from lit_lazy.data.trigger import Trigger


def of(kind: type[DataConfig]) -> pytest.MarkDecorator:
    """All small tasks of a kind, in the usual order of tokens."""
    usual = [task for task in TASKS if isinstance(task, kind) and getattr(task, "fixed_token_at", None) is None]
    return pytest.mark.parametrize("config", usual, ids=str)


# Backcopy


BACKCOPY = Backcopy(train_sequences=20_000, validation_sequences=2_000)


@pytest.fixture(scope="module")
def train():
    return read(BACKCOPY.load().train)


@pytest.fixture(scope="module")
def chain():
    return make_chain(BACKCOPY)


def trigger_probability(config):
    """P(trigger) by position: 0 at BOS and after it, then m times P(no trigger at the previous position)."""
    probability = np.zeros(config.context_length)
    for t in range(2, config.context_length):
        probability[t] = config.trigger_mass * (1 - probability[t - 1])
    return probability


def entropy(law):
    return -np.sum(law * np.log(np.where(law > 0, law, 1)), axis=-1)


def assert_mean(per_sequence, expected):
    values = per_sequence.double()
    error = values.std().item() / len(values) ** 0.5
    assert abs(values.mean().item() - expected) < 5 * error


@of(Backcopy)
def test_the_rules_of_backcopy(config):
    source = config.load()
    bos = config.vocab_size
    for data in (source.train, source.validation):
        batch = read(data)
        tokens, targets, trigger = batch["tokens"], batch["targets"], batch["trigger"]
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert torch.equal(tokens == bos, torch.arange(config.context_length).expand_as(tokens) == 0)
        assert targets.max() < bos
        assert torch.equal(trigger, tokens < config.n_triggers)
        assert torch.equal(targets[:, 1:][trigger[:, 1:]], tokens[:, :-1][trigger[:, 1:]])
        assert not trigger[:, :2].any()
        assert not (trigger[:, 1:] & trigger[:, :-1]).any()
        assert torch.equal(batch["non_trigger"], ~trigger & (tokens != bos))
        assert (batch["oracle_nll"][trigger] == 0).all()
        assert (batch["oracle_nll"][~trigger] > 0).all()


def test_the_chain_has_its_documented_properties(chain):
    k = BACKCOPY.n_triggers
    assert np.allclose(chain.transition.sum(axis=1), 1)
    assert np.allclose(chain.transition[:, :k].sum(axis=1), BACKCOPY.trigger_mass)
    assert (chain.start[:k] == 0).all()
    without_triggers = chain.transition[k:, k:] / (1 - BACKCOPY.trigger_mass)
    assert np.allclose(chain.start[k:] @ without_triggers, chain.start[k:])


def assert_frequencies(counts, law):
    """Counts `[n, V]` are multinomial draws from the rows of `law`, by chi-square on the cells with enough draws."""
    expected = counts.sum(axis=1, keepdims=True) * law
    enough = expected >= 10
    z = (counts - expected)[enough] / np.sqrt((expected * (1 - law))[enough])
    assert enough.sum() > 30
    assert np.abs(z).max() < 6
    assert abs(np.mean(z**2) - 1) < 5 * np.sqrt(2 / enough.sum())


def test_bigrams_follow_the_table(train, chain):
    counts = count_pairs(train, "non_trigger").numpy()
    assert (counts[chain.transition == 0] == 0).all()
    assert_frequencies(counts[BACKCOPY.n_triggers :], chain.transition[BACKCOPY.n_triggers :])


@pytest.mark.parametrize("position", [1, 2, 63])
def test_non_triggers_have_the_stationary_law_everywhere(train, chain, position):
    tokens = train["tokens"][:, position]
    tokens = tokens[tokens >= BACKCOPY.n_triggers]
    assert_frequencies(torch.bincount(tokens, minlength=BACKCOPY.vocab_size).numpy()[None], chain.start[None])


def test_oracle_is_the_entropy(train, chain):
    per_row = chain.start @ entropy(chain.transition)
    p_trigger = trigger_probability(BACKCOPY)
    overall = (entropy(chain.start) + ((1 - p_trigger[1:]) * per_row).sum()) / BACKCOPY.context_length
    assert_mean(train["oracle_nll"].double().mean(dim=1), overall)
    surprise = torch.where(train["non_trigger"], train["oracle_nll"].double() - per_row, 0.0)
    assert_mean(surprise.sum(dim=1), 0)


def count_pairs(batch, rows):
    """How often each target follows each token in these rows."""
    size = BACKCOPY.vocab_size
    pairs = batch["tokens"][batch[rows]] * size + batch["targets"][batch[rows]]
    return torch.bincount(pairs, minlength=size**2).reshape(size, size)


def add_one_nll(train, held_out, rows):
    """The loss of each held-out target by an add-one table of target by token."""
    counts = count_pairs(train, rows).double() + 1
    nll = -(counts / counts.sum(dim=1, keepdim=True)).log()
    return nll[held_out["tokens"][held_out[rows]], held_out["targets"][held_out[rows]]]


def test_oracle_is_not_beaten_and_is_reached(train):
    """An add-one bigram on 20 000 sequences: its expected excess is about cells / (2 n) = 0.002 nats."""
    held_out = read(BACKCOPY.load().validation)
    excess = add_one_nll(train, held_out, "non_trigger") - held_out["oracle_nll"][held_out["non_trigger"]]
    assert 0 < excess.mean() < 0.01


@pytest.mark.parametrize("place", [None, 32])
def test_chance_knows_everything_but_the_token_before(place):
    """An add-one table of target by token: on triggers it ends at the chance of a predictor without attention."""
    source = dataclasses.replace(BACKCOPY, fixed_token_at=place).load()
    nll = add_one_nll(read(source.train), read(source.validation), "trigger")
    surprise = source.info["chance_nats"] - source.info["optimum_nats"]
    assert surprise / source.info["trigger_fraction"] == pytest.approx(nll.mean().item(), abs=0.01)
    assert 0.6 < surprise < 0.75


@pytest.mark.parametrize("place", [1, 2, 9, 64])
def test_a_fixed_token_elsewhere(place):
    """BOS occurs only there; an ordinary sequence follows it, and a separate chain precedes it."""
    config = Backcopy(train_sequences=300, validation_sequences=50, fixed_token_at=place)
    plain = dataclasses.replace(config, fixed_token_at=None)
    source, bos = config.load(), config.vocab_size
    assert (source.watched_key, plain.load().watched_key) == (place, None)
    batch = read(source.train)
    tokens, targets = batch["tokens"], batch["targets"]
    assert torch.equal(tokens == bos, torch.arange(64).expand_as(tokens) == place - 1)
    before, behind = tokens[:, : place - 1], torch.cat([tokens[:, place - 1 :], targets[:, -1:]], 1)
    for part in (before, behind):
        trigger = part[:, 1:-1] < config.n_triggers
        assert torch.equal(part[:, 2:][trigger], part[:, :-2][trigger])
        assert not (part[:, :1] < config.n_triggers).any()
    assert not (behind[:, 1:2] < config.n_triggers).any()
    rows = batch["trigger"] | batch["non_trigger"]
    assert torch.equal(rows, (tokens != bos) & (targets != bos))
    assert torch.equal(batch["trigger"], rows & (tokens < config.n_triggers))
    assert (batch["oracle_nll"][targets == bos] == 0).all()
    assert (batch["oracle_nll"][batch["non_trigger"]] > 0).all()
    assert torch.equal(source.train.sequences, plain.load().train.sequences) == (place == 1)


# Recall


RECALL = Recall(train_sequences=2_000, validation_sequences=500)


@of(Recall)
def test_the_rules_of_recall(config):
    """Keys are distinct, half of the queries have a pair, and the answers are its values, or NULL."""
    source, v = config.load(), config.vocabulary
    assert source.vocab_size == v.vocab_size == config.keys * (config.values + 1) + config.values + 1
    for data in (source.train, source.validation):
        batch = read(data)
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


def test_keys_positions_and_values_are_uniform():
    """Chi-square per cell: keys among pairs, queries among present keys, positions, values."""
    batch = read(Recall(train_sequences=20_000).load().train)
    pairs, queries = batch["tokens"].split([RECALL.pairs, RECALL.queries], 1)
    keys, asked = pairs // RECALL.values, queries - RECALL.keys * RECALL.values
    place = (asked[:, :, None] == keys[:, None])[batch["present"][:, RECALL.pairs :]].int().argmax(-1)
    present = batch["present"][:, RECALL.pairs :].int().argmax(1)  # the first present query: P(0) = 1/2
    for drawn, cells in ((keys, RECALL.keys), (asked, RECALL.keys), (pairs % RECALL.values, RECALL.values)):
        counts = torch.bincount(drawn.flatten(), minlength=cells).double()
        mean = counts.mean()
        assert ((counts - mean) / mean.sqrt()).abs().max() < 5
    assert torch.bincount(place, minlength=RECALL.pairs).double().std() < 0.02 * len(place) / RECALL.pairs
    assert abs((present == 0).double().mean() - 0.5) < 5 * 0.5 / len(present) ** 0.5


def test_more_pairs_keep_the_vocabulary():
    more = dataclasses.replace(RECALL, pairs=8 * RECALL.pairs, train_sequences=1)
    assert more.vocabulary == RECALL.vocabulary
    assert more.load().context_length == 8 * RECALL.pairs + RECALL.queries
    assert more.load().row_groups == RECALL.load().row_groups
    assert RECALL.outline() == dataclasses.replace(more.outline(), context_length=24, sequences=2_000)


# Distractors


DISTRACTORS = Distractors(train_sequences=2_000, validation_sequences=500)


def split(config, data):
    """The batch; keys and values of the pairs `[n, 1, C]`; query keys and answers `[n, Q, 1]`; distances."""
    batch = read(data)
    pairs, queries = batch["tokens"].split([config.lags * config.queries, config.queries], 1)
    answers = batch["targets"][:, pairs.shape[1] :, None] - config.vocabulary.encode_answer(0)
    asked = queries[:, :, None] - config.vocabulary.encode_query(0)
    distance = torch.arange(pairs.shape[1], config.context_length)[:, None] - torch.arange(pairs.shape[1])
    return batch, pairs[:, None] // config.values, pairs[:, None] % config.values, asked, answers, distance


@of(Distractors)
def test_exactly_one_token_of_the_key_is_at_a_lag_and_has_the_answer(config):
    source = config.load()
    for data in (source.train, source.validation):
        batch, keys, values, asked, answers, distance = split(config, data)
        assert source.vocab_size == config.vocabulary.vocab_size
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


def test_neither_key_nor_distance_suffices():
    """Each of m tokens of the key is equally likely, so a guess by content is right in about 1 / m; lags likewise."""
    config = dataclasses.replace(DISTRACTORS, validation_sequences=4_000)
    source = config.load()
    batch, keys, values, asked, answers, distance = split(config, source.validation)
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


# Mqar


MQAR = Mqar(vocab_size=20, context_length=16, pairs=3, train_sequences=300, validation_sequences=40)


@of(Mqar)
def test_the_rules_of_mqar(config):
    """The target of a repeated key is the value after it among the pairs; there is no other target."""
    source = config.load()
    assert source.vocab_size == config.vocab_size
    for data in (source.train, source.validation):
        batch = read(data)
        tokens, targets, query = batch["tokens"], batch["targets"], batch["query"]
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


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_are_drawn_without_replacement_by_the_power_law(power):
    """The first follows the law, the second the law without the first."""
    config, space, n = dataclasses.replace(MQAR, pairs=2, power=power), 4, 20_000
    found = draw_gaps(space, config, n, np.random.default_rng(0))
    law = np.arange(1, space + 1) ** (power - 1)
    law /= law.sum()
    second = sum(law[first] * np.where(np.arange(space) == first, 0, law) / (1 - law[first]) for first in range(space))
    for draw, expected in ((found[:, 0], law), (found[:, 1], second)):
        share = np.bincount(draw, minlength=space) / n
        assert (np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / n)).all()


# Trigger


@of(Trigger)
def test_the_rules_of_trigger(config):
    source = config.load()
    for data in (source.train, source.validation):
        batch = read(data)
        tokens, targets, trigger = batch["tokens"], batch["targets"], batch["trigger"]
        assert source.vocab_size == config.bos + 1 == 2 * config.symbols + 1
        assert torch.equal(tokens == config.bos, torch.arange(config.context_length).expand_as(tokens) == 0)
        assert torch.equal(trigger, (tokens >= config.symbols) & (tokens < config.bos))
        assert torch.equal(batch["non_trigger"], tokens < config.symbols)
        assert not trigger[:, :2].any()
        assert targets.max() < config.symbols


@of(Trigger)
def test_the_oracle_is_the_share_among_the_symbols_before(config):
    batch = read(config.load().validation)
    for tokens, targets, nll in zip(
        *(batch[name].tolist() for name in ("tokens", "targets", "oracle_nll")), strict=True
    ):
        before: Counter[int] = Counter()
        for token, target, found in zip(tokens, targets, nll, strict=True):
            is_trigger = config.symbols <= token < config.bos
            law = before[target] / before.total() if is_trigger else 1 / config.symbols
            assert found == pytest.approx(-math.log(law), rel=1e-6)
            before[token % config.symbols] += token != config.bos


def test_answers_have_their_laws():
    """Places of the answers behind a trigger, answers elsewhere, and symbols, by chi-square on all their values."""
    config = Trigger(symbols=400, context_length=10, train_sequences=20_000, validation_sequences=1)
    batch = read(config.load().train)
    tokens, targets, trigger = batch["tokens"], batch["targets"], batch["trigger"]
    last = trigger[:, 9]
    same = tokens[last, 1:9] % 400 == targets[last, 9:]
    alone = same.sum(1) == 1
    assert alone.double().mean() > 0.95
    assert_even(same[alone].sum(0).double())
    assert_even(torch.bincount(targets[batch["non_trigger"]], minlength=400).double())
    assert_even(torch.bincount(tokens[:, 1:].flatten() % 400, minlength=400).double())
    share = trigger[:, 2:].double().mean().item()
    assert share == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / trigger[:, 2:].numel()) ** 0.5)
    echo = (targets == tokens)[batch["non_trigger"]].double().mean()
    assert echo == pytest.approx(1 / 400, rel=0.2)  # the answer does not depend on the token


def assert_even(counts):
    z = (counts - counts.mean()) / counts.mean().sqrt()
    assert z.abs().max() < 5
    assert abs(z.square().mean() - 1) < 5 * (2 / len(counts)) ** 0.5
