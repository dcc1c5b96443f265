"""The statistics against hand-worked values, other routines of scipy, and simulation with a fixed seed."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lit_lazy.table.statistics import Estimate, contrast, estimate, holm, minimum_detectable_effect, paired


def seeds(*values):
    return dict(enumerate(values))


def test_estimate_by_hand():
    # s = 1; t(0.975, 2) = 4.302653 (any printed table); 4.302653 / sqrt(3) = 2.484138
    result = estimate(seeds(1.0, 2.0, 3.0))
    assert (result.mean, result.n, result.undefined) == (2.0, 3, 0)
    assert result.ci95 == pytest.approx(2.484138, abs=1e-6)


def test_estimate_needs_two_values_for_an_interval():
    assert estimate({}) == Estimate(None, None, 0, 0)
    assert estimate({7: 1.5}) == Estimate(1.5, None, 1, 0)
    assert estimate(seeds(1.0, 2.0)).ci95 == pytest.approx(12.706205 * math.sqrt(0.5) / math.sqrt(2), abs=1e-6)


def test_undefined_values_are_dropped_and_counted():
    with_gaps = {0: 1.0, 1: None, 2: 2.0, 3: math.nan, 4: 3.0, 5: math.inf}
    result = estimate(with_gaps)
    assert (result.mean, result.n, result.undefined) == (2.0, 3, 3)
    assert result.ci95 == estimate(seeds(1.0, 2.0, 3.0)).ci95
    assert paired(with_gaps, dict.fromkeys(range(6), 0.0)).n == 3
    assert estimate({0: None, 1: math.nan}) == Estimate(None, None, 0, 2)


def test_interval_covers_the_true_mean_95_times_in_100():
    draws = np.random.default_rng(0).normal(5.0, 2.0, size=(4000, 3))
    results = [estimate(dict(enumerate(row))) for row in draws.tolist()]
    covered = np.mean([abs(r.mean - 5.0) <= r.ci95 for r in results])
    assert abs(covered - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 4000)


def test_paired_is_the_paired_t_test():
    rng = np.random.default_rng(1)
    for n in (3, 5, 12):
        a, b = rng.normal(size=(2, n)).tolist()
        result = paired(seeds(*a), seeds(*b))
        reference = stats.ttest_rel(a, b)
        low, high = reference.confidence_interval(0.95)
        assert result.test == "t"
        assert result.n == n
        assert result.p == pytest.approx(reference.pvalue, rel=1e-10)
        assert result.mean == pytest.approx((low + high) / 2, rel=1e-10)
        assert result.ci95 == pytest.approx((high - low) / 2, rel=1e-10)


def test_false_positives_occur_at_the_nominal_rate():
    rng = np.random.default_rng(2)
    p = []
    for _ in range(3000):
        common = rng.normal(0, 100.0, size=4)
        a, b = (common + rng.normal(size=(2, 4))).tolist()
        p.append(paired(seeds(*a), seeds(*b)).p)
    assert abs(np.mean(np.array(p) < 0.05) - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 3000)
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_pairing_uses_the_common_seeds():
    three = {0: 1.0, 2: 2.5, 4: 2.0}
    five = {4: 0.5, 3: 99.0, 2: 2.0, 1: -99.0, 0: 0.0}
    result = paired(three, five)
    assert result == paired(three, {0: 0.0, 2: 2.0, 4: 0.5})
    assert result.n == 3
    assert result.mean == pytest.approx(1.0)


def test_two_pairs_have_an_interval_and_no_p_one_pair_has_neither():
    two = paired(seeds(1.0, 2.0), seeds(0.0, 0.5))
    assert (two.mean, two.p, two.test) == (1.25, None, None)
    assert two.ci95 == pytest.approx(12.706205 * 0.25, abs=1e-5)
    one = paired({0: 1.0}, {0: 0.5, 1: 2.0})
    assert (one.mean, one.ci95, one.n, one.p, one.test) == (0.5, None, 1, None, None)
    none = paired({0: 1.0}, {1: 1.0})
    assert (none.mean, none.ci95, none.n, none.p) == (None, None, 0, None)


def test_equal_differences_are_never_given_a_p():
    tie = paired(seeds(0.1, 0.2, 0.3), seeds(0.1, 0.2, 0.3))
    assert (tie.mean, tie.ci95, tie.p, tie.test) == (0.0, 0.0, None, "tie")
    parameters = paired(seeds(1024, 1024, 1024), seeds(1000, 1000, 1000))
    assert (parameters.mean, parameters.ci95, parameters.p, parameters.test) == (24.0, 0.0, None, "constant")
    # Equal but for rounding: 0.3 - 0.2 != 0.2 - 0.1 in binary.
    rounded = paired(seeds(0.2, 0.3, 0.4), seeds(0.1, 0.2, 0.3))
    assert (rounded.p, rounded.test) == (None, "constant")
    real = paired(seeds(0.2, 0.3, 0.4 + 1e-9), seeds(0.1, 0.2, 0.3))
    assert real.test == "t"


def test_results_do_not_depend_on_the_order_of_the_seeds():
    values = {seed: 10.0 ** (seed % 5) * math.pi * (-1) ** seed for seed in range(12)}
    other = {seed: math.e * 7.0 ** (seed % 4) for seed in range(12)}
    order = list(range(12))
    random.Random(0).shuffle(order)
    shuffled = {seed: values[seed] for seed in order}
    assert estimate(shuffled) == estimate(values)
    assert paired(shuffled, other) == paired(values, other)


def test_interaction_contrast_is_a_one_sample_t_test_of_the_combination():
    rng = np.random.default_rng(3)
    a, b, c, d = rng.normal(size=(4, 5))
    values = {name: seeds(*row.tolist()) for name, row in zip("abcd", (a, b, c, d), strict=True)}
    result = contrast(values, {"a": 1, "b": -1, "c": -1, "d": 1})
    assert result.p == pytest.approx(stats.ttest_1samp(a - b - c + d, 0).pvalue, rel=1e-10)
    assert result.mean == pytest.approx(np.mean(a - b - c + d))
    del values["c"][1], values["d"][4]
    assert contrast(values, {"a": 1, "b": -1, "c": -1, "d": 1}).n == 3


def test_holm_by_hand():
    # sorted .005 .01 .03 .04 -> 4 x .005, 3 x .01, 2 x .03, then 1 x .04 raised to the .06 before it
    p = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    assert holm(p) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    # one more hypothesis without a p: 5, 4, 3, 2 times
    assert holm(p, family=5) == pytest.approx({"a": 0.04, "b": 0.09, "c": 0.09, "d": 0.025})
    assert holm({"a": 0.7, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
    with pytest.raises(ValueError, match="family: 1 "):
        holm({"a": 0.1, "b": 0.2}, family=1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 4), st.floats(0.001, 0.5))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values, untested, alpha):
    m = len(p_values) + untested
    adjusted = holm({str(i): p for i, p in enumerate(p_values)}, family=m)
    rejected = set()
    for step, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if (m - step) * p_values[i] > alpha:
            break
        rejected.add(str(i))
    assert {name for name, p in adjusted.items() if p <= alpha} == rejected


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (5, 0.05), (10, 0.05), (3, 0.05 / 16), (5, 0.05 / 100)])
def test_minimum_detectable_effect_is_found_with_power_80(n, alpha):
    effect = minimum_detectable_effect(2.5, n, alpha)
    draws = np.random.default_rng(4).normal(effect, 2.5, size=(200_000, n))
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(n))
    power = np.mean(np.abs(t) > stats.t.isf(alpha / 2, n - 1))
    assert abs(power - 0.8) < 4 * math.sqrt(0.8 * 0.2 / 200_000)


def test_minimum_detectable_effect_scales_with_the_spread_and_needs_a_test():
    assert minimum_detectable_effect(3.0, 5) == pytest.approx(3 * minimum_detectable_effect(1.0, 5))
    assert minimum_detectable_effect(1.0, 6) < minimum_detectable_effect(1.0, 5)
    assert minimum_detectable_effect(1.0, 2) is None
    assert minimum_detectable_effect(0.0, 5) is None
