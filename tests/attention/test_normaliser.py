"""What runs on which backend, and in which mode. Formulas: test_every_normaliser.py."""

from contextlib import nullcontext

import pytest
import torch
from layers import layer_shape
from torch.nn.functional import scaled_dot_product_attention

from flash_lazy.cpu.library import find_obstacle
from lit_lazy.attention import (
    AttentionCall,
    BiasTerms,
    Differential,
    Elastic,
    NormaliserModule,
    OffByOne,
    Relu,
    SinkLogit,
    Softmax,
    SSMax,
)

BATCH, HEADS, KV_HEADS, LENGTH, DIM, CONTEXT = 2, 4, 2, 13, 6, 32
SHAPE = layer_shape(HEADS, CONTEXT, DIM)


def qkv(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        1.5 * torch.randn(BATCH, heads, LENGTH, DIM, generator=generator, dtype=dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def test_explicit_sdpa_runs_nothing_else():
    q = torch.zeros(1, HEADS, 2, 4)
    call = AttentionCall(q, q, q, backend="sdpa")
    module = Softmax().build(SHAPE)
    assert module.backend_name(call) == "sdpa"
    assert module(call._replace(with_stats=True))[1] is not None
    for refused in (call._replace(window=4), call._replace(bias=BiasTerms(slopes=torch.ones(HEADS)))):
        with pytest.raises(ValueError, match="backend is 'sdpa', which takes no bias, window"):
            module(refused)
    with pytest.raises(ValueError, match="backend is 'sdpa', which computes softmax attention alone"):
        Elastic().build(SHAPE)(call)
    for backend in ("sdpa", "cpu", "triton"):
        with pytest.raises(ValueError, match=f"backend is '{backend}', for which this rule has no kernel"):
            Relu().build(SHAPE)(call._replace(backend=backend))


def test_ssmax_scales_scores_by_the_logarithm_of_the_keys():
    q, k, v = qkv()
    scaled = q * (0.5 * torch.arange(1, LENGTH + 1, dtype=torch.float64).log())[:, None]
    expected = scaled_dot_product_attention(scaled, k, v, is_causal=True, enable_gqa=True)
    found, stats = SSMax(0.5).build(SHAPE).double()(AttentionCall(q, k, v))
    assert stats is None
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


class Mixed(NormaliserModule):
    """Softmax weights mixed across heads by a learned matrix: autocast would round the product."""

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.zeros(HEADS, HEADS))

    def weights(self, scores, rows):  # noqa: ARG002
        return torch.einsum("hg,bgrc->bhrc", self.mix.softmax(-1), scores.softmax(-1))


MODES = {
    "as it is": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [Mixed, lambda: Elastic().build(SHAPE)], ids=["mixed", "elastic"])
def test_the_first_call_may_be_made_in_any_mode(build, mode):
    module, call = build(), AttentionCall(*qkv(torch.float32))
    with MODES[mode]():
        assert torch.equal(module(call)[0], module(call)[0])


ON_KERNELS = [Softmax(), Elastic(), OffByOne(), SinkLogit(), SSMax(), Differential()]


@pytest.mark.skipif(find_obstacle() is not None, reason="needs the compiled backend")
@pytest.mark.parametrize("spec", ON_KERNELS, ids=repr)
def test_what_runs_on_kernels_runs_on_the_compiled_backend(spec):
    """In float32 on a CPU; tests/kernels/test_cpu.py has its gradients."""
    module, call = spec.build(SHAPE), AttentionCall(*qkv(torch.float32))
    for each in (call, call._replace(bias=BiasTerms(table=torch.ones(HEADS, 3)))):
        assert module.backend_name(each) == "cpu"
        expected = module(each._replace(backend="reference"))[0]
        torch.testing.assert_close(module(each)[0], expected, rtol=1e-4, atol=1e-5)
