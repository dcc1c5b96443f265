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


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tiling, "BLOCK_ELEMENTS_CPU", 40)
    monkeypatch.setattr(tiling, "FULL_ROWS", 2)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.usefixtures("small_blocks")
def test_the_rows_say_where_they_stand(backend):
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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "<lambda> uses a tensor that was computed before it, by DivBackward0, from one that"),
        (("scale",), "<lambda> uses a tensor that was computed before it"),
        (("half", "scale"), "parameters has a tensor and another one that was computed from it; list only"),
        ("half", "parameters is a torch.Tensor; give a list of tensors"),
        (("half", "half"), ""),
    ],
)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_gets_its_gradient_or_is_refused(names, message, frozen):
    scale = torch.ones(4, 1, 1, requires_grad=True)
    half = scale / 2
    tensors = {"scale": scale, "half": half}
    parameters = tensors[names] if isinstance(names, str) else (tensors[name] for name in names)

    def differentiate(backend, parameters):
        q = Q.clone().requires_grad_(not frozen)
        out = rule_attention(lambda s, _: (s * half).softmax(-1), q, K, V, parameters=parameters, backend=backend)
        return torch.autograd.grad(out.square().sum(), scale, retain_graph=True)[0]

    if message:
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            differentiate("chunked", parameters)
        return
    torch.testing.assert_close(differentiate("chunked", parameters), differentiate("reference", []))


def test_a_leaf_that_would_get_no_gradient_is_refused():
    scale = torch.ones(4, 1, 1, requires_grad=True)
    with pytest.raises(ValueError, match=r"^<lambda> uses a tensor \[4, 1, 1\] that requires a gradient and would get"):
        rule_attention(lambda s, _: (s * scale).softmax(-1), Q, K, V)


@pytest.mark.usefixtures("small_blocks")
def test_both_passes_draw_the_same_numbers():
    """The output is linear in the values, so their product with its gradient is the output."""
    v = V.clone().requires_grad_()
    out = rule_attention(lambda s, _: torch.dropout(s.softmax(-1), 0.5, train=True), Q, K, v).sum()
    next_number, (dv,) = torch.rand(1), torch.autograd.grad(out, v)
    torch.testing.assert_close((dv * v).sum(), out)
    assert not torch.equal(torch.rand(1), next_number)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(
    "options",
    [{"window": 3}, {"kv_lengths": torch.tensor([9, 7])}, {"key_mask": torch.arange(9).expand(2, -1) > 1}, {"maps": 2}],
    ids=lambda x: "-".join(x),
)
def test_a_rule_knows_distances_and_sequences(options, backend):
    slopes, strength = draw(4).abs(), torch.tensor([0.5, 2.0], dtype=torch.float64)

    def rule(scores, rows):
        shape = -1, *[1] * (scores.dim() - 1)
        far = rows.distance * slopes.view(4, *[1] * (scores.dim() - 2))
        weights = ((scores - far) * strength[rows.sequences].view(shape)).softmax(-1)
        return weights if weights.dim() == 4 else weights.mean(2)

    def known(scores, _):
        weights = torch.stack([(x * by).softmax(-1) for x, by in zip(scores, strength, strict=True)])
        return weights if weights.dim() == 4 else weights.mean(2)

    found = rule_attention(rule, Q, K, V, backend=backend, **options)
    torch.testing.assert_close(found, rule_attention(known, Q, K, V, slopes=slopes, backend="reference", **options))


def test_it_needs_no_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert rule_attention(softmax, Q.float(), K.float(), V.float()).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


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
