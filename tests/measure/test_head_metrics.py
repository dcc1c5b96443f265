"""Head metrics and kinds of sinks: closed forms, undefined values, and invariances."""

import math
import warnings

import pytest
import torch
from layers import layer_shape

from lit_lazy.attention import AttentionCall, Elastic, NormaliserModule, Softmax
from lit_lazy.measure.collapse_and_sink_kinds import SinkKinds
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


def summary_of(spec, q, k):
    rule = spec.build(layer_shape(q.shape[1], q.shape[2]))
    return summarise(rule, AttentionCall(q, k, k, renormalise=spec.renormalise))


def measure(*summaries, length=None):
    """All arrays of the summaries. Fails on a warning."""
    _, heads, rows = summaries[0].mass.shape
    length, arrays = length or rows, {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for metric in (Sink(heads, length), Mass(heads, length), Sparsity(heads), Entropy(heads), Spread(heads)):
            for summary in summaries:
                metric.update(summary)
            arrays |= metric.compute()
    return arrays


def uniform(length=LENGTH):
    return torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]


def approx(value, **tolerance):
    return pytest.approx(value, rel=1e-5, nan_ok=True, **tolerance)


def sink_at(key, length=LENGTH):
    return torch.eye(length)[key - 1].expand(length, length).tril()


NONE = torch.zeros(LENGTH, LENGTH)
SMALL_SHARE = 0.01 * sink_at(1) + 0.03 * torch.eye(LENGTH)
TWO_KEYS, HALF, ONLY_FIRST = (NONE.clone() for _ in range(3))
TWO_KEYS[3, 0], TWO_KEYS[3, 2] = 0.3, 0.1
NATS = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
HALF[LENGTH // 2 :] = uniform()[LENGTH // 2 :]
ONLY_FIRST[0, 0] = 1  # row 1, which sees one key, does not keep a head alive
LOGS = [math.log(i) for i in range(1, LENGTH + 1)]
ALPHA = HARMONIC / LENGTH  # 0.07412 at T = 64
OFF_DIAGONAL = 1 - 2 / (LENGTH + 1)
ENTROPY = ("nats", "normalised", "keys", "participation")

CLOSED_FORMS = {
    "uniform": (
        given(uniform(), 0.2 * uniform()),
        {
            "sink/weight 1": [ALPHA, 0.2 * ALPHA],
            "sink/weight 3": [x * (HARMONIC - 1.5) / (LENGTH - 2) for x in (1, 0.2)],
            "sink/share 1": [ALPHA] * 2,
            "sink/rate": [[0] * 8] * 2,
            "entropy/nats": [sum(LOGS) / LENGTH] * 2,
            "entropy/normalised": [1] * 2,
            "entropy/keys": [(LENGTH + 1) / 2] * 2,
            "entropy/participation": [(LENGTH + 1) / 2] * 2,
        },
    ),
    "the identity, whose last keys cannot be the position": (
        given(torch.eye(LENGTH), theta=0.1),
        {"sink/weight 1": [1 / LENGTH], "sink/position": [LENGTH // 2]}
        | {"sparsity/zero": [OFF_DIAGONAL], "sparsity/small": [OFF_DIAGONAL]},
    ),
    "equal weights of ten rows": (given(uniform(10)), {"sink/rate": [[0] * 8], "sink/rate_share": [[0] * 8]}),
    "too few rows to tell": (given(uniform(9)), {"sink/rate": [[math.nan] * 8], "sink/rate_share": [[math.nan] * 8]}),
    "a sink elsewhere": (
        given(sink_at(5), sink_at(1)),
        {"sink/position": [5, 1], "sink/weight": [[0, 0, 0, 0, 1, 0, 0, 0], [1, *[0] * 7]]},
    ),
    "the share of a small mass": (
        given(0.01 * sink_at(1), SMALL_SHARE),
        {
            "sink/weight 1": [0.01, 0.01 + 0.03 / LENGTH],
            "sink/share 1": [1, (0.01 + 0.03 / LENGTH) / 0.04],
            "sink/rate 1": [0, 0],
            "sink/rate_share 1": [1, 0],
        },
    ),
    "without mass": (
        given(NONE, 1e-7 * sink_at(1)),
        {"sink/share": [[math.nan] * 8] * 2, "sink/rate_share": [[0] * 8] * 2}
        | {"mass/empty_rows": [1, 0], "mass/dead": [1, 0]},
    ),
    "row 1 does not keep a head alive": (
        given(NONE, ONLY_FIRST, uniform()),
        {"mass/empty_rows": [1, 1 - 1 / LENGTH, 0], "mass/dead": [1, 1, 0]},
    ),
    "rates are shares of sequences": (
        given_batch([[sink_at(1)], [uniform()], [uniform()], [NONE]]),
        {"sink/rate 1": [0.25], "sink/rate_share 1": [0.25], "sink/weight 1": [(1 + 2 * ALPHA) / 4]},
    ),
    "a sequence of too few rows does not count": (
        given_batch([[sink_at(5)], [sink_at(1)]], counted=torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])),
        {"sink/rate": [[0, 0, 0, 0, 1, 0, 0, 0]]},
    ),
    "small weights above a threshold of 0": (
        given(torch.eye(LENGTH) + 1e-6 * torch.ones(LENGTH, LENGTH).tril()),
        {"sparsity/zero": [0], "sparsity/small": [OFF_DIAGONAL]},
    ),
    "tiles: of 4 x 4 ten are causal, of 2 x 2 three": (
        given(torch.eye(256), sink_at(1, 256), torch.zeros(256, 256)),
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


@pytest.mark.parametrize(
    ("spec", "zero"), [(Softmax(), math.nan), (Elastic(0.0), 0), (Elastic(0.99), 0), (Elastic(1.01), 1)]
)
def test_sparsity_of_equal_scores(spec, zero):
    """p = 1 / i: all entries are cut above tau = 1, and none below."""
    q = torch.zeros(1, 1, 20, 8)
    assert measure(summary_of(spec, q, q))["sparsity/zero"].item() == approx(zero)


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


@pytest.mark.parametrize(
    "normaliser",
    [Elastic(), Elastic(0.02, "constant"), Elastic(1.0, "seq_len"), Elastic(0.5, "per_token", renormalise=True)],
)
def test_independent_normal_scores_do_as_the_null_model_says(normaliser):
    """Sparsity and mass by the threshold of each row, in rows of up to 400 keys."""
    q, k = torch.randn(2, 3, 1, 400, 64, generator=torch.Generator().manual_seed(0))
    arrays = measure(summary_of(normaliser, q, k))
    assert arrays["scores/spread"].item() == pytest.approx(1, abs=0.05)
    assert arrays["sparsity/over_null"].item() == pytest.approx(0, abs=0.02)
    assert arrays["sparsity/null_mass"].item() == pytest.approx(arrays["mass/row"].mean().item(), abs=0.03)


def test_norms_of_values_ignore_padding():
    v, counted = torch.ones(2, 2, 6, 3), torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    v[1, :, 3:], v[1, 0, 0], v[:, 1] = torch.nan, 4, 0
    metric = ValueNorms(2, 6)
    metric.update(v, counted)
    ratio = metric.compute()["sink/value_norm"]
    assert ratio[0].tolist() == approx([(1 + 4 / 2) / 2, (1 + 1 / 2) / 2, (1 + 1 / 2) / 2, 1, 1, 1])
    assert ratio[1].isnan().all()  # a head without values


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_padding_and_what_is_batched_together_do_not_matter(backend):
    """Sequences of three lengths, individually or in one batch with arbitrary padding."""
    generator = torch.Generator().manual_seed(5)
    q, k = 2 * torch.randn(6, 4, 150, 8, generator=generator), torch.randn(6, 2, 150, 8, generator=generator)
    lengths = torch.tensor([150, 70, 100, 150, 70, 100])
    counted = torch.arange(150) < lengths[:, None]
    rule = Elastic().build(layer_shape(4, 150))
    apart = [(q[b : b + 1, :, :n], k[b : b + 1, :, :n]) for b, n in enumerate(lengths)]
    expected = measure(*(summarise(rule, AttentionCall(q, k, k, backend=backend)) for q, k in apart))
    padding = ~counted[:, None, :, None]
    q, k = q.masked_fill(padding, torch.nan), k.masked_fill(padding, 1e9)
    measured = measure(summarise(rule, AttentionCall(q, k, k, backend=backend), counted=counted))
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(measured[name], value, rtol=1e-6, atol=1e-9, msg=name)
        assert value.isfinite().all(), name


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


# Kinds of sinks

T, HEADS, D, WIDTH = 24, 4, 6, 20
KINDS = ("no_operation", "broadcast", "neither")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_key(key, weight=1.0):
    """Rows from a key on give it a weight and themselves the rest; earlier ones see only themselves."""
    w = torch.eye(T, dtype=torch.float64)
    w[key:] *= 1 - weight
    w[key:, key] += weight
    return w


def measure_kinds(weights, v, projection, counted=None):
    """Arrays of sequences with weight matrices `[B, H, T, T]` on values `[B, Hkv, T, D]`."""
    metric = SinkKinds(weights.shape[1])
    values = v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
    outputs = (weights @ values).transpose(1, 2).flatten(2)
    metric.update(given_batch(weights, counted=counted), v, outputs, projection)
    return {name.removeprefix("sink/"): value for name, value in metric.compute().items()}


def test_heads_of_each_kind():
    """A drained sink; a sink with all weight; a large one of half the weight, with varied rest; and no sink."""
    weights = torch.stack([sink_at(1, T).double(), on_key(2), on_key(0, 0.5), uniform(T).double()])[None]
    v = normal(1, HEADS, T, D)
    v[:, 0, 0] *= 0.02
    v[:, 1, :2] *= 1e-3  # the rows before the sink add next to nothing
    projection = normal(WIDTH, HEADS * D, seed=1)
    arrays = measure_kinds(weights, v, projection)
    assert arrays["no_operation"].tolist() == [1, 0, 0, 0]
    assert arrays["broadcast"].tolist() == [0, 1, 0, 0]
    assert arrays["neither"].tolist() == [0, 0, 1, 0]
    assert arrays["stable_rank"][:2].tolist() == pytest.approx([1, 1], abs=1e-4)
    values = v[0, 2] @ projection[:, 2 * D : 3 * D].T
    size, singular = values.norm(dim=-1), torch.linalg.svdvals(weights[0, 2] @ values)
    assert arrays["value_ratio"][2].item() == pytest.approx((size[0] / size[1:].mean()).item())
    rank = (singular.square().sum() / singular[0] ** 2).item()
    assert arrays["stable_rank"][2].item() == pytest.approx(rank)
    assert rank > 1.5
    assert arrays["value_ratio"][3].isnan()
    assert arrays["stable_rank"][3].isnan()


def test_padding_is_ignored():
    weights = torch.stack([torch.stack([on_key(key, share) for key in (0, 1, 2, 3)]) for share in (0.9, 0.6, 0.2)])
    v, projection, short = normal(3, 2, T, D), normal(WIDTH, HEADS * D, seed=1), 15
    padded = v.clone()
    padded[:, :, short:] = 1e6
    cut = measure_kinds(weights[..., :short, :short], v[:, :, :short], projection)
    masked = measure_kinds(weights, padded, projection, (torch.arange(T) < short).expand(3, -1))
    for name, value in cut.items():
        torch.testing.assert_close(masked[name], value, equal_nan=True)
    assert sum(cut[name] for name in KINDS).tolist() == pytest.approx([2 / 3] * HEADS)  # 0.2 is no sink


def test_a_late_key_is_no_sink():
    """Rows of the last keys are so few that their weight on themselves makes a mean."""
    arrays = measure_kinds(torch.eye(T, dtype=torch.float64)[None, None], normal(1, 1, T, D), normal(WIDTH, D))
    assert arrays["neither"].tolist() == [0]
    late = measure_kinds(on_key(T // 2, 1.0)[None, None], normal(1, 1, T, D), normal(WIDTH, D))
    assert late["no_operation"].tolist() == late["broadcast"].tolist() == [0]


def test_what_adds_nothing_broadcasts_nothing():
    arrays = measure_kinds(on_key(0)[None, None], normal(1, 1, T, D), torch.zeros(WIDTH, D))
    assert [arrays[name].tolist() for name in KINDS] == [[0], [0], [0]]


def test_sequences_of_too_few_rows_do_not_count():
    """Of 9 rows, equal weights make a sink of the first key, and the identity makes none."""
    weights = torch.stack([on_key(2), uniform(T).double(), torch.eye(T, dtype=torch.float64)])[:, None]
    counted = torch.arange(T) < torch.tensor([[T], [9], [9]])
    arrays = measure_kinds(weights, normal(3, 1, T, D), normal(WIDTH, D, seed=1), counted)
    assert sum(arrays[name] for name in KINDS).tolist() == [1]
