"""The summary of rows, computed by blocks, against loops over the rows of the full float64 weight matrix."""

import math

import pytest
import torch
from layers import LargestTensor, layer_shape

from lit_lazy.attention import AffineScaled, ASEntmax, AttentionCall, BiasTerms, Elastic, Softmax
from lit_lazy.measure.row_statistics import TILES, RowSummary, summarise

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 3, 4, 2, 151, 8
TABLE = torch.linspace(1, -3, 40, dtype=torch.float64).expand(HEADS, 40) * torch.tensor([[0.1], [0.5], [1.0], [2.0]])
SLOPES = torch.tensor([0.5, 0.1, 0.01, 0.0], dtype=torch.float64)

SPECS = {
    "softmax": (Softmax(), BiasTerms(), None),
    "softmax_slopes_window": (Softmax(), BiasTerms(slopes=SLOPES), 20),
    "per_query_table": (Elastic(), BiasTerms(table=TABLE), None),
    "renormalised": (Elastic(renormalise=True), BiasTerms(), None),
    "renormalised_window": (Elastic(renormalise=True), BiasTerms(table=TABLE), 70),
    "per_token": (Elastic(threshold="per_token"), BiasTerms(), None),
    "constant": (Elastic(0.02, threshold="constant"), BiasTerms(slopes=SLOPES), None),
    "seq_len": (Elastic(threshold="seq_len"), BiasTerms(), None),
    "negative": (Elastic(-0.5), BiasTerms(), None),
}


def build(spec):
    """A normaliser in float64 whose heads have different offsets; the last one of per_query cuts everything."""
    module = spec.build(layer_shape(HEADS, 100, WIDTH)).double()
    if spec == Softmax():
        return module
    factors = torch.tensor([0.25, 0.5, 1.0, 300.0 if spec == Elastic() else 1.5], dtype=torch.float64)
    module.tau.data.mul_(factors if module.tau.ndim == 1 else factors[:, None] * torch.linspace(0.5, 1.5, 100))
    return module


def draw(length=LENGTH, batch=BATCH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(batch, HEADS, length, WIDTH, dtype=dtype, generator=generator)
    k = torch.randn(batch, KV_HEADS, length, WIDTH, dtype=dtype, generator=generator)
    return 2 * q, k


def dense(module, call, counted):
    """Reference summary from the full matrix."""
    whole, rows = module.compute_weights(call), counted[:, None]
    visible = whole.rows.visible[:, :1]
    (batch, heads, length, _), n = call.q.shape, visible.sum(-1)
    found = module.theta(whole.rows)
    thresholded = found is not None and bool((found != 0).any())
    theta = torch.zeros(1, 1, length, 1) if found is None else found
    p = whole.scores.masked_fill(~visible, -math.inf).softmax(-1)
    w = whole.w * rows[..., None]
    total = w.sum(-1)
    shares = w / total.masked_fill(total == 0, 1)[..., None]
    scores = whole.scores.masked_fill(~visible, 0)
    deviation = (scores - scores.sum(-1, keepdim=True) / n[..., None]).masked_fill(~visible, 0)
    by_row = {
        "mass": torch.relu(p - theta).masked_fill(~visible, 0).sum(-1),  # before any renormalising
        "total": total,
        "theta": theta[..., 0].expand(batch, heads, length),
        "zeros": ((p <= theta) & visible).sum(-1),
        "small": ((whole.w <= 1e-5) & visible).sum(-1),
        "entropy": -torch.xlogy(shares, shares).sum(-1),
        "squares": shares.square().sum(-1),
        "score_variance": deviation.square().sum(-1) / (n - 1).clamp(min=1),
    }
    tiles, alive, seen = {}, {}, visible[:, 0] & counted[..., None]
    for tile in TILES:
        rest, whole_tiles = -length % tile, counted.sum(-1) >= tile

        def count(x, tile=tile, rest=rest):
            padded = torch.nn.functional.pad(x.float(), (0, rest, 0, rest))
            return padded.unflatten(-1, (-1, tile)).unflatten(-3, (-1, tile)).amax((-1, -3)).sum((-1, -2))

        tiles[tile] = count(seen) * whole_tiles
        alive[tile] = count((whole.w > 0) & seen[:, None]) * whole_tiles[:, None]
    return RowSummary(
        **{name: x * rows for name, x in by_row.items()},
        columns=w.sum(-2),
        first=w[..., :8],
        visible=n[0, 0],
        counted=counted,
        alive_tiles=alive,
        tiles=tiles,
        thresholded=thresholded,
        can_zero=thresholded,
        signed=False,
    )


def assert_same(measured, expected, **tolerance):
    for name, value in expected._asdict().items():
        found = getattr(measured, name)
        torch.testing.assert_close(
            found, value, check_dtype=False, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@pytest.mark.parametrize("length", [1, 64, 65, LENGTH])
@pytest.mark.parametrize("name", SPECS)
def test_blocks_equal_the_whole_matrix(name, length):
    """For any block size: single rows, single sequences, everything in one block."""
    spec, bias, window = SPECS[name]
    module, (q, k) = build(spec), draw(length)
    call = AttentionCall(q, k, k, bias, window, renormalise=spec.renormalise)
    counted = torch.arange(length) < torch.tensor([length, 130, 40])[:, None]
    expected = dense(module, call, counted)
    for most_scores in (1, 20 * HEADS * length, 300 * HEADS * length, 2**22):
        assert_same(summarise(module, call, most_scores, counted), expected, rtol=1e-9, atol=1e-12)


def test_the_cases_are_not_trivial():
    """The cases include heads with and without mass, empty and nonempty tiles, and thresholds that cut."""
    spec, bias, window = SPECS["per_query_table"]
    q, k = draw()
    summary = summarise(build(spec), AttentionCall(q, k, k, bias, window))
    assert (summary.mass[:, -1] == 0).all()
    assert (summary.alive_tiles[64][:, -1] == 0).all()
    assert (summary.mass[:, 0] > 0).all()
    assert (summary.alive_tiles[64][:, 0] == 6).all()
    assert 0 < summary.zeros[:, 0].sum() < summary.visible.sum() * BATCH
    assert not summarise(build(Softmax()), AttentionCall(q, k, k)).thresholded


def test_what_stands_at_padding_has_no_influence():
    module, (q, k) = build(Elastic(0.5)), draw()
    short, counted = 100, (torch.arange(LENGTH) < 100).expand(BATCH, -1)
    q[:, :, short:], k[:, :, short:] = torch.nan, torch.nan
    padded = summarise(module, AttentionCall(q, k, k), 10_000, counted)
    q, k = q[:, :, :short], k[:, :, :short]
    alone = summarise(module, AttentionCall(q, k, k))
    for name in ("first", "mass", "total", "zeros", "small", "entropy", "squares", "score_variance", "columns"):
        field = getattr(padded, name)
        torch.testing.assert_close(field[:, :, :short], getattr(alone, name), msg=name)
        assert (field[:, :, short:] == 0).all(), name
    assert (padded.tiles[64] == 3).all()
    assert (padded.tiles[128] == 0).all()
    torch.testing.assert_close(padded.alive_tiles, alone.alive_tiles)
    torch.testing.assert_close(padded.tiles, alone.tiles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_summarised_in_float32(dtype):
    module, (q, k) = build(Elastic(0.5)), draw(40)
    q, k = q.to(dtype), k.to(dtype)
    exact = summarise(module, AttentionCall(q.double(), k.double(), k.double()))
    rounded = summarise(module.float(), AttentionCall(q, k, k))
    assert rounded.mass.dtype == torch.float32
    for name in ("first", "mass", "total", "entropy", "squares", "score_variance", "columns"):
        torch.testing.assert_close(getattr(rounded, name), getattr(exact, name).float(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_tensor_is_larger_than_the_scores_of_a_block():
    module, (q, k) = build(Elastic()).float(), draw(1024, batch=1, dtype=torch.float32)
    with LargestTensor() as largest:
        summarise(module, AttentionCall(q, k, k), most_scores=2**16)
    assert largest.elements <= 2**16 < HEADS * 1024**2


@pytest.mark.parametrize("spec", [ASEntmax(), AffineScaled()], ids=repr)
def test_blocks_of_a_rule_that_reads_the_input_have_their_own_rows_of_it(spec):
    q, k = draw(40)
    module = spec.build(layer_shape(HEADS, 100, WIDTH)).double()
    for seed, parameter in enumerate(module.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    x = torch.randn(BATCH, 40, HEADS * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    call = AttentionCall(q, k, k, x=x)
    whole, blocks = (summarise(module, call, most_scores=size) for size in (2**22, 300))
    for name in ("first", "mass", "zeros", "entropy", "score_variance", "columns"):
        torch.testing.assert_close(getattr(blocks, name), getattr(whole, name), msg=name)
