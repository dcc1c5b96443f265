"""Head metrics: closed forms, undefined values, and invariances."""

import math
import warnings

import pytest
import torch
from layers import layer_shape

from lit_lazy.attention import AttentionCall, BiasTerms, Elastic, NormaliserModule, Softmax
from lit_lazy.measure.head_metrics import (
    Entropy,
    GaussianNull,
    Mass,
    ScoreSpread,
    Sink,
    Sparsity,
    ValueNorms,
    null_sparsity,
)
from lit_lazy.measure.row_statistics import summarise

LENGTH = 64
HARMONIC = sum(1 / i for i in range(1, LENGTH + 1))


class Given(NormaliserModule):
    """Returns fixed weights `[B, H, T, T]`; its threshold cuts nothing."""

    can_zero = True

    def __init__(self, w, threshold):
        super().__init__()
        self.w, self.threshold = w, threshold

    def weights(self, scores, rows):
        return self.w[:, :, rows.position[0, 0, :, 0] - 1, : scores.shape[-1]] * rows.visible

    def theta(self, rows):
        return torch.full_like(rows.n, self.threshold)


def given(*heads, theta=0.0, counted=None, window=None):
    """Summary of one sequence with weight matrices `[T, T]`, one per head."""
    return given_batch([heads], theta, counted, window)


def given_batch(sequences, theta=0.0, counted=None, window=None):
    w = torch.stack([torch.stack([torch.as_tensor(head) for head in heads]) for heads in sequences]).float()
    return summarise(Given(w, theta), AttentionCall(w, torch.zeros_like(w), w, window=window), counted=counted)


def summary_of(spec, q, k, bias=BiasTerms(), window=None):  # noqa: B008
    """Summary of a normaliser's rows in a layer with these settings."""
    normaliser = spec.build(layer_shape(q.shape[1], q.shape[2]))
    return summarise(normaliser, AttentionCall(q, k, k, bias, window, renormalise=spec.renormalise))


def metrics(n_heads, length):
    """One metric of each class that reads a summary."""
    of_heads = (Sparsity, Entropy, ScoreSpread, GaussianNull)
    return [Sink(n_heads, length), Mass(n_heads, length), *(metric(n_heads) for metric in of_heads)]


def measure(*summaries, n_heads=None, length=None):
    """All arrays of the summaries. Fails on a warning."""
    _, heads, rows = summaries[0].mass.shape
    arrays = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for metric in metrics(n_heads or heads, length or rows):
            for summary in summaries:
                metric.update(summary)
            arrays |= metric.compute()
    return arrays


def on_first_key(length=LENGTH):
    return torch.eye(length)[0].expand(length, length)


def uniform(length=LENGTH):
    return torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]


def random_weights(generator, length=LENGTH, kept=0.6):
    w = torch.rand(length, length, generator=generator)
    return (w * (torch.rand(length, length, generator=generator) < kept)).tril() / length


def approx(value, **tolerance):
    return pytest.approx(value, rel=1e-5, nan_ok=True, **tolerance)


class TestSink:
    def test_all_weight_on_the_first_key(self):
        arrays = measure(given(on_first_key()))
        assert arrays["sink/weight"][0, 0] == 1
        assert arrays["sink/rate"][0, 0] == 1
        assert arrays["sink/position"] == 1
        assert (arrays["sink/weight"][0, 1:] == 0).all()
        assert (arrays["sink/rate"][0, 1:] == 0).all()

    def test_uniform_attention(self):
        """alpha_1 is the harmonic number over T: 0.07412 at T = 64."""
        arrays = measure(given(uniform()))
        alpha = arrays["sink/weight"][0]
        assert alpha[0] == approx(HARMONIC / LENGTH)
        assert alpha[0] == pytest.approx(0.07412, abs=5e-6)
        assert alpha[2] == approx((HARMONIC - 1 - 1 / 2) / (LENGTH - 2))
        assert arrays["sink/rate"].sum() == 0
        assert arrays["sink/share"][0, 0] == approx(HARMONIC / LENGTH)

    def test_the_last_key_of_uniform_attention(self):
        """alpha_T = 1 / T: with T = K, the last stored key is the last key."""
        assert measure(given(uniform(8)))["sink/weight"][0, 7] == approx(1 / 8)

    def test_identity(self):
        """alpha_1 is 1 / T, and the last keys, which look like sinks, cannot be the position."""
        arrays = measure(given(torch.eye(LENGTH)))
        assert arrays["sink/weight"][0, 0] == approx(1 / LENGTH)
        assert arrays["sink/position"] == LENGTH // 2
        assert measure(given(torch.eye(8)))["sink/rate"][0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]

    def test_a_sink_elsewhere(self):
        fifth = torch.eye(LENGTH)[4].expand(LENGTH, LENGTH).tril()
        arrays = measure(given(fifth, on_first_key()))
        assert arrays["sink/position"].tolist() == [5, 1]
        assert arrays["sink/weight"][0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]

    def test_the_share_of_a_small_mass(self):
        """Raw weights below the sink's threshold, although they are the full mass."""
        arrays = measure(given(0.01 * on_first_key(), 0.01 * on_first_key() + 0.03 * torch.eye(LENGTH)))
        assert arrays["sink/weight"][:, 0].tolist() == approx([0.01, 0.01 + 0.03 / LENGTH])
        assert arrays["sink/share"][:, 0].tolist() == approx([1, (0.01 + 0.03 / LENGTH) / 0.04])
        assert arrays["sink/rate"][:, 0].tolist() == [0, 0]
        assert arrays["sink/rate_share"][:, 0].tolist() == [1, 0]

    def test_the_share_is_of_the_rows_that_can_see_the_key(self):
        w = torch.zeros(LENGTH, LENGTH)
        w[0, 0], w[LENGTH - 1, 1], w[LENGTH - 1, 2] = 1, 0.25, 0.75
        arrays = measure(given(w))
        assert arrays["sink/share"][0, :3].tolist() == approx([1 / 2, 0.25, 0.75])

    def test_without_mass_there_is_no_share_and_no_position(self):
        arrays = measure(given(torch.zeros(LENGTH, LENGTH)))
        assert (arrays["sink/weight"] == 0).all()
        assert arrays["sink/share"].isnan().all()
        assert (arrays["sink/rate_share"] == 0).all()
        assert arrays["sink/position"].isnan().all()
        next_to_none = measure(given(1e-7 * on_first_key()))
        assert next_to_none["sink/share"].isnan().all()
        assert (next_to_none["sink/rate_share"] == 0).all()

    def test_rates_are_shares_of_sequences(self):
        """A quarter of the sequences have a sink; a mean of alpha over sequences would show none or all."""
        empty = torch.zeros(LENGTH, LENGTH)
        arrays = measure(given_batch([[on_first_key()], [uniform()], [uniform()], [empty]]))
        assert arrays["sink/rate"][0, 0] == 0.25
        assert arrays["sink/rate_share"][0, 0] == 0.25
        assert arrays["sink/weight"][0, 0] == approx((1 + 2 * HARMONIC / LENGTH) / 4)

    def test_a_sequence_has_a_rate_only_for_keys_it_has(self):
        fifth = torch.eye(LENGTH)[4].expand(LENGTH, LENGTH).tril()
        counted = torch.arange(LENGTH) < torch.tensor([[LENGTH], [3]])
        arrays = measure(given_batch([[fifth], [on_first_key()]], counted=counted))
        assert arrays["sink/rate"][0].tolist() == [0.5, 0, 0, 0, 1, 0, 0, 0]

    def test_a_rate_is_strictly_above_the_bound(self):
        assert measure(given(0.25 * on_first_key()))["sink/rate"][0, 0] == 0
        assert measure(given(0.31 * on_first_key()))["sink/rate"][0, 0] == 1


class TestMass:
    def test_by_position(self):
        arrays = measure(given(uniform(), 0.5 * on_first_key()))
        assert arrays["mass/row"].shape == (2, LENGTH)
        assert arrays["mass/row"][0].tolist() == approx([1.0] * LENGTH)
        assert arrays["mass/row"][1].tolist() == [0.5] * LENGTH
        assert arrays["mass/first_key"][0].tolist() == approx([1 / i for i in range(1, LENGTH + 1)])

    def test_empty_rows_and_dead_heads(self):
        """Row 1, which sees one key, does not keep a head alive."""
        none, only_first = torch.zeros(LENGTH, LENGTH), torch.zeros(LENGTH, LENGTH)
        only_first[0, 0] = 1
        arrays = measure(given(none, only_first, uniform()))
        assert arrays["mass/empty_rows"].tolist() == approx([1, 1 - 1 / LENGTH, 0])
        assert arrays["mass/dead"].tolist() == [1, 1, 0]

    def test_before_renormalising(self):
        """With equal scores and offsets: mass and first-key weight are those before renormalisation."""
        q = torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(0))
        plain, renormalised = (
            measure(summary_of(Elastic(renormalise=renormalise), q, q.flip(2))) for renormalise in (False, True)
        )
        for name in ("mass/row", "mass/first_key", "mass/empty_rows", "entropy/nats"):
            torch.testing.assert_close(plain[name], renormalised[name], rtol=1e-5, atol=1e-6)
        assert (renormalised["sink/weight"][:, 0] > plain["sink/weight"][:, 0]).all()
        alive = 1 - renormalised["mass/empty_rows"]
        torch.testing.assert_close(renormalised["sink/share"][:, 0] * alive, renormalised["sink/weight"][:, 0])


class TestSparsity:
    def test_identity(self):
        """1 - 2 / (T + 1) of the causal entries are 0; the upper triangle does not count."""
        arrays = measure(given(torch.eye(LENGTH), theta=0.1))
        assert arrays["sparsity/zero"] == approx(1 - 2 / (LENGTH + 1))
        assert arrays["sparsity/small"] == approx(1 - 2 / (LENGTH + 1))

    def test_softmax_has_no_exact_sparsity_but_small_weights(self):
        small = torch.eye(LENGTH) + 1e-6 * torch.ones(LENGTH, LENGTH).tril()
        arrays = measure(given(small))
        assert arrays["sparsity/zero"].isnan().all()
        assert arrays["sparsity/small"] == approx(1 - 2 / (LENGTH + 1))

    @pytest.mark.parametrize("spec", [Softmax(), Elastic(0.0)])
    def test_undefined_without_a_threshold(self, spec):
        q = torch.randn(1, 2, 20, 8)
        assert measure(summary_of(spec, q, q))["sparsity/zero"].isnan().all()

    def test_all_equal_scores(self):
        """p = 1 / i: all entries are cut at tau = 1, and none at tau = 0.99."""
        q = torch.zeros(1, 1, 20, 8)
        assert measure(summary_of(Elastic(0.99), q, q))["sparsity/zero"] == 0
        arrays = measure(summary_of(Elastic(1.01), q, q))
        assert arrays["sparsity/zero"] == 1
        assert arrays["mass/empty_rows"] == 1

    def test_tiles_of_the_identity(self):
        """Of 4 x 4 tiles 10 are causal and 4 on the diagonal; of 2 x 2 there are 3 and 2."""
        arrays = measure(given(torch.eye(256), on_first_key(256), torch.zeros(256, 256)))
        assert arrays["sparsity/block_64"].tolist() == approx([0.6, 0.6, 1])
        assert arrays["sparsity/block_128"].tolist() == approx([1 / 3, 1 / 3, 1])

    def test_tiles_outside_the_window_do_not_count(self):
        arrays = measure(given(torch.eye(256), window=1))
        assert arrays["sparsity/block_64"] == arrays["sparsity/block_128"] == 0
        assert arrays["sparsity/small"] == 0

    def test_a_sequence_shorter_than_a_tile(self):
        arrays = measure(given(torch.eye(100)))
        assert arrays["sparsity/block_64"] == approx(1 / 3)
        assert arrays["sparsity/block_128"].isnan().all()

    def test_pooled_over_sequences(self):
        q = torch.randn(6, 2, 40, 8, generator=torch.Generator().manual_seed(1))
        summary = summary_of(Elastic(), q, q.flip(0))
        assert measure(summary)["sparsity/zero"].tolist() == approx(
            (summary.zeros.sum((0, 2)) / (6 * 40 * 41 / 2)).tolist()
        )


class TestEntropy:
    def test_uniform_rows(self):
        """ln i nats, i keys by either count, and normalised 1."""
        arrays = measure(given(uniform(), 0.2 * uniform()))
        logs = [math.log(i) for i in range(1, LENGTH + 1)]
        for head in range(2):
            assert arrays["entropy/nats"][head] == approx(sum(logs) / LENGTH)
            assert arrays["entropy/normalised"][head] == approx(1)
            assert arrays["entropy/keys"][head] == approx((LENGTH + 1) / 2)
            assert arrays["entropy/participation"][head] == approx((LENGTH + 1) / 2)

    def test_one_key(self):
        arrays = measure(given(on_first_key(), torch.eye(LENGTH)))
        assert arrays["entropy/nats"].tolist() == arrays["entropy/normalised"].tolist() == [0, 0]
        assert arrays["entropy/keys"].tolist() == arrays["entropy/participation"].tolist() == [1, 1]

    def test_two_keys_of_unequal_weight(self):
        w = torch.zeros(LENGTH, LENGTH)
        w[3, 0], w[3, 2] = 0.3, 0.1
        arrays = measure(given(w))
        nats = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
        assert arrays["entropy/nats"] == approx(nats)
        assert arrays["entropy/normalised"] == approx(nats / math.log(4))
        assert arrays["entropy/keys"] == approx(math.exp(nats))
        assert arrays["entropy/participation"] == approx(1 / (0.75**2 + 0.25**2))

    def test_rows_without_mass_are_left_out(self):
        half = uniform().clone()
        half[: LENGTH // 2] = 0
        arrays = measure(given(half, torch.zeros(LENGTH, LENGTH)))
        assert arrays["entropy/participation"][0] == approx(sum(range(33, 65)) / 32)
        assert arrays["entropy/normalised"][0] == approx(1)
        assert all(value[1].isnan() for name, value in arrays.items() if name.startswith("entropy/"))

    def test_an_empty_row_has_the_entropy_0(self):
        summary = given(torch.zeros(LENGTH, LENGTH))
        assert (summary.entropy == 0).all()
        assert (summary.squares == 0).all()


class TestScoreSpread:
    def test_two_values(self):
        """Alternating scores 0 and c have variance c^2 n / (4 (n - 1)) over an even number n of keys."""
        q, k = torch.zeros(1, 1, 8, 1), torch.zeros(1, 1, 8, 1)
        q[..., 7, 0], k[0, 0, ::2, 0] = 3, 1
        arrays = measure(summary_of(Softmax(), q, k))
        assert arrays["scores/spread"] == approx(math.sqrt(9 * 8 / (4 * 7)))

    def test_a_bias_is_part_of_the_scores(self):
        q = torch.zeros(1, 1, 8, 4)
        arrays = measure(summary_of(Softmax(), q, q, BiasTerms(slopes=torch.ones(1))))
        assert arrays["scores/spread"] == approx(math.sqrt(6))  # 0 .. 7: 42 / 7

    def test_undefined_where_rows_see_few_keys(self):
        q = torch.randn(1, 2, 20, 8)
        assert measure(summary_of(Softmax(), q, q, window=7))["scores/spread"].isnan().all()
        assert measure(summary_of(Softmax(), q, q, window=8))["scores/spread"].isfinite().all()


class TestNullModel:
    @pytest.mark.parametrize(
        ("spread", "tau", "sparsity"), [(1.0, 1.0, 0.6915), (1.0, 0.5, 0.4234), (0.485, 1.0, 0.5958)]
    )
    def test_known_values(self, spread, tau, sparsity):
        assert null_sparsity(torch.tensor(spread), torch.tensor(tau))[0] == pytest.approx(sparsity, abs=5e-5)

    def test_mass_at_tau_1(self):
        """2 Phi(spread / 2) - 1."""
        spread = torch.tensor([0.1, 0.485, 1.0, 3.0])
        torch.testing.assert_close(
            null_sparsity(spread, torch.ones(4))[1], 2 * torch.special.ndtr(spread.double() / 2) - 1
        )

    @pytest.mark.parametrize("tau", [0.0, -0.5])
    def test_without_a_positive_tau_nothing_is_cut(self, tau):
        sparsity, mass = null_sparsity(torch.tensor([0.5, 1.0]), torch.tensor(tau))
        assert sparsity.tolist() == [0, 0]
        assert mass.tolist() == [1 - tau, 1 - tau]

    def test_without_spread_all_or_nothing_is_cut(self):
        sparsity, mass = null_sparsity(torch.zeros(2), torch.tensor([0.5, 2.0]))
        assert sparsity.tolist() == [0, 1]
        assert mass.tolist() == [0.5, 0]

    def test_undefined_spread(self):
        sparsity, mass = null_sparsity(torch.tensor(torch.nan), torch.tensor(1.0))
        assert sparsity.isnan()
        assert mass.isnan()

    def test_independent_normal_scores_do_as_it_says(self):
        """Measured sparsity, mass and spread of rows of up to 400 keys."""
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(3, 2, 400, 64, generator=generator) for _ in range(2))
        normaliser = Elastic().build(layer_shape(2, 400))
        normaliser.tau.data.copy_(torch.tensor([0.5, 1.0]))
        arrays = measure(summarise(normaliser, AttentionCall(q, k, k)))
        assert arrays["scores/spread"].tolist() == pytest.approx([1, 1], abs=0.05)
        sparsity, mass = null_sparsity(arrays["scores/spread"], normaliser.tau.data)
        assert arrays["sparsity/zero"].tolist() == pytest.approx(sparsity.tolist(), abs=0.02)
        assert arrays["mass/row"][:, 100:].mean(-1).tolist() == pytest.approx(mass.tolist(), abs=0.02)


class TestGaussianNull:
    def test_rows_of_two_spreads_are_held_against_their_own(self):
        """Independent normal scores have no structure, even if half of the rows are flat and the others are not."""
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(3, 1, 400, 64, generator=generator) for _ in range(2))
        q *= torch.tensor([0.1, 4.0]).repeat(200)[:, None]
        arrays = measure(summary_of(Elastic(), q, k))
        pooled, _ = null_sparsity(arrays["scores/spread"], torch.ones(1))
        assert arrays["sparsity/over_null"].item() == pytest.approx(0, abs=0.02)
        assert abs((arrays["sparsity/zero"] - pooled).item()) > 0.1
        total = arrays["sparsity/null"] + arrays["sparsity/over_null"]
        assert total.item() == pytest.approx(arrays["sparsity/zero"].item(), abs=1e-3)

    @pytest.mark.parametrize(
        "normaliser", [Elastic(0.02, "constant"), Elastic(1.0, "seq_len"), Elastic(0.5, "per_token", renormalise=True)]
    )
    def test_every_threshold_has_its_null(self, normaliser):
        """Sparsity and mass of independent normal scores, by the threshold of each row."""
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(3, 1, 400, 64, generator=generator) for _ in range(2))
        arrays = measure(summary_of(normaliser, q, k))
        assert arrays["sparsity/over_null"].item() == pytest.approx(0, abs=0.02)
        assert arrays["sparsity/null_mass"].item() == pytest.approx(arrays["mass/row"].mean().item(), abs=0.03)

    def test_without_a_threshold_there_is_none(self):
        q, k = torch.randn(2, 1, 2, 20, 8)
        arrays = measure(summary_of(Softmax(), q, k))
        assert all(arrays[f"sparsity/{name}"].isnan().all() for name in ("null", "over_null", "null_mass"))


class TestValueNorms:
    def test_a_drained_first_value(self):
        """|v_1| = 0.1, all others 1: 0.1 / ((0.1 + 9) / 10)."""
        v = torch.nn.functional.normalize(torch.randn(3, 2, 10, 4), dim=-1)
        v[:, :, 0] *= 0.1
        metric = ValueNorms(2, 10)
        metric.update(v)
        ratio = metric.compute()["sink/value_norm"]
        assert ratio.shape == (2, 8)
        assert ratio[:, 0].tolist() == approx([0.1 / 0.91] * 2)
        assert ratio[:, 1].tolist() == approx([1 / 0.91] * 2)

    def test_query_heads_have_the_values_they_read(self):
        v = torch.ones(1, 2, 4, 3)
        v[0, 1, 0] = 0
        metric = ValueNorms(6, 4)
        metric.update(v)
        assert metric.compute()["sink/value_norm"][:, 0].tolist() == [1, 1, 1, 0, 0, 0]

    def test_padding_and_values_of_zero(self):
        """A head without values is undefined; padding is ignored."""
        v, counted = torch.ones(2, 2, 6, 3), torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
        v[1, :, 3:], v[1, 0, 0], v[:, 1] = torch.nan, 4, 0
        metric = ValueNorms(2, 6)
        metric.update(v, counted)
        ratio = metric.compute()["sink/value_norm"]
        assert ratio[0].tolist() == approx([(1 + 4 / 2) / 2, (1 + 1 / 2) / 2, (1 + 1 / 2) / 2, 1, 1, 1])
        assert ratio[1].isnan().all()


def elastic_summary(q, k, **options):
    return summarise(Elastic().build(layer_shape(q.shape[1], 100)), AttentionCall(q, k, k), **options)


@pytest.fixture
def queries():
    generator = torch.Generator().manual_seed(5)
    q = 2 * torch.randn(6, 4, 100, 8, generator=generator)
    return q, torch.randn(6, 2, 100, 8, generator=generator)


def assert_same(measured, expected):
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(measured[name], value, equal_nan=True, rtol=1e-6, atol=1e-9, msg=name)


class TestInvariance:
    def test_to_how_the_batch_is_split(self, queries):
        q, k = queries
        whole = measure(elastic_summary(q, k))
        parts = [slice(0, 1), slice(1, 3), slice(3, 6)]
        assert_same(measure(*[elastic_summary(q[part], k[part]) for part in parts]), whole)

    def test_to_padding(self, queries):
        """Sequences of two lengths, individually or in one batch with arbitrary padding."""
        q, k = queries
        lengths = torch.tensor([100, 70, 100, 70, 70, 100])
        counted = torch.arange(100) < lengths[:, None]
        apart = [elastic_summary(q[b : b + 1, :, :n], k[b : b + 1, :, :n]) for b, n in enumerate(lengths)]
        padding = ~counted[:, None, :, None]
        together = elastic_summary(q.masked_fill(padding, torch.nan), k.masked_fill(padding, 1e9), counted=counted)
        measured = measure(together)
        assert_same(measured, measure(*apart))
        assert all(value.isfinite().all() for name, value in measured.items() if name != "sparsity/block_128")

    def test_to_rows_that_are_all_padding(self, queries):
        q, k = (x[:, :, :70] for x in queries)
        longer = torch.nn.functional.pad(q, (0, 0, 0, 30)), torch.nn.functional.pad(k, (0, 0, 0, 30))
        counted = (torch.arange(100) < 70).expand(6, -1)
        measured = measure(elastic_summary(*longer, counted=counted))
        expected = measure(elastic_summary(q, k), length=100)
        assert_same(measured, expected)
        assert expected["mass/row"][:, 70:].isnan().all()

    def test_over_processes_sums_are_added(self, queries):
        q, k = queries
        summaries = [elastic_summary(q[part], k[part]) for part in (slice(0, 2), slice(2, 6))]
        for one, other, both in zip(*(metrics(4, 100) for _ in range(3)), strict=True):
            one.update(summaries[0])
            other.update(summaries[1])
            both.update(summaries[0])
            both.update(summaries[1])
            assert all(state.dtype == torch.float64 for state in one.metric_state.values())
            one.merge_state(other)
            assert_same(one.compute(), both.compute())
        norms = [ValueNorms(4, 100) for _ in range(3)]
        for metric, part in zip(norms, (k[:2], k[2:], k), strict=True):
            metric.update(part)
        norms[0].merge_state(norms[1])
        assert_same(norms[0].compute(), norms[2].compute())

    def test_to_what_was_measured_before_a_reset(self, queries):
        q, k = queries
        for metric, fresh in zip(metrics(4, 100), metrics(4, 100), strict=True):
            metric.update(elastic_summary(q[:3], k[:3]))
            metric.compute()
            metric.reset()
            metric.update(elastic_summary(q[3:], k[3:]))
            fresh.update(elastic_summary(q[3:], k[3:]))
            assert_same(metric.compute(), fresh.compute())


def test_one_head_keeps_its_axis():
    arrays = measure(given(uniform(1)))
    shapes = {name: tuple(value.shape) for name, value in arrays.items()}
    assert shapes["sink/weight"] == shapes["mass/row"] == (1, 1)
    assert shapes["sink/position"] == shapes["entropy/nats"] == shapes["scores/spread"] == (1,)


def test_a_shorter_batch_leaves_the_last_keys_undefined():
    arrays = measure(given(uniform(3)), length=10)
    assert arrays["sink/weight"].shape == (1, 8)
    assert arrays["sink/weight"][0, :3].isfinite().all()
    assert arrays["sink/weight"][0, 3:].isnan().all()


@pytest.mark.parametrize("name", ["Sink", "Mass"])
def test_a_batch_too_long(name):
    metric = {"Sink": Sink, "Mass": Mass}[name](1, 63)
    with pytest.raises(ValueError, match=f"a batch has 64 rows, and {name}.length=63; give a length of at least 64"):
        metric.update(given(uniform()))


def test_no_row_without_mass_makes_a_nan_elsewhere():
    """With a head that has empty rows and a dead head, only undefined values are NaN."""
    generator = torch.Generator().manual_seed(2)
    alive = random_weights(generator)
    alive[::3] = 0
    arrays = measure(given(alive, torch.zeros(LENGTH, LENGTH), theta=0.1))
    undefined = {name for name, value in arrays.items() if value[0].isnan().any()}
    assert undefined == {"sparsity/block_128"}
    undefined = {name for name, value in arrays.items() if value[1].isnan().any()}
    assert undefined == {
        "sparsity/block_128",
        "sink/share",
        "sink/position",
        "entropy/nats",
        "entropy/normalised",
        "entropy/keys",
        "entropy/participation",
    }
