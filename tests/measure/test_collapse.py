"""Collapse and outliers of hidden states: closed forms, invariances, and comparison with plain computation."""

import math

import numpy as np
import pytest
import torch

from lit_lazy.measure.collapse_and_sink_kinds import (
    Collapse,
    effective_rank,
    rank_residual,
    repeated_gap,
    stable_rank,
    token_cosine,
)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def measure(*batches):
    metric = Collapse()
    for batch in batches:
        metric.update(*batch) if isinstance(batch, tuple) else metric.update(batch)
    return {name.removeprefix("hidden/"): value.item() for name, value in metric.compute().items()}


TOKEN, NAN = normal(8), math.nan
WITH_ZEROS = normal(6, 4)
WITH_ZEROS[[1, 4]] = 0
INFINITE = torch.zeros(3, 4)
INFINITE[1, 1] = math.inf

DEGENERATE = [
    (token_cosine, WITH_ZEROS, token_cosine(WITH_ZEROS[[0, 2, 3, 5]]).item()),  # tokens of 0 are left out
    (token_cosine, torch.eye(4, 3)[[0, 3, 3, 3]], NAN),  # one token
    (effective_rank, torch.outer(normal(800), normal(600, seed=1)).double(), 1),  # the others are rounding
    (effective_rank, torch.zeros(3, 3), NAN),
    (effective_rank, torch.full((3, 3), NAN), NAN),
    (stable_rank, torch.zeros(3, 4), NAN),
    (stable_rank, INFINITE, NAN),
    (rank_residual, TOKEN.expand(6, 8), 0),
]


@pytest.mark.parametrize(("function", "x", "expected"), DEGENERATE)
def test_what_has_no_rank_or_direction(function, x, expected):
    assert function(x).item() == pytest.approx(expected, abs=1e-5, nan_ok=True)


def expected_cosine(x):
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return (unit @ unit.T)[~np.eye(len(x), dtype=bool)].mean()


def expected_effective_rank(x):
    q = np.linalg.svd(x, compute_uv=False)
    return np.exp(-(q / q.sum() * np.log(q / q.sum())).sum())


def expected_stable_rank(x):
    singular = np.linalg.svd(x, compute_uv=False)
    return (singular**2).sum() / singular[0] ** 2


def expected_residual(x):
    one, infinite = (np.linalg.norm(x - x.mean(0), n) / np.linalg.norm(x, n) for n in (1, np.inf))
    return math.sqrt(one * infinite)


@pytest.mark.parametrize("shape", [(30, 8), (8, 30)])
@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (token_cosine, expected_cosine),
        (effective_rank, expected_effective_rank),
        (stable_rank, expected_stable_rank),
        (rank_residual, expected_residual),
    ],
)
def test_each_sequence_of_a_batch_has_what_numpy_finds(function, expected, scale, shape):
    x = scale * (normal(2, *shape, dtype=torch.float64) + 0.5)
    np.testing.assert_allclose(function(x), [expected(sequence) for sequence in x.numpy()], rtol=1e-9)


def test_the_gap_of_uniform_attention_over_a_b_b():
    """y_n = v_b + (v_a - v_b) / n, so repeating b moves the last output by |v_a - v_b| (1/n - 1/(n+1))."""
    v_a, v_b = normal(2, 6, dtype=torch.float64)
    for n in (1, 2, 9):
        outputs = v_b + (v_a - v_b) / torch.arange(1, n + 2, dtype=torch.float64)[:, None]
        gap = repeated_gap(outputs[None, :n], outputs[None])
        expected = (v_a - v_b).norm() * (1 / n - 1 / (n + 1)) / outputs[n - 1].norm()
        assert gap.item() == pytest.approx(expected.item(), rel=1e-12)


def spiked(value, *scales):
    """A sequence of 10 x 10 equal entries for each scale, with one other value."""
    x = torch.tensor(scales)[:, None, None].expand(-1, 10, 10).clone()
    x[:, 3, 5] = value
    return x


SIZES = torch.tensor([[[3.0, -4.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 0.5]]])
OUTLIERS = [
    (normal(1, 60, 50, dtype=torch.float64) + 1e5, "kurtosis", NAN),  # past 1000 standard deviations
    (torch.full((1, 4, 4), 0.1), "kurtosis", NAN),
    *((SIZES, name, value) for name, value in (("max_abs", 4), ("max_norm", 5), ("median_abs", (1 + 0) / 2))),
    *((spiked(value, 0.01), "massive", share) for value, share in ((100.0, 0), (-101.0, 0.01), (99.0, 0))),
    *((spiked(value, 0.5, 10.0), "massive", share) for value, share in ((499.0, 0), (500.0, 1 / 200))),
]


@pytest.mark.parametrize(("x", "name", "expected"), OUTLIERS)
def test_outliers(x, name, expected):
    assert measure(x)[name] == pytest.approx(expected, abs=1e-6, nan_ok=True)


def sequences():
    """Sequences of different lengths, scales, means and ranks."""
    return [
        scale * (normal(length, 6, seed=length) @ normal(6, 6, seed=length + 50) + scale)
        for length, scale in ((11, 1.0), (1, 0.3), (4, 30.0), (20, 0.1), (7, 5.0))
    ]


def padded(batch, width, value=0.0):
    hidden = torch.full((len(batch), width, 6), value)
    counted = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, sequence in enumerate(batch):
        hidden[row, : len(sequence)] = sequence
        counted[row, : len(sequence)] = True
    return hidden, counted


class TestAccumulation:
    def test_equals_plain_computation(self):
        """Against means of the functions over sequences, and numpy's moments of all entries."""

        def mean(function):
            return np.mean([function(x.double()) for x in sequences()])

        entries = np.concatenate([x.double().numpy().ravel() for x in sequences()])
        deviation = entries - entries.mean()
        large = [((x.abs() > 100) & (x.abs() >= 1000 * x.abs().median())).numpy().ravel() for x in sequences()]
        expected = {
            "cosine": np.mean([token_cosine(x).item() for x in sequences() if len(x) > 1]),
            "effective_rank": mean(effective_rank),
            "rank_residual": mean(rank_residual),
            "median_abs": mean(lambda x: x.abs().median()),
            "max_over_median": mean(lambda x: x.abs().max() / x.abs().median()),
            "max_abs": np.abs(entries).max(),
            "max_norm": max(x.double().norm(dim=-1).max().item() for x in sequences()),
            "kurtosis": np.mean(deviation**4) / np.mean(deviation**2) ** 2,
            "massive": np.mean(np.concatenate(large)),
        }
        assert measure(*(x[None] for x in sequences())) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("cut", [1, 2, 4])
    def test_batches_and_padding_do_not_matter(self, cut):
        one_by_one = measure(*(x[None] for x in sequences()))
        together = measure(padded(sequences(), 20))
        cut_up = measure(padded(sequences()[:cut], 20, torch.nan), padded(sequences()[cut:], 33, 1e9))
        assert together == pytest.approx(one_by_one, rel=1e-12)
        assert cut_up == pytest.approx(one_by_one, rel=1e-12)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_not_finite_is_not_hidden_by_the_other_sequences(self, value):
        x = normal(3, 5, 4)
        nothing = measure((x, torch.zeros(3, 5, dtype=torch.bool)))
        x[1, 2, 3] = value
        assert all(math.isnan(measured) for found in (measure(x), nothing) for measured in found.values())

    def test_zeros(self):
        """Sequences without direction or rank are excluded from the means."""
        x = normal(2, 5, 4)
        x[0] = 0
        measured, alone = measure(x), measure(x[1:])
        for name in ("cosine", "effective_rank", "rank_residual", "max_over_median"):
            assert measured[name] == alone[name]
        assert measured["median_abs"] == alone["median_abs"] / 2
