"""The fused kernels against the reference: over all options, and where blocks, buffers, addresses or operators matter.

Without a GPU they run in Triton's interpreter, where a tile costs milliseconds; with one the same tests run on it.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import (
    AXES,
    Case,
    RoundedProducts,
    assert_compiles_to_the_same_bits,
    assert_refused,
    assert_same_bits,
    assert_small_errors,
    device_for,
    draw,
    eager_errors,
    elementwise_max,
    flash_errors,
    make_noise,
    measure_errors,
    pairwise_cover,
    replace_infinite,
    run_named,
    tolerance,
    use_small_blocks,
)
from torch.library import opcheck

from bench import correctness
from flash_lazy import lazy_attention, resolve_backend
from flash_lazy.call import LEAVES, Call
from flash_lazy.fused import configurations, ops

pytest.importorskip("triton", reason="the fused kernels need triton, which is for Linux")
from flash_lazy.fused import backward, decode
from flash_lazy.fused.launch import balance_programs, makespan

DEVICE = device_for("triton")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

OPTIONS = {name: values for name, values in AXES.items() if name not in ("key_mask", "group", "kv_heads")}
SHAPES = {
    "heads": [(1, 1), (3, 1), (1, 2), (3, 2)],  # group, kv heads
    "length": [1, 2, 63, 65],
    "width": [16, 80, 24],
    "block": [(16, 16), (32, 16), (16, 32), (64, 64)],
    "dtype": DTYPES,
}
COVER = [setting | {"skip": index // 2 % 2 == 0} for index, setting in enumerate(pairwise_cover(OPTIONS | SHAPES))]
LONGER = [
    {"length": 64, "bias_width": 20, "width": 96, "block": (32, 32), "dtype": torch.float16},
    {"length": 127, "threshold": "per_token", "slopes": True, "window": 50, "block": (64, 32), "dtype": torch.bfloat16},
    {"length": 127, "bias_width": 40, "width": 128, "block": (32, 64), "dtype": torch.bfloat16},
    {"length": 130, "renormalise": True, "bias_width": 40, "width": 24, "block": (32, 64), "dtype": torch.float32},
    {"length": 257, "layout": "packed", "width": 256, "block": (32, 64), "dtype": torch.float16},
    {"length": 257, "sign": -1, "bias_width": 100, "block": (64, 64), "dtype": torch.float32},
]


def apply_setting(setting, monkeypatch):
    """Use the setting's block, skipping and backward pass; returns the arguments of `draw`, and the dtype."""
    rest = {"length": 65, "width": 16, **setting}
    block, dtype, (group, kv_heads) = rest.pop("block"), rest.pop("dtype"), rest.pop("heads", (1, 1))
    monkeypatch.setattr(configurations, "SKIP_EMPTY_TILES", rest.pop("skip", True))
    monkeypatch.setattr(configurations, "MERGED_BACKWARD", rest.pop("merged", False))
    if block is not None:
        use_small_blocks(monkeypatch, *block)
    return rest | {"group": group, "kv_heads": kv_heads, "batch": 1 if rest["length"] > 2 else 2}, dtype


def allowed(drawn, dtype, exact, grad):
    case = drawn.to(dtype)
    return eager_errors(case, exact, grad, RoundedProducts), flash_errors(case, grad)


def assert_equals_reference(setting, dtype, seed=31, mean=0.0):
    """Output, stats and all gradients: at most twice eager's error, or 1.5 times that of a softmax."""
    assert_small_errors(lambda each: errors_of_a_draw(setting, dtype, each, mean), (seed, *range(1000, 1004)))


def errors_of_a_draw(setting, dtype, seed, mean):
    drawn = draw(seed, mean=mean, **setting)
    grad = make_noise(drawn, mean)
    exact = run_named(drawn.to(torch.float64), "reference", grad)
    found = run_named(drawn.to(dtype), "triton", grad)
    eager, flash = allowed(drawn, dtype, exact, grad)
    if setting["length"] < 63 or setting.get("window") == 1:
        # Rows of one or two keys rarely round, and their gradients cancel: use the bounds of rows of three.
        more = draw(seed, mean=mean, **setting | {"length": max(63, setting["length"]), "window": 3})
        more_grad = make_noise(more, mean)
        others = allowed(more, dtype, run_named(more.to(torch.float64), "reference", more_grad), more_grad)
        eager, flash = elementwise_max(eager, others[0]), elementwise_max(flash, others[1])
    cancelled = dtype == torch.float32 or setting.get("window") == 1
    return measure_errors(
        found, exact, eager, flash, one_key_rounding(drawn, dtype, exact, grad) if cancelled else None
    )


def one_key_rounding(case, dtype, exact, grad):
    """Rounding in rows of one key: of terms that cancel exactly in eager, which uses one sum for both.

    In dq p dp k and delta k, rounded for their products; in dk and dbias dp and delta, each computed by a kernel of its
    own; in dv the weight over the mass.
    """
    options = {name: x for name, x in case.options.items() if name != "slopes"}
    level = replace(case, q=0 * case.q, bias=None, options=options)
    seen = (
        replace_infinite(run_named(level.to(torch.float64), "reference")["lse"]).exp().round()
    )  # equal scores: log of a count
    renormalise = case.options["renormalise"]
    mass = replace_infinite(exact["mass"])
    alive = (mass > 0) & (seen == 1)
    if not alive.any():
        return None
    dp = ((grad * exact["out"]).sum(-1) / (1 if renormalise else mass))[alive].abs().max()
    inverse = 1 / mass[alive].min() if renormalise else 1
    own, single = (torch.finfo(x).eps * inverse for x in (dtype, torch.float32))
    scale = case.q.shape[-1] ** -0.5
    return {
        "dq": own * scale * dp * case.k.abs().max(),
        "dk": single * scale * dp * case.q.abs().max(),
        "dbias": single * dp,
        "dv": own * exact["dv"].abs().max(),
    }


@pytest.mark.parametrize("renormalise", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"bias_width": 20, "slopes": True, "group": 3}, id="plain", marks=pytest.mark.long),
        pytest.param({"layout": "ragged"}, id="ragged", marks=pytest.mark.long),
        pytest.param({"layout": "packed", "window": 17}, id="packed"),
    ],
)
def test_gradients_of_the_log_sum_exp(setting, renormalise, monkeypatch):
    use_small_blocks(monkeypatch, 32, 16)

    def measure(seed):
        drawn = draw(seed, length=65, width=16, batch=1, renormalise=renormalise, **setting)
        grad, generator = make_noise(drawn), torch.Generator().manual_seed(seed)
        dlse = torch.randn(drawn.q.shape[:3], generator=generator)
        exact = run_named(drawn.to(torch.float64), "reference", grad, dlse)
        case = drawn.to(torch.float32)
        mine = run_named(case, "triton", grad, dlse)
        return measure_errors(mine, exact, eager_errors(case, exact, grad, RoundedProducts, dlse))

    assert_small_errors(measure, tuple(range(31, 36)))


def every(n, settings):
    """Parameters of which all but every n-th wait for `make test-all`."""
    return [
        pytest.param(setting, id=str(setting), marks=pytest.mark.long if index % n else ())
        for index, setting in enumerate(settings)
    ]


MERGED = [setting | {"merged": True} for setting in COVER]


@pytest.mark.parametrize(
    "setting", every(4, COVER) + every(12, MERGED) + [pytest.param(s, marks=pytest.mark.long) for s in LONGER]
)
def test_equals_reference(setting, monkeypatch):
    """Merged: dq from the sweep over rows."""
    rest, dtype = apply_setting(setting, monkeypatch)
    assert_equals_reference(rest, dtype)


@pytest.mark.parametrize(("dtype", "renormalise"), [(torch.float16, True), (torch.bfloat16, False)])
def test_common_means_cost_no_more_accuracy_than_in_eager(dtype, renormalise, monkeypatch):
    """Gradients are differences of sums that contain the means of k, v and the output's gradient."""
    use_small_blocks(monkeypatch, 32, 32)
    setting = {"length": 65, "width": 24, "bias_width": 20, "renormalise": renormalise, "batch": 1}
    assert_equals_reference(setting, dtype, mean=3.0)


def sparse(dtype=torch.float32, length=80, rows=None, renormalise=False):
    """Slopes keep only the nearest keys of a row, so that most tiles are empty."""
    generator = torch.Generator().manual_seed(27)
    q, k, v = torch.randn(3, 1, 2, length, 16, generator=generator).to(dtype)
    options = {"slopes": torch.full((2,), 0.5), "renormalise": renormalise}
    return Case(q[:, :, -(rows or length) :], k, v, torch.ones(2), 0.1 * torch.randn(2, 40), options)


def decoded(case, backend="triton"):
    """Output of a call without gradients and stats."""
    on = case.to_device(device_for(backend))
    with torch.no_grad():
        return lazy_attention(on.q, on.k, on.v, on.tau, on.bias, backend=backend, **on.options).cpu()


SHORT = [(24, torch.float32, None), (256, torch.bfloat16, 1)]
"""Where earlier blocks gave different results."""


@pytest.mark.parametrize(
    ("width", "dtype", "window"),
    [
        pytest.param(*each, marks=() if each in SHORT else pytest.mark.long)
        for each in product([16, 24, 80, 96, 128, 256], [torch.float32, torch.bfloat16], [None, 1])
    ],
)
def test_rows_of_one_key_are_dead_at_tau_one_in_every_kernel(width, dtype, window):
    """At the initial tau p = theta = 1 exactly, for all blocks in which a kernel sums its products."""
    generator = torch.Generator().manual_seed(width)
    q, k, v = (3 * torch.randn(1, 8, 17, width, generator=generator).to(dtype) for _ in range(3))
    case = Case(q, k, v, torch.ones(8), torch.randn(8, 4, generator=generator), {"window": window})
    grad = torch.zeros_like(q)
    grad[:, :, : None if window else 1] = 1  # rows that see one key
    found = run_named(case, "triton", grad)
    assert not found["out"][:, :, : None if window else 1].any()
    for name in ("dq", "dk", "dv", "dtau", "dbias"):
        assert not found[name].any(), name


def test_decoding_divides_the_valid_keys(monkeypatch):
    """Regardless of the cache's capacity: 300 keys of 2,048 are five tiles for six programs."""
    kernel, masses = decode.decode_sum_kernel, []

    class Watched:
        __name__, arg_names = kernel.__name__, kernel.arg_names

        def __getitem__(self, grid):
            return lambda **given: masses.append(given["masses"]) or kernel[grid](**given)

    monkeypatch.setattr(decode, "decode_sum_kernel", Watched())
    monkeypatch.setattr(decode, "count_resident_programs", lambda _: 3)
    q = torch.ones(1, 1, 1, 16, device=DEVICE)
    cache = torch.ones(1, 1, 2048, 16, device=DEVICE)
    lengths, tau = torch.tensor([300], device=DEVICE), torch.zeros(1, device=DEVICE)
    with torch.no_grad():
        out = lazy_attention(q, cache, cache, tau, kv_lengths=lengths, backend="triton")
    torch.testing.assert_close(out, torch.ones_like(q))
    torch.testing.assert_close(masses[0].flatten().cpu() * 300, torch.tensor([64.0, 64, 64, 64, 44, 0]))


POISONED = {"q": (0, 0, 1), "k": (0, 1, 17), "tau": 2, "bias": (3, 2), "slopes": 4}
"""Where each input of a case of five heads holds NaN."""


@pytest.mark.parametrize(
    ("decoding", "renormalise"),
    [(False, False), (True, True), *(pytest.param(*x, marks=pytest.mark.long) for x in ((False, True), (True, False)))],
)
def test_nan_propagates(renormalise, decoding, monkeypatch):
    """NaN where the reference has NaN: a diverged model must not look like one without attention."""
    use_small_blocks(monkeypatch, 16, 16)
    drawn = draw(43, length=20, batch=1, kv_heads=5, bias_width=5, slopes=True, renormalise=renormalise)
    case = drawn.to(torch.float32)
    case = replace(case, q=case.q[:, :, -3:]) if decoding else case
    for name, at in POISONED.items():
        case.leaves()[name][at] = torch.nan
    if decoding:
        found, expected = ({"out": decoded(case, backend)} for backend in ("triton", "reference"))
    else:
        found, expected = (run_named(case, backend) for backend in ("triton", "reference"))
    assert expected["out"].isnan().any((0, 2, 3)).all(), "in every head"
    for result in set(expected) & {"out", "mass", "dq", "dk", "dv"}:
        lost = expected[result].isnan() & ~found[result].isnan()
        # Eager products also spread NaN over hidden pairs, as 0 times NaN: these pairs are not compared.
        if result == "dk":
            lost[:, 0, 2:] = False
        if result == "dq":
            lost[:, 1, :17] = False
        assert not lost.any(), f"{result}: no NaN at {lost.nonzero()[:3].tolist()}"


@pytest.mark.parametrize("length", [1024, 4096, 16384])
def test_programs_of_the_key_gradient_end_together(length):
    """Simulated for the 264 slots of an H200: at most an eighth above the ideal; a fixed count took up to twice."""
    slots, block = 264, 64
    for batches, heads in product([1, 4], [1, 2, 5, 12, 20, 32, 64, 128]):
        costs = tuple(length - at for at in range(0, length, block) for _ in range(batches))
        ideal = max(sum(costs) * heads / slots, costs[0])
        chosen = balance_programs(slots, heads, costs)
        assert makespan(chosen, slots, heads, costs) <= 1.125 * ideal
        assert chosen <= max(1, 4 * slots / heads)  # each needs a partial gradient of the bias


class TestSkipping:
    """With FLASH_LAZY_SKIP_EMPTY_TILES, tiles without a surviving weight skip the product with the values."""

    @pytest.fixture(autouse=True)
    def skip_empty_tiles(self, monkeypatch):
        monkeypatch.setattr(configurations, "SKIP_EMPTY_TILES", True)

    @pytest.mark.parametrize("renormalise", [True, pytest.param(False, marks=pytest.mark.long)])
    @pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.long)])
    def test_results_are_bit_identical(self, renormalise, dtype, monkeypatch):
        use_small_blocks(monkeypatch, 16, 16)
        case, few = sparse(dtype, renormalise=renormalise), sparse(dtype, 200, 2, renormalise)
        skipping, decoding = run_named(case, "triton"), decoded(few)
        monkeypatch.setattr(configurations, "SKIP_EMPTY_TILES", False)
        assert_same_bits(skipping, run_named(case, "triton"))
        assert torch.equal(decoding, decoded(few))

    # A NaN value appears in the result exactly if its tile is multiplied.
    @pytest.mark.parametrize("rows", [16, pytest.param(2, marks=pytest.mark.long)])
    def test_empty_tiles_are_not_multiplied(self, rows, monkeypatch):
        use_small_blocks(monkeypatch, 16, 16)
        case = sparse(length=96, rows=rows)
        poisoned = replace(case, v=case.v.clone())
        poisoned.v[:, :, 16:48] = torch.nan
        expected, found = run_named(case, "triton"), run_named(poisoned, "triton")
        assert torch.equal(decoded(case), decoded(poisoned))
        assert_same_bits(expected, found)

    @pytest.mark.parametrize("rows", [16, pytest.param(2, marks=pytest.mark.long)])
    def test_a_tile_with_one_survivor_is_multiplied(self, rows, monkeypatch):
        use_small_blocks(monkeypatch, 16, 16)
        case = sparse(length=96, rows=rows)
        case.k[:, :, 40] = 200 * case.q[:, :, 1] / case.q[:, :, 1].norm(dim=-1, keepdim=True)  # row 1 attends to it
        exact = run_named(case.to(torch.float64), "reference")["out"]
        assert (exact[:, :, 1] - case.v[:, :, 40]).abs().max() < 0.1
        torch.testing.assert_close(decoded(case), exact.float(), **tolerance(case))
        torch.testing.assert_close(run_named(case, "triton")["out"], exact.float(), **tolerance(case))
        case.v[:, :, 40] = torch.nan
        assert decoded(case)[:, :, 1].isnan().all()
        found = run_named(case, "triton")
        assert found["out"][:, :, 1].isnan().all()
        assert found["dq"][:, :, 1].isnan().all()


@pytest.mark.parametrize("layout", [*(pytest.param(x, marks=pytest.mark.long) for x in ("plain", "ragged")), "packed"])
def test_buffers_need_no_initial_values(layout, monkeypatch):
    """With new tensors of NaN, or the largest integer."""
    use_small_blocks(monkeypatch, 16, 32)
    case = draw(33, length=40, width=24, layout=layout, bias_width=9, slopes=True, renormalise=True, window=30)
    case = case.to(torch.float32)
    few = replace(case, q=case.q[:, :, -2:]) if layout != "packed" else case
    expected, tail = run_named(case, "triton"), decoded(few)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty_like(case.q).isnan().all()
        assert case.q.new_empty(3, dtype=torch.int32).min() == torch.iinfo(torch.int32).max
        found, again = run_named(case, "triton"), decoded(few)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(expected, found)
    assert torch.equal(tail, again)


@pytest.fixture(scope="module")
def vast():
    """More elements than 32 bits can count; the system allocates only the accessed ones.

    `torch.empty` would fill them all after a training in this process, which is deterministic.
    """
    try:
        storage = torch.UntypedStorage(2 * (2**31 + 2**25), device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"4.4 GB of address space are not to be had: {error}")
    return torch.empty(0, dtype=torch.float16, device=DEVICE).set_(storage)


# Row 257 lies beyond; the second sequence and the second head do; rows of one tile do, which takes a copy.
STRIDES = {
    "rows": ((1, 1, 258), (1, 1, 2**23 - 8)),
    "sequences": ((2, 1, 3), (2**31, 16, 16)),
    "heads": ((1, 2, 3), (16, 2**31, 16)),
    "rows of a tile": ((1, 1, 3), (16, 16, 2**30)),
}


class TestAddresses:
    """Offsets beyond 2**31 elements through strides: bit-identical to compact tensors."""

    @pytest.mark.parametrize("name", ["k", *(pytest.param(x, marks=pytest.mark.long) for x in ("q", "v", "grad"))])
    @pytest.mark.parametrize("axis", STRIDES)
    def test_far_apart(self, axis, name, vast, monkeypatch):
        use_small_blocks(monkeypatch, 64, 64)
        shape, strides = STRIDES[axis]
        q, k, v, grad = torch.randn(4, *shape, 16, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
        case = Case(q, k, v, torch.ones(shape[1]), None, {})
        far = vast.as_strided((*shape, 16), (*strides, 1))
        far.copy_(grad if name == "grad" else getattr(case, name))
        assert (far.data_ptr() - far[-1, -1, -1].data_ptr()) / 2 <= -(2**31)
        away = (case, far) if name == "grad" else (replace(case, **{name: far}), grad)
        assert_same_bits(run_named(case, "triton", grad), run_named(away[0], "triton", away[1]))
        if name != "grad":
            few = [replace(x, q=x.q[:, :, -1:]) for x in (case, away[0])]
            assert torch.equal(*map(decoded, few))


def test_lengths_and_boundaries_with_strides(monkeypatch):
    """Views that share or skip elements give the results of copies."""
    use_small_blocks(monkeypatch, 64, 64)
    for name, layout in (("cu_seqlens", "packed"), ("kv_lengths", "ragged")):
        case = draw(36, layout=layout, length=40, bias_width=5).to(torch.float32)
        column = torch.stack([case.options[name], case.options[name] * 0], -1)[:, 0]
        strided = replace(case, options=case.options | {name: column})
        assert_same_bits(run_named(case, "triton"), run_named(strided, "triton"))
    few = replace(case, q=case.q[:, :, -2:])
    shared = torch.tensor(30).expand(4)
    views = (replace(few, options=few.options | {name: x}) for x in (shared, shared.clone()))
    assert torch.equal(*map(decoded, views))


@pytest.mark.parametrize(("switched_on", "stats", "calls"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_the_dq_kernel_for_hopper_takes_what_it_covers_if_switched_on(switched_on, stats, calls, monkeypatch):
    """Not the gradient of the log-sum-exp. What it receives is what it fills; only a GPU runs it."""
    received = []
    stub = SimpleNamespace(covers=lambda *_: True, compute_query_gradient=lambda *given: received.append(given))
    monkeypatch.setattr(backward, "hopper", stub)
    monkeypatch.setattr(configurations, "HOPPER_BACKWARD", switched_on)
    case = draw(38, length=20, width=16, batch=1, bias_width=7).to(torch.float32)
    run_named(case, "triton", make_noise(case), torch.ones(case.q.shape[:3]) if stats else None)
    assert len(received) == calls
    for call, grad, softmax, dq, by_row, survivors in received:
        rows = call.q.shape[:3]
        assert [*map(len, (softmax, by_row))] == [2, 4]
        assert grad.shape == dq.shape == call.q.shape
        assert by_row.shape[1:] == survivors.shape == rows


CUTS = (0, 1, 1, 120, 257, 300)
"""Of documents; none but the first begins or ends with a block."""


@pytest.mark.parametrize(
    ("width", "window"),
    [(64, None), *(pytest.param(*x, marks=pytest.mark.gpu) for x in ((64, 50), (128, None), (128, 50)))],
)
def test_nan_stays_in_its_document(width, window, monkeypatch):
    """On a Hopper card also in the kernels for it, whose tiles reach into the next document."""
    monkeypatch.setattr(configurations, "HOPPER_DOCUMENTS", True)
    monkeypatch.setattr(configurations, "HOPPER_BACKWARD", True)
    generator = torch.Generator().manual_seed(44)
    clean = torch.randn(4, 1, 2, CUTS[-1], width, generator=generator).bfloat16().to(DEVICE)
    poisoned = clean.clone()
    others = torch.ones(CUTS[-1], dtype=torch.bool, device=DEVICE)
    for document in (2, 4):
        poisoned[..., slice(*CUTS[document : document + 2]), :] = torch.nan
        others[slice(*CUTS[document : document + 2])] = False
    tau, bias = torch.ones(2, device=DEVICE), torch.randn(2, 40, generator=generator).to(DEVICE)
    cuts = torch.tensor(CUTS, dtype=torch.int32, device=DEVICE)
    results = []
    for *qkv, grad in (clean, poisoned):
        leaves = [x.requires_grad_() for x in qkv]
        out = lazy_attention(*leaves, tau, bias, cu_seqlens=cuts, window=window, backend="triton")
        results.append([x[:, :, others] for x in (out, *torch.autograd.grad(out, leaves, grad))])
    for before, after in zip(*results, strict=True):
        assert after.isfinite().all()
        assert torch.equal(before, after)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    "change",
    [{}, {"window": 100}, {"reach": None}, {"kv_heads": 2}, {"threshold": "per_token", "positions": 100}],
    ids=str,
)
def test_the_kernels_for_hopper_take_documents(change, width, monkeypatch):
    """As accurate as the gate of the benchmark asks."""
    monkeypatch.setattr(configurations, "HOPPER_DOCUMENTS", True)
    monkeypatch.setattr(configurations, "HOPPER_BACKWARD", True)
    monkeypatch.setitem(correctness.CASES, "packed", {"batch": 1, "cuts": CUTS[:5], "width": width, **change})
    rows = correctness.check_cases("triton", ["packed"])
    assert all(row["passed"] for row in rows), rows


def test_tiles_for_hopper_end_with_their_document(monkeypatch):
    """The copies' coordinates, by the rules of the engine that makes them: 0 beyond an axis, otherwise an address."""
    common = pytest.importorskip("flash_lazy.fused.hopper.common", reason="a triton without Gluon")
    x = torch.arange(50 * 2 * 64).bfloat16().view(1, 50, 2, 64).transpose(1, 2)
    rows = common.describe_keys(Call(x, x, x, torch.ones(2), cu_seqlens=torch.tensor(CUTS)), x, 16)
    below = (rows.base.data_ptr() - x.data_ptr()) // 2
    copied = []
    monkeypatch.setattr(common, "gl", SimpleNamespace(minimum=min))
    monkeypatch.setattr(common, "mbarrier", SimpleNamespace(wait=lambda *_: None, expect=lambda *_: None))
    engine = SimpleNamespace(async_copy_global_to_shared=lambda _, at, *__: copied.append(at))
    monkeypatch.setattr(common, "tma", engine)
    places = SimpleNamespace(type=SimpleNamespace(shape=[1]), index=lambda _: None)
    kernel_rows = SimpleNamespace(block_type=SimpleNamespace(shape=rows.block_shape, nbytes=0))
    for head, first, end in product([0, 1], [0, 1, 7, 33, 45, 50, 60], [1, 8, 34, 49, 50, 60]):
        if end < first or (end > 50 and first < end):
            continue
        common.copy_tile.fn(kernel_rows, 0, head, first, end, 5, places, places, places, 0)
        at = [start + torch.arange(size) for start, size in zip(copied[-1], rows.block_shape, strict=True)]
        found = torch.zeros(16, 64, dtype=x.dtype)
        for h, e, r in product(*(axis.tolist() for axis in at[:3])):
            if h < rows.shape[0] and e < rows.shape[1] and r < rows.shape[2]:
                offset = below + sum(index * step for index, step in zip((h, e, r), rows.strides, strict=False))
                assert 0 <= offset < x.numel()
                found[r - copied[-1][2]] = x.transpose(1, 2).reshape(-1)[offset : offset + 64]
        expected = torch.zeros(16, 64, dtype=x.dtype)
        real = x[0, head, first : min(end, first + 16)]
        expected[: len(real)] = real
        assert torch.equal(found, expected), (head, first, end)


OPERATOR_CASES = {
    "plain": {},
    "everything": {"bias_width": 7, "slopes": True, "renormalise": True, "window": 9, "group": 2},
    "ragged": {"layout": "ragged", "threshold": "per_token", "bias_width": 7},
    "packed": {"layout": "packed", "threshold": "seq_len", "slopes": True},
}


def operator_arguments(case):
    """Arguments shared by the operators."""
    call = Call(case.q, case.k, case.v, case.tau, case.bias, **case.options)
    return *(x if x is None else x.detach().requires_grad_() for x in call[:LEAVES]), *call[LEAVES:]


class TestOperators:
    @pytest.fixture(
        params=[
            pytest.param(case, id=name, marks=() if name == "everything" else pytest.mark.long)
            for name, case in OPERATOR_CASES.items()
        ]
    )
    def case(self, request, monkeypatch):
        use_small_blocks(monkeypatch, 16, 16)
        return draw(34, length=15, batch=1, width=16, **request.param).to(torch.float32).to_device(DEVICE)

    @pytest.mark.parametrize("stats", [False, pytest.param(True, marks=pytest.mark.long)])
    def test_forward_passes_opcheck(self, case, stats):
        opcheck(ops.forward, (*operator_arguments(case), True, stats))

    def test_backward_passes_opcheck(self, case):
        arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in operator_arguments(case)]
        out, softmax, mass, *_ = ops.forward(*arguments, True, False)
        kept = out if case.options["renormalise"] else None
        wanted = (case.bias is not None, "slopes" in case.options)
        opcheck(ops.backward, (*arguments, kept, make_noise(case).to(out), None, softmax, mass, *wanted))
        opcheck(ops.backward, (*arguments, kept, make_noise(case).to(out), softmax[0], softmax, mass, *wanted))

    def test_decode_passes_opcheck(self, case):
        if "cu_seqlens" in case.options:
            return  # decoding does not support packed sequences
        few = replace(case, q=case.q[:, :, -2:])
        opcheck(ops.decode, [x.detach() if isinstance(x, torch.Tensor) else x for x in operator_arguments(few)])

    def test_a_program_recorded_without_gradients_has_them(self, case):
        arguments = [*operator_arguments(case), True, False]
        leaves = [x for x in arguments[:LEAVES] if x is not None]

        def differentiate(operator, *more):
            return torch.autograd.grad(operator(*arguments[:-2], *more).square().sum(), leaves)

        expected = differentiate(lambda *given: ops.forward(*given)[0], True, False)
        assert all(map(torch.equal, expected, differentiate(lambda *given: ops.forward(*given)[0], False, False)))
        if "cu_seqlens" not in case.options:
            for mine, theirs in zip(differentiate(ops.decode), expected, strict=True):
                torch.testing.assert_close(mine, theirs)

    def test_compiles_to_the_same_bits(self, case):
        assert_compiles_to_the_same_bits(case, "triton")

        def attend(q):
            return lazy_attention(q, case.k, case.v, case.tau, case.bias, backend="triton", **case.options)

        few = case.q if "cu_seqlens" in case.options else case.q[:, :, -2:]
        with torch.no_grad():
            assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(few), attend(few))

    def test_second_backward_is_an_error(self, case):
        q = case.q.detach().requires_grad_()
        out = lazy_attention(q, case.k, case.v, case.tau, case.bias, backend="triton", **case.options)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match=r"flash_lazy\.backward\S* but no autograd"):
            grad.sum().backward()


REFUSED = {
    "a mask": ({}, {"key_mask": torch.ones(1, 6, dtype=torch.bool)}, ["key_mask", "kv_lengths or cu_seqlens"]),
    "float64": ({"dtype": torch.float64}, {}, ["q float64", "float16, bfloat16 or float32"]),
    "wide heads": ({"width": 257}, {}, ["D = 257", "D <= 256"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_call_names_argument_and_fix(name):
    changes, options, expected = REFUSED[name]
    q = torch.zeros(1, 1, 6, changes.get("width", 16), dtype=changes.get("dtype"), device=DEVICE)
    options = {option: x.to(DEVICE) for option, x in options.items()}
    attend = partial(lazy_attention, q, q, q, torch.ones(1, device=DEVICE), **options)
    assert_refused(partial(attend, backend="triton"), ["backend is 'triton'", *expected, "choose 'chunked'"])
    assert torch.equal(attend(), attend(backend="chunked"))


def test_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(configurations, "INTERPRETED", False)
    q = torch.zeros(1, 1, 6, 16)
    with pytest.raises(ValueError, match=r"backend is 'triton' and q on cpu; move .* to a GPU, or choose 'chunked'"):
        lazy_attention(q, q, q, torch.ones(1), backend="triton")
    assert resolve_backend("auto", q) in ("chunked", "cpu")


CACHED = {
    "bias_width": [None, 30, 1500],
    "window": [None, 40, 900],
    "layout": ["decode", "ragged"],
    "heads": [(1, 1), (3, 1), (1, 2)],
    "rows": [1, 2, 3],
    "width": [16, 24],
    "dtype": DTYPES,
}
DECODING = pairwise_cover({"skip": [False, True]} | OPTIONS | CACHED)


@pytest.mark.parametrize("setting", every(4, DECODING))
def test_decoding_equals_reference(setting, monkeypatch):
    """A few queries against a cache divided over several programs; kv_lengths of 0, of fewer keys, and of all."""
    monkeypatch.setattr(configurations, "INTERPRETED_RESIDENT", 64)
    rest, dtype = apply_setting({**setting, "length": 1200, "block": None}, monkeypatch)
    drawn = draw(35, **rest)
    exact = run_named(drawn.to(torch.float64), "reference")
    case = drawn.to(dtype)
    eager = eager_errors(case, exact, mode=RoundedProducts)
    # Keys beyond a sequence in its cache have no effect.
    lengths = case.options.get("kv_lengths", torch.tensor([1200]))
    beyond = (torch.arange(1200) >= lengths[:, None])[:, None, :, None]
    poisoned = replace(case, k=case.k.masked_fill(beyond, torch.nan), v=case.v.masked_fill(beyond, torch.nan))
    out = {"out": decoded(poisoned)}
    found = measure_errors(out, exact, eager, {"out": flash_errors(case)["out"]})
    assert not found.too_large(), found.too_large()
    assert torch.equal(out["out"], decoded(poisoned))
