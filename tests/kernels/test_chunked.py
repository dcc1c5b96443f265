"""`chunked` against the reference over all options; causality, isolation and bit-identity of every backend."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    AXES,
    COMPILED,
    THRESHOLDS,
    Case,
    assert_compiles_to_the_same_bits,
    assert_same_bits,
    device_for,
    draw,
    eager_errors,
    make_noise,
    measure_errors,
    pairwise_cover,
    require_library,
    run,
    run_named,
    use_small_blocks,
    widest_dtype,
)
from torch.library import opcheck

from flash_lazy import chunked, lazy_attention, tiling
from flash_lazy.call import LEAVES, Call

ONE_BLOCK = (2**30, 64)

COVER = pairwise_cover(AXES | {"length": [1, 2, 63, 65], "block": [(1, 1), (600, 8), (3000, 16), ONE_BLOCK]})
LONG = [
    {"length": 130, "bias_width": 40, "batch": 1, "block": (2000, 16)},
    {"length": 130, "threshold": "per_token", "renormalise": True, "window": 50, "batch": 1, "block": (2000, 16)},
]


WAYS = {
    "reference": ("reference", None),
    "chunked-small": ("chunked", (150, 4)),
    "chunked": ("chunked", ONE_BLOCK),
    "cpu": ("cpu", None),
    "triton-small": ("triton", (16, 16)),
}


def ways(*names):
    """Backends for `parametrize`; the interpreter of the fused kernels is slow, and test_triton.py covers them."""
    long = {"triton": pytest.mark.long}
    return [pytest.param(WAYS[name], id=name, marks=long.get(WAYS[name][0], ())) for name in names]


def only(*names):
    return pytest.mark.parametrize("backend", ways(*names), indirect=True)


takes_a_mask = only("reference", "chunked-small", "chunked", "cpu")
keeps_bits_for_any_strides = only("reference", "chunked", "cpu", "triton-small")
"""Rounding of small matrix products on the CPU depends on strides."""


def chunk(monkeypatch, elements, rows):
    """Set the score budget of a block and its preferred minimum of rows."""
    monkeypatch.setattr(tiling, "BLOCK_ELEMENTS_CPU", elements)
    monkeypatch.setattr(tiling, "FULL_ROWS", rows)


@pytest.fixture(params=ways(*WAYS))
def backend(request, monkeypatch):
    """The name of each backend, with small and with large blocks."""
    name, size = request.param
    if name == "chunked":
        chunk(monkeypatch, *size)
    if name == "cpu":
        require_library()
    if name == "triton":
        use_small_blocks(monkeypatch, *size)
    return name


@pytest.mark.parametrize("setting", COVER + LONG, ids=str)
def test_equals_reference(setting, monkeypatch):
    """With gradients of the output and of the log-sum-exp."""
    chunk(monkeypatch, *setting["block"])
    case = draw(11, **{name: value for name, value in setting.items() if name != "block"}).to(torch.float64)
    dlse = torch.randn(case.q.shape[:3], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    exact, mine = (run_named(case, backend, dlse=dlse) for backend in ("reference", "chunked"))
    for name, expected in exact.items():
        torch.testing.assert_close(
            mine[name], expected, rtol=1e-10, atol=1e-11, msg=lambda t, name=name: f"{name}: {t}"
        )
    if case.k.shape[2] < 63:
        return  # one or two keys round too rarely to compare the errors of two computations
    # The values are exact in bfloat16, so all three precisions have the same exact result.
    exact = run_named(case, "reference")
    for dtype in (torch.float32, torch.bfloat16):
        rounded = case.to(dtype)
        assert not measure_errors(run_named(rounded, "chunked"), exact, eager_errors(rounded, exact)).too_large()


@only("reference", "chunked-small", "cpu", "triton-small")
def test_the_log_sum_exp_alone_has_the_gradient_of_torch(backend):
    """The output is unused; the closed form is torch.logsumexp of the masked scores."""
    case = draw(42, length=12, bias_width=4, group=2).to(widest_dtype(backend))
    leaves = [x.detach().to(device_for(backend)).requires_grad_() for x in (case.q, case.k, case.bias)]
    q, k, bias = leaves
    _, stats = lazy_attention(q, k, case.v.to(q), case.tau.to(q), bias, backend=backend, return_stats=True)
    weights = torch.randn(stats.lse.shape, generator=torch.Generator().manual_seed(5), dtype=stats.lse.dtype).to(q)
    found = torch.autograd.grad((stats.lse * weights).sum(), leaves)

    own = torch.arange(12)
    distance = (own[:, None] - own).to(q.device)
    table = torch.nn.functional.pad(bias, (0, 8))[:, distance.clamp(min=0)]
    scores = q @ k.repeat_interleave(2, 1).mT / case.q.shape[-1] ** 0.5 + table
    lse = scores.masked_fill(distance < 0, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(stats.lse, lse)
    for mine, theirs in zip(found, torch.autograd.grad((lse * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_blocks_skip_keys_nobody_sees():
    def sizes(window):
        return [
            b.shape for b in tiling.make_blocks((1, 1, 1), [(slice(0, 4096), slice(0, 4096))], window, "cpu", False)[2]
        ]

    assert sum(rows * columns for rows, columns in sizes(None)) < 0.53 * 4096**2
    near = sizes(128)
    assert max(columns for _, columns in near) < 128 + max(rows for rows, _ in near)


@pytest.mark.parametrize(("length", "width", "tile", "block"), [(130, 8, 16, (3000, 16)), (700, 64, 256, (2**17, 64))])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_skipping_tiles_changes_no_bit(dtype, renormalise, length, width, tile, block, monkeypatch):
    """Slopes leave weight only on a row's nearest keys, so that most tiles are empty."""
    monkeypatch.setattr(chunked, "TILE_COLUMNS", tile)
    chunk(monkeypatch, *block)
    q, k, v = torch.randn(3, 1, 2, length, width, dtype=dtype, generator=torch.Generator().manual_seed(27))
    options = {"slopes": torch.full((2,), 0.5, dtype=dtype), "renormalise": renormalise}
    case = Case(q, k, v, torch.ones(2, dtype=dtype), torch.zeros(2, 40, dtype=dtype), options)
    tiles, found = chunked._split_tiles, []
    monkeypatch.setattr(chunked, "_split_tiles", lambda w: found.extend(tiles(w)) or tiles(w))
    skipping = run_named(case, "chunked")
    monkeypatch.setattr(chunked, "_split_tiles", lambda w: [(part, True) for part, _ in tiles(w)])
    assert_same_bits(skipping, run_named(case, "chunked"))
    asked = [alive for part, alive in found if part.stop - part.start == tile]
    assert 0 < sum(not alive for alive in asked) > len(asked) / 3


def test_only_tiles_without_weight_are_skipped(monkeypatch):
    monkeypatch.setattr(chunked, "TILE_COLUMNS", 4)
    w = torch.zeros(2, 3, 14)
    w[1, 2, 5] = 1e-30
    w[0, 0, 11] = torch.nan
    assert [(tile.start, tile.stop, bool(alive)) for tile, alive in chunked._split_tiles(w)] == [
        (0, 4, False),
        (4, 8, True),
        (8, 12, True),
        (12, 14, True),  # the last tile is not checked
    ]
    assert [tile for tile, _ in chunked._split_tiles(w[..., :4])] == [slice(0, 4)]


@pytest.mark.parametrize(
    "setting", pairwise_cover({"threshold": THRESHOLDS, "sign": [1, -1], "renormalise": [False, True]}), ids=str
)
def test_causality(setting, backend):
    case = draw(13, length=20, batch=1, bias_width=6, **setting).to(torch.float32)
    token = 11
    changed = replace(case, **{name: getattr(case, name).clone() for name in "qkv"})
    for x in (changed.q, changed.k, changed.v):
        x[:, :, token] = -3 * x[:, :, token] + 1
    before, after = (run(c, backend) for c in (case, changed))
    assert torch.equal(before[0][:, :, :token], after[0][:, :, :token])
    for mine, theirs in zip(before[1], after[1], strict=True):
        assert torch.equal(mine[..., :token], theirs[..., :token])
    assert not torch.equal(before[0][:, :, token:], after[0][:, :, token:])
    early = torch.zeros_like(case.q)
    early[:, :, :token] = 1
    grads = run(case, backend, early)[2]
    assert grads["k"][:, :, token:].count_nonzero() == grads["v"][:, :, token:].count_nonzero() == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_without_keys_are_zero(backend, sign):
    case = draw(18, sign=sign, length=12, threshold="constant").to(torch.float32)
    case = replace(case, q=case.q[:, :, 1:], options=case.options | {"kv_lengths": torch.tensor([0, 6])})
    found = run_named(case, backend)
    assert found["out"][0].count_nonzero() == found["out"][1, :, :5].count_nonzero() == 0
    assert found["lse"][0].isneginf().all()
    assert found["zeros"][0].count_nonzero() == found["mass"][0].count_nonzero() == 0
    assert found["dq"][0].count_nonzero() == found["dk"][0].count_nonzero() == 0
    assert all(x.isfinite().all() for name, x in found.items() if name != "lse")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("sign", [1, -1])
class TestPoison:
    """Hidden values may be NaN or inf, as in uninitialised padding."""

    def same(self, case, backend, poison, hidden, blind=None):
        """hidden: keys `[B, Lk]`. blind: rows `[B, Lq]` that see none, whose gradient is padding too."""
        hidden = hidden.expand(len(case.k), -1)[:, None, :, None]
        rows = torch.zeros(1, 1, 1, 1, dtype=torch.bool) if blind is None else blind[:, None, :, None]
        assert hidden.any()
        k, v = (x.masked_fill(hidden, poison) for x in (case.k, case.v))
        grad = torch.ones_like(case.q)
        expected = run_named(case, backend, grad)
        poisoned = replace(case, q=case.q.masked_fill(rows, poison), k=k, v=v)
        found = run_named(poisoned, backend, grad.masked_fill(rows, poison))
        assert all(x.isfinite().all() for name, x in found.items() if name != "lse")
        assert_same_bits(expected, found)

    @takes_a_mask
    def test_masked_keys(self, backend, poison, sign):
        case = draw(14, sign=sign, length=20, key_mask=True, bias_width=5, renormalise=True).to(torch.float32)
        blind = case.options["key_mask"].cumsum(-1) == 0
        assert blind.any()
        self.same(case, backend, poison, ~case.options["key_mask"], blind)

    def test_keys_beyond_kv_lengths(self, backend, poison, sign):
        case = draw(15, sign=sign, length=20, layout="ragged", bias_width=5).to(torch.float32)
        self.same(case, backend, poison, torch.arange(20) >= case.options["kv_lengths"][:, None])

    def test_keys_before_every_window(self, backend, poison, sign):
        case = draw(16, sign=sign, length=20, layout="decode", window=4).to(torch.float32)
        self.same(case, backend, poison, torch.arange(20) < 20 - case.q.shape[2] - 3)


@keeps_bits_for_any_strides
def test_strided_inputs(backend):
    case = draw(22, length=20, bias_width=5, slopes=True, threshold="per_token", group=2, kv_heads=2)
    case = case.to(torch.float32).to_device(device_for(backend))
    transposed = {name: getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qk"}
    halved = {name: torch.stack([getattr(case, name)] * 2, -1)[..., 0] for name in ("v", "bias")}
    strided = replace(case, **transposed, **halved, tau=case.tau.T.contiguous().T)
    assert not any(x.is_contiguous() for x in (strided.q, strided.k, strided.v, strided.tau, strided.bias))
    ones = torch.ones_like(case.q)
    expanded = ones[:1, :1, :1, :1].expand(case.q.shape)
    assert_same_bits(run_named(case, backend, ones), run_named(strided, backend, expanded))


@keeps_bits_for_any_strides
def test_expanded_inputs(backend):
    """Stride 0 of heads, sequences and columns; fewer columns than a tile; W and window larger than the keys."""
    case = draw(61, length=20, group=2, width=5, bias_width=40, slopes=True, window=99).to(torch.float32)
    case = case.to_device(device_for(backend))
    leaves = {name: x for name, x in case.leaves().items() if name != "slopes"}
    shared = {name: x[(slice(1), slice(1), slice(None), slice(1))[: x.dim()]] for name, x in leaves.items()}
    expanded = replace(case, **{name: x.expand_as(leaves[name]) for name, x in shared.items()})
    copies = replace(case, **{name: x.expand_as(leaves[name]).contiguous() for name, x in shared.items()})
    assert_same_bits(run_named(copies, backend), run_named(expanded, backend))


def test_second_call_has_the_same_bits(backend):
    case = draw(23, length=40, bias_width=20, slopes=True, threshold="per_token", group=2, batch=1).to(torch.float32)
    first = run_named(case, backend)
    torch.set_num_threads(2)  # only several threads accumulate in varying order
    several = [run_named(case, backend) for _ in range(3 if backend == "chunked" else 2)]
    torch.set_num_threads(1)
    for again in several[1:]:
        assert_same_bits(several[0], again)
    assert_same_bits(first, run_named(case, backend))


@only("reference", "chunked-small", "chunked", "triton-small")  # cpu is for float32
def test_autocast_casts_q_k_v_alone(backend):
    drawn, device = draw(24, length=20, bias_width=5), device_for(backend)
    full, half = (drawn.to(dtype).to_device(device) for dtype in (torch.float32, torch.bfloat16))
    expected = run_named(half, backend, torch.ones_like(half.q))
    leaves = {name: x.requires_grad_() for name, x in full.leaves().items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        out = lazy_attention(**leaves, backend=backend)
        mixed = lazy_attention(full.q, full.k, half.v, full.tau, full.bias, backend=backend)
    assert torch.equal(out.cpu(), expected["out"])
    assert torch.equal(mixed.cpu(), expected["out"])
    grads = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out), retain_graph=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert grad.dtype == leaf.dtype == torch.float32
        assert torch.equal(grad.cpu(), expected[f"d{name}"].float()), name
    if backend != "reference":  # a custom backward pass keeps its precision under autocast
        with torch.autocast(device, dtype=torch.bfloat16):
            again = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
        assert all(map(torch.equal, grads, again))


@pytest.mark.parametrize(("backend", "more"), [("chunked", 0), ("cpu", 1)])
def test_inference_keeps_nothing_and_training_its_inputs(backend, more):
    """`cpu` also keeps three numbers a row."""
    if backend == "cpu":
        require_library()
    case, kept = draw(26, length=65, bias_width=5).to(torch.float32), []
    leaves = case.leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        lazy_attention(**leaves, backend=backend)
        assert not kept
        lazy_attention(**{name: x.requires_grad_() for name, x in leaves.items()}, backend=backend)
    inputs = {x.data_ptr() for x in leaves.values()}
    assert inputs <= {x.data_ptr() for x in kept}
    assert [x.shape for x in kept if x.data_ptr() not in inputs] == more * [(3, *case.q.shape[:3])]


class TestCompiled:
    """torch.compile sees a call as one opaque operator."""

    @pytest.mark.parametrize(("backend", "dtype"), [("chunked", torch.bfloat16), ("cpu", torch.float32)])
    @pytest.mark.parametrize("name", COMPILED)
    def test_without_breaks_and_to_the_same_bits(self, name, backend, dtype):
        if backend == "cpu":
            require_library()
        assert_compiles_to_the_same_bits(draw(45, length=15, **COMPILED[name]).to(dtype), backend)

    @pytest.mark.parametrize(
        "name", ["plain", *(pytest.param(name, marks=pytest.mark.long) for name in COMPILED if name != "plain")]
    )
    def test_operators_pass_opcheck(self, name):
        case = draw(45, length=15, **COMPILED[name]).to(torch.bfloat16)
        call = Call(case.q, case.k, case.v, case.tau, case.bias, **case.options)
        leaves = [x if x is None else x.detach().requires_grad_() for x in call[:LEAVES]]
        opcheck(chunked._forward, (*leaves, *call[LEAVES:], True))
        opcheck(chunked._forward, (*call, False))
        dlse = torch.zeros(case.q.shape[:3])
        for rest in ((None, False), (dlse, case.bias is not None)):
            opcheck(chunked._backward, (*call, make_noise(case).to(case.q), *rest))
