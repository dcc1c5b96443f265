"""The statistics against hand-computed values, other routines of scipy, and a simulation with a fixed seed."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lit_lazy.table.designs import MOST_LEVELS, interactions, main_effects
from lit_lazy.table.statistics import (
    Effect,
    Estimate,
    compute_contrast,
    estimate,
    holm,
    minimum_detectable_effect,
    tost,
)


def seeds(*values):
    return dict(enumerate(values))


def test_estimate_by_hand_of_the_values_that_are_defined():
    # s = 1; t(0.975, 2) = 4.302653 (any printed table); 4.302653 / sqrt(3) = 2.484138
    for values, undefined in (
        (seeds(1.0, 2.0, 3.0), 0),
        ({0: 1.0, 1: None, 2: 2.0, 3: math.nan, 4: 3.0, 5: math.inf}, 3),
    ):
        result = estimate(values)
        assert (result.mean, result.n, result.undefined) == (2.0, 3, undefined)
        assert result.ci95 == pytest.approx(2.484138, abs=1e-6)
        assert difference(values, dict.fromkeys(range(6), 0.0)).n == 3
    assert estimate(seeds(1.0, 2.0)).ci95 == pytest.approx(12.706205 * math.sqrt(0.5) / math.sqrt(2), abs=1e-6)
    assert estimate({}) == Estimate(None, None, 0, 0)
    assert estimate({7: 1.5}) == Estimate(1.5, None, 1, 0)
    assert estimate({0: None, 1: math.nan}) == Estimate(None, None, 0, 2)


def difference(row, baseline):
    return compute_contrast({"row": row, "baseline": baseline}, {"row": 1.0, "baseline": -1.0})


weighted_rows = st.integers(2, 5).flatmap(
    lambda rows: st.tuples(
        st.lists(st.sampled_from([-1.0, -0.5, 0.0, 1.0, 2.0]), min_size=rows, max_size=rows).filter(any),
        st.integers(3, 7).flatmap(
            lambda n: st.lists(
                st.lists(st.integers(-1000, 1000), min_size=n, max_size=n, unique=True), min_size=rows, max_size=rows
            )
        ),
    )
)


@given(weighted_rows)
def test_a_contrast_is_a_t_test_of_its_sums_per_seed(drawn):
    weights, y = drawn[0], np.array(drawn[1], dtype=float)
    sums = weights @ y
    names = [str(i) for i in range(len(weights))]
    values = {name: seeds(*row) for name, row in zip(names, y.tolist(), strict=True)}
    result = compute_contrast(values, dict(zip(names, weights, strict=True)))
    assert result.mean == pytest.approx(sums.mean())
    if np.ptp(sums):
        reference = stats.ttest_1samp(sums, 0.0)
        assert (result.test, result.df) == ("t", len(sums) - 1)
        assert result.se == pytest.approx(stats.sem(sums))
        assert result.p == pytest.approx(reference.pvalue, rel=1e-8)
        interval = (result.mean - result.ci95, result.mean + result.ci95)
        assert interval == pytest.approx(tuple(reference.confidence_interval(0.95)))
        assert (result.low, result.high) == pytest.approx((sums.min(), sums.max()))
    else:
        assert (result.test, result.p, result.ci95, result.se) == ("constant" if sums.any() else "tie", None, 0.0, 0.0)
    # A row of weight 0 has no part in it, and what a seed does to all rows of a difference cancels.
    assert compute_contrast(values | {"other": {}}, dict(zip(names, weights, strict=True)) | {"other": 0.0}) == result
    if sum(weights) == 0:
        moved = {name: {s: v + 2.0**s for s, v in row.items()} for name, row in values.items()}
        assert compute_contrast(moved, dict(zip(names, weights, strict=True))).mean == pytest.approx(result.mean)


def test_a_contrast_is_over_the_seeds_that_its_rows_share():
    """Three of them give a p, two an interval, one a mean, none nothing."""
    three = {0: 1.0, 2: 2.5, 4: 2.0}
    five = {4: 0.5, 3: 9.0, 2: 2.0, 1: -9.0, 0: 0.0}
    result = difference(three, five)
    assert (result.n, result.mean, result.low, result.high) == (3, 1.0, 0.5, 1.5)
    assert result == difference(three, {seed: five[seed] for seed in three})
    two = difference(seeds(1.0, 2.0), seeds(0.5, 0.0))
    assert (two.mean, two.p, two.test) == (1.25, None, None)
    assert two.ci95 > 0
    one = difference({0: 1.0}, {0: 0.5, 1: 2.0})
    assert (one.mean, one.ci95, one.n, one.p, one.test) == (0.5, None, 1, None, None)
    assert difference({0: 1.0, 1: 2.0, 2: 3.5}, {3: 1.0, 4: 2.0, 5: 4.0}) == Effect(None, None, 0)
    assert difference({0: None, 1: math.nan}, seeds(1.0, 2.0)) == Effect(None, None, 0)


def test_equal_differences_are_never_given_a_p():
    tie = difference(seeds(0.1, 0.2, 0.3), seeds(0.1, 0.2, 0.3))
    assert (tie.mean, tie.ci95, tie.p, tie.test) == (0.0, 0.0, None, "tie")
    parameters = difference(seeds(1024, 1024, 1024), seeds(1000, 1000, 1000))
    found = parameters.mean, parameters.ci95, parameters.se, parameters.p, parameters.test
    assert found == (24.0, 0.0, 0.0, None, "constant")
    # Equal except for rounding: 0.3 - 0.2 != 0.2 - 0.1 in binary.
    rounded = difference(seeds(0.2, 0.3, 0.4), seeds(0.1, 0.2, 0.3))
    assert (rounded.p, rounded.test) == (None, "constant")
    # Metrics are float32 sums: a spread in their eighth digit is rounding, too.
    assert difference(seeds(0.2, 0.3, 0.4 + 1e-8), seeds(0.1, 0.2, 0.3)).test == "constant"
    assert difference(seeds(0.2, 0.3, 0.4 + 1e-6), seeds(0.1, 0.2, 0.3)).test == "t"


def test_a_row_without_a_measured_spread_has_a_range_and_no_t():
    vary = seeds(0.29, 0.38, 0.47)
    for still in (seeds(0.0, 0.0, 0.0), seeds(1.0, 1.0 - 1e-8, 1.0)):
        result = difference(vary, still)
        assert (result.test, result.p, result.ci95, result.se) == ("saturated", None, None, None)
        assert result.mean == pytest.approx(0.38 - still[0])
        assert (result.low, result.high) == pytest.approx((0.29 - still[0], 0.47 - still[0]))
    at_bounds = {"a": seeds(0.0, 1.0, 1.0), "b": vary}
    assert compute_contrast(at_bounds, {"a": 1, "b": -1}, bounds=(0.0, 1.0)).test == "saturated"
    assert compute_contrast(at_bounds, {"a": 1, "b": -1}).test == "t"
    assert compute_contrast(at_bounds | {"c": vary}, {"b": 1, "c": -1, "a": 0}, bounds=(0.0, 1.0)).test == "tie"
    assert estimate(at_bounds["a"], (0.0, 1.0)) == Estimate(2 / 3, None, 3, 0)
    assert estimate(seeds(0.5, 0.5)) == Estimate(0.5, 0.0, 2, 0)
    assert difference(seeds(1e-170, 3e-170, 2e-170), seeds(1.0, 2.0, 4.0)).test == "saturated"


def test_equivalence_is_two_one_sided_tests():
    rng = np.random.default_rng(6)
    a, b = rng.normal(size=6).tolist(), (2 * rng.normal(size=6)).tolist()
    effect = compute_contrast({"a": seeds(*a), "b": seeds(*b)}, {"a": 1, "b": -1})
    for margin in (0.3, 2.0, 9.0):
        shifted = [
            stats.ttest_rel(np.add(a, sign * margin), b, alternative=side).pvalue
            for sign, side in ((1, "greater"), (-1, "less"))
        ]
        assert tost(effect, margin) == pytest.approx(max(shifted), rel=1e-9)
        inside = abs(effect.mean) + stats.t.isf(0.05, effect.df) * effect.se < margin
        assert (tost(effect, margin) < 0.05) == inside
    assert tost(difference(seeds(1.0, 2.0), seeds(1.0, 3.0)), 1.0) is None
    assert tost(difference(seeds(1.0, 1.0, 1.0), seeds(1.0, 2.0, 3.0)), 1.0) is None
    with pytest.raises(ValueError, match="margin: 0; give the largest difference that counts as none, above 0"):
        tost(effect, 0)


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


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (5, 0.05), (10, 0.05), (3, 0.05 / 16), (5, 0.05 / 100)])
def test_minimum_detectable_effect_is_found_with_power_80(n, alpha):
    """With n - 1 degrees of freedom, as for a mean of n values."""
    delta = minimum_detectable_effect(Effect(0.0, None, n, 2.5 / math.sqrt(n), n - 1, test="t", p=1.0), alpha)
    draws = np.random.default_rng(4).normal(delta, 2.5, size=(200_000, n))
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(n))
    power = np.mean(np.abs(t) > stats.t.isf(alpha / 2, n - 1))
    assert abs(power - 0.8) < 4 * math.sqrt(0.8 * 0.2 / 200_000)


def test_minimum_detectable_effect_needs_a_test():
    assert minimum_detectable_effect(difference(seeds(1.0, 2.0), seeds(1.0, 3.0))) is None
    assert minimum_detectable_effect(difference(seeds(1.0, 1.0, 1.0), seeds(1.0, 2.0, 3.0))) is None


# Main effects and interactions of factorial designs


def design(*levels):
    return {" ".join(point): dict(zip("ab", point, strict=True)) for point in itertools.product(*levels)}


def test_it_is_the_effect_of_an_additive_table_whatever_is_missing():
    whole = design(("p", "q", "r"), ("x", "y", "z"))
    values = {name: {"p": 1.0, "q": 3.0, "r": 7.0}[at["a"]] + {"x": 0.0, "y": 10.0, "z": 30.0}[at["b"]]
              for name, at in whole.items()}  # fmt: skip
    for missing in ("p y", "q x", "r z"):
        kept = {name: at for name, at in whole.items() if name != missing}
        effects = {c.name: sum(w * values[row] for row, w in c.weights.items()) for c in main_effects(kept)}
        assert effects == pytest.approx({"a: q - p": 2, "a: r - p": 6, "b: y - x": 10, "b: z - x": 30})


def test_interactions_are_zero_in_an_additive_table_and_found_where_they_are():
    """Values 10 if a and b are both at their second level, plus anything additive; one point is missing."""
    whole = {" ".join(at): dict(zip("abc", at, strict=True)) for at in itertools.product("pq", "xy", "uv")}
    del whole["q y v"]
    additive = {"p": 1, "q": 3, "x": 0, "y": 5, "u": 2, "v": 9}
    values = {name: sum(map(additive.get, at.values())) + 10 * (at["a"] == "q" and at["b"] == "y")
              for name, at in whole.items()}  # fmt: skip
    effects = {
        c.name.partition(":")[0]: sum(w * values[row] for row, w in c.weights.items()) for c in interactions(whole)
    }
    assert effects == {"a x b": 10, "a x c": 0, "b x c": 0}


def test_where_there_is_no_contrast():
    """Of levels that share no point, and of interactions of many levels."""
    nested = {name: at for name, at in design(("p", "q"), ("x", "y")).items() if name in ("p x", "q y")}
    assert main_effects(nested) == main_effects({}) == ()
    many = design([f"{i}" for i in range(MOST_LEVELS + 1)], ("x", "y"))
    assert (interactions(many), len(main_effects(many))) == ((), MOST_LEVELS + 1)
