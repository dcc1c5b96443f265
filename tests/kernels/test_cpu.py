"""`cpu`, the compiled backend, against the reference: sizes, layouts, threads, special values, skipping, operators."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    AXES,
    COMPILED,
    Case,
    assert_same_bits,
    assert_small_errors,
    draw,
    eager_errors,
    make_noise,
    measure_errors,
    pairwise_cover,
    require_library,
    run_named,
)
from torch.library import opcheck

from flash_lazy import lazy_attention, resolve_backend
from flash_lazy.call import LEAVES, Call
from flash_lazy.cpu import ops

SIZES = {"window": [None, 1, 17, 140], "length": [1, 7, 63, 129], "width": [1, 3, 8, 24, 80, 257]}


def later(values):
    """Of a parameter, for `make test-all`."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


COVER = pairwise_cover(AXES | SIZES | {"threads": [1, 2, 3]})
CACHE = {"length": 500, "layout": "decode"}
LONG = [
    {"length": 300, "width": 64, "kv_heads": 1, "batch": 1, "bias_width": 200, "threads": 2},
    {"length": 300, "width": 24, "layout": "packed", "renormalise": True, "slopes": True, "threads": 1},
    CACHE | {"width": 80, "rows": 7, "batch": 1, "group": 2, "threads": 1},
    CACHE | {"width": 257, "rows": 1, "batch": 2, "window": 400, "threads": 3},
    CACHE | {"width": 16, "rows": 20, "batch": 1, "window": 200, "slopes": True, "threads": 2},
]


@pytest.fixture(autouse=True)
def _library():
    require_library()


@pytest.mark.parametrize("setting", [*COVER[::2], *LONG, *later(COVER[1::2])], ids=str)
def test_equals_reference(setting):
    torch.set_num_threads(setting["threads"])
    drawn = {name: value for name, value in setting.items() if name != "threads"}

    def measure(seed):
        """With gradients of the output and of the log-sum-exp."""
        case = draw(seed, **drawn)
        dlse = torch.randn(case.q.shape[:3], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        exact, rounded = run_named(case.to(torch.float64), "reference", dlse=dlse), case.to(torch.float32)
        return measure_errors(run_named(rounded, "cpu", dlse=dlse), exact, eager_errors(rounded, exact, dlse=dlse))

    assert_small_errors(measure, (71, *range(1000, 1004)))


def large(length=300, **changes):
    """A case of several tiles and blocks, in which weights may be at the kink."""
    setting = {"heads": 4, "kv_heads": 2, "width": 24, "batch": 1} | changes
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    shape = setting["batch"], setting["kv_heads"], length, setting["width"]
    q, k, v = normal(setting["batch"], setting["heads"], length, setting["width"]), normal(*shape), normal(*shape)
    options = {"slopes": 0.05 * normal(setting["heads"]).abs()}
    return Case(q, k, v, 1 + 0.1 * normal(setting["heads"]), normal(setting["heads"], 40), options)


LAYOUTS = {
    "rows before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of columns": lambda x: torch.cat([torch.full_like(x, torch.nan), x, x], -1).chunk(3, -1)[1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_no_bit(layout):
    """Also those of the output's gradient; columns and parameters with strides are copied, as in test_chunked.py."""
    case, change = large(150, batch=2), LAYOUTS[layout]
    grad = make_noise(case)
    changed = replace(case, **{name: change(getattr(case, name)) for name in "qkv"})
    assert_same_bits(run_named(case, "cpu", grad), run_named(changed, "cpu", change(grad)))


@pytest.mark.parametrize("place", ["q", "k"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [1, 39])  # the first of 40 would see only the poisoned key
def test_nan_and_infinity_spread_as_in_the_reference(rows, poison, place):
    """From the last row, and from a key that all rows see."""
    case = large(40, heads=2)
    case = replace(case, q=case.q[:, :, -rows:])
    poisoned = getattr(case, place).clone()
    poisoned[:, 0, -1 if place == "q" else 0, 3] = poison
    case = replace(case, **{place: poisoned})
    expected, found = run_named(case, "reference"), run_named(case, "cpu")
    for name in ("out", "lse", "mass", "dq"):
        seen = torch.isfinite(expected[name])
        assert torch.equal(seen, found[name].isfinite()), name
        torch.testing.assert_close(found[name][seen], expected[name][seen])
        assert torch.equal(expected[name].isnan(), found[name].isnan()), name


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 200])
def test_equal_scores_at_tau_one_are_exactly_zero_and_get_no_gradient(rows, renormalise):
    """Not only scores of 0: keys are copies of one key, whose product with a query rounds."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, length, 24, generator=generator) for length in (rows, 1, 200))
    case = Case(q, k.expand_as(v), v, torch.ones(2), None, {"renormalise": renormalise})
    found = run_named(case, "cpu")
    for name in ("out", "mass", "dq", "dk", "dv", "dtau"):
        assert found[name].count_nonzero() == 0, name
    assert torch.equal(found["zeros"], torch.arange(200.0)[-rows:].add(1).expand(1, 2, -1))


@pytest.mark.parametrize("rows", [1, 12, 700])
def test_one_head_is_split_over_threads(rows):
    """Rows keep their bits; what rows share is summed in an order that depends on the number of threads alone."""
    case = large(700, heads=1, kv_heads=1)
    case = replace(case, q=case.q[:, :, -rows:])
    alone = run_on(1, case)
    for threads in (2, 3, 5):
        found = run_on(threads, case)
        for name in ("out", "lse", "mass", "first_weight", "zeros", "dq"):
            assert torch.equal(alone[name], found[name]), name
        for name in ("dk", "dv", "dtau", "dbias", "dslopes"):
            torch.testing.assert_close(alone[name], found[name], rtol=1e-5, atol=1e-5)
        for _ in range(3):
            assert_same_bits(found, run_on(threads, case))


def run_on(threads, case):
    torch.set_num_threads(threads)
    return run_named(case, "cpu")


class TestSkipping:
    """Slopes leave weight only on near keys, so that tiles of far keys are empty for all rows of a late block."""

    FAR = 128
    """Keys of the first tile."""

    def make(self, rows, renormalise=False):
        case = large(400, heads=2)
        options = {"slopes": torch.full((2,), 0.5), "renormalise": renormalise}
        return replace(case, q=case.q[:, :, -rows:], bias=None, tau=torch.ones(2), options=options)

    @pytest.mark.parametrize("rows", [1, 40])
    def test_values_of_an_empty_tile_are_not_read(self, rows):
        """A product would spread NaN in them, though their weights are 0."""
        case = self.make(rows)
        v = case.v.clone()
        v[:, :, : self.FAR] = torch.nan
        clean, found = run_named(case, "cpu"), run_named(replace(case, v=v), "cpu")
        assert_same_bits(clean, found)

    def test_gradients_of_its_values_are_not_computed(self):
        case = self.make(40)
        found = run_named(case, "cpu", torch.full_like(case.q, torch.nan))
        assert found["dv"][:, :, : self.FAR].count_nonzero() == 0
        assert found["dv"][:, :, -40:].isnan().all()

    @pytest.mark.parametrize("renormalise", [False, True])
    def test_it_changes_no_bit(self, renormalise):
        """A row that has a weight in the first tile makes its block compute the tile for the other rows too."""
        case = self.make(40, renormalise)
        reaching = replace(case, q=case.q.clone())
        reaching.q[:, :, 5] = 300 * case.k[:, :, 7]
        grad = make_noise(case)
        grad[:, :, 5] = 0
        skipping, computing = (run_named(each, "cpu", grad) for each in (case, reaching))
        assert computing["first_weight"].count_nonzero() == 0
        far = lazy_attention(
            reaching.q,
            case.k,
            torch.ones_like(case.v) * (torch.arange(400) < self.FAR)[:, None],
            case.tau,
            **case.options,
        )
        assert far[:, :, 5].count_nonzero() == far[:, :, 5].numel()
        assert far[:, :, 6:].count_nonzero() == 0
        others = [*range(5), *range(6, 40)]
        for name in ("out", "lse", "mass", "zeros", "dq"):
            assert torch.equal(skipping[name][:, :, others], computing[name][:, :, others]), name
        assert torch.equal(skipping["dv"], computing["dv"])
        assert torch.equal(skipping["dk"], computing["dk"])


class TestOperators:
    """torch.compile and torch.export see a call as one operator."""

    @pytest.mark.parametrize("name", ["packed", *later(name for name in COMPILED if name != "packed")])
    def test_they_pass_opcheck(self, name):
        case = draw(45, length=15, **COMPILED[name]).to(torch.float32)
        call = Call(case.q, case.k, case.v, case.tau, case.bias, **case.options)
        leaves = [x if x is None else x.detach().requires_grad_() for x in call[:LEAVES]]
        opcheck(ops._forward, (*leaves, *call[LEAVES:], True, True))
        opcheck(ops._forward, (*call, False, False))
        _, sums, _ = ops._forward(*call, True, False)
        channels_first = (x.mT.contiguous().mT for x in call[:3])
        call = Call(*channels_first, *call[3:])
        opcheck(ops._forward, (*call, True, True))
        dlse = torch.zeros(case.q.shape[:3])
        for rest in ((None, False, False), (dlse, case.bias is not None, call.slopes is not None)):
            opcheck(ops._backward, (*call, sums, make_noise(case), *rest))

    @pytest.mark.parametrize("name", ["kv_lengths", "cu_seqlens"])
    def test_compiled_calls_do_not_read_beyond_the_keys(self, name):
        q, k = torch.randn(1, 1, 4 if name == "kv_lengths" else 20, 8), torch.randn(1, 1, 20, 8)
        wrong = {"kv_lengths": torch.tensor([10**7]), "cu_seqlens": torch.tensor([0, 15, 10, 20], dtype=torch.int32)}
        attend = torch.compile(
            lambda x: lazy_attention(q, k, k, torch.ones(1), backend="cpu", **{name: x}), backend="eager"
        )
        with pytest.raises(ValueError, match=f"{name} is .*; it reaches beyond"):
            attend(wrong[name])

    def test_negated_views_count_with_their_sign(self):
        q, k, v = (torch.randn(1, 1, 40, 8) for _ in range(3))
        tau, expected = torch.ones(1), lazy_attention(q, k, -v, torch.ones(1), backend="cpu")
        assert torch.equal(lazy_attention(q, k, torch._neg_view(v), tau, backend="cpu"), expected)
        assert torch.equal(lazy_attention(q, k, -v, torch._neg_view(-tau), backend="cpu"), expected)


def test_under_autocast_auto_runs_what_takes_its_dtype():
    case = large(20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match=r"backend is 'cpu' and q torch.bfloat16; give float32"):
            lazy_attention(case.q, case.k, case.v, case.tau, backend="cpu")
        out = lazy_attention(case.q, case.k, case.v, case.tau)
        assert out.dtype == torch.bfloat16
        leaf = case.tau.clone().requires_grad_()
    outside = lazy_attention(case.q, case.k, case.v, leaf, backend="cpu")
    (expected,) = torch.autograd.grad(outside.sum(), leaf, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.autograd.grad(outside.sum(), leaf)[0], expected)
    assert resolve_backend("auto", case.q) == "cpu"
