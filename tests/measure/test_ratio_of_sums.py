"""A ratio of sums in fp64, independent of the batches and undefined below its minimum."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_lazy.measure.attention_metrics import RatioOfSums


def ratio(*pairs, minimum=0.0):
    metric = RatioOfSums(minimum)
    for numerator, denominator in pairs:
        metric.update(torch.as_tensor(numerator), torch.as_tensor(denominator))
    return metric.compute().item()


def test_is_no_mean_of_ratios():
    assert ratio((1.0, 1.0), (0.0, 9.0)) == 0.1


def test_sums_tensors_of_any_shape_and_a_plain_count():
    metric = RatioOfSums()
    metric.update(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bool))
    metric.update(torch.tensor(4.0), 5)
    assert metric.compute().item() == 10 / 25


@pytest.mark.parametrize(("denominator", "defined"), [(0.0, False), (0.5, False), (1.0, False), (1.5, True)])
def test_undefined_below_the_minimum(denominator, defined):
    assert math.isnan(ratio((3.0, denominator), minimum=1.0)) is not defined


def test_undefined_without_data_and_defined_after():
    metric = RatioOfSums()
    assert math.isnan(RatioOfSums(minimum=1e-6)(torch.tensor(0.0), torch.tensor(0.0)))
    metric.update(torch.tensor(2.0), 0)
    assert math.isnan(metric.compute())
    metric.update(torch.tensor(2.0), 8)
    assert metric.compute().item() == 0.5


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


def test_stays_in_fp64_when_its_model_is_cast():
    module = torch.nn.Module()
    module.metric = RatioOfSums()
    module.bfloat16()
    module.metric.update(torch.tensor(2.0**24 + 2), 1)
    assert module.metric.compute().item() == 2**24 + 2


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 1000)), min_size=1, max_size=20), st.data())
def test_batches_do_not_matter(pairs, data):
    numerators, denominators = (torch.tensor(values, dtype=torch.float64) for values in zip(*pairs, strict=True))
    cut = data.draw(st.integers(0, len(pairs)))
    whole = ratio((numerators, denominators))
    assert ratio((numerators[:cut], denominators[:cut]), (numerators[cut:], denominators[cut:])) == whole
    assert whole == sum(n for n, _ in pairs) / sum(d for _, d in pairs)


def test_reset_forgets():
    metric = RatioOfSums()
    metric.update(torch.tensor(5.0), 1)
    metric.reset()
    metric.update(torch.tensor(1.0), 4)
    assert metric.compute().item() == 0.25


def test_processes_are_summed():
    assert set(RatioOfSums()._reductions) == {"numerator", "denominator"}
    assert {reduce(torch.tensor([1.0, 2.0])).item() for reduce in RatioOfSums()._reductions.values()} == {3.0}
