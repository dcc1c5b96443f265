"""The summary of rows: by blocks, compiled and in lower precision it is that of the full float64 weight matrix."""

import pytest
import torch
from layers import LargestTensor, layer_shape

from lit_lazy.attention import AffineScaled, ASEntmax, AttentionCall, BiasTerms, Elastic, Softmax
from lit_lazy.measure import row_statistics
from lit_lazy.measure.row_statistics import summarise

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 3, 4, 2, 151, 8
TABLE = torch.linspace(1, -3, 40, dtype=torch.float64).expand(HEADS, 40) * torch.tensor([[0.1], [0.5], [1.0], [2.0]])
SLOPES = torch.tensor([0.5, 0.1, 0.01, 0.0], dtype=torch.float64)

SPECS = {
    "softmax": (Softmax(), BiasTerms(), None),
    "softmax_slopes_window": (Softmax(), BiasTerms(slopes=SLOPES), 20),
    "per_query_table": (Elastic(), BiasTerms(table=TABLE), None),
    "renormalised_window": (Elastic(renormalise=True), BiasTerms(table=TABLE), 70),
    "per_token": (Elastic(threshold="per_token"), BiasTerms(), None),
    "constant": (Elastic(0.02, threshold="constant"), BiasTerms(slopes=SLOPES), None),
    "negative": (Elastic(-0.5), BiasTerms(), None),
    "reads the input": (ASEntmax(), BiasTerms(), None),
    "signed, reads the input": (AffineScaled(), BiasTerms(), None),
}


def build(spec):
    """A normaliser in float64 whose heads have different offsets; the last one of per_query cuts everything."""
    module = spec.build(layer_shape(HEADS, 100, WIDTH)).double()
    if isinstance(spec, Elastic):
        factors = torch.tensor([0.25, 0.5, 1.0, 300.0 if spec == Elastic() else 1.5], dtype=torch.float64)
        module.tau.data.mul_(factors if module.tau.ndim == 1 else factors[:, None] * torch.linspace(0.5, 1.5, 100))
        return module
    for seed, parameter in enumerate(module.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return module


def draw(length, batch=BATCH):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64, generator=generator)
    k = torch.randn(batch, KV_HEADS, length, WIDTH, dtype=torch.float64, generator=generator)
    return 2 * q, k


def assert_same(measured, expected, skipped=(), **tolerance):
    for name, value in expected._asdict().items():
        if name not in skipped:
            found = getattr(measured, name)
            torch.testing.assert_close(found, value, check_dtype=False, msg=lambda text: f"{name}: {text}", **tolerance)  # noqa: B023


@pytest.mark.parametrize("length", [1, 64, 65, LENGTH])
@pytest.mark.parametrize("name", SPECS)
def test_blocks_equal_the_whole_matrix(name, length, monkeypatch):
    """For any block size: single rows, single sequences. In float32, where a kernel may compute it, to its rounding."""
    spec, bias, window = SPECS[name]
    module, (q, k) = build(spec), draw(length)
    x = torch.randn(BATCH, length, HEADS * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    call = AttentionCall(q, k, k, bias, window, renormalise=spec.renormalise, x=x)
    counted = torch.arange(length) < torch.tensor([length, 130, 40])[:, None]
    monkeypatch.setattr(row_statistics, "BLOCK_ROWS", LENGTH)
    expected = summarise(module, call, 2**22, counted)
    undefined = ["squares"] if expected.signed else []
    for most_scores in (1, 20 * HEADS * length, 300 * HEADS * length):
        assert_same(summarise(module, call, most_scores, counted), expected, undefined, rtol=1e-9, atol=1e-12)
    in_fp32 = {"q": q.float(), "k": k.float(), "v": k.float(), "x": x.float()}
    bias = BiasTerms(*(None if term is None else term.float() for term in bias))
    rounded = summarise(module.float(), call._replace(**in_fp32, bias=bias), counted=counted)
    assert rounded.mass.dtype == torch.float32
    assert_same(rounded, expected, [*undefined, "zeros", "small"], rtol=1e-4, atol=1e-5)
    for name in ("zeros", "small"):
        torch.testing.assert_close(getattr(rounded, name), getattr(expected, name), check_dtype=False, rtol=0, atol=1)


def test_bf16_is_summarised_in_float32():
    module, (q, k) = build(Elastic(0.5)), draw(40)
    q, k = q.bfloat16(), k.bfloat16()
    exact = summarise(module, AttentionCall(q.double(), k.double(), k.double()))
    rounded = summarise(module.float(), AttentionCall(q, k, k))
    assert rounded.mass.dtype == torch.float32
    assert_same(rounded, exact, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_tensor_is_larger_than_the_scores_of_a_block():
    module, (q, k) = build(Elastic()).float(), draw(1024, batch=1)
    with LargestTensor() as largest:
        summarise(module, AttentionCall(q.float(), k.float(), k.float()), most_scores=2**16)
    assert largest.elements <= 2**16 < HEADS * 1024**2
