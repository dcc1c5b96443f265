"""Kinds of sinks: heads made to do nothing, to broadcast and neither, by plain matrices, whatever the batches."""

import pytest
import torch
from test_head_metrics import given_batch, on_first_key, uniform

from lit_lazy.measure.collapse_and_sink_kinds import SinkKinds

LENGTH, HEADS, D, WIDTH = 24, 4, 6, 20
NAMES = ("no_operation", "broadcast", "neither", "value_ratio", "stable_rank")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_key(key, weight=1.0):
    """Rows from a key on give it a weight and themselves the rest; earlier ones see only themselves."""
    w = torch.eye(LENGTH, dtype=torch.float64)
    w[key:] *= 1 - weight
    w[key:, key] += weight
    return w


def measure(weights, v, projection, counted=None):
    """Arrays of sequences with weight matrices `[B, H, T, T]` on values `[B, Hkv, T, D]`."""
    metric = SinkKinds(weights.shape[1])
    values = v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
    outputs = (weights @ values).transpose(1, 2).flatten(2)
    metric.update(given_batch(weights, counted=counted), v, outputs, projection)
    return {name.removeprefix("sink/"): value for name, value in metric.compute().items()}


def test_heads_of_each_kind():
    """A drained sink; a sink with all weight; a large one of half the weight, with varied rest; and no sink."""
    weights = torch.stack([on_first_key(LENGTH).double(), on_key(2), on_key(0, 0.5), uniform(LENGTH).double()])[None]
    v = draw(1, HEADS, LENGTH, D)
    v[:, 0, 0] *= 0.02
    v[:, 1, :2] *= 1e-3  # the rows before the sink add next to nothing
    arrays = measure(weights, v, draw(WIDTH, HEADS * D, seed=1))
    assert arrays.keys() == {*NAMES}
    assert arrays["no_operation"].tolist() == [1, 0, 0, 0]
    assert arrays["broadcast"].tolist() == [0, 1, 0, 0]
    assert arrays["neither"].tolist() == [0, 0, 1, 0]
    assert arrays["stable_rank"][:2].tolist() == pytest.approx([1, 1], abs=1e-4)
    assert arrays["stable_rank"][2] > 1.5
    assert arrays["value_ratio"][3].isnan()
    assert arrays["stable_rank"][3].isnan()


def test_padding_is_ignored():
    weights = torch.stack([torch.stack([on_key(key, share) for key in (0, 1, 2, 3)]) for share in (0.9, 0.6, 0.2)])
    v, projection, short = draw(3, 2, LENGTH, D), draw(WIDTH, HEADS * D, seed=1), 15
    padded = v.clone()
    padded[:, :, short:] = 1e6
    cut = measure(weights[..., :short, :short], v[:, :, :short], projection)
    masked = measure(weights, padded, projection, (torch.arange(LENGTH) < short).expand(3, -1))
    for name in NAMES:
        torch.testing.assert_close(masked[name], cut[name], equal_nan=True)
    assert sum(cut[name] for name in NAMES[:3]).tolist() == pytest.approx([2 / 3] * HEADS)  # 0.2 is no sink


def test_a_late_key_is_no_sink():
    """Rows of the last keys are so few that their weight on themselves makes a mean."""
    arrays = measure(torch.eye(LENGTH, dtype=torch.float64)[None, None], draw(1, 1, LENGTH, D), draw(WIDTH, D))
    assert arrays["neither"].tolist() == [0]
    late = measure(on_key(LENGTH // 2, 1.0)[None, None], draw(1, 1, LENGTH, D), draw(WIDTH, D))
    assert late["no_operation"].tolist() == late["broadcast"].tolist() == [0]


def test_what_adds_nothing_broadcasts_nothing():
    arrays = measure(on_key(0)[None, None], draw(1, 1, LENGTH, D), torch.zeros(WIDTH, D))
    assert [arrays[name].tolist() for name in NAMES[:3]] == [[0], [0], [0]]
