"""First-key weight, mass and sparsity against closed forms and against a dense matrix of weights."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from flash_lazy import Stats
from lit_lazy.attention import AttentionCall, AttentionSpec, Differential, Elastic, LayerShape, Softmax, Softpick
from lit_lazy.attention.bias import BiasTerms
from lit_lazy.config.schema import ModelConfig
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.measure.attention_metrics import AttentionMetrics
from lit_lazy.measure.evaluation import evaluate
from lit_lazy.model.decoder import DecoderLM

BATCH, HEADS, LENGTH, FIRST = 2, 3, 20, 8
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
