"""Biases against their published formulas: closed forms, initial values, reach, errors."""

import math
import re
from contextlib import nullcontext

import pytest
import torch

from lit_lazy.attention import Alibi, Fire, KerpleLog, LearnedBias, T5Bias
from lit_lazy.attention.bias import BiasModule, BiasTerms, alibi_slopes, t5_buckets
from lit_lazy.model.decoder import parameter_generator

HEADS, CONTEXT = 4, 24


def build(spec, n_heads=HEADS, context_length=CONTEXT, seed=0):
    module = spec.build(n_heads, context_length)
    module.init_parameters(lambda name: parameter_generator(seed, name))
    return module


def test_a_learned_table_starts_at_zero_or_by_its_seed():
    assert torch.equal(build(LearnedBias()).table, torch.zeros(HEADS, CONTEXT))
    assert build(LearnedBias(length=5))(100).table.shape == (HEADS, 5)
    spec = LearnedBias(length=4096, init_std=1e-3)
    table = build(spec).table
    # Five times the relative error of the standard deviation of n normal values, 1 / sqrt(2 n).
    assert table.std().item() == pytest.approx(1e-3, rel=5 / math.sqrt(2 * table.numel()))
    assert torch.equal(build(spec).table, table)
    assert not torch.equal(build(spec, seed=1).table, table)


class Mine(BiasModule):
    """A bias of a user."""

    def __init__(self, compute):
        super().__init__()
        self.compute, self.slope = compute, torch.nn.Parameter(torch.ones(HEADS, 1))

    def forward(self, n_keys):
        return BiasTerms(table=self.compute(self.slope, torch.arange(n_keys)))


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda slope, d: slope * d, None),
        (lambda slope, d: slope / d, "Mine gives a term that is not finite; give finite numbers at every"),
        (lambda slope, d: (slope - 2).log() * d, "Mine gives a term that is not finite"),
    ],
)
def test_a_users_bias_is_probed(compute, said):
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        Mine(compute).probe(CONTEXT)


def test_alibi_slopes():
    """Other head counts take every other slope of the next power of two; they are fixed and reach every distance."""
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(16) == pytest.approx([2 ** (-h / 2) for h in range(1, 17)])
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(12) == pytest.approx([*alibi_slopes(8), 0.7071, 0.3536, 0.1768, 0.0884], abs=5e-5)
    module = build(Alibi(), 8)
    assert not module.state_dict()
    torch.testing.assert_close(module(10**6).slopes, torch.tensor(alibi_slopes(8)))


BUCKETS = {0: 0, 15: 15, 16: 16, 17: 16, 20: 17, 32: 21, 63: 26, 64: 26, 100: 30, 127: 31, 128: 31, 10**4: 31}


class TestT5:
    @pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (2, 2), (3, 9), (7, 50), (33, 17)])
    def test_buckets_rise_and_stay_in_range(self, n_buckets, max_distance):
        buckets = t5_buckets(500, n_buckets, max_distance)
        assert (buckets.diff() >= 0).all()
        assert torch.equal(buckets[: n_buckets // 2], torch.arange(n_buckets // 2))
        assert set(buckets[max_distance:].tolist()) == {n_buckets - 1}

    def test_starts_at_zero_and_adds_its_buckets_value(self):
        module = build(T5Bias())
        assert torch.equal(module.values, torch.zeros(HEADS, 32))
        module.values.data = torch.arange(HEADS * 32.0).view(HEADS, 32)
        table = module(10**4 + 1).table
        for distance, bucket in BUCKETS.items():
            assert table[:, distance].tolist() == [32 * head + bucket for head in range(HEADS)]


@pytest.mark.parametrize(("r1", "r2"), [(1.0, math.e - 1), (0.5, 1.0), (-3.0, -3.0)])
def test_kerple_falls_by_the_logarithm_and_learns_at_the_floor(r1, r2):
    """Both parameters are clamped at 0.01."""
    module = build(KerpleLog())
    module.r1.data.fill_(r1)
    module.r2.data.fill_(r2)
    table, scale, rate = module(9).table[0], max(r1, 0.01), max(r2, 0.01)
    assert table.tolist() == pytest.approx([-scale * math.log1p(rate * d) for d in range(9)])
    table.sum().backward()
    assert module.r1.grad[0] < 0 > module.r2.grad[0]


class TestFire:
    def test_is_f_of_the_scaled_distance(self):
        """f(0) on the diagonal, and f(1) at distance L, whatever the number of keys.

        BLAS sums one row and nine rows in different orders, so compare with float64: a float32 sum of n terms is off by
        at most n roundings of the sum of their sizes, and the ratio by another four.
        """
        module = build(Fire(length=10))
        module.c.data.fill_(0.7)
        table, c = module(9).table, module.c.item()
        ratios = [math.log1p(c * d) / math.log1p(c * 10) for d in range(9)]
        assert ratios[0] == 0
        inner, outer, bias = module.hidden.weight.double(), module.out.weight.double(), module.out.bias.double()
        hidden = torch.relu(inner @ torch.tensor([ratios]).double() + module.hidden.bias.double()[:, None])
        sizes = outer.abs() @ (inner.abs() + module.hidden.bias.double().abs()[:, None]) + bias.abs()[:, None]
        bound = (module.hidden.out_features + 4) * torch.finfo(torch.float32).eps * sizes
        assert ((table - (outer @ hidden + bias[:, None])).abs() <= bound).all()

    def test_stays_fp32_under_autocast(self):
        module = build(Fire())
        with torch.autocast("cpu", torch.bfloat16):
            table = module(CONTEXT).table
        assert table.dtype == torch.float32
        assert torch.equal(table, module(CONTEXT).table)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(Fire(length=10))(11), "Fire.length=10: cannot serve 11 keys"),
        (lambda: build(Alibi(slopes=(0.5, 0.25)), 3), "Alibi.slopes=(0.5, 0.25): has 2 slopes; give one, or one per"),
        (lambda: T5Bias(max_distance=16), "T5Bias.max_distance=16: must be a whole number above 16"),
    ],
)
def test_what_cannot_be_served_is_named(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}.*$"):
        make()


@pytest.mark.parametrize("spec", [LearnedBias(init_std=0.1), T5Bias(), KerpleLog(), Fire()], ids=str)
def test_follows_the_model_to_fp64(spec):
    single, double = build(spec), build(spec).double()
    assert double(CONTEXT).table.dtype == torch.float64
    torch.testing.assert_close(double(CONTEXT).table.float(), single(CONTEXT).table)
