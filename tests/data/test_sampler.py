"""The order of batches depends on (seed, step) only, so a resumed run sees what the uninterrupted one would have."""

from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.sampler import StepBatchSampler


def batches(n_items, batch_size, seed=0, start=0, count=10):
    return list(islice(StepBatchSampler(n_items, batch_size, seed, lambda: start), count))


@pytest.mark.parametrize("start", [0, 1, 13, 14, 15, 29, 40])  # 100 / 7: passes end inside batches 14 and 28
def test_resume_gives_the_tail_of_the_same_seed(start):
    assert batches(100, 7, start=start, count=5) == batches(100, 7, count=start + 5)[start:]
    assert batches(100, 7, start=start, count=5) != batches(100, 7, seed=1, start=start, count=5)


@given(n_items=st.integers(1, 40), data=st.data())
def test_every_item_once_per_pass(n_items, data):
    batch_size = data.draw(st.integers(1, n_items))
    drawn = batches(n_items, batch_size, count=3 * n_items)
    assert {len(batch) for batch in drawn} == {batch_size}
    stream = list(chain.from_iterable(drawn))
    passes = [stream[begin : begin + n_items] for begin in range(0, len(stream) - n_items + 1, n_items)]
    assert all(sorted(each) == list(range(n_items)) for each in passes)
    assert n_items < 20 or passes[0] != passes[1]


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="batch_size=11: must not exceed the 10 items"):
        StepBatchSampler(10, 11, 0, lambda: 0)


def test_data_loader_fetches_complete_batches():
    """From the step at which its iterator is created."""
    data, step = Backcopy(train_sequences=100, validation_sequences=10).load().train, 3
    sampler = StepBatchSampler(len(data), 7, 0, lambda: step)
    iterator = iter(sampler)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=lambda batch: batch)
    step = 9
    assert next(iterator) == batches(100, 7)[3]
    for batch, indices in zip(islice(loader, 20), islice(sampler, 20), strict=True):
        one_by_one = [data[index] for index in indices]
        assert set(batch) == {"tokens", "targets", "trigger", "non_trigger", "oracle_nll"}
        for name, values in batch.items():
            alone = torch.stack([item[name] for item in one_by_one])
            assert values.dtype == alone.dtype
            assert torch.equal(values, alone)
            assert values.is_contiguous()
