"""The order of batches depends on (seed, step) only, so a resumed run sees what the uninterrupted one would have."""

from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.base import TokenDataset
from lit_lazy.data.sampler import StepBatchSampler


def batches(n_items, batch_size, seed=0, start=0, count=10):
    return list(islice(StepBatchSampler(n_items, batch_size, seed, lambda: start), count))


def test_same_seed_same_batches():
    assert batches(100, 7) == batches(100, 7)


def test_seeds_differ():
    assert batches(100, 7, seed=0) != batches(100, 7, seed=1)


@pytest.mark.parametrize("start", [0, 1, 13, 14, 15, 29, 40])  # 100 / 7: passes end inside batches 14 and 28
def test_resume_gives_the_tail(start):
    assert batches(100, 7, start=start, count=5) == batches(100, 7, count=start + 5)[start:]


@given(n_items=st.integers(1, 40), data=st.data())
def test_every_item_once_per_pass(n_items, data):
    batch_size = data.draw(st.integers(1, n_items))
    drawn = batches(n_items, batch_size, count=3 * n_items)
    assert {len(batch) for batch in drawn} == {batch_size}
    stream = list(chain.from_iterable(drawn))
    for begin in range(0, len(stream) - n_items + 1, n_items):
        assert sorted(stream[begin : begin + n_items]) == list(range(n_items))


def test_passes_differ():
    first, second = batches(50, 50, count=2)
    assert first != second


def test_a_pass_is_drawn_once():
    drawn = []

    class Counting(StepBatchSampler):
        def _draw_order(self, number):
            drawn.append(number)
            return super()._draw_order(number)

    list(islice(Counting(100, 7, 0, lambda: 0), 40))  # 280 items: into the third pass
    assert drawn == [0, 1, 2]


def test_start_is_read_when_the_iterator_is_created():
    step = 3
    sampler = StepBatchSampler(100, 7, 0, lambda: step)
    iterator = iter(sampler)
    step = 9
    assert next(iterator) == batches(100, 7)[3]
    assert next(iter(sampler)) == batches(100, 7)[9]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1, 0), "n_items=0"),
        ((10, 0, 0), "batch_size=0"),
        ((10, 2, -1), "seed=-1"),
        ((10, 11, 0), "batch_size=11: must not exceed the 10 items"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        StepBatchSampler(*arguments, lambda: 0)


def test_negative_start_is_an_error():
    with pytest.raises(ValueError, match="start_step=-1"):
        iter(StepBatchSampler(10, 2, 0, lambda: -1))


def test_data_loader_fetches_complete_batches():
    data = Backcopy(train_sequences=100, validation_sequences=10).load().train
    sampler = StepBatchSampler(len(data), 7, 0, lambda: 5)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=lambda batch: batch)
    for batch, indices in zip(islice(loader, 20), islice(sampler, 20), strict=True):
        one_by_one = [data[index] for index in indices]
        assert set(batch) == {"tokens", "targets", "trigger", "non_trigger", "oracle_nll"}
        for name, values in batch.items():
            alone = torch.stack([item[name] for item in one_by_one])
            assert values.dtype == alone.dtype
            assert torch.equal(values, alone)
            assert values.is_contiguous()


def test_data_loader_has_no_length():
    data = TokenDataset(torch.zeros(10, 5, dtype=torch.uint8))
    loader = DataLoader(data, batch_sampler=StepBatchSampler(10, 2, 0, lambda: 0), collate_fn=lambda batch: batch)
    with pytest.raises(TypeError):
        len(loader)
