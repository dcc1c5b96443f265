"""The statistics against hand-computed values, other routines of scipy, and simulations with a fixed seed."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lit_lazy.table.fixed_rules import compute_welch_contrast, seed_correlation
from lit_lazy.table.statistics import (
    Effect,
    Estimate,
    estimate,
    holm,
    minimum_detectable_effect,
    tost,
)


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
    assert difference(with_gaps, dict.fromkeys(range(6), 0.0)).n == 3
    assert estimate({0: None, 1: math.nan}) == Estimate(None, None, 0, 2)


def test_interval_covers_the_true_mean_95_times_in_100():
    draws = np.random.default_rng(0).normal(5.0, 2.0, size=(4000, 3))
    results = [estimate(dict(enumerate(row))) for row in draws.tolist()]
    covered = np.mean([abs(r.mean - 5.0) <= r.ci95 for r in results])
    assert abs(covered - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 4000)


def difference(row, baseline, **others):
    """The effect of a table of rows; `others` are not in the difference."""
    return compute_welch_contrast({"row": row, "baseline": baseline, **others}, {"row": 1.0, "baseline": -1.0})


def test_without_correlation_it_is_welchs_test():
    rng = np.random.default_rng(1)
    for n, m in ((3, 3), (5, 3), (12, 5)):
        a, b = rng.normal(size=n).tolist(), (4 * rng.normal(size=m)).tolist()
        values = {"row": seeds(*a), "baseline": seeds(*b)}
        result = compute_welch_contrast(values, {"row": 1.0, "baseline": -1.0}, correlation=0.0)
        reference = stats.ttest_ind(a, b, equal_var=False)
        low, high = reference.confidence_interval(0.95)
        assert (result.test, result.n) == ("t", min(n, m))
        assert result.p == pytest.approx(reference.pvalue, rel=1e-10)
        assert result.df == pytest.approx(reference.df, rel=1e-10)
        assert (result.mean - result.ci95, result.mean + result.ci95) == pytest.approx((low, high), rel=1e-10)


def test_the_variance_is_a_quadratic_form_by_hand():
    # variances 1 and 4, correlation 0.25: (1 + 4 - 2 * 0.25 * min(1, 4)) / 3 = 1.5; df (1 + 4)^2 / (1 / 2 + 16 / 2)
    values = {"a": seeds(1.0, 2.0, 3.0), "b": seeds(6.0, 4.0, 2.0)}
    result = compute_welch_contrast(values, {"a": 1.0, "b": -1.0}, correlation=0.25)
    assert (result.mean, result.low, result.high) == (-2.0, -5.0, 1.0)
    assert result.se == pytest.approx(math.sqrt(1.5))
    assert result.df == pytest.approx(25 / 8.5)
    # three of b's five seeds are shared: var(b) = 2.5, (1 / 3 + 2.5 / 5 - 2 * 0.25 * 1 * 3 / 15)
    values["b"] = seeds(2.0, 1.0, 3.0, 4.0, 5.0)
    result = compute_welch_contrast(values, {"a": 1.0, "b": -1.0}, correlation=0.25)
    assert (result.mean, result.n) == (-1.0, 3)
    assert result.se == pytest.approx(math.sqrt(1 / 3 + 0.5 - 0.1))


def test_what_seeds_have_in_common_is_the_mean_correlation_of_the_rows():
    rng = np.random.default_rng(8)
    for rows in (2, 3, 7):
        y = rng.normal(size=(rows, 5)) + 4 * rng.normal(size=5)
        mean = np.corrcoef(y)[np.triu_indices(rows, 1)].mean()
        values = {str(i): seeds(*row) for i, row in enumerate(y.tolist())}
        assert seed_correlation(values) == pytest.approx(max(0.0, 1 - (1 - mean) * rows / (rows - 1)))
        scaled = {name: {s: 1e-3 * v - 7 for s, v in row.items()} for name, row in values.items()}
        assert seed_correlation(scaled) == pytest.approx(seed_correlation(values))
        without = values | {"two": seeds(1.0, 2.0), "same": seeds(3.0, 3.0, 3.0), "none": {}}
        assert seed_correlation(without) == pytest.approx(seed_correlation(values))
    opposed = {"a": seeds(1.0, 2.0, 3.0), "b": seeds(3.0, 2.0, 1.0)}
    assert seed_correlation(opposed) == 0.0
    assert seed_correlation({"a": seeds(1.0, 2.0, 3.0)}) == 0.0


@pytest.mark.parametrize(("common", "rows"), [(0.0, 4), (3.0, 4), (0.0, 2)])
def test_false_positives_are_no_more_than_nominal_and_the_interval_covers(common, rows):
    rng = np.random.default_rng(2)
    y = rng.normal(size=(1000, rows, 4)) + common * rng.normal(size=(1000, 1, 4))
    effects = [
        compute_welch_contrast({str(i): dict(enumerate(row)) for i, row in enumerate(table)}, {"0": 1.0, "1": -1.0})
        for table in y.tolist()
    ]
    wrong = np.mean([effect.p < 0.05 for effect in effects])
    assert wrong < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
    assert wrong > (0.02 if common == 0 else 0.0)
    assert np.mean([abs(effect.mean) > effect.ci95 for effect in effects]) == wrong


def test_rows_that_move_together_are_told_apart_at_smaller_differences():
    y = np.random.default_rng(9).normal(size=(6, 5)) + 5 * np.random.default_rng(10).normal(size=5)
    values, weights = {str(i): seeds(*row) for i, row in enumerate(y.tolist())}, {"0": 1.0, "1": -1.0}
    assert (
        compute_welch_contrast(values, weights).se < 0.7 * compute_welch_contrast(values, weights, correlation=0.0).se
    )


def test_each_row_has_its_own_seeds():
    three = {0: 1.0, 2: 2.5, 4: 2.0}
    five = {4: 0.5, 3: 9.0, 2: 2.0, 1: -9.0, 0: 0.0}
    result = difference(three, five)
    assert result.n == 3
    assert result.mean == pytest.approx(5.5 / 3 - 0.5)
    assert (result.low, result.high) == (0.5, 1.5)
    apart = difference({0: 1.0, 1: 2.0, 2: 3.5}, {3: 1.0, 4: 2.0, 5: 4.0})
    assert (apart.test, apart.low) == ("t", None)


def test_undefined_rows_have_no_effect():
    assert difference({0: None, 1: math.nan}, seeds(1.0, 2.0)) == Effect(None, None, 0)


def test_two_seeds_have_an_interval_and_no_p_one_has_neither():
    two = difference(seeds(1.0, 2.0), seeds(0.5, 0.0))
    assert (two.mean, two.p, two.test) == (1.25, None, None)
    assert two.ci95 > 0
    one = difference({0: 1.0}, {0: 0.5, 1: 2.0})
    assert (one.mean, one.ci95, one.n, one.p, one.test) == (-0.25, None, 1, None, None)


def test_equal_differences_are_never_given_a_p():
    tie = difference(seeds(0.1, 0.2, 0.3), seeds(0.1, 0.2, 0.3))
    assert (tie.mean, tie.ci95, tie.p, tie.test) == (0.0, 0.0, None, "tie")
    parameters = difference(seeds(1024, 1024, 1024), seeds(1000, 1000, 1000))
    assert (parameters.mean, parameters.ci95, parameters.p, parameters.test) == (24.0, 0.0, None, "constant")
    # Equal except for rounding: 0.3 - 0.2 != 0.2 - 0.1 in binary.
    rounded = difference(seeds(0.2, 0.3, 0.4), seeds(0.1, 0.2, 0.3))
    assert (rounded.p, rounded.test) == (None, "constant")
    real = difference(seeds(0.2, 0.3, 0.4 + 1e-9), seeds(0.1, 0.2, 0.3))
    assert real.test == "t"


def test_a_row_without_a_measured_spread_has_a_range_and_no_t():
    vary = seeds(0.29, 0.38, 0.47)
    for still in (seeds(0.0, 0.0, 0.0), seeds(1.0, 1.0 - 1e-8, 1.0)):
        result = difference(vary, still)
        assert (result.test, result.p, result.ci95, result.se) == ("saturated", None, None, None)
        assert result.mean == pytest.approx(0.38 - still[0])
        assert (result.low, result.high) == pytest.approx((0.29 - still[0], 0.47 - still[0]))
    at_bounds = {"a": seeds(0.0, 1.0, 1.0), "b": vary}
    assert compute_welch_contrast(at_bounds, {"a": 1, "b": -1}, bounds=(0.0, 1.0)).test == "saturated"
    assert compute_welch_contrast(at_bounds, {"a": 1, "b": -1}).test == "t"
    assert compute_welch_contrast(at_bounds | {"c": vary}, {"b": 1, "c": -1, "a": 0}, bounds=(0.0, 1.0)).test == "tie"
    assert estimate(at_bounds["a"], (0.0, 1.0)) == Estimate(2 / 3, None, 3, 0, saturated=True)
    assert estimate(seeds(0.5, 0.5)) == Estimate(0.5, 0.0, 2, 0, saturated=True)
    assert difference(seeds(1e-170, 3e-170, 2e-170), seeds(1.0, 2.0, 4.0)).test == "saturated"


def test_results_do_not_depend_on_the_order_of_the_seeds():
    values = {seed: 10.0 ** (seed % 5) * math.pi * (-1) ** seed for seed in range(12)}
    other = {seed: math.e * 7.0 ** (seed % 4) for seed in range(12)}
    order = list(range(12))
    random.Random(0).shuffle(order)
    shuffled = {seed: values[seed] for seed in order}
    assert estimate(shuffled) == estimate(values)
    assert difference(shuffled, other) == difference(values, other)


def test_interaction_and_main_effect_are_welch_satterthwaite_contrasts():
    """Against the textbook's sums over independent rows (Kutner et al., Applied Linear Statistical Models, 5th ed.)."""
    y = np.random.default_rng(3).normal(size=(4, 5))
    values = {name: seeds(*row) for name, row in zip("abcd", y.tolist(), strict=True)}
    for weights in ([1, -1, -1, 1], [0.5, 0.5, -0.5, -0.5]):
        result = compute_welch_contrast(values, dict(zip("abcd", weights, strict=True)), correlation=0.0)
        parts = np.square(weights) * y.var(1, ddof=1) / 5
        assert result.mean == pytest.approx(weights @ y.mean(1))
        assert result.se == pytest.approx(math.sqrt(parts.sum()))
        assert result.df == pytest.approx(parts.sum() ** 2 / (parts**2 / 4).sum())
        assert result.p == pytest.approx(2 * stats.t.sf(abs(result.mean) / result.se, result.df))


def test_equivalence_is_two_one_sided_tests():
    rng = np.random.default_rng(6)
    a, b = rng.normal(size=6).tolist(), (2 * rng.normal(size=6)).tolist()
    effect = compute_welch_contrast({"a": seeds(*a), "b": seeds(*b)}, {"a": 1, "b": -1}, correlation=0.0)
    for margin in (0.3, 2.0, 9.0):
        shifted = [
            stats.ttest_ind(np.add(a, sign * margin), b, equal_var=False, alternative=side).pvalue
            for sign, side in ((1, "greater"), (-1, "less"))
        ]
        assert tost(effect, margin) == pytest.approx(max(shifted), rel=1e-9)
        inside = abs(effect.mean) + stats.t.isf(0.05, effect.df) * effect.se < margin
        assert (tost(effect, margin) < 0.05) == inside
    assert tost(difference(seeds(1.0, 2.0), seeds(1.0, 3.0)), 1.0) is None
    assert tost(difference(seeds(1.0, 1.0, 1.0), seeds(1.0, 2.0, 3.0)), 1.0) is None
    with pytest.raises(ValueError, match="margin: 0; give the largest difference that counts as none, above 0"):
        tost(effect, 0)


def test_equivalence_is_wrong_at_most_5_times_in_100():
    """The true difference equals the margin."""
    y = np.random.default_rng(7).normal(size=(1000, 2, 5))
    y[:, 1] += 4.0
    effects = [compute_welch_contrast({"a": seeds(*a), "b": seeds(*b)}, {"a": 1, "b": -1}) for a, b in y.tolist()]
    wrong = np.mean([tost(effect, 4.0) < 0.05 for effect in effects])
    assert 0.02 < wrong < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_holm_by_hand():
    # sorted .005 .01 .03 .04 -> 4 x .005, 3 x .01, 2 x .03, then 1 x .04 raised to the .06 before it
    p = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    assert holm(p) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    # with one more hypothesis without a p: factors 5, 4, 3, 2
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
    """With n - 1 degrees of freedom, as for a mean of n values."""
    delta = minimum_detectable_effect(Effect(0.0, None, n, 2.5 / math.sqrt(n), n - 1, test="t", p=1.0), alpha)
    draws = np.random.default_rng(4).normal(delta, 2.5, size=(200_000, n))
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(n))
    power = np.mean(np.abs(t) > stats.t.isf(alpha / 2, n - 1))
    assert abs(power - 0.8) < 4 * math.sqrt(0.8 * 0.2 / 200_000)


def test_minimum_detectable_effect_scales_with_the_error_and_needs_a_test():
    effect = Effect(0.0, None, 5, 1.0, 6.5, test="t", p=1.0)
    one = minimum_detectable_effect(effect)
    assert minimum_detectable_effect(replace(effect, se=3.0)) == pytest.approx(3 * one)
    assert minimum_detectable_effect(replace(effect, df=8.0)) < one
    assert minimum_detectable_effect(difference(seeds(1.0, 2.0), seeds(1.0, 3.0))) is None
    assert minimum_detectable_effect(difference(seeds(1.0, 1.0, 1.0), seeds(1.0, 2.0, 3.0))) is None
