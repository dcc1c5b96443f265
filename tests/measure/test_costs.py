"""Costs relative to a softmax twin: the comparison and the counted bytes. Int8 equals integer arithmetic."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias, OutputGate, Softmax
from lit_lazy.config.user_files import experiment
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.measure import costs
from lit_lazy.measure.costs import (
    Costs,
    cache_bytes_per_token,
    decode,
    make_twin,
    median_ratio,
    prefill,
    record_attention_calls,
)
from lit_lazy.measure.diagnostics import sample_validation
from lit_lazy.measure.int8 import Int8, quantise
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll

TINY = experiment("backcopy_tiny")
LAZY = AttentionSpec(Elastic(), LearnedBias(init_std=1.0), window=5, gate=OutputGate())
COSTS = Costs(sequences=2, rounds=2, decoded=4)
IDS = torch.randint(16, (2, 16), generator=torch.Generator().manual_seed(0))


def build(attention=LAZY, **changes):
    cfg = dataclasses.replace(TINY.model, n_layers=2, attention=attention, **changes)
    return DecoderLM(cfg, TINY.data.load().vocab_size, 16, seed=1)


def test_the_twin_is_the_model_with_the_softmax_of_torch_and_its_weights():
    model = build()
    other = make_twin(model)
    expected = build(AttentionSpec(), backend="sdpa")
    assert {attention.backend_name() for attention in other.attentions} == {"sdpa"}
    assert other.cfg == expected.cfg
    assert torch.equal(other(IDS), expected(IDS)), "of one seed, hence with equal shared weights"
    assert not torch.equal(other(IDS), model(IDS))


def test_attention_is_asked_what_the_model_asks():
    model = build()
    for attention, call in record_attention_calls(model, IDS):
        outs = []
        hook = attention.normaliser.register_forward_hook(lambda _, args, out: outs.append((args[0].q, out[0])))  # noqa: B023
        with torch.no_grad():
            model(IDS)
        hook.remove()
        q, out = outs[0]
        assert torch.equal(call.q, q)
        torch.testing.assert_close(attention.normaliser(call)[0], out)
        assert all(x.requires_grad for x in (call.q, call.k, call.v))


def test_bytes_of_the_cache_are_two_numbers_a_dimension_key_head_and_layer():
    for heads in (1, 2):
        model = build(n_heads=4, n_kv_heads=heads)
        cache = prefill(model, IDS)
        head_dim = TINY.model.d_model // 4
        assert cache_bytes_per_token(cache, 2) == 2 * 2 * heads * head_dim * 4


def test_decoding_leaves_the_cache_as_it_was():
    model = build().eval()
    cache = prefill(model, IDS[:, :12])
    before = [(layer.k.clone(), layer.v.clone()) for layer in cache]
    decode(model, cache, IDS[:, 12:])
    for layer, (k, v) in zip(cache, before, strict=True):
        assert torch.equal(layer.k, k)
        assert torch.equal(layer.v, v)
    with torch.no_grad():
        logits = torch.cat([model(token, cache) for token in IDS[:, 12:].split(1, 1)], 1)
    torch.testing.assert_close(logits, model(IDS)[:, 12:])


def test_what_is_kept_grows_with_what_a_rule_keeps():
    batch, specs = {"tokens": IDS, "targets": IDS}, (AttentionSpec(), AttentionSpec(gate=OutputGate()))
    plain, gated = (costs.measure_kept_per_token(build(spec), batch) for spec in specs)
    width = TINY.model.d_model
    # In each of two layers, a gate saves its value and the output it multiplies; the layer's input is saved anyway.
    assert 2 * width * 4 <= gated - plain <= 2 * 4 * width * 4


def test_rises_follow_from_the_times(monkeypatch):
    seconds = {"own": [3.0, 2.0, 9.0], "twin": [2.0, 2.0, 3.0]}
    monkeypatch.setattr(costs, "time_in_turns", lambda calls, _: {name: seconds[name] for name in calls})
    found = Costs(sequences=2, rounds=3, decoded=4).measure(build(), TINY.data)
    assert median_ratio(*seconds.values()) == 1.5
    assert {found[f"cost/{name}_rise"] for name in ("step", "attention", "decode")} == {0.5}
    assert found["cost/decode_ms"] == pytest.approx(1e3 * 3 / 4)
    names = {"decode_ms", "kept_bytes", "cache_bytes", *(f"{x}_rise" for x in ("step", "attention", "decode", "kept"))}
    assert found.keys() == {f"cost/{name}" for name in names}
    # Up to three numbers of a query row instead of SDPA's one.
    assert 0 <= COSTS.measure(build(AttentionSpec(Softmax())), TINY.data)["cost/kept_rise"] < 0.01


def test_steps_are_timed_at_each_length_with_as_many_tokens(monkeypatch):
    shapes = []
    monkeypatch.setattr(costs, "step", lambda _, batch: shapes.append(tuple(batch["tokens"].shape)))
    monkeypatch.setattr(costs, "time_in_turns", lambda calls, _: {n: [float(call() or 1)] for n, call in calls.items()})
    found = dataclasses.replace(COSTS, divisors=(2, 1)).measure(build(), TINY.data)
    assert shapes[:4] == [(4, 8), (4, 8), (2, 16), (2, 16)]
    assert found["cost/step_rise_worst"] == max(found["cost/step_rise_over_2"], found["cost/step_rise_over_1"]) == 0


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_the_twin_runs_the_softmax_of_torch_while_it_is_timed(monkeypatch, backend):
    """Evaluation lets a model's attention choose its backend; neither the twin's nor one that was asked for."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    model = build(AttentionSpec() if backend == "sdpa" else LAZY, backend=backend)
    own = costs.step

    def step(timed, batch):
        names[timed is model] |= {attention.backend_name() for attention in timed.attentions}
        own(timed, batch)

    monkeypatch.setattr(costs, "step", step)
    COSTS.measure(model, TINY.data)
    assert names[False] == {"sdpa"}
    assert ("sdpa" in names[True]) == (backend == "sdpa")


# Int8

DATA = Backcopy(vocab_size=16, context_length=32, train_sequences=4, validation_sequences=48)
MODEL = dataclasses.replace(TINY.model, d_model=32, n_layers=2, n_heads=2, init_std=0.2)


class IntegerLinear(nn.Module):
    """A linear layer in integers, for inputs of at most a given size."""

    def __init__(self, layer, largest):
        super().__init__()
        self.weight_scale, self.scale = layer.weight.abs().max() / 127, largest / 127
        self.weight = (layer.weight / self.weight_scale).round().long()

    def forward(self, x):
        whole = (x / self.scale).round().clamp(-127, 127).long()  # quantised passes may exceed the range
        return (whole @ self.weight.T) * (self.scale * self.weight_scale)


def test_rounding_is_to_whole_steps_of_the_largest_value():
    x = torch.tensor([-2.0, 0.005, 1.0, 2.54, 9.0])
    assert quantise(x, torch.tensor(2.54)).tolist() == pytest.approx([-2.0, 0.0, 1.0, 2.54, 2.54])
    assert quantise(torch.zeros(2), torch.tensor(0.0)).tolist() == [0, 0]


def test_loss_is_that_of_integer_arithmetic():
    """In fp64, so that no entry is so near to the middle of two steps that rounding errors decide."""
    model = DecoderLM(MODEL, 17, 32, seed=1).double()
    (batch,) = sample_validation(DATA.load(), 6)
    integer = copy.deepcopy(model)
    largest = {}

    def read(name):
        return lambda _, args: largest.update({name: args[0].abs().max()})

    layers = {name: part for name, part in model.blocks.named_modules() if isinstance(part, nn.Linear)}
    hooks = [layer.register_forward_pre_hook(read(name)) for name, layer in layers.items()]
    with torch.no_grad():
        exact = token_nll(model(batch["tokens"]), batch["targets"]).mean().item()
        for hook in hooks:
            hook.remove()
        for name, layer in layers.items():
            integer.blocks.set_submodule(name, IntegerLinear(layer, largest[name]))
        expected = token_nll(integer(batch["tokens"]), batch["targets"]).mean().item()
    found = Int8(sequences=6).measure(model, DATA)
    assert found == pytest.approx({"int8/loss": expected, "int8/loss_rise": expected - exact}, rel=1e-5, abs=1e-6)
    assert abs(expected - exact) > 1e-4
