"""The attention layer with projections, positions, bias, window and cache, against its formula."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lit_lazy.attention import (
    Alibi,
    Attention,
    AttentionSpec,
    Elastic,
    LayerCache,
    LayerShape,
    LearnedBias,
    NoBias,
    NoPosition,
    PassInputs,
    Rope,
    Softmax,
    T5Bias,
)
from lit_lazy.attention.bias import Bias, BiasModule, BiasTerms, alibi_slopes

BATCH, LENGTH, D_MODEL, HEADS, CONTEXT = 2, 11, 24, 4, 16
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def layer(spec, n_kv_heads=HEADS, n_heads=HEADS, backend="auto"):
    torch.manual_seed(0)
    shape = LayerShape(n_heads, n_kv_heads, D_MODEL // n_heads, D_MODEL, CONTEXT)
    attention = Attention(spec, shape, backend).double()
    for projection in (attention.q, attention.k):
        projection.weight.data.mul_(3)  # scores of order one, so that weights differ
    return attention


def inputs(length=LENGTH, seed=1):
    return torch.randn(BATCH, length, D_MODEL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(position, length=LENGTH, offset=0, head_dim=D_MODEL // HEADS):
    return position.build(D_MODEL, head_dim, CONTEXT).double().rotation(length, offset)


def forward(attention, x, position=NoPosition(), **options):  # noqa: B008
    return attention(x, PassInputs(rotation(position, x.shape[1], head_dim=attention.head_dim), **options))


def written_out(attention, x, rotate=lambda x: x, added=None, tau=0.0, window=None):
    """The layer by its formula. added: `[H, L, L]`, added to the scores; tau: per_query offset of all heads."""
    length = x.shape[1]
    q, k, v = (
        (x @ projection.weight.mT).view(BATCH, length, -1, attention.head_dim).transpose(1, 2)
        for projection in (attention.q, attention.k, attention.v)
    )
    q, k = rotate(q), rotate(k)
    groups = attention.n_heads // attention.n_kv_heads
    scores = q @ k.repeat_interleave(groups, 1).mT / math.sqrt(attention.head_dim)
    if added is not None:
        scores = scores + added
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    p = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
    w = torch.relu(p - tau / visible.sum(-1, keepdim=True).double()) * visible
    mixed = w @ v.repeat_interleave(groups, 1)
    return mixed.transpose(1, 2).reshape(BATCH, length, -1) @ attention.out.weight.mT


def by_distance(table, length=LENGTH):
    """Expand `[H, W]` by distance to `[H, L, L]`, zero beyond W."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    padded = torch.nn.functional.pad(table, (0, max(0, length - table.shape[1])))
    return padded[:, distance.clamp(min=0)]


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
@pytest.mark.parametrize("position", [NoPosition(), Rope()], ids=str)
@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("tau", [0.0, 0.5, -0.5])
def test_equals_the_formula(tau, window, n_kv_heads, position, backend):
    """tau = 0 selects Softmax."""
    spec = AttentionSpec(Elastic(tau_init=tau) if tau else Softmax(), LearnedBias(length=5), window)
    attention, x = layer(spec, n_kv_heads, backend=backend), inputs()
    attention.bias.table.data.normal_(generator=torch.Generator().manual_seed(2))
    expected = written_out(attention, x, rotation(position), by_distance(attention.bias.table), tau, window)
    torch.testing.assert_close(forward(attention, x, position)[0], expected, **TIGHT)


@pytest.mark.parametrize("normaliser", [Softmax(), Elastic(tau_init=0.5)], ids=str)
@pytest.mark.parametrize("n_heads", [4, 6])
def test_a_learned_bias_of_minus_slope_times_distance_is_alibi(n_heads, normaliser):
    x = inputs()
    alibi = layer(AttentionSpec(normaliser, Alibi()), n_heads, n_heads)
    learned = layer(AttentionSpec(normaliser, LearnedBias()), n_heads, n_heads)
    slopes = torch.tensor(alibi_slopes(n_heads))  # fp32 like the buffer
    learned.bias.table.data.copy_(-slopes.double()[:, None] * torch.arange(CONTEXT))
    torch.testing.assert_close(forward(learned, x, Rope())[0], forward(alibi, x, Rope())[0], **TIGHT)
    unbiased = layer(AttentionSpec(normaliser), n_heads, n_heads)
    assert not torch.allclose(forward(unbiased, x, Rope())[0], forward(alibi, x, Rope())[0])


@pytest.mark.parametrize("normaliser", [Softmax(), Elastic(tau_init=0.5), Elastic(tau_init=-0.5)], ids=str)
def test_gradient_of_a_distance_is_the_sum_over_its_diagonal(normaliser):
    attention, x = layer(AttentionSpec(normaliser, LearnedBias(length=5))), inputs()
    attention.bias.table.data.normal_(generator=torch.Generator().manual_seed(2))
    weight = torch.randn(BATCH, LENGTH, D_MODEL, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (forward(attention, x)[0] * weight).sum().backward()
    added = by_distance(attention.bias.table.detach()).requires_grad_()
    tau = getattr(normaliser, "tau_init", 0.0)
    (written_out(attention, x, added=added, tau=tau) * weight).sum().backward()
    expected = torch.stack([added.grad.diagonal(-d, 1, 2).sum(-1) for d in range(5)], -1)
    torch.testing.assert_close(attention.bias.table.grad, expected, **TIGHT)
    assert expected.abs().min() > 1e-6


def test_beyond_the_table_keys_stay_visible_without_bias():
    """A bias of -1e4 below W leaves softmax attention over the other keys."""
    attention, x = layer(AttentionSpec(Softmax(), LearnedBias(length=3))), inputs()
    attention.bias.table.data.fill_(-1e4)
    last = forward(attention, x)[0][:, -1]
    distant = layer(AttentionSpec(Softmax()))
    q, k, v = (
        (x @ p.weight.mT).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for p in (distant.q, distant.k, distant.v)
    )
    p = torch.softmax(q[:, :, -1:] @ k[:, :, :-3].mT / math.sqrt(distant.head_dim), -1)
    expected = (p @ v[:, :, :-3])[:, :, 0].flatten(1) @ distant.out.weight.mT
    torch.testing.assert_close(last, expected, **TIGHT)


def test_a_bias_shifts_logits_by_its_value():
    """The bias is not divided by sqrt(D): with zero queries, bias c only at distance 0 gives e^c / (e^c + n - 1)."""
    attention = layer(AttentionSpec(Softmax(), LearnedBias(length=1)))
    attention.q.weight.data.zero_()
    shift = 1.7
    attention.bias.table.data.fill_(shift)
    _, stats = forward(attention, inputs(), with_stats=True)
    n = torch.arange(1, LENGTH + 1).double()
    first = torch.where(n == 1, 1.0, 1 / (math.exp(shift) + n - 1))
    torch.testing.assert_close(stats.first_weight, first.expand(BATCH, HEADS, -1))
    torch.testing.assert_close(stats.lse, torch.log(math.exp(shift) + n - 1).expand(BATCH, HEADS, -1))


def test_a_common_bias_changes_no_weight_but_moves_the_log_sum_exp_by_itself():
    x = inputs()
    plain, shifted = (layer(AttentionSpec(Elastic(tau_init=0.5), LearnedBias())) for _ in range(2))
    shifted.bias.table.data.fill_(2.5)
    (out, stats), (moved, moved_stats) = (forward(a, x, Rope(), with_stats=True) for a in (plain, shifted))
    torch.testing.assert_close(moved, out, **TIGHT)
    torch.testing.assert_close(moved_stats.lse - stats.lse, torch.full_like(stats.lse, 2.5))


@pytest.mark.parametrize("steps", [[1] * LENGTH, [4, 1, 3, 3], [LENGTH]], ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(Softmax(), NoBias()),
        AttentionSpec(Softmax(), T5Bias(), window=4),
        AttentionSpec(Elastic(), LearnedBias(length=5)),
    ],
    ids=str,
)
def test_cache_continues_the_sequence(spec, steps):
    attention, x = layer(spec, n_kv_heads=2), inputs()
    cache, outs, start = LayerCache(), [], 0
    for step in steps:
        assert cache.length == start
        rotate = rotation(Rope(), step, start)
        outs.append(attention(x[:, start : start + step], PassInputs(rotate, cache))[0])
        start += step
    torch.testing.assert_close(torch.cat(outs, 1), forward(attention, x, Rope())[0], **TIGHT)
    assert cache.length == LENGTH
    assert cache.k.shape == cache.v.shape == (BATCH, 2, LENGTH, D_MODEL // HEADS)


def test_names_its_backend():
    assert layer(AttentionSpec()).backend_name() == "sdpa"
    assert layer(AttentionSpec(Elastic())).backend_name() == "chunked"
    assert layer(AttentionSpec(bias=LearnedBias())).backend_name() == "chunked"
    assert layer(AttentionSpec(window=3)).backend_name() == "chunked"
    assert layer(AttentionSpec(), backend="reference").backend_name() == "reference"
    assert layer(AttentionSpec()).backend_name(documents=True) == "chunked"


@dataclass(frozen=True)
class Given(Bias):
    """A bias whose module returns what it is given."""

    terms: Any = None

    def build(self, n_heads, context_length):  # noqa: ARG002
        return _Given(self.terms)


class _Given(BiasModule):
    def __init__(self, terms):
        super().__init__()
        self.terms = terms

    def forward(self, n_keys):  # noqa: ARG002
        return self.terms


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (BiasTerms(torch.zeros(3, 8)), "_Given.forward returned table of shape [3, 8]; give [heads, width], heads = 4"),
        (BiasTerms(torch.zeros(4)), "_Given.forward returned table of shape [4]; give [heads, width], heads = 4"),
        (BiasTerms(slopes=torch.zeros(3)), "_Given.forward returned slopes of shape [3]; give [heads], heads = 4"),
        (torch.zeros(4, 8), "_Given.forward returned a Tensor; give BiasTerms(table), table [heads, width], heads = 4"),
    ],
)
def test_a_custom_bias_of_another_shape_is_named(terms, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is compared)
        forward(layer(AttentionSpec(Softmax(), Given(terms))), inputs())
    assert str(error.value) == message


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
@pytest.mark.parametrize("width", [1, 3, LENGTH, LENGTH + 4])
def test_a_custom_table_of_any_width_is_0_beyond_its_end(width, backend):
    """Keys there stay visible; columns that no key needs have no effect."""
    table = torch.randn(HEADS, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x, spec = inputs(), AttentionSpec(Elastic(tau_init=0.5), Given(BiasTerms(table)))
    expected = written_out(layer(spec), x, added=by_distance(table), tau=0.5)
    torch.testing.assert_close(forward(layer(spec, backend=backend), x)[0], expected, **TIGHT)
