"""First-key weight, mass and sparsity against closed forms and against a dense matrix of weights."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from flash_lazy import Stats
from lit_lazy.attention import AttentionCall, AttentionSpec, Differential, Elastic, LayerShape, Softmax, Softpick, SSMax
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


def layer(can_zero=True, renormalised=False, window=None, signed=False):
    """What the metrics read of a layer."""
    rule = SimpleNamespace(can_zero=can_zero, signed=signed)
    return SimpleNamespace(normaliser=rule, renormalise=renormalised, window=window)


def measure(layer_stats, rows=None, **settings):
    metrics = AttentionMetrics([layer(**settings)], tuple(rows or ()))
    metrics.update([layer_stats], rows or {"all": ALL})
    return metrics.compute()


EARLY, LATE, EVEN = (x.float() for x in (N < FIRST, N >= FIRST, N % 2 == 0))
MEAN = sum(1 / i for i in range(FIRST, LENGTH + 1)) / (LENGTH - FIRST + 1)
N_EVEN, N_ODD = (EVEN * LATE).sum().item(), ((1 - EVEN) * LATE).sum().item()
WEIGHT, SHARE, MASS, ZERO = "sink/first_key_weight", "sink/first_key_share", "mass/all", "sparsity/zero"

CLOSED_FORMS = {
    "all weight on the first key": ({"first_weight": 1.0}, {}, {WEIGHT: 1, SHARE: 1, MASS: 1, ZERO: 0}),
    "uniform": ({"first_weight": 1 / N}, {}, {WEIGHT: MEAN, SHARE: MEAN, MASS: 1, ZERO: 0}),
    "rows before the eighth count for the mass alone": (
        {"mass": EARLY, "first_weight": EARLY},
        {},
        {WEIGHT: 0, MASS: (FIRST - 1) / LENGTH, ZERO: 0},
    ),
    "all weights are 0": ({"mass": 0.0, "zeros": N}, {}, {WEIGHT: 0, MASS: 0, ZERO: 1}),
    "next to no mass": ({"mass": 1e-9, "first_weight": 5e-10}, {}, {WEIGHT: 5e-10, MASS: 1e-9, ZERO: 0}),
    "rows of large mass weigh more in a share": (
        {"mass": 0.9 * EVEN + 0.1 * (1 - EVEN), "first_weight": 0.1 * (1 - EVEN)},
        {},
        {WEIGHT: 0.1 * N_ODD / (N_EVEN + N_ODD), SHARE: 0.1 * N_ODD / (0.9 * N_EVEN + 0.1 * N_ODD), MASS: 0.5, ZERO: 0},
    ),
    "renormalised weights are shared among rows with mass": (
        {"mass": 0.01 * EVEN, "first_weight": 0.3 * EVEN},
        {"renormalised": True},
        {WEIGHT: 0.3 * N_EVEN / (N_EVEN + N_ODD), SHARE: 0.3, MASS: 0.005, ZERO: 0},
    ),
    "renormalised without mass": ({"mass": 0.0}, {"renormalised": True}, {WEIGHT: 0, MASS: 0, ZERO: 0}),
    "zeros are pooled over rows": (
        {"zeros": N * (N == LENGTH)},
        {},
        {WEIGHT: 0, SHARE: 0, MASS: 1, ZERO: LENGTH / (LENGTH * (LENGTH + 1) / 2)},
    ),
    "zeros of the keys in a window": (
        {"zeros": 1.0},
        {"window": 6},
        {WEIGHT: 0, SHARE: 0, MASS: 1, ZERO: LENGTH / N.clamp(max=6).sum().item()},
    ),
    "a rule that cannot cut": ({"mass": 0.5}, {"can_zero": False}, {WEIGHT: 0, SHARE: 0, MASS: 0.5}),
    "weights that can be negative": ({"mass": 0.5, "first_weight": -0.1}, {"signed": True}, {WEIGHT: -0.1, MASS: 0.5}),
    "a group without rows": ({}, {"rows": {"none": torch.zeros_like(ALL)}, "can_zero": False}, {}),
    "groups": (
        {"mass": 0.2 + 0.6 * EVEN, "first_weight": 0.1 + 0.1 * EVEN},
        {"rows": {"even": EVEN.bool().expand(BATCH, -1), "odd": ~EVEN.bool().expand(BATCH, -1)}},
        {f"{WEIGHT}_even": 0.2, f"{SHARE}_even": 0.25, "mass/even": 0.8, ZERO: 0}
        | {f"{WEIGHT}_odd": 0.1, f"{SHARE}_odd": 0.5, "mass/odd": 0.2},
    ),
}
"""Row statistics, settings of the metric, and all that is measured."""


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name):
    rows, settings, expected = CLOSED_FORMS[name]
    assert measure(stats(**rows), **settings) == pytest.approx(expected, rel=1e-6)


def test_layers_are_pooled_each_with_its_own_window():
    metrics = AttentionMetrics([layer(window=6), layer()])
    metrics.update([stats(zeros=N.clamp(max=6)), stats(mass=0.5)], {"all": ALL})
    seen, found = N.clamp(max=6).sum().item(), metrics.compute()
    assert found["sparsity/zero"] == pytest.approx(seen / (seen + N.sum().item()))
    assert found["mass/all"] == 0.75


class TestWatchedKey:
    NORMALISERS = (
        Softmax(),
        Elastic(tau_init=0.5),
        Elastic(renormalise=True),
        Elastic(tau_init=0.01, threshold="constant"),
        Softpick(),
        Differential(),
        SSMax(),
    )

    @pytest.mark.parametrize("normaliser", NORMALISERS, ids=repr)
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


def test_many_small_masses_are_added_in_fp64():
    metrics = AttentionMetrics([layer(), layer()])
    big, small = stats(mass=2.0**24), stats(mass=2.0**-20)
    metrics.update([big, small], {"all": ALL})
    assert metrics.compute()["mass/all"] == (2.0**24 + 2.0**-20) / 2
