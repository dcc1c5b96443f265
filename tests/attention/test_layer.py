"""The attention layer with projections, positions, bias, window and cache, against its formula."""

import math
import re

import pytest
import torch

from lit_lazy.attention import (
    Alibi,
    Attention,
    AttentionSpec,
    Elastic,
    LayerShape,
    LearnedBias,
    NoPosition,
    PassInputs,
    Rope,
    Softmax,
)
from lit_lazy.attention.bias import BiasTerms

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
    parts = (attention.q, attention.k, attention.v)
    q, k, v = ((x @ part.weight.mT).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for part in parts)
    k, v = (part.repeat_interleave(attention.n_heads // attention.n_kv_heads, 1) for part in (rotate(k), v))
    scores = rotate(q) @ k.mT / math.sqrt(attention.head_dim) + (0 if added is None else added)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    p = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
    w = torch.relu(p - tau / visible.sum(-1, keepdim=True).double()) * visible
    return (w @ v).transpose(1, 2).flatten(2) @ attention.out.weight.mT


def by_distance(table, length=LENGTH):
    """Expand `[H, W]` by distance to `[H, L, L]`, zero beyond W."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    padded = torch.nn.functional.pad(table, (0, max(0, length - table.shape[1])))
    return padded[:, distance.clamp(min=0)]


@pytest.mark.parametrize("position", [NoPosition(), Rope()], ids=str)
@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("tau", [0.0, 0.5, -0.5])
def test_equals_the_formula(tau, window, n_kv_heads, position):
    """tau = 0 selects Softmax."""
    spec = AttentionSpec(Elastic(tau_init=tau) if tau else Softmax(), LearnedBias(length=5), window)
    attention, x = layer(spec, n_kv_heads), inputs()
    attention.bias.table.data.normal_(generator=torch.Generator().manual_seed(2))
    expected = written_out(attention, x, rotation(position), by_distance(attention.bias.table), tau, window)
    torch.testing.assert_close(forward(attention, x, position)[0], expected, **TIGHT)


def test_names_its_backend():
    for spec, name in (
        (AttentionSpec(), "sdpa"),
        (AttentionSpec(Elastic()), "chunked"),
        (AttentionSpec(bias=LearnedBias()), "chunked"),
        (AttentionSpec(bias=Alibi()), "chunked"),
        (AttentionSpec(window=3), "chunked"),
    ):
        assert layer(spec).backend_name() == name  # in float64, for which there is no compiled backend
        assert layer(spec, backend="reference").backend_name() == "reference"
        assert layer(spec).backend_name(documents=True) == "chunked"


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (
            BiasTerms(torch.zeros(3, 8)),
            "_LearnedBias.forward returned table of shape [3, 8]; give [heads, width], heads = 4",
        ),
        (
            torch.zeros(4, 8),
            "_LearnedBias.forward returned a Tensor; give BiasTerms(table), table [heads, width], heads = 4",
        ),
    ],
)
def test_a_custom_bias_of_another_shape_is_named(terms, message):
    attention = layer(AttentionSpec(bias=LearnedBias()))
    attention.bias.forward = lambda _: terms
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        forward(attention, inputs())
