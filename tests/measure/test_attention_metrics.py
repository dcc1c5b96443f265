"""First-key weight, mass and sparsity as closed forms and dense matrices give them; learned parameters and biases."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flash_lazy import Stats
from lit_lazy.attention import (
    Alibi,
    AttentionCall,
    AttentionSpec,
    Differential,
    Elastic,
    Fire,
    LayerShape,
    LearnedBias,
    NoBias,
    SinkLogit,
    Softmax,
    Softpick,
    SSMax,
    T5Bias,
)
from lit_lazy.attention.bias import BiasTerms
from lit_lazy.config.schema import ModelConfig
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.figures.ablation import _read_curve, list_learned
from lit_lazy.measure.attention_metrics import AttentionMetrics
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.evaluation import evaluate
from lit_lazy.measure.learned_parameters import (
    MOST_NUMBERS,
    average_by_head,
    collect_learned,
    compute_bias_curves,
    fit_alibi,
    list_by_head,
)
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.table.columns import list_learned_columns

BATCH, HEADS, LENGTH, FIRST = 2, 4, 20, 8
ALL = torch.ones(BATCH, LENGTH, dtype=torch.bool)
N = torch.arange(1, LENGTH + 1.0)


def stats(mass=1.0, first_weight=0.0, zeros=0.0):
    """Row statistics `[B, H, L]` from values that are numbers or `[L]`."""
    fields = (torch.as_tensor(x, dtype=torch.float32).expand(BATCH, HEADS, LENGTH) for x in (mass, first_weight, zeros))
    return Stats(torch.zeros(BATCH, HEADS, LENGTH), *fields)


def layer(can_zero=True, renormalised=False, window=None):
    """What the metrics read of a layer."""
    rule = SimpleNamespace(can_zero=can_zero, signed=False)
    return SimpleNamespace(normaliser=rule, renormalise=renormalised, window=window)


@pytest.mark.parametrize(
    ("rows", "made", "group", "expected"),
    [
        (stats(mass=0.0, zeros=N), layer(), "all", {"sink/first_key_weight": 0, "mass/all": 0, "sparsity/zero": 1}),
        (
            stats(mass=1e-9, first_weight=5e-10),
            layer(can_zero=False),
            "all",
            {"sink/first_key_weight": 5e-10, "mass/all": 1e-9},
        ),
        (stats(mass=0.0), layer(False, renormalised=True), "all", {"sink/first_key_weight": 0, "mass/all": 0}),
        (stats(), layer(can_zero=False), "none", {}),
    ],
    ids=["no weights", "next to no mass", "renormalised without mass", "a group without rows"],
)
def test_a_share_of_nothing_is_undefined(rows, made, group, expected):
    metrics = AttentionMetrics([made], (group,))
    metrics.update([rows], {"all": ALL, "none": ~ALL})
    assert metrics.compute() == pytest.approx(expected, rel=1e-6)


def test_layers_are_pooled_each_with_its_own_window():
    metrics = AttentionMetrics([layer(window=6), layer()])
    metrics.update([stats(zeros=N.clamp(max=6)), stats(mass=0.5)], {"all": ALL})
    seen, found = N.clamp(max=6).sum().item(), metrics.compute()
    assert found["sparsity/zero"] == pytest.approx(seen / (seen + N.sum().item()))
    assert found["mass/all"] == 0.75


class TestWatchedKey:
    @pytest.mark.parametrize(
        "normaliser", [Softmax(), Elastic(0.5), Elastic(renormalise=True), Softpick(), Differential()], ids=repr
    )
    @pytest.mark.parametrize("key", [1, 4, LENGTH])
    def test_its_weight_is_that_of_the_matrix(self, normaliser, key):
        """With grouped heads, a bias and a window."""
        draw = torch.Generator().manual_seed(key)
        q, k, v = (torch.randn(BATCH, h, LENGTH, 8, dtype=torch.float64, generator=draw) for h in (4, 2, 2))
        bias = BiasTerms(table=torch.randn(4, 5, dtype=torch.float64, generator=draw))
        rule = normaliser.build(LayerShape(4, 2, 8, 32, LENGTH)).double()
        call = AttentionCall(q, k, v, bias, window=9, renormalise=normaliser.renormalise)
        weights = rule.compute_weights(call).w
        torch.testing.assert_close(rule.compute_key_weight(call, key), weights[..., key - 1], rtol=1e-12, atol=1e-14)

    def test_only_rows_that_see_it_count_and_only_from_the_eighth_on(self):
        position = torch.arange(1, LENGTH + 1.0).expand(BATCH, HEADS, LENGTH)
        for key in (2, 11):
            metrics = AttentionMetrics([layer()])
            metrics.update_watched_key(position / LENGTH, key, {"all": ALL})
            rows = range(max(key, FIRST), LENGTH + 1)
            expected = sum(rows) / len(rows) / LENGTH
            assert metrics.compute() == pytest.approx({"sink/fixed_key_weight": expected})

    def test_watching_the_first_key_gives_its_weight(self):
        """On data with row groups."""
        source = Backcopy(
            vocab_size=16, context_length=16, train_sequences=8, validation_sequences=40, fixed_token_at=1
        ).load()
        cfg = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=16, attention=AttentionSpec(Elastic(tau_init=0.4)))
        found = evaluate(DecoderLM(cfg, 17, 16, 0), source, "fp32", 16)
        for group in source.row_groups:
            first, fixed = (found[f"sink/{name}_key_weight_{group}"] for name in ("first", "fixed"))
            assert fixed == pytest.approx(first, rel=1e-5)
            assert fixed > 0
        other = dataclasses.replace(source, watched_key=3)
        elsewhere = evaluate(DecoderLM(cfg, 17, 16, 0), other, "fp32", 16)["sink/fixed_key_weight_trigger"]
        assert elsewhere != pytest.approx(found["sink/fixed_key_weight_trigger"], rel=1e-3)


LAYERS, CONTEXT = 3, 24


def model(normaliser=None, bias=None, window=None):
    attention = AttentionSpec(normaliser or Softmax(), bias or NoBias(), window)
    cfg = ModelConfig(d_model=16, n_layers=LAYERS, n_heads=HEADS, d_ff=8, attention=attention)
    return DecoderLM(cfg, 11, CONTEXT, seed=0)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class TestLearned:
    @pytest.mark.parametrize(
        ("normaliser", "name", "shape"),
        [
            (Elastic(0.5), "tau", (HEADS,)),
            (Elastic(0.5, learn_tau=False), "tau", (HEADS,)),
            (Elastic(0.5, threshold="per_token"), "tau", (HEADS, CONTEXT)),
            (SSMax(), "learned/s", (HEADS,)),
            (SinkLogit(), "learned/sink", (HEADS,)),
        ],
    )
    def test_of_each_layer_and_head(self, normaliser, name, shape):
        made, values = model(normaliser), normal(LAYERS, *shape)
        with torch.no_grad():
            for layer, value in zip(made.attentions, values, strict=True):
                getattr(layer.normaliser, name.removeprefix("learned/")).copy_(value)
        (found,) = collect_learned(made).items()
        assert found[0] == name
        assert torch.equal(found[1], values)
        assert not found[1].requires_grad
        assert list_by_head(made) == {name}
        assert torch.equal(average_by_head(found[1], True), values.reshape(LAYERS, HEADS, -1).mean(-1))

    @pytest.mark.parametrize("shape", [(), (1,), (HEADS,), (HEADS + 1,), (HEADS, 2, 2)])
    def test_a_parameter_may_have_any_shape(self, shape):
        made = model()
        for i, layer in enumerate(made.attentions):
            layer.normaliser.slack = torch.nn.Parameter(torch.full(shape, float(i)))
        found = collect_learned(made)["learned/slack"]
        assert found.shape == (LAYERS, *shape)
        assert "learned/slack" not in list_by_head(made), "it is of the layer, whatever its length"
        assert average_by_head(found, False).tolist() == [[0.0], [1.0], [2.0]]

    def test_a_part_that_takes_no_other_number_of_heads_leaves_the_others_theirs(self, monkeypatch, caplog):
        """What it has learned is one mean, and that is said."""
        slopes = tuple(0.1 * (head + 1) for head in range(HEADS))
        assert list_by_head(model(Elastic(), Alibi(slopes=slopes))) == {"tau"}
        made, build = model(Elastic()), Elastic.build
        monkeypatch.setattr(Elastic, "build", lambda self, shape: {HEADS: build(self, shape)}[shape.n_heads])
        assert list_by_head(made) == set()
        assert caplog.messages == ["_Elastic takes no other number of heads (KeyError: 8): curves are means over them"]

    def test_a_bias_s_parameter_has_columns_a_mean_and_a_figure_like_any_other(self):
        names = "bias/learned.slope", "learned/gate.strength", "learned/cut"
        arrays = {name: np.full((LAYERS, HEADS), 2.0) for name in names} | {"sample": np.zeros(3)}
        assert {f"{name}/mean": 2.0 for name in names}.items() <= Diagnostics(arrays).metrics().items()
        columns = list_learned_columns([f"{name}/{what}" for name in (*names, "tau") for what in ("mean", "max")])
        assert [column.title for column in columns[::3]] == ["bias.slope, mean", "cut, mean", "gate.strength, mean"]
        curves = {f"watch/{name}_{of}": [(0, 2.0)] for name in (*names, "tau") for of in ("layer_0", "layer_10", "max")}
        assert list_learned({"row": [curves]}) == ["tau", *sorted(names)]

    def test_a_parameter_whose_name_begins_another_s_has_its_own_curve(self):
        seed = {f"watch/{name}_layer_0": [(0, value)] for name, value in (("gain", 1.0), ("gain_layer_scale", 9.0))}
        assert _read_curve(seed, "watch/gain") == {0: 1.0}

    def test_bias_and_gate_and_what_a_checkpoint_keeps(self):
        """And nothing that not every layer has in one shape, nor many numbers, nor counts."""
        made = model()
        for i, layer in enumerate(made.attentions):
            layer.bias, layer.gate.strength = torch.nn.Module(), torch.nn.Parameter(torch.ones(HEADS))
            layer.bias.strength = torch.nn.Parameter(torch.tensor(0.5))
            layer.bias.register_buffer("progress", torch.zeros(2))
            layer.bias.register_buffer("distances", torch.zeros(3), persistent=False)
            layer.normaliser.uneven = torch.nn.Parameter(torch.ones(2 + (i == 0)))
            layer.normaliser.matrix = torch.nn.Parameter(torch.ones(MOST_NUMBERS + 1))
            layer.normaliser.register_buffer("count", torch.tensor(3))
        made.attentions[0].normaliser.alone = torch.nn.Parameter(torch.ones(1))
        assert set(collect_learned(made)) == {"bias/learned.strength", "bias/learned.progress", "learned/gate.strength"}


class TestBiasCurves:
    @pytest.mark.parametrize("bias", [Alibi(), LearnedBias(length=6), LearnedBias(length=30), T5Bias(8, 20), Fire()])
    def test_is_what_attention_adds_to_the_scores(self, bias):
        """The scores of zero queries are the bias."""
        biased = model(bias=bias)
        with torch.no_grad():
            for parameter in biased.attentions[-1].bias.parameters():
                parameter.copy_(normal(*parameter.shape))
        zeros = torch.zeros(1, HEADS, CONTEXT, 4)
        curves = compute_bias_curves(biased, CONTEXT)
        distance = torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)
        visible = distance >= 0
        with torch.no_grad():
            for layer, curve in zip(biased.attentions, curves, strict=True):
                call = AttentionCall(zeros, zeros, zeros, layer.bias(CONTEXT))
                expected = curve[:, distance.clamp(min=0)][:, visible]
                found = layer.normaliser.compute_weights(call).scores[0][:, visible]
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert compute_bias_curves(model(), CONTEXT) is None


class TestAlibiFit:
    def test_equals_numpys_least_squares(self):
        curves = normal(LAYERS, HEADS, CONTEXT)
        slope, distance = fit_alibi(curves)
        d = np.arange(CONTEXT)
        for index in np.ndindex(LAYERS, HEADS):
            curve = curves[index].double().numpy()
            fitted = np.polyfit(d, curve, 1)
            residual = curve - np.polyval(fitted, d)
            assert slope[index].item() == pytest.approx(-fitted[0], rel=1e-9)
            expected = np.linalg.norm(residual) / np.linalg.norm(curve - curve.mean())
            assert distance[index].item() == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("level", [0.0, 0.1, -7.3])
    def test_a_flat_curve_has_no_distance(self, level):
        slope, distance = fit_alibi(torch.full((2, 11), level, dtype=torch.float64))
        np.testing.assert_allclose(slope, 0, atol=1e-12)
        assert distance.isnan().all()
