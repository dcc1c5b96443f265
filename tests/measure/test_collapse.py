"""Collapse and outliers of hidden states: closed forms, invariances, and comparison with plain computation."""

import math

import numpy as np
import pytest
import torch

from lit_lazy.measure.collapse import (
    Collapse,
    effective_rank,
    rank_residual,
    repeated_gap,
    stable_rank,
    token_cosine,
)

NAMES = {
    f"hidden/{name}"
    for name in (
        *("cosine", "effective_rank", "rank_residual", "median_abs", "max_over_median"),
        *("max_abs", "max_norm", "massive", "kurtosis"),
    )
}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def measure(*batches, metric=None):
    metric = metric or Collapse()
    for batch in batches:
        metric.update(*batch) if isinstance(batch, tuple) else metric.update(batch)
    return {name.removeprefix("hidden/"): value.item() for name, value in metric.compute().items()}


class TestTokenCosine:
    def test_closed_forms(self):
        token = normal(8)
        pair = torch.stack((token, -3 * token))
        assert token_cosine(token.expand(5, 8)).item() == pytest.approx(1, rel=1e-12)
        assert token_cosine(torch.eye(6)).item() == pytest.approx(0, abs=1e-15)
        assert token_cosine(pair).item() == pytest.approx(-1, rel=1e-12)

    def test_is_the_mean_over_pairs_of_different_tokens(self):
        x = normal(3, 7, 5)
        unit = x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=-1, keepdims=True)
        cosines = unit @ unit.transpose(0, 2, 1)
        expected = cosines[:, ~np.eye(7, dtype=bool)].mean(-1)
        np.testing.assert_allclose(token_cosine(x), expected, rtol=1e-12)

    def test_zero_tokens_are_left_out(self):
        x = normal(6, 4)
        x[[1, 4]] = 0
        assert token_cosine(x).item() == pytest.approx(token_cosine(x[[0, 2, 3, 5]]).item(), rel=1e-12)

    @pytest.mark.parametrize("n_tokens", [0, 1])
    def test_undefined_without_a_pair(self, n_tokens):
        x = torch.zeros(4, 3)
        x[:n_tokens] = 0.3
        assert token_cosine(x).isnan()


class TestEffectiveRank:
    @pytest.mark.parametrize(("rows", "columns"), [(5, 5), (5, 9), (9, 5)])
    def test_equal_singular_values(self, rows, columns):
        assert effective_rank(torch.eye(rows, columns)).item() == pytest.approx(5, rel=1e-12)

    @pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
    def test_rank_one(self, shape):
        x = torch.outer(normal(shape[0]), normal(shape[1], seed=1)).double()
        assert effective_rank(x).item() == pytest.approx(1, abs=1e-5)
        assert effective_rank(torch.ones(shape)).item() == pytest.approx(1, abs=1e-12)

    def test_singular_values_two_and_one(self):
        """Of the singular values, not of their squares (which give 1.64938)."""
        u, v = torch.linalg.qr(normal(7, 2, dtype=torch.float64))[0], torch.linalg.qr(normal(3, 2).double())[0]
        x = u @ torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64)) @ v.T
        assert effective_rank(x).item() == pytest.approx(1.88988, abs=5e-6)
        assert effective_rank(1e-4 * x.T).item() == pytest.approx(1.88988, abs=5e-6)

    def test_is_not_centred(self):
        assert effective_rank(torch.eye(2) + 3).item() != pytest.approx(effective_rank(torch.eye(2)).item(), rel=0.1)
        assert effective_rank(torch.ones(4, 4)).item() == pytest.approx(1)

    @pytest.mark.parametrize("shape", [(2, 30, 8), (2, 8, 30)])
    def test_equals_the_one_of_the_svd(self, shape):
        x = normal(*shape) + 2
        singular = np.linalg.svd(x.double().numpy(), compute_uv=False)
        q = singular / singular.sum(-1, keepdims=True)
        np.testing.assert_allclose(effective_rank(x), np.exp(-(q * np.log(q)).sum(-1)), rtol=1e-9)

    def test_undefined_for_zeros_and_for_what_is_not_finite(self):
        x = torch.stack((torch.zeros(3, 3), torch.eye(3), torch.full((3, 3), torch.nan)))
        assert effective_rank(x).isnan().tolist() == [True, False, True]


class TestStableRank:
    def test_known_singular_values(self):
        assert stable_rank(torch.eye(7, 5)).item() == pytest.approx(5)
        assert stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))).item() == pytest.approx(1.5)
        assert stable_rank(torch.ones(3, 4, 9)).tolist() == pytest.approx([1] * 3)

    def test_equals_the_one_of_the_svd(self):
        for x in (normal(4, 30, 6), normal(4, 6, 30)):
            singular = torch.linalg.svdvals(x.double())
            expected = singular.square().sum(-1) / singular[:, 0].square()
            torch.testing.assert_close(stable_rank(x), expected)

    def test_undefined_for_zeros_and_for_what_is_not_finite(self):
        x = torch.zeros(2, 3, 4)
        x[1, 1, 1] = torch.inf
        assert stable_rank(x).isnan().all()
        assert stable_rank(torch.zeros(0, 3, 4)).shape == (0,)


class TestRankResidual:
    def test_identical_tokens(self):
        assert rank_residual(normal(8).expand(6, 8)).item() == pytest.approx(0, abs=1e-15)

    def test_scale_invariant(self):
        x = normal(2, 9, 5) + 1
        torch.testing.assert_close(rank_residual(1000 * x.double()), rank_residual(x), rtol=1e-12, atol=0)

    def test_tokens_that_cancel(self):
        """Their mean is 0, so the residual is x."""
        x = normal(5, 4)
        assert rank_residual(torch.cat((x, -x))).item() == pytest.approx(1, rel=1e-6)

    def test_by_hand(self):
        """|X|_1 = 4, |X|_inf = 3; the mean (2, 0.5) leaves rows (-1, .5) and (1, -.5): 2 and 1.5."""
        x = torch.tensor([[1.0, 1.0], [3.0, 0.0]])
        assert rank_residual(x).item() == pytest.approx(math.sqrt(2 * 1.5) / math.sqrt(4 * 3), rel=1e-12)

    def test_norms_are_numpys(self):
        x = normal(7, 3, dtype=torch.float64) + 0.5

        def size(x):
            return math.sqrt(np.linalg.norm(x, 1) * np.linalg.norm(x, np.inf))

        x_np = x.numpy()
        expected = size(x_np - x_np.mean(0)) / size(x_np)
        assert rank_residual(x).item() == pytest.approx(expected, rel=1e-12)


class TestRepeatedGap:
    def test_uniform_attention_over_a_b_b(self):
        """y_n = v_b + (v_a - v_b) / n, so repeating b moves the last output by |v_a - v_b| (1/n - 1/(n+1))."""
        v_a, v_b = normal(2, 6, dtype=torch.float64)
        for n in (1, 2, 9):
            outputs = v_b + (v_a - v_b) / torch.arange(1, n + 2, dtype=torch.float64)[:, None]
            gap = repeated_gap(outputs[None, :n], outputs[None])
            expected = (v_a - v_b).norm() * (1 / n - 1 / (n + 1)) / outputs[n - 1].norm()
            assert gap.item() == pytest.approx(expected.item(), rel=1e-12)

    def test_is_of_the_last_token_alone(self):
        y = normal(3, 5, 4)
        repeated = torch.cat((normal(3, 5, 4, seed=1), y[:, -1:]), dim=1)
        assert repeated_gap(y, repeated).tolist() == [0, 0, 0]
        repeated[1, -1] *= 3
        torch.testing.assert_close(repeated_gap(y, repeated), torch.tensor([0, 2, 0], dtype=torch.float64))

    def test_needs_one_token_more(self):
        with pytest.raises(ValueError, match=r"y_repeated of shape \[2, 5, 4\]: must be \[2, 6, 4\], one token more"):
            repeated_gap(torch.ones(2, 5, 4), torch.ones(2, 5, 4))


class TestOutliers:
    def test_kurtosis_of_a_normal_sample(self):
        """Standard error sqrt(24 / n) = 0.0069."""
        assert measure(normal(4, 500, 250))["kurtosis"] == pytest.approx(3, abs=0.025)

    @pytest.mark.parametrize("d", [2, 8, 100])
    def test_kurtosis_of_one_hot_tokens(self, d):
        one_hot = torch.eye(d)[torch.arange(12) % d]
        measured = measure(1e3 * one_hot[None])
        assert measured["kurtosis"] == pytest.approx((d * d - 3 * d + 3) / (d - 1), rel=1e-9)
        assert d != 8 or measured["kurtosis"] == pytest.approx(6.142857, abs=1e-6)

    def test_kurtosis_is_pooled_over_sequences(self):
        """Two sequences of +-1 and +-3: E x^4 / (E x^2)^2 = 41 / 25, while each sequence has 1."""
        signs = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        x = torch.stack((signs, 3 * signs))
        assert measure(x[:1])["kurtosis"] == pytest.approx(1)
        assert measure(x)["kurtosis"] == pytest.approx(41 / 25, rel=1e-12)

    def test_kurtosis_around_a_mean(self):
        """The mean is subtracted, accurately up to 100 standard deviations; past 1000 the value is undefined."""
        x = normal(1, 60, 50, dtype=torch.float64)
        assert measure(x + 100)["kurtosis"] == pytest.approx(measure(x)["kurtosis"], rel=1e-6)
        assert math.isnan(measure(x + 1e5)["kurtosis"])
        assert math.isnan(measure(torch.full((1, 4, 4), 0.1))["kurtosis"])

    def test_sizes(self):
        x = torch.tensor([[[3.0, -4.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 0.5]]])
        measured = measure(x)
        assert measured["max_abs"] == 4
        assert measured["max_norm"] == 5
        assert measured["median_abs"] == (1 + 0) / 2

    @pytest.mark.parametrize(("value", "massive"), [(100.0, 0), (-101.0, 1), (99.0, 0)])
    def test_a_massive_activation_exceeds_100(self, value, massive):
        x = torch.full((1, 10, 10), 0.01)
        x[0, 3, 5] = value
        assert measure(x)["massive"] == pytest.approx(massive / 100)

    @pytest.mark.parametrize(("value", "massive"), [(499.0, 0), (500.0, 1)])
    def test_a_massive_activation_is_1000_medians_of_its_own_sequence(self, value, massive):
        x = torch.full((2, 10, 10), 0.5)
        x[1] *= 20
        x[:, 3, 5] = value
        assert measure(x)["massive"] == pytest.approx(massive / 200)


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
        entries = np.concatenate([x.double().numpy().ravel() for x in sequences()])
        deviation = entries - entries.mean()
        expected = {
            "cosine": np.mean([token_cosine(x).item() for x in sequences() if len(x) > 1]),
            "effective_rank": np.mean([effective_rank(x).item() for x in sequences()]),
            "rank_residual": np.mean([rank_residual(x).item() for x in sequences()]),
            "median_abs": np.mean([np.sort(x.abs().numpy().ravel())[(x.numel() - 1) // 2] for x in sequences()]),
            "max_over_median": np.mean([x.abs().max().item() / x.abs().median().item() for x in sequences()]),
            "max_abs": np.abs(entries).max(),
            "max_norm": max(x.double().norm(dim=-1).max().item() for x in sequences()),
            "kurtosis": np.mean(deviation**4) / np.mean(deviation**2) ** 2,
            "massive": np.mean(
                np.concatenate(
                    [((x.abs() > 100) & (x.abs() >= 1000 * x.abs().median())).numpy().ravel() for x in sequences()]
                )
            ),
        }
        assert measure(*(x[None] for x in sequences())) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("cut", [1, 2, 4])
    def test_batches_and_padding_do_not_matter(self, cut):
        one_by_one = measure(*(x[None] for x in sequences()))
        together = measure(padded(sequences(), 20))
        cut_up = measure(padded(sequences()[:cut], 20, torch.nan), padded(sequences()[cut:], 33, 1e9))
        assert together == pytest.approx(one_by_one, rel=1e-12)
        assert cut_up == pytest.approx(one_by_one, rel=1e-12)

    def test_all_counted_is_none_given(self):
        x = normal(3, 5, 4)
        assert measure(x) == measure((x, torch.ones(3, 5, dtype=torch.bool)))

    def test_two_processes_are_one(self):
        """Reduce each state of two instances by its `dist_reduce_fx`."""
        first, second, whole = Collapse(), Collapse(), Collapse()
        first.update(*padded(sequences()[:2], 20))
        second.update(*padded(sequences()[2:], 20))
        whole.update(*padded(sequences(), 20))
        assert set(Collapse()._reductions) == set(whole.metric_state)
        for name, reduce in Collapse()._reductions.items():
            both = reduce(torch.stack((first.metric_state[name], second.metric_state[name])))
            torch.testing.assert_close(both, whole.metric_state[name], rtol=1e-12, atol=0)
            setattr(first, name, both)
        assert measure(metric=first) == pytest.approx(measure(metric=whole), rel=1e-12)

    def test_states_stay_fp64_on_a_cast_model(self):
        module = torch.nn.Module()
        module.metric = Collapse()
        module.bfloat16()
        assert {state.dtype for state in module.metric.metric_state.values()} == {torch.float64}
        assert measure(sequences()[0][None], metric=module.metric) == measure(sequences()[0][None])

    def test_reset_forgets(self):
        metric = Collapse()
        metric.update(100 * normal(2, 9, 4))
        metric.reset()
        assert measure(sequences()[0][None], metric=metric) == measure(sequences()[0][None])

    def test_keeps_no_graph(self):
        metric = Collapse()
        metric.update(normal(2, 5, 4).requires_grad_())
        assert not any(value.requires_grad for value in metric.compute().values())

    def test_names(self):
        metric = Collapse()
        metric.update(normal(2, 5, 4))
        assert set(metric.compute()) == NAMES

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_not_finite_is_not_hidden_by_the_other_sequences(self, value):
        x = normal(3, 5, 4)
        x[1, 2, 3] = value
        assert all(math.isnan(measured) for measured in measure(x).values())

    def test_nothing_counted(self):
        x = normal(2, 5, 4)
        nothing = measure((x, torch.zeros(2, 5, dtype=torch.bool)))
        assert all(math.isnan(measured) for measured in nothing.values())

    def test_zeros(self):
        """Sequences without direction or rank are excluded from the means."""
        x = normal(2, 5, 4)
        x[0] = 0
        measured, alone = measure(x), measure(x[1:])
        for name in ("cosine", "effective_rank", "rank_residual", "max_over_median"):
            assert measured[name] == alone[name]
        assert measured["median_abs"] == alone["median_abs"] / 2
