"""The generated sequences follow the documented law, and the batches report its optimum.

Sampling errors are those of the mean over sequences, which are independent; bounds are five of them.
"""

import dataclasses

import numpy as np
import pytest
import torch
from test_tasks import read

from lit_lazy.data.backcopy import Backcopy, make_chain

CONFIG = Backcopy(train_sequences=20_000, validation_sequences=2_000)
CORNERS = [
    Backcopy(vocab_size=3, n_triggers=1, context_length=3, train_sequences=500),
    Backcopy(vocab_size=20, n_triggers=7, trigger_mass=0.9, concentration=0.05, train_sequences=500),
    Backcopy(vocab_size=100, n_triggers=1, trigger_mass=0.01, concentration=5, context_length=33, train_sequences=500),
]


@pytest.fixture(scope="module")
def train():
    return read(CONFIG.load().train)


@pytest.fixture(scope="module")
def chain():
    return make_chain(CONFIG, np.random.default_rng(np.random.SeedSequence(CONFIG.task_seed).spawn(3)[0]))


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


@pytest.mark.parametrize("config", [CONFIG, *CORNERS], ids=str)
def test_rules(config):
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


@pytest.mark.parametrize("mass", [0.25, 0.6])
def test_trigger_fraction(mass):
    config = Backcopy(trigger_mass=mass, train_sequences=5_000)
    fraction = read(config.load().train)["trigger"].double().mean(dim=1)
    assert_mean(fraction, trigger_probability(config).mean())
    assert abs(fraction.mean().item() - mass / (1 + mass)) < 0.02


def test_the_chain_has_its_documented_properties(chain):
    k = CONFIG.n_triggers
    assert np.allclose(chain.transition.sum(axis=1), 1)
    assert np.allclose(chain.transition[:, :k].sum(axis=1), CONFIG.trigger_mass)
    assert (chain.start[:k] == 0).all()
    without_triggers = chain.transition[k:, k:] / (1 - CONFIG.trigger_mass)
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
    rows = train["non_trigger"]
    pairs = train["tokens"][rows] * CONFIG.vocab_size + train["targets"][rows]
    counts = torch.bincount(pairs, minlength=CONFIG.vocab_size**2).reshape(CONFIG.vocab_size, -1).numpy()
    assert (counts[chain.transition == 0] == 0).all()
    assert_frequencies(counts[CONFIG.n_triggers :], chain.transition[CONFIG.n_triggers :])


@pytest.mark.parametrize("position", [1, 2, 63])
def test_non_triggers_have_the_stationary_law_everywhere(train, chain, position):
    tokens = train["tokens"][:, position]
    tokens = tokens[tokens >= CONFIG.n_triggers]
    assert_frequencies(torch.bincount(tokens, minlength=CONFIG.vocab_size).numpy()[None], chain.start[None])


def test_oracle_is_the_entropy(train, chain):
    per_row = chain.start @ entropy(chain.transition)
    p_trigger = trigger_probability(CONFIG)
    overall = (entropy(chain.start) + ((1 - p_trigger[1:]) * per_row).sum()) / CONFIG.context_length
    assert_mean(train["oracle_nll"].double().mean(dim=1), overall)
    surprise = torch.where(train["non_trigger"], train["oracle_nll"].double() - per_row, 0.0)
    assert_mean(surprise.sum(dim=1), 0)


def test_oracle_is_not_beaten_and_is_reached(train):
    """An add-one bigram on 20 000 sequences: its expected excess is about cells / (2 n) = 0.002 nats."""
    size = CONFIG.vocab_size
    rows = train["non_trigger"]
    pairs = train["tokens"][rows] * size + train["targets"][rows]
    counts = torch.bincount(pairs, minlength=size**2).reshape(size, size).double() + 1
    nll = -(counts / counts.sum(dim=1, keepdim=True)).log()
    held_out = read(CONFIG.load().validation)
    rows = held_out["non_trigger"]
    excess = nll[held_out["tokens"][rows], held_out["targets"][rows]] - held_out["oracle_nll"][rows]
    assert 0 < excess.mean() < 0.01


@pytest.mark.parametrize("place", [None, 32])
def test_chance_knows_everything_but_the_token_before(place):
    """An add-one table of target by token: on triggers it ends at the chance of a predictor without attention."""
    config = dataclasses.replace(CONFIG, fixed_token_at=place)
    source, size = config.load(), CONFIG.vocab_size
    batches = [read(source.train), read(source.validation)]
    (tokens, targets), (asked, answers) = [(b["tokens"][b["trigger"]], b["targets"][b["trigger"]]) for b in batches]
    counts = torch.bincount(tokens * size + targets, minlength=size**2).reshape(size, size).double() + 1
    nll = -(counts / counts.sum(dim=1, keepdim=True)).log()[asked, answers]
    surprise = source.info["chance_nats"] - source.info["optimum_nats"]
    assert surprise / source.info["trigger_fraction"] == pytest.approx(nll.mean().item(), abs=0.01)
    assert 0.6 < surprise < 0.75


def test_info_is_measured_on_validation():
    source = CONFIG.load()
    batch = read(source.validation)
    assert source.vocab_size == CONFIG.vocab_size + 1
    assert source.info["trigger_fraction"] == pytest.approx(batch["trigger"].float().mean().item(), rel=1e-5)
    non_trigger = batch["oracle_nll"][batch["non_trigger"]].mean().item()
    assert source.info["optimum_nats_non_trigger"] == pytest.approx(non_trigger, rel=1e-5)


@pytest.mark.parametrize("place", [1, 2, 5, 9, 64])
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


def test_a_fixed_token_elsewhere_leaves_the_law_of_the_chain():
    config = Backcopy(train_sequences=20_000, validation_sequences=2_000, fixed_token_at=32)
    plain = dataclasses.replace(config, fixed_token_at=None)
    moved, first = (c.load().info["optimum_nats_non_trigger"] for c in (config, plain))
    assert moved == pytest.approx(first, abs=0.02)
