"""Offset parameters, bias curves and their best ALiBi fit, on models and on known curves."""

import numpy as np
import pytest
import torch

from lit_lazy.attention import (
    Alibi,
    AttentionCall,
    AttentionSpec,
    Elastic,
    Fire,
    KerpleLog,
    LearnedBias,
    NoBias,
    SinkLogit,
    Softmax,
    SSMax,
    T5Bias,
)
from lit_lazy.attention.bias import BiasModule, BiasTerms
from lit_lazy.config.schema import ModelConfig
from lit_lazy.figures.ablation import list_learned
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.learned_parameters import (
    MOST_NUMBERS,
    average_by_head,
    collect_learned,
    compute_bias_curves,
    fit_alibi,
)
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.table.columns import list_learned_columns

LAYERS, HEADS, CONTEXT = 3, 4, 24


def model(normaliser=None, bias=None, window=None):
    attention = AttentionSpec(normaliser or Softmax(), bias or NoBias(), window)
    cfg = ModelConfig(d_model=16, n_layers=LAYERS, n_heads=HEADS, d_ff=8, attention=attention)
    return DecoderLM(cfg, 11, CONTEXT, seed=0)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class _Scheduled(BiasModule):
    """A bias with a parameter, a buffer that a schedule changes, and one that no checkpoint keeps."""

    def __init__(self):
        super().__init__()
        self.strength = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("progress", torch.zeros(2))
        self.register_buffer("distances", torch.zeros(3), persistent=False)

    def forward(self, n_keys):  # noqa: ARG002
        return BiasTerms()


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
        assert torch.equal(average_by_head(found[1], HEADS), values.reshape(LAYERS, HEADS, -1).mean(-1))

    @pytest.mark.parametrize("shape", [(), (1,), (HEADS + 1,), (2, 2, 2)])
    def test_a_parameter_may_have_any_shape(self, shape):
        made = model()
        for i, layer in enumerate(made.attentions):
            layer.normaliser.slack = torch.nn.Parameter(torch.full(shape, float(i)))
        found = collect_learned(made)["learned/slack"]
        assert found.shape == (LAYERS, *shape)
        assert average_by_head(found, HEADS).tolist() == [[0.0], [1.0], [2.0]]

    def test_a_bias_s_parameter_has_columns_a_mean_and_a_figure_like_any_other(self):
        names = "bias/learned.slope", "learned/gate.strength", "learned/cut"
        arrays = {name: np.full((LAYERS, HEADS), 2.0) for name in names} | {"sample": np.zeros(3)}
        assert {f"{name}/mean": 2.0 for name in names}.items() <= Diagnostics(arrays).metrics().items()
        columns = list_learned_columns([f"{name}/{what}" for name in (*names, "tau") for what in ("mean", "max")])
        assert [column.title for column in columns[::3]] == ["bias.slope, mean", "cut, mean", "gate.strength, mean"]
        curves = {f"watch/{name}_{of}": [(0, 2.0)] for name in (*names, "tau") for of in ("layer_0", "layer_10", "max")}
        assert list_learned({"row": [curves]}) == ["tau", *sorted(names)]

    def test_bias_and_gate_and_what_a_checkpoint_keeps(self):
        """And nothing that not every layer has in one shape, nor many numbers, nor counts."""
        made = model()
        for i, layer in enumerate(made.attentions):
            layer.bias, layer.gate.strength = _Scheduled(), torch.nn.Parameter(torch.ones(HEADS))
            layer.normaliser.uneven = torch.nn.Parameter(torch.ones(2 + (i == 0)))
            layer.normaliser.matrix = torch.nn.Parameter(torch.ones(MOST_NUMBERS + 1))
            layer.normaliser.register_buffer("count", torch.tensor(3))
        made.attentions[0].normaliser.alone = torch.nn.Parameter(torch.ones(1))
        assert set(collect_learned(made)) == {"bias/learned.strength", "bias/learned.progress", "learned/gate.strength"}


class TestBiasCurves:
    @pytest.mark.parametrize(("table", "length"), [(6, 20), (20, 6), (6, 6)])
    def test_a_table_is_zero_beyond_its_end(self, table, length):
        learned = model(bias=LearnedBias(length=table))
        values = normal(LAYERS, HEADS, table)
        with torch.no_grad():
            for layer, value in zip(learned.attentions, values, strict=True):
                layer.bias.table.copy_(value)
        curves = compute_bias_curves(learned, length)
        assert curves.shape == (LAYERS, HEADS, length)
        assert torch.equal(curves[..., :table], values[..., :length])
        assert not curves[..., table:].any()
        assert not curves.requires_grad

    @pytest.mark.parametrize("bias", [Alibi(), LearnedBias(length=6), T5Bias(8, 20), KerpleLog(), Fire()])
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
