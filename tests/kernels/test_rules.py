"""`flash_lazy.rules`: attention by any rule. tests/attention checks each normaliser's rule."""

import re
from functools import partial

import pytest
import torch
from layers import LargestTensor

from flash_lazy import lazy_attention, rule_attention, tiling
from flash_lazy.rules import HIDDEN


def softmax(scores, _):
    return scores.softmax(-1)


lazily = partial(lazy_attention, tau=torch.ones(2), backend="chunked")


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


Q, K, V = draw(2, 4, 6, 8), draw(2, 2, 9, 8), draw(2, 2, 9, 8) + 1


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"kv_lengths": torch.tensor([7, 2])}, {"key_mask": draw(2, 9) > 0}, {"scale": 0.2}],
    ids=lambda x: "-".join(x) or "plain",
)
def test_softmax_as_a_rule_is_lazy_attention_at_tau_zero(backend, options):
    """Against `lazy_attention`, which shares only the geometry of scores: output, statistics and gradients."""
    found = []
    for attend in (
        lambda q, bias, slopes: lazy_attention(
            q, K, V, torch.zeros(4), bias, slopes=slopes, backend="reference", return_stats=True, **options
        ),
        lambda q, bias, slopes: rule_attention(
            softmax, q, K, V, bias, slopes=slopes, backend=backend, return_stats=True, **options
        ),
    ):
        leaves = [x.clone().requires_grad_() for x in (Q, draw(4, 5), draw(4).abs())]
        out, stats = attend(*leaves)
        found.append([out.detach(), *(x.detach() for x in stats[:3]), *torch.autograd.grad(out.square().sum(), leaves)])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_rule_of_two_maps_combines_the_halves_of_queries_and_keys(backend):
    def difference(scores, _):
        one, other = scores.softmax(-1).unbind(2)
        return one - other / 2

    first, bias = torch.arange(8) < 4, draw(4, 5)
    halves = [rule_attention(softmax, Q * half, K, V, bias, scale=0.5, backend=backend) for half in (first, ~first)]
    found = rule_attention(difference, Q, K, V, bias, maps=2, backend=backend)
    torch.testing.assert_close(found, halves[0] - halves[1] / 2)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_the_rows_say_where_they_stand(backend, monkeypatch):
    monkeypatch.setattr(tiling, "BLOCK_ELEMENTS_CPU", 40)
    monkeypatch.setattr(tiling, "FULL_ROWS", 2)
    seen = []

    def note(scores, rows):
        at, n = (x.expand(1, 1, scores.shape[2], 1)[0, 0, :, 0].tolist() for x in (rows.position, rows.n))
        assert (rows.visible.sum(-1)[0, 0] == torch.tensor(n)).all()
        assert (scores.masked_select(~rows.visible.expand_as(scores)) == HIDDEN).all()
        seen.extend(zip(at, n, strict=True))
        return scores.softmax(-1)

    x = draw(1, 2, 9, 4)
    packed = torch.tensor([0, 3, 9], dtype=torch.int32)
    rule_attention(note, x, x, x, cu_seqlens=packed, window=4, backend=backend)
    assert seen == [(1, 1), (2, 2), (3, 3), (1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (6, 4)]


@pytest.mark.parametrize("attend", [partial(rule_attention, softmax), lazily], ids=["rule", "lazy"])
@pytest.mark.parametrize("length", [1024, 4096])
def test_no_tensor_grows_with_the_square_of_the_length(length, attend):
    q, k, v = (draw(1, 2, length, 8, dtype=torch.float32).requires_grad_() for _ in range(3))
    with LargestTensor() as largest:
        attend(q, k, v, bias=torch.zeros(2, 64)).sum().backward()
    assert largest.elements <= max(tiling.BLOCK_ELEMENTS_CPU, q.numel())


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(
    "rule", [lambda s, _: (-s).sigmoid(), lambda s, _: (-s).softmax(-1), lambda s, rows: s.softmax(-1) - 1 / rows.n]
)
def test_no_rule_can_show_a_row_its_future(rule, backend):
    """For any weights of hidden keys, as from a trained factor that turned negative."""
    q = draw(1, 2, 9, 8)
    changed = V[:1].clone()
    changed[:, :, 5] = 100
    before, after = (rule_attention(rule, q, K[:1], v, window=4, backend=backend) for v in (V[:1], changed))
    assert torch.equal(before[:, :, :5], after[:, :, :5])


@pytest.mark.parametrize("known", ["nothing", "another", "made of it"])
def test_a_tensor_that_would_get_no_gradient_is_refused(known):
    scale, other, q = (x.clone().requires_grad_() for x in (torch.ones(4, 1, 1), torch.ones(1), Q))
    half = scale / 2
    listed = {"nothing": [], "another": [other], "made of it": [half]}[known]
    out = rule_attention(lambda s, _: (s * half * other.detach()).softmax(-1), q, K, V, parameters=listed)
    if known == "made of it":
        out.sum().backward()
        assert scale.grad is not None
        assert scale.grad.any()
        return
    with pytest.raises(ValueError, match=r"^<lambda> uses a tensor \[4, 1, 1\] that requires a gradient and would get"):
        out.sum().backward()


def naughty(scores, _):
    return scores.sub_(scores.amax(-1, keepdim=True)).softmax(-1)


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (softmax, {"maps": 3}, "maps is 3 and q has width D = 8; give a D that is divisible by maps"),
        (softmax, {"maps": 0}, "maps is 0; give a whole number, at least 1"),
        (softmax, {"backend": "triton"}, "backend is 'triton'; choose reference or chunked for a rule"),
        (softmax, {"window": 0}, "window is 0; give a whole number"),
        ("softmax", {}, "rule is 'softmax'; give a function of scores and Rows"),
        (naughty, {}, "naughty changes its scores in place; use an operation that returns a new"),
        (lambda s, _: s.softmax(-1).sum(1), {}, "<lambda> returns torch.float64 [2, "),
        (lambda s, _: s.softmax(-1).float(), {}, "<lambda> returns torch.float32 [2, 4, "),
    ],
)
def test_a_mistake_is_named(rule, settings, message):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}.*$"):
        rule_attention(rule, Q, K, V, **settings)
