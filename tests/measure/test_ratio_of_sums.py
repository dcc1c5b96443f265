"""A ratio of sums in fp64, independent of the batches and undefined below its minimum."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_lazy.measure.ratio_of_sums import RatioOfSums


def ratio(*pairs, minimum=0.0):
    metric = RatioOfSums(minimum)
    for numerator, denominator in pairs:
        metric.update(torch.as_tensor(numerator), torch.as_tensor(denominator))
    return metric.compute().item()


@pytest.mark.parametrize(("denominator", "defined"), [(0.0, False), (0.5, False), (1.0, False), (1.5, True)])
def test_undefined_below_the_minimum(denominator, defined):
    assert math.isnan(ratio((3.0, denominator), minimum=1.0)) is not defined


def test_sums_of_fp32_are_taken_in_fp64():
    """fp32 would stop counting at 2^24, within a tensor and over updates."""
    one = torch.ones(2**24 + 1)
    assert RatioOfSums()(one, 2**24 + 1).item() == 1
    metric = RatioOfSums()
    metric.update(torch.tensor(2.0**24), 1)
    for _ in range(5):
        metric.update(torch.tensor(1.0), 0)
    assert metric.compute().item() == 2**24 + 5
    assert metric.compute().dtype == torch.float64


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 1000)), min_size=1, max_size=20), st.data())
def test_batches_do_not_matter(pairs, data):
    numerators, denominators = (torch.tensor(values, dtype=torch.float64) for values in zip(*pairs, strict=True))
    cut = data.draw(st.integers(0, len(pairs)))
    whole = ratio((numerators, denominators))
    assert ratio((numerators[:cut], denominators[:cut]), (numerators[cut:], denominators[cut:])) == whole
    assert whole == sum(n for n, _ in pairs) / sum(d for _, d in pairs)
