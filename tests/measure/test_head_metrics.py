"""Head metrics: closed forms, undefined values, and invariances."""

import math
import warnings

import pytest
import torch
from layers import layer_shape

from lit_lazy.attention import AttentionCall, BiasTerms, Elastic, NormaliserModule, Softmax
from lit_lazy.measure.head_metrics import Entropy, Mass, Sink, Sparsity, Spread, ValueNorms, null_sparsity
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
    return [Sink(n_heads, length), Mass(n_heads, length), *(metric(n_heads) for metric in (Sparsity, Entropy, Spread))]


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


def approx(value, **tolerance):
    return pytest.approx(value, rel=1e-5, nan_ok=True, **tolerance)


def sink_at(key, length=LENGTH):
    return torch.eye(length)[key - 1].expand(length, length).tril()


NONE = torch.zeros(LENGTH, LENGTH)
SMALL_SHARE = 0.01 * on_first_key() + 0.03 * torch.eye(LENGTH)
FEW_ROWS, TWO_KEYS, HALF, ONLY_FIRST = (NONE.clone() for _ in range(4))
FEW_ROWS[0, 0], FEW_ROWS[-1, 1], FEW_ROWS[-1, 2] = 1, 0.25, 0.75
TWO_KEYS[3, 0], TWO_KEYS[3, 2] = 0.3, 0.1
NATS = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
HALF[LENGTH // 2 :] = uniform()[LENGTH // 2 :]
ONLY_FIRST[0, 0] = 1  # row 1, which sees one key, does not keep a head alive
LOGS = [math.log(i) for i in range(1, LENGTH + 1)]
ALPHA = HARMONIC / LENGTH  # 0.07412 at T = 64
OFF_DIAGONAL = 1 - 2 / (LENGTH + 1)
ENTROPY = ("nats", "normalised", "keys", "participation")

CLOSED_FORMS = {
    "all on the first key": (
        given(on_first_key()),
        {"sink/weight": [[1, *[0] * 7]], "sink/rate": [[1, *[0] * 7]], "sink/position": [1]}
        | {f"entropy/{name}": [value] for name, value in zip(ENTROPY, (0, 0, 1, 1), strict=True)},
    ),
    "uniform": (
        given(uniform(), 0.2 * uniform()),
        {
            "sink/weight 1": [ALPHA, 0.2 * ALPHA],
            "sink/weight 3": [x * (HARMONIC - 1.5) / (LENGTH - 2) for x in (1, 0.2)],
            "sink/share 1": [ALPHA] * 2,
            "sink/rate": [[0] * 8] * 2,
            "mass/row": [[1] * LENGTH, [0.2] * LENGTH],
            "mass/first_key": [[x / i for i in range(1, LENGTH + 1)] for x in (1, 0.2)],
            "entropy/nats": [sum(LOGS) / LENGTH] * 2,
            "entropy/normalised": [1] * 2,
            "entropy/keys": [(LENGTH + 1) / 2] * 2,
            "entropy/participation": [(LENGTH + 1) / 2] * 2,
        },
    ),
    "the last key of uniform rows is the last that is stored": (given(uniform(8)), {"sink/weight 8": [1 / 8]}),
    "the identity, whose last keys cannot be the position": (
        given(torch.eye(LENGTH), theta=0.1),
        {"sink/weight 1": [1 / LENGTH], "sink/position": [LENGTH // 2]}
        | {"sparsity/zero": [OFF_DIAGONAL], "sparsity/small": [OFF_DIAGONAL]},
    ),
    "a short identity": (given(torch.eye(8)), {"sink/rate": [[0, 0, 0, 0, 0, 1, 1, 1]]}),
    "a sink elsewhere": (
        given(sink_at(5), on_first_key()),
        {"sink/position": [5, 1], "sink/weight": [[0, 0, 0, 0, 1, 0, 0, 0], [1, *[0] * 7]]},
    ),
    "the share of a small mass": (
        given(0.01 * on_first_key(), SMALL_SHARE),
        {
            "sink/weight 1": [0.01, 0.01 + 0.03 / LENGTH],
            "sink/share 1": [1, (0.01 + 0.03 / LENGTH) / 0.04],
            "sink/rate 1": [0, 0],
            "sink/rate_share 1": [1, 0],
        },
    ),
    "a share is of the rows that can see the key": (
        given(FEW_ROWS),
        {"sink/share 1": [1 / 2], "sink/share 2": [0.25], "sink/share 3": [0.75]},
    ),
    "without mass": (
        given(NONE, 1e-7 * on_first_key()),
        {"sink/share": [[math.nan] * 8] * 2, "sink/rate_share": [[0] * 8] * 2}
        | {"mass/empty_rows": [1, 0], "mass/dead": [1, 0]},
    ),
    "row 1 does not keep a head alive": (
        given(NONE, ONLY_FIRST, uniform()),
        {"mass/empty_rows": [1, 1 - 1 / LENGTH, 0], "mass/dead": [1, 1, 0]},
    ),
    "rates are shares of sequences": (
        given_batch([[on_first_key()], [uniform()], [uniform()], [NONE]]),
        {"sink/rate 1": [0.25], "sink/rate_share 1": [0.25], "sink/weight 1": [(1 + 2 * ALPHA) / 4]},
    ),
    "a sequence has a rate only for keys it has": (
        given_batch([[sink_at(5)], [on_first_key()]], counted=torch.arange(LENGTH) < torch.tensor([[LENGTH], [3]])),
        {"sink/rate": [[0.5, 0, 0, 0, 1, 0, 0, 0]]},
    ),
    "a rate is strictly above the bound": (
        given(0.25 * on_first_key(), 0.31 * on_first_key()),
        {"sink/rate 1": [0, 1]},
    ),
    "small weights without a threshold": (
        given(torch.eye(LENGTH) + 1e-6 * torch.ones(LENGTH, LENGTH).tril()),
        {"sparsity/zero": [math.nan], "sparsity/small": [OFF_DIAGONAL]},
    ),
    "tiles: of 4 x 4 ten are causal, of 2 x 2 three": (
        given(torch.eye(256), on_first_key(256), torch.zeros(256, 256)),
        {"sparsity/block_64": [0.6, 0.6, 1], "sparsity/block_128": [1 / 3, 1 / 3, 1]},
    ),
    "tiles outside the window": (
        given(torch.eye(256), window=1),
        {"sparsity/block_64": [0], "sparsity/block_128": [0], "sparsity/small": [0]},
    ),
    "shorter than a tile": (given(torch.eye(100)), {"sparsity/block_64": [1 / 3], "sparsity/block_128": [math.nan]}),
    "two keys of unequal weight": (
        given(TWO_KEYS),
        {
            "entropy/nats": [NATS],
            "entropy/normalised": [NATS / math.log(4)],
            "entropy/keys": [math.exp(NATS)],
            "entropy/participation": [1 / (0.75**2 + 0.25**2)],
        },
    ),
    "rows without mass have no entropy": (
        given(HALF, NONE),
        {"entropy/participation": [sum(range(33, 65)) / 32, math.nan], "entropy/normalised": [1, math.nan]},
    ),
}
"""Summaries and arrays by head; with a number, of that key alone."""


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name):
    summary, expected = CLOSED_FORMS[name]
    arrays = measure(summary)
    for array, values in expected.items():
        which, _, key = array.partition(" ")
        found = arrays[which][:, int(key) - 1] if key else arrays[which]
        for mine, theirs in zip(found, values, strict=True):
            assert mine.tolist() == approx(theirs, abs=1e-9), array


def test_mass_is_before_renormalising():
    """With equal scores and offsets: mass and first-key weight are those before renormalisation."""
    q = torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    plain, renormalised = (measure(summary_of(Elastic(renormalise=on), q, q.flip(2))) for on in (False, True))
    for name in ("mass/row", "mass/first_key", "mass/empty_rows", "entropy/nats"):
        torch.testing.assert_close(plain[name], renormalised[name], rtol=1e-5, atol=1e-6)
    assert (renormalised["sink/weight"][:, 0] > plain["sink/weight"][:, 0]).all()
    alive = 1 - renormalised["mass/empty_rows"]
    torch.testing.assert_close(renormalised["sink/share"][:, 0] * alive, renormalised["sink/weight"][:, 0])


@pytest.mark.parametrize(
    ("spec", "zero"), [(Softmax(), math.nan), (Elastic(0.0), math.nan), (Elastic(0.99), 0), (Elastic(1.01), 1)]
)
def test_sparsity_of_equal_scores(spec, zero):
    """p = 1 / i: all entries are cut above tau = 1, and none below."""
    q = torch.zeros(1, 1, 20, 8)
    assert measure(summary_of(spec, q, q))["sparsity/zero"].item() == approx(zero)


def test_spread_of_two_values_and_of_a_bias_where_rows_see_enough_keys():
    """Alternating scores 0 and c have variance c^2 n / (4 (n - 1)) over an even number n of keys."""
    q, k = torch.zeros(1, 1, 8, 1), torch.zeros(1, 1, 8, 1)
    q[..., 7, 0], k[0, 0, ::2, 0] = 3, 1
    assert measure(summary_of(Softmax(), q, k))["scores/spread"] == approx(math.sqrt(9 * 8 / (4 * 7)))
    slopes = BiasTerms(slopes=torch.ones(1))
    assert measure(summary_of(Softmax(), 0 * q, k, slopes))["scores/spread"] == approx(math.sqrt(6))  # 0 .. 7: 42 / 7
    assert measure(summary_of(Softmax(), q, k, window=7))["scores/spread"].isnan().all()


@pytest.mark.parametrize(
    ("spread", "tau", "sparsity", "mass"),
    [
        (1.0, 1.0, 0.6915, 2 * 0.6915 - 1),  # 2 Phi(spread / 2) - 1
        (1.0, 0.5, 0.4234, None),
        (0.485, 1.0, 0.5958, 2 * 0.5958 - 1),
        (0.5, 0.0, 0, 1),
        (1.0, -0.5, 0, 1.5),
        (0.0, 0.5, 0, 0.5),
        (0.0, 2.0, 1, 0),
        (math.nan, 1.0, math.nan, math.nan),
    ],
)
def test_known_values_of_the_null_model(spread, tau, sparsity, mass):
    found = null_sparsity(torch.tensor(spread), torch.tensor(tau))
    assert found[0].item() == pytest.approx(sparsity, abs=5e-5, nan_ok=True)
    assert mass is None or found[1].item() == pytest.approx(mass, abs=1e-4, nan_ok=True)


def normal_queries_and_keys():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(3, 1, 400, 64, generator=generator) for _ in range(2))


@pytest.mark.parametrize(
    "normaliser",
    [Elastic(), Elastic(0.02, "constant"), Elastic(1.0, "seq_len"), Elastic(0.5, "per_token", renormalise=True)],
)
def test_independent_normal_scores_do_as_the_null_model_says(normaliser):
    """Sparsity and mass by the threshold of each row, in rows of up to 400 keys."""
    arrays = measure(summary_of(normaliser, *normal_queries_and_keys()))
    assert arrays["scores/spread"].item() == pytest.approx(1, abs=0.05)
    assert arrays["sparsity/over_null"].item() == pytest.approx(0, abs=0.02)
    assert arrays["sparsity/null_mass"].item() == pytest.approx(arrays["mass/row"].mean().item(), abs=0.03)


def test_rows_of_two_spreads_are_held_against_their_own():
    """Independent normal scores have no structure, even if half of the rows are flat and the others are not."""
    q, k = normal_queries_and_keys()
    arrays = measure(summary_of(Elastic(), q * torch.tensor([0.1, 4.0]).repeat(200)[:, None], k))
    pooled, _ = null_sparsity(arrays["scores/spread"], torch.ones(1))
    assert arrays["sparsity/over_null"].item() == pytest.approx(0, abs=0.02)
    assert abs((arrays["sparsity/zero"] - pooled).item()) > 0.1
    total = arrays["sparsity/null"] + arrays["sparsity/over_null"]
    assert total.item() == pytest.approx(arrays["sparsity/zero"].item(), abs=1e-3)


def value_norms(v, heads, counted=None):
    metric = ValueNorms(heads, v.shape[2])
    metric.update(v, counted)
    return metric.compute()["sink/value_norm"]


def test_norms_of_values():
    """A drained first value; query heads have the values they read; padding is ignored."""
    v = torch.nn.functional.normalize(torch.randn(3, 2, 10, 4), dim=-1)
    v[:, :, 0] *= 0.1
    assert value_norms(v, 2)[:, :2].tolist() == [approx([0.1 / 0.91, 1 / 0.91])] * 2  # the mean is (0.1 + 9) / 10
    v = torch.ones(1, 2, 4, 3)
    v[0, 1, 0] = 0
    assert value_norms(v, 6)[:, 0].tolist() == [1, 1, 1, 0, 0, 0]
    v, counted = torch.ones(2, 2, 6, 3), torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    v[1, :, 3:], v[1, 0, 0], v[:, 1] = torch.nan, 4, 0
    ratio = value_norms(v, 2, counted)
    assert ratio[0].tolist() == approx([(1 + 4 / 2) / 2, (1 + 1 / 2) / 2, (1 + 1 / 2) / 2, 1, 1, 1])
    assert ratio[1].isnan().all()  # a head without values


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


def test_a_shorter_batch_leaves_the_last_keys_undefined():
    arrays = measure(given(uniform(3)), length=10)
    assert arrays["sink/weight"].shape == (1, 8)
    assert arrays["sink/weight"][0, :3].isfinite().all()
    assert arrays["sink/weight"][0, 3:].isnan().all()


def test_no_row_without_mass_makes_a_nan_elsewhere():
    """With a head that has empty rows and a dead head, only undefined values are NaN."""
    generator = torch.Generator().manual_seed(2)
    alive = torch.rand(LENGTH, LENGTH, generator=generator).tril() / LENGTH
    alive[::3] = 0
    arrays = measure(given(alive, NONE, theta=0.1))
    some, none = ({name for name, value in arrays.items() if value[head].isnan().any()} for head in (0, 1))
    assert some == {"sparsity/block_128"}
    assert none == some | {"sink/share", "sink/position", *(f"entropy/{name}" for name in ENTROPY)}
