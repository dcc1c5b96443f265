"""Losses by position, with a full and an evicting cache; n and theta by length."""

import dataclasses

import numpy as np
import pytest
import torch

from lit_lazy.attention import AttentionSpec, Elastic, Eviction, LearnedAbsolute, LearnedBias, Rope, Softmax
from lit_lazy.attention.position import DynamicScaling
from lit_lazy.config.schema import ModelConfig
from lit_lazy.measure import diagnostics
from lit_lazy.measure.lengths import (
    compute_length_arrays,
    compute_length_metrics,
    compute_streaming_arrays,
    loss_by_position,
)
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll

VOCABULARY, CONTEXT, T = 11, 16, 40
LAZY = AttentionSpec(Elastic(), LearnedBias(length=7, init_std=1.0))
SMALL = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24, init_std=0.5, attention=LAZY)
IDS = torch.randint(VOCABULARY, (5, T + 1), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": IDS[:, :-1], "targets": IDS[:, 1:]}


def build(**changes):
    return DecoderLM(dataclasses.replace(SMALL, **changes), VOCABULARY, CONTEXT, seed=2).double()


@pytest.mark.parametrize("at_once", [1, 64, 8192])
def test_loss_is_that_of_the_full_pass_whatever_is_read_at_once(at_once, monkeypatch):
    """Also where the length changes how each token is rotated."""
    monkeypatch.setattr(diagnostics, "TOKENS_AT_ONCE", at_once)
    for position in (Rope(), Rope(scaling=DynamicScaling(4.0, trained_length=CONTEXT))):
        model = build(position=position)
        expected = token_nll(model(BATCH["tokens"]), BATCH["targets"]).double().mean(0)
        torch.testing.assert_close(loss_by_position(model, BATCH), expected, rtol=1e-6, atol=1e-6)
        if model.position.relative:
            by_cache = loss_by_position(model, BATCH, Eviction(4, 60))
            torch.testing.assert_close(by_cache, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("at_once", [10, 8192])
def test_a_cache_that_evicts_is_that_of_decoding_token_by_token(at_once, monkeypatch):
    monkeypatch.setattr(diagnostics, "TOKENS_AT_ONCE", at_once)
    model, eviction = build().train(), Eviction(2, 9)
    cache = model.new_cache(eviction)
    with torch.no_grad():
        logits = torch.cat([model(token, cache) for token in BATCH["tokens"].split(1, 1)], 1)
    expected = token_nll(logits, BATCH["targets"]).double().mean(0)
    arrays = compute_streaming_arrays(model, BATCH, eviction)
    np.testing.assert_allclose(arrays["streamed/loss"], expected, rtol=1e-5)
    assert model.training  # restored
    whole = loss_by_position(model, BATCH)
    assert torch.equal(whole[:11].float(), torch.from_numpy(arrays["streamed/loss"])[:11])
    assert (whole[11:].float() != torch.from_numpy(arrays["streamed/loss"])[11:]).all()
    assert arrays["streamed/kept"].tolist() == [2, 9]
    with pytest.raises(ValueError, match="a cache that evicts moves tokens"):
        loss_by_position(build(position=LearnedAbsolute()), BATCH, eviction)


@pytest.mark.parametrize("threshold", ["per_query", "constant"])
@pytest.mark.parametrize("window", [None, 5])
def test_with_n_held_theta_is_that_of_the_token_s_place_in_the_text(threshold, window):
    """theta = tau / min(i, window) equals that of the cache's m keys with tau * m / min(i, window)."""
    spec = AttentionSpec(Elastic(0.4, threshold), LearnedBias(length=7, init_std=1.0), window=window)
    model, eviction = build(attention=spec), Eviction(2, 9)
    found = loss_by_position(model, BATCH, eviction, n_held=True)
    cache, logits = model.new_cache(eviction), []
    taus = [layer.normaliser.tau for layer in model.attentions]
    for i, token in enumerate(BATCH["tokens"].split(1, 1), start=1):
        seen, there = (min(n, window or T) for n in (min(i, eviction.capacity), i))
        with torch.no_grad():
            for tau in taus:
                tau.fill_(0.4 * (seen / there if threshold == "per_query" else 1))
            logits.append(model(token, cache))
    expected = token_nll(torch.cat(logits, 1), BATCH["targets"]).double().mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for tau in taus:
        tau.data.fill_(0.4)
    by_cache = loss_by_position(model, BATCH, eviction)
    torch.testing.assert_close(found[: eviction.capacity], by_cache[: eviction.capacity], rtol=1e-6, atol=1e-6)
    # A window smaller than the cache is full in both.
    differs = threshold == "per_query" and window is None
    assert ((found - by_cache)[eviction.capacity :].abs() > 1e-6).any() == differs


class TestThresholds:
    EVERY = np.arange(1, T + 1)

    def of(self, threshold, eviction=None, window=None):
        model = build(attention=AttentionSpec(Elastic(0.5, threshold), window=window))
        for i, layer in enumerate(model.attentions):
            tau = layer.normaliser.tau
            tau.data += torch.arange(tau.numel()).view(tau.shape) * 0.01 + i
        taus = torch.stack([layer.normaliser.tau.detach() for layer in model.attentions]).numpy()
        arrays = compute_length_arrays(model, T, eviction)
        return taus, {name.removeprefix("streamed/" if eviction else "length/"): x for name, x in arrays.items()}

    @pytest.mark.parametrize(("eviction", "room"), [(None, T), (Eviction(3, 9), 12)])
    def test_are_those_of_the_rows(self, eviction, room):
        place = self.EVERY.clip(max=room)
        divisors = {"per_query": place, "seq_len": np.full(T, CONTEXT), "constant": np.ones(T)}
        for threshold, divisor in divisors.items():
            taus, found = self.of(threshold, eviction)
            assert found["n"].tolist() == place.tolist()
            np.testing.assert_allclose(found["theta"], taus[..., None] / divisor, rtol=1e-6)
        taus, found = self.of("per_token", eviction)
        np.testing.assert_allclose(found["theta"], taus[..., place.clip(max=CONTEXT) - 1] / place, rtol=1e-6)

    def test_count_a_window_and_are_absent_where_there_are_none(self):
        taus, found = self.of("per_query", window=5)
        assert found["n"].tolist() == self.EVERY.clip(max=5).tolist()
        np.testing.assert_allclose(found["theta"], taus[..., None] / self.EVERY.clip(max=5), rtol=1e-6)
        assert compute_length_arrays(build(attention=AttentionSpec(Softmax())), T).keys() == {"length/n"}


def test_scalars_are_perplexities_of_parts_and_the_last_row():
    loss = np.linspace(1, 3, T).astype(np.float32)
    counts = np.arange(T, 0, -1)
    short = {"context": np.array(T), "loss/by_position": loss, "length/n": np.arange(1, T + 1)}
    short["loss/target_count"] = counts
    arrays = short | {"context": np.array(16), "streamed/loss": loss + 1, "streamed/kept": np.array([4, 20])}
    arrays |= {"streamed/n": np.full(T, 24), "streamed/theta": np.full((1, 2, T), 0.375)}
    expected = {
        "length/perplexity": np.exp(np.average(loss, weights=counts)),
        "length/perplexity_beyond": np.exp(np.average(loss[16:], weights=counts[16:])),
        "length/n": T,
        "streamed/perplexity": np.exp(np.average(loss, weights=counts) + 1),
        "streamed/perplexity_beyond": np.exp(np.average(loss[16:], weights=counts[16:]) + 1),
        "streamed/perplexity_evicted": np.exp(np.average(loss[24:], weights=counts[24:]) + 1),
        "streamed/n": 24,
        "streamed/theta": 0.375,
    }
    assert compute_length_metrics(arrays) == pytest.approx(expected, rel=1e-5)
    assert compute_length_metrics(short).keys() == {"length/perplexity", "length/n"}
