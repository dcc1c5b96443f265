"""The contrasts of questions that were declared under one correlation for all rows."""

import math

import numpy as np
import pytest
from scipy import stats

from lit_lazy.table.fixed_rules import compute_welch_contrast, seed_correlation


def seeds(*values):
    return dict(enumerate(values))


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
