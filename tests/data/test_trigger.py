"""Trigger-conditional averaging: the law of the targets, the oracle counted anew, and what a model learns of it."""

import math
from collections import Counter

import pytest
import torch
from test_tasks import read

from lit_lazy.attention import NoPosition
from lit_lazy.config import ModelConfig
from lit_lazy.data.trigger import Trigger
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll

CONFIG = Trigger(symbols=64, context_length=64, train_sequences=2_000, validation_sequences=500)
CORNERS = [
    Trigger(symbols=2, context_length=3, trigger_share=0.9, train_sequences=60, validation_sequences=60),
    Trigger(symbols=300, context_length=40, trigger_share=0.01, train_sequences=60, validation_sequences=60),
]


@pytest.mark.parametrize("config", [CONFIG, *CORNERS], ids=str)
def test_rules(config):
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


@pytest.mark.parametrize("config", [CONFIG, *CORNERS], ids=str)
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


def test_info_is_measured_on_validation():
    source = CONFIG.load()
    batch = read(source.validation)
    on_triggers = batch["oracle_nll"][batch["trigger"]].mean().item()
    assert source.info["optimum_nats_trigger"] == pytest.approx(on_triggers, rel=1e-5)
    assert source.info["chance_nats"] == math.log(64)
    assert source.info["trigger_fraction"] == pytest.approx(batch["trigger"].float().mean().item(), rel=1e-6)


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


def test_a_small_model_falls_below_chance():
    """Attention to nothing leaves `chance_nats`; softmax attention learns in seconds to average before triggers."""
    config = Trigger(symbols=8, context_length=16, train_sequences=12_800, validation_sequences=200)
    source = config.load()
    cfg = ModelConfig(d_model=32, n_layers=1, n_heads=1, d_ff=16, position=NoPosition())
    model = DecoderLM(cfg, source.vocab_size, source.context_length, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for rows in torch.arange(len(source.train)).split(32):
        batch = source.train.__getitems__(rows.tolist())
        optimizer.zero_grad()
        token_nll(model(batch["tokens"]), batch["targets"]).mean().backward()
        optimizer.step()
    batch = read(source.validation)
    with torch.no_grad():
        nll = token_nll(model(batch["tokens"]), batch["targets"]).double()
    below = source.info["chance_nats"] - nll
    gains, error = below[batch["trigger"]], below[batch["trigger"]].std() / batch["trigger"].sum().sqrt()
    assert gains.mean() > 5 * error
    assert gains.mean() < source.info["chance_nats"] - source.info["optimum_nats_trigger"] + 5 * error
    assert abs(below[batch["non_trigger"]].mean()) < error
