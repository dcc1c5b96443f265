"""The reference, which is the specification, against independent loops, gradcheck and closed forms."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases import (
    AXES,
    THRESHOLDS,
    Case,
    device_for,
    draw,
    pairwise_cover,
    run,
    tolerance,
    use_small_blocks,
    widest_dtype,
)
from torch.nn.functional import scaled_dot_product_attention

from flash_lazy import Stats, attention_weights, lazy_attention

BIASES = {"none": {}, "table": {"bias_width": 3}, "slopes": {"slopes": True}}

SMALL = {"bias_width": [None, 1, 7, 64], "window": [None, 1, 5], "group": [1, 2], "length": [1, 2, 21]}
COVER = pairwise_cover(AXES | SMALL)


def naive_attention(case):
    """Output and stats by loops over rows with a list of visible keys.

    Shares nothing with the package: visibility is decided key by key.
    """
    options = case.options
    q, k, v = (x.double().numpy() for x in (case.q, case.k, case.v))
    tau = case.tau.double().numpy()
    bias = None if case.bias is None else case.bias.double().numpy()
    slopes = options["slopes"].double().numpy() if "slopes" in options else None
    (batch, heads, rows, width), (kv_heads, keys) = q.shape, k.shape[1:3]
    cuts = options["cu_seqlens"].tolist() if "cu_seqlens" in options else [0, keys]
    scale = options.get("scale") or 1 / math.sqrt(width)
    out = np.zeros_like(q)
    stats = Stats(*(np.zeros((batch, heads, rows)) for _ in Stats._fields))
    stats.lse.fill(-np.inf)
    for b, r in itertools.product(range(batch), range(rows)):
        here = int(options["kv_lengths"][b]) if "kv_lengths" in options else keys
        here += r - rows  # index of the row's own key
        start = max((cut for cut in cuts if cut <= here), default=0)
        window = options.get("window") or keys
        shown = [j for j in range(start, here + 1) if "key_mask" not in options or options["key_mask"][b, j]]
        seen = [j for j in shown if here - j < window]
        if not seen:
            continue
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = k[b, kv, seen] @ q[b, h, r] * scale
            for index, j in enumerate(seen):
                if bias is not None and here - j < bias.shape[1]:
                    scores[index] += bias[h, here - j]
                if slopes is not None:
                    scores[index] -= slopes[h] * (here - j)
            lse = scores.max() + np.log(np.exp(scores - scores.max()).sum())
            p = np.exp(scores - lse)
            match options["threshold"]:
                case "per_query":
                    theta = tau[h] / len(seen)
                case "per_token":
                    theta = tau[h, min(len(shown), tau.shape[1]) - 1] / len(seen)
                case "seq_len":
                    theta = tau[h] / options["context_length"]
                case "constant":
                    theta = tau[h]
            w = np.maximum(p - theta, 0)
            stats.lse[b, h, r], stats.mass[b, h, r], stats.zeros[b, h, r] = lse, w.sum(), (p <= theta).sum()
            if options["renormalise"] and w.sum() > 0:
                w = w / w.sum()
            stats.first_weight[b, h, r] = w[seen.index(start)] if start in seen else 0
            out[b, h, r] = w @ v[b, kv, seen]
    return out, stats


@pytest.mark.parametrize("setting", COVER, ids=str)
def test_equals_row_by_row_loops(setting):
    case = draw(1, **setting).to(torch.float64)
    expected, expected_stats = naive_attention(case)
    out, stats, _ = run(case, "reference")
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-13)
    for name, mine, theirs in zip(stats._fields, stats, expected_stats, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_gradcheck(threshold, sign, renormalise, bias):
    setting = {"threshold": threshold, "sign": sign, "renormalise": renormalise, **BIASES[bias]}
    case = draw(2, layout="decode", length=6, group=2, batch=1, width=3, **setting).to(torch.float64)
    names = list(case.leaves())
    leaves = [x.detach().requires_grad_() for x in case.leaves().values()]

    def call(*tensors):
        given = dict(zip(names, tensors, strict=True))
        head = [given.pop(name) for name in ("q", "k", "v", "tau")]
        return lazy_attention(*head, given.pop("bias", None), backend="reference", **(case.options | given))

    assert torch.autograd.gradcheck(call, leaves)


class TestClosedForms:
    """Section "closed forms" of the method, for every backend."""

    @pytest.mark.parametrize("threshold", THRESHOLDS)
    @pytest.mark.parametrize("renormalise", [False, pytest.param(True, marks=pytest.mark.long)])
    def test_zero_tau_is_softmax_attention(self, backend, threshold, renormalise):
        case = draw(3, threshold=threshold, renormalise=renormalise, group=2, length=17)
        case = replace(case, tau=0 * case.tau).to(widest_dtype(backend))
        out, stats, _ = run(case, backend)
        expected = scaled_dot_product_attention(case.q, case.k, case.v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out, expected, **tolerance(case))
        torch.testing.assert_close(stats.mass, torch.ones_like(stats.mass), rtol=1e-6, atol=0)
        assert stats.zeros.count_nonzero() == 0

    def test_row_mass_is_the_total_variation_from_uniform(self, backend):
        case = draw(4, length=40).to(widest_dtype(backend))
        _, stats, _ = run(Case(case.q, case.k, case.v, torch.ones_like(case.tau), None, case.options), backend)
        scores = (case.q @ case.k.mT / math.sqrt(case.q.shape[-1])).masked_fill(torch.ones(40, 40).triu(1).bool(), -1e9)
        uniform = torch.ones(40, 40).tril() / torch.arange(1, 41)[:, None]
        distance = (torch.softmax(scores, -1) - uniform).abs().sum(-1) / 2
        torch.testing.assert_close(stats.mass, distance.to(stats.mass), rtol=1e-6, atol=1e-7)

    def test_first_row_at_tau_one_is_zero_and_so_is_its_gradient(self, backend):
        case = draw(5, length=9).to(widest_dtype(backend))
        case = Case(case.q, case.k, case.v, torch.ones_like(case.tau), None, case.options)
        first_only = torch.zeros_like(case.q)
        first_only[:, :, 0] = 1
        out, _, grads = run(case, backend, first_only)
        assert out[:, :, 0].count_nonzero() == 0
        assert all(grads[name].count_nonzero() == 0 for name in grads)

    @pytest.mark.parametrize("sigma", [0.485, *(pytest.param(sigma, marks=pytest.mark.long) for sigma in (1.0, 2.0))])
    def test_gaussian_scores(self, backend, sigma, monkeypatch):
        keys = 100_000
        if backend == "triton":
            use_small_blocks(
                monkeypatch, 16, 16 if torch.cuda.is_available() else 2**14
            )  # a tile takes milliseconds there
        k = sigma * torch.randn(1, 1, keys, 1, generator=torch.Generator().manual_seed(0)).to(device_for(backend))
        one = torch.ones_like(k[:, :, :1])
        _, stats = lazy_attention(one, k, k, one.flatten(), scale=1.0, backend=backend, return_stats=True)
        below = 0.5 * (1 + math.erf(sigma / 2 / math.sqrt(2)))
        sampling = 5 / math.sqrt(keys)  # five standard errors of a proportion are at most 2.5 / sqrt(n)
        assert abs(stats.zeros.item() / keys - below) < sampling
        assert abs(stats.mass.item() - (2 * below - 1)) < sampling

    @pytest.mark.parametrize("renormalise", [False, True])
    def test_huge_tau_gives_exact_zeros(self, backend, renormalise):
        case = draw(6, length=12, bias_width=4, renormalise=renormalise).to(torch.float32)
        out, stats, grads = run(Case(case.q, case.k, case.v, 1e6 + case.tau, case.bias, case.options), backend)
        assert out.count_nonzero() == 0
        assert stats.mass.count_nonzero() == 0
        assert all(grad.count_nonzero() == 0 for grad in grads.values())


def test_ties_are_zero(backend, monkeypatch):
    """With equal scores and tau = 1 every p equals theta: weights are 0 in the reference, else within rounding."""
    if backend == "triton":
        use_small_blocks(monkeypatch, 64, 64)
    for dtype in {torch.float32, widest_dtype(backend)}:
        v = torch.randn(1, 1, 300, 4, generator=torch.Generator().manual_seed(0)).to(device_for(backend), dtype)
        q, tau = torch.zeros_like(v), torch.ones(1, dtype=dtype, device=v.device)
        bound = 0 if backend == "reference" else 4 * torch.finfo(dtype).eps * v.abs().max()
        assert lazy_attention(q, q, v, tau, backend=backend).abs().max() <= bound


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_weights_are_those_that_multiply_the_values(threshold, renormalise):
    """At once, and in blocks of rows aligned to the end of their keys."""
    setting = {"threshold": threshold, "renormalise": renormalise, "bias_width": 4, "slopes": True, "window": 9}
    case = draw(5, length=12, group=2, batch=1, width=4, **setting).to(torch.float64)
    whole = attention_weights(case.q, case.k, case.tau, case.bias, **case.options)
    out, stats = lazy_attention(
        case.q, case.k, case.v, case.tau, case.bias, backend="reference", return_stats=True, **case.options
    )
    torch.testing.assert_close(whole.w @ case.v.repeat_interleave(2, 1), out)
    torch.testing.assert_close(whole.mass, stats.mass)
    assert torch.equal(((whole.p <= whole.theta[..., None]) & whole.visible).sum(-1).double(), stats.zeros)
    for first, end in ((0, 5), (5, 12)):
        block = attention_weights(case.q[:, :, first:end], case.k[:, :, :end], case.tau, case.bias, **case.options)
        torch.testing.assert_close(block.w, whole.w[:, :, first:end, :end])
        torch.testing.assert_close(block.theta, whole.theta[:, :, first:end])
