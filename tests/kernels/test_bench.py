"""The kernel benchmark: cost model, inputs, peers, gate, tables, plots; its whole course with torch.cuda stubbed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import without_gpu
from triton.runtime.autotuner import Autotuner, Config
from without_gpu import POINTS

from bench import __main__ as command
from bench import compiled, course, device, provenance, results, timing, tuning
from bench import gate as gate_module
from bench import peers as peers_module
from bench.__main__ import main
from bench.course import Course
from bench.gate import GATE, gate
from bench.peers import Inputs, draw, draw_with_share, eager, empty_share, peers, set_recency, two_calls
from bench.points import DECODE, FORWARD, FULL, GUARDS, QUICK, TRAINING, BenchPoint, planned_seconds, red
from bench.results import plots, tables
from bench.timing import measure, measure_ceilings, share_of_ceiling, take_turns
from bench.worker import _CONTEXT, GpuWorker, Outcome
from flash_lazy import lazy_attention
from flash_lazy.fused import configurations

CPU = torch.device("cpu")


@pytest.fixture
def on_cpu(monkeypatch):
    """torch.cuda stubbed in this process."""
    without_gpu.install(monkeypatch.setattr)


def point(operation=FORWARD, batch=1, length=128, heads=2, kv_heads=2, width=16, reach=512, share=0.0):
    return BenchPoint(operation, batch, length, heads, kv_heads, width, reach, share)


def peers_named(authors):
    return {peer.name: peer for peer in peers("chunked", authors)}


def random_inputs(length, recency=20.0, **shape):
    inputs = draw(point(length=length, batch=2, **shape), CPU, torch.float64)
    set_recency(inputs, recency)
    return Inputs(*(x.double() for x in inputs))


def test_products_of_a_tile():
    full, none = ({kind: compiled.products("forward+backward", kind, f) for kind in ("softmax", "lazy", "authors")}
                  for f in (1, 0))  # fmt: skip
    assert full == {"softmax": 7, "lazy": 11, "authors": 12}
    assert none == {"softmax": 7, "lazy": 5, "authors": 12}
    assert compiled.products("forward", "lazy", 0.5) == 2
    text = compiled.cost_model()
    assert "| forward+backward | flash_lazy | 5 + 6 f | 11 | 9.2 | 7.4 | 5.6 | 5 |" in text


@pytest.mark.parametrize("width", [64, 128])
def test_bytes_are_those_of_the_launched_tensors(width):
    """The formulas of the cost model against what the launcher allocates and hands to the kernels."""
    small = {"tau", "strip", "maxima", "alive_tiles", "dbias"}
    for name in compiled.MOVED:
        tensors = compiled.launch_arguments(name, torch.bfloat16, width).items()
        sizes = [x.numel() * x.element_size() for key, x in tensors if isinstance(x, torch.Tensor) and key not in small]
        assert sum(sizes) == compiled.moved_bytes(name, width)
    rows, buffers = 4 * 4 * 16 * 4096, compiled.buffer_bytes(width)
    assert buffers["softmax"] / 2 == buffers["delta"] == buffers["survivors"] == rows
    blocks = configurations.CONFIGURATIONS["forward"][2][width]
    assert buffers["maxima"] == 4 * 264 * max(-(-4096 // b.n) * b.m for b in blocks)
    assert buffers["alive_tiles"] == 4 * 264 * max(-(-4096 // b.n) for b in blocks)
    assert buffers["strip"] == 4 * 16 * (512 + 512)
    assert buffers["dbias"] == 4 * 16 * 512 * 33  # two programs of a kv head for each of its 264 / 16 places


def test_a_default_configuration_compiles_within_its_limits():
    code = (
        "import json; from bench.compiled import compile_kernel; "
        "from flash_lazy.fused.configurations import CONFIGURATIONS; "
        "print(json.dumps(compile_kernel('query_gradient', CONFIGURATIONS['query_gradient'][2][64][0], 90)._asdict()))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["shared"] <= compiled.SHARED_LIMITS[90]
    assert 32 <= found["registers"] <= 255
    assert found["instructions"] == ["wgmma"]
    assert compiled.looped_spills(found) == 0


def test_compiling_needs_a_process_that_does_not_interpret(monkeypatch):
    monkeypatch.setattr(configurations, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match=r"^compiling needs a process without TRITON_INTERPRET=1[^\n]*$"):
        compiled.compile_kernel("decode_scores", None, 90)


def test_decoding_has_no_packed_variant():
    with pytest.raises(ValueError, match="decode_values has neither packed nor stats"):
        compiled.launch_arguments("decode_values", torch.bfloat16, 64, compiled.Variant(packed=True))


def test_innermost_product_loops_alone_are_counted():
    listing = """
        /*0000*/                   STL [R1], R2 ;
        /*0010*/                   LDL R2, [R1] ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/                   LDL.64 R4, [R1+0x8] ;
        /*0034*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0038*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/              @!P0 BRA 0x20 ;
        /*0050*/                   STL.64 [R1], R2 ;
        /*0060*/               @P1 BRA 0x10 ;
        /*0070*/                   LDL R2, [R1] ;
        /*0080*/               @P1 BRA 0x70 ;
"""
    assert compiled.product_loops(listing) == [compiled.Loop(instructions=5, barriers=1, waits=1, spills=1)]
    assert compiled.product_loops("") == []


def test_the_compiled_table_shows_limits_and_failures():
    row = {
        "kernel": "forward",
        "dtype": "bf16",
        "width": 64,
        "target": 80,
        "blocks": {"m": 128, "n": 64, "warps": 8, "stages": 3},
    }
    loops = compiled.Loop(275, 2, 2, 0)._asdict(), compiled.Loop(524, 40, 2, 3)._asdict()
    good = row | compiled.Compiled(170 * 1024, 255, 16, loops, ("mma.sync",), False)._asdict()
    text = compiled.table([good, row | {"target": 100, "failed": "PassError: a | b"}])
    assert "| sm_80 | 128 x 64, 8, 3 | 170.0 (over) | 163 | no | 255 | 16 | 3 | mma.sync | 275 (2), 524 (40) |" in text
    assert "failed" in text.splitlines()[-1]
    assert {line.count("|") for line in text.splitlines()} == {14}


def test_the_schedule_follows_from_the_counts():
    """All tiles of the example, walked over one by one; and cycles of a processor, which has 2048, 16 and 4 of each."""
    length, reach = compiled.LENGTH, compiled.REACH
    for name, m, n in (("forward", 128, 64), ("query_gradient", 64, 32), ("key_gradient", 128, 64)):
        row, key = torch.meshgrid(torch.arange(0, length, m), torch.arange(0, length, n), indexing="ij")
        seen = row + m > key
        plain = row - (key + n - 1) >= reach  # the least distance of the tile
        assert compiled.tile_counts(name, m, n) == (int((seen & plain).sum()), int((seen & ~plain).sum()))
    loops = [compiled.Loop(instructions, 2, 2, 0)._asdict() for instructions in (400, 800)]
    row = {"kernel": "query_gradient", "dtype": "bf16", "width": 64, "target": 90}
    row |= {
        "blocks": {"m": 64, "n": 64, "warps": 4, "stages": 2},
        "registers": 255,
        "shared": 120 * 1024,
        "loops": loops,
    }
    plain, near = (64 * count for count in compiled.tile_counts("query_gradient", 64, 64))
    cycle = 1e3 / 132 / 1.755e9
    products = (plain + near) * 4 * 64 * 64 * 64 / 2048 * cycle
    issue = (plain * 400 + near * 800) * cycle
    figures = f"| 1 | {products:.2f} | {(plain + near) * 256 * cycle:.2f} | {issue:.2f} |"
    text = compiled.schedule([row, row | {"dtype": "fp32"}, row | {"kernel": "decode_values"}])
    assert f"| query_gradient | 64 | 64 x 64, 4 {figures} {issue:.2f} to {products + issue:.2f} |\n" in text
    assert text.count("query_gradient") == 1


def tiles_alive(inputs):
    """Whether a weight survives, by row and tile of 64 keys: values that name their tile, in float64."""
    q, k, _, tau, bias = (x.double() for x in inputs)
    blocks = k.shape[2] // 64
    names = torch.nn.functional.one_hot(torch.arange(k.shape[2]) // 64).double().expand(*k.shape[:2], -1, -1)
    width = max(blocks, q.shape[3])
    q, k, names = (torch.nn.functional.pad(x, (0, width - x.shape[3])) for x in (q, k, names))
    return lazy_attention(q, k, names, tau, bias, scale=inputs.q.shape[3] ** -0.5)[..., :blocks] > 0


@pytest.mark.parametrize(("asked", "length"), [(0.0, 512), (0.3, 1024), (0.6, 1024), (0.9, 2048)])
def test_the_share_of_empty_tiles_is_set(asked, length):
    inputs, share, _ = draw_with_share(point(length=length, heads=1, kv_heads=1, width=32, share=asked), CPU)
    assert share == pytest.approx(asked, abs=0.03)
    alive, blocks = tiles_alive(inputs)[0, 0].unflatten(0, (-1, 64)).any(1), length // 64
    assert share == pytest.approx(1 - alive.sum().item() / (blocks * (blocks + 1) / 2), abs=0.03)


def test_a_decoded_tile_is_empty_where_no_query_of_its_kv_head_needs_it():
    inputs, share, _ = draw_with_share(point(DECODE, 2, 1024, 4, 2, 32, share=0.5), CPU)
    assert [tuple(x.shape) for x in inputs] == [(2, 4, 1, 32), (2, 2, 1024, 32), (2, 2, 1024, 32), (4,), (4, 512)]
    alive = tiles_alive(inputs)[:, :, 0].unflatten(1, (2, 2)).any(2)
    assert share == pytest.approx(0.5, abs=0.05)
    assert share == pytest.approx(1 - alive.float().mean().item(), abs=0.03)


def test_a_sample_of_row_blocks_stands_for_all():
    inputs, _, _ = draw_with_share(point(length=1024, width=32, share=0.6), CPU)
    assert empty_share(inputs, sampled=8) == pytest.approx(empty_share(inputs, sampled=10**6), abs=0.03)


def gradients(attend, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    return out.detach(), torch.autograd.grad(out, leaves, grad)


def reference(*inputs):
    return lazy_attention(*inputs, backend="reference")


def test_eager_is_the_function():
    inputs = random_inputs(100)
    for found, expected in zip(gradients(eager, inputs)[1], gradients(reference, inputs)[1], strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(eager(inputs.q[:, :, -1:], *inputs[1:]), reference(*inputs)[:, :, -1:])


def dense_attention(q, k, v, *, score_mod, block_mask, return_aux, enable_gqa):  # noqa: ARG001
    """What FlexAttention computes, on whole matrices, with gradients on a CPU; `block_mask` is a bool matrix."""
    assert enable_gqa == (q.shape[1] > k.shape[1])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    batch, head, row, key = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = score_mod(q @ k.mT * q.shape[3] ** -0.5, batch, head, row, key)
    scores = scores.masked_fill(~block_mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return scores.softmax(-1).masked_fill(empty, 0) @ v, SimpleNamespace(lse=lse)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_two_calls_are_the_function(kv_heads):
    """Gradients included: the logarithm of a weight that is cut must not turn them into NaN."""
    inputs = random_inputs(96, kv_heads=kv_heads)
    causal = torch.ones(96, 96, dtype=torch.bool).tril()
    found = gradients(lambda *x: two_calls(*x, causal, dense_attention), inputs)
    expected = gradients(reference, inputs)
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_flex_attention_takes_the_two_calls(monkeypatch, kv_heads):
    """Not compiled, which takes a compiler and minutes; FlexAttention's own call of torch.compile runs it eagerly."""
    given = torch.compile
    compile = lambda function, **options: given(function, **options) if "backend" in options else function  # noqa: E731
    monkeypatch.setattr(torch, "compile", compile)
    flex = peers_named(None)["FlexAttention, two calls"].attend
    inputs = random_inputs(128, kv_heads=kv_heads)
    expected = reference(*inputs)
    torch.testing.assert_close(flex(*inputs), expected)
    torch.testing.assert_close(flex(inputs.q[:, :, -1:], *inputs[1:]), expected[:, :, -1:])
    peers_module._compiled_flex.cache_clear()


def test_the_authors_kernel_is_loaded_from_a_checkout(tmp_path):
    """Their tau is added; and a peer that is not there says why."""
    source = "def lazy_attention_triton(q, k, v, bias, tau, window_size=None, varlen=None):\n    return tau\n"
    (tmp_path / "lazy_attention_triton.py").write_text(source)
    inputs = random_inputs(64)
    authors = peers_named(tmp_path)["the authors' kernel"]
    torch.testing.assert_close(authors.attend(*inputs), -inputs.tau)
    with pytest.raises(NotImplementedError, match="it has no decoding"):
        authors.attend(inputs.q[:, :, -1:], *inputs[1:])
    with pytest.raises(NotImplementedError, match="it has no grouped heads"):
        authors.attend(*random_inputs(64, kv_heads=1))
    with pytest.raises(FileNotFoundError, match="no checkout was given"):
        peers_named(None)["the authors' kernel"].attend(*inputs)


def test_adasplash_is_called_where_it_is_installed(monkeypatch):
    adasplash, inputs = peers_named(None)["AdaSplash"], random_inputs(64)
    with pytest.raises(ModuleNotFoundError, match="adasplash"):
        adasplash.attend(*inputs)
    stub = SimpleNamespace(adasplash=lambda q, k, v, is_causal: (q, k, v, is_causal))
    monkeypatch.setitem(sys.modules, "adasplash", stub)
    assert adasplash.attend(*inputs) == (*inputs[:3], True)


def test_who_keeps_all_scores_is_measured_where_they_are_few(monkeypatch):
    monkeypatch.setattr(peers_module, "MOST_SCORES", 2 * 2 * 64 * 64)
    plain = peers_named(None)["eager"]
    assert plain.attend(*random_inputs(64)).shape == (2, 2, 64, 16)
    with pytest.raises(NotImplementedError, match=r"it keeps all 6.6e\+04 scores; it is measured up to 1.6e\+04"):
        plain.attend(*random_inputs(128))


def test_sdpa_reads_grouped_heads():
    inputs = random_inputs(64, kv_heads=1)
    softmax = peers_named(None)["SDPA MATH"]
    k, v = (x.repeat_interleave(2, 1) for x in inputs[1:3])
    expected = torch.nn.functional.scaled_dot_product_attention(inputs.q, k, v, is_causal=True)
    torch.testing.assert_close(softmax.attend(*inputs), expected)


@pytest.mark.usefixtures("on_cpu")
def test_the_gate_passes_a_right_backend():
    decodes = "decode, two kv heads"
    cases = ["bf16, D = 64", "fp32, D = 64", "documents", "a tau per position", "ragged", "window", "renormalised"]
    rows = gate("chunked", [*cases, "most tiles empty", decodes])
    assert all(row["passed"] for row in rows)
    assert {row["result"] for row in rows} == {"out", "out, training", "q", "k", "v", "tau", "bias", "slopes"}
    assert [row["result"] for row in rows if row["case"] == decodes] == ["out"]


@pytest.mark.parametrize("fault", ["scale", "nan", "raise", "unsteady"])
@pytest.mark.usefixtures("on_cpu")
def test_the_gate_fails_a_wrong_one(monkeypatch, fault):
    calls = []

    def wrong(*args, backend, **kwargs):
        out = lazy_attention(*args, backend=backend, **kwargs)
        if backend == "reference":
            return out
        calls.append(fault)
        if fault == "raise":
            raise RuntimeError("out of resource\nand more")
        return out * {"scale": 1.02, "nan": float("nan"), "unsteady": 1 + 0.01 * (len(calls) > 2)}[fault]

    monkeypatch.setattr(gate_module, "lazy_attention", wrong)
    rows = gate("chunked", ["bf16, D = 64"])
    assert not any(row["passed"] for row in rows if row.get("result") in (None, "out"))
    if fault == "raise":
        assert rows == [{"case": "bf16, D = 64", "passed": False, "failed": "RuntimeError: out of resource"}]


def test_a_red_row_concerns_the_points_that_its_case_stands_for():
    def names(case, result=None):
        row = {"case": case, "passed": False} | ({"result": result} if result else {})
        good = {"case": case, "result": "tau", "passed": True}
        return [str(p) for p in FULL if red(p, [good, row])]

    assert set(GUARDS) < set(GATE)
    assert names("documents") == names("fp32, D = 64") == []
    assert names("bf16, D = 64", "k") == [str(p) for p in FULL if p.width == 64 and p.operation == TRAINING]
    assert names("bf16, D = 64") == [str(p) for p in FULL if p.width == 64 and p.operation != DECODE]
    assert names("decode, D = 128", "out") == [str(p) for p in FULL if p.width == 128 and p.operation == DECODE]
    assert names("one kv head") == [str(p) for p in FULL if p.kv_heads == 4 and p.operation != DECODE]
    assert red(QUICK[0], [{"case": "bf16, D = 128", "result": "out", "passed": False}]) == ["bf16, D = 128: out"]
    for p in FULL:
        assert any(guards(p) for guards in GUARDS.values())


def test_the_points_are_the_promised_ones():
    assert len(set(FULL)) == len(FULL)
    assert FULL[: len(QUICK)] == QUICK
    assert planned_seconds(QUICK) < 60 * command.QUICK_MINUTES
    assert QUICK[0] == BenchPoint(FORWARD, 4, 4096, 16, 16, 128, 512, 0.0)
    for operation in (FORWARD, TRAINING):
        mine = [p for p in FULL if p.operation == operation]
        for width in (64, 128):
            plain = [p for p in mine if (p.width, p.kv_heads, p.reach) == (width, 16, 512)]
            assert {p.length for p in plain} == {1024, 2048, 4096, 8192, 16384}
            assert {p.share for p in plain if p.length == 4096} == {0.0, 0.3, 0.6, 0.9}
        assert {p.length for p in mine if p.kv_heads == 4} == {1024, 4096, 16384}
        assert {p.reach for p in mine} == {512, 4096}
    decodes = [p for p in FULL if p.operation == DECODE]
    assert {p.batch for p in decodes} == {1, 8, 64}
    assert {(p.length, p.rows) for p in decodes} == {(32768, 1)}
    assert {p.kv_heads for p in decodes} == {4, 16}


@pytest.mark.usefixtures("on_cpu")
def test_a_step_that_fails_leaves_the_others():
    calls = []

    def breaks():
        calls.append(0)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("out of memory, tried\nto allocate")

    used = []
    steps = {"good": [partial(used.append, copy) for copy in (0, 1)], "bad": [breaks]}
    times, failed = take_turns(steps, 5)
    assert len(times["good"]) == 5
    assert used == [0, 1, 0, 1, 0, 1, 0]  # each copy once before the rounds that count
    assert min(times["good"]) >= 0
    assert failed == {"bad": "OutOfMemoryError: out of memory, tried"}
    assert len(calls) == 3


@pytest.mark.usefixtures("on_cpu")
def test_what_breaks_the_device_is_not_survived(monkeypatch):
    def breaks():
        monkeypatch.setattr(device, "DEVICE", torch.device("meta"))
        raise RuntimeError("an illegal memory access was encountered")

    assert not device.broken()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        take_turns({"bad": [breaks]}, 5)
    assert device.broken()


@pytest.mark.usefixtures("on_cpu")
def test_inputs_are_copied_until_they_leave_the_cache():
    assert device.copies(1_000_000) == 1
    assert device.copies(100_000) == 3
    assert device.copies(99_999) == 4
    assert device.copies(2**30) == 1  # no more than half the free memory holds


@pytest.mark.usefixtures("on_cpu")
def test_a_point_is_measured(monkeypatch):
    """Every peer has its figures or a reason; what is said of the values is that of the first peer's."""
    monkeypatch.setattr(tuning, "chosen", lambda: {"forward": "some blocks"})
    found = measure(point(TRAINING), "chunked", None, {"eager": "why"}, rounds=2)
    assert list(found["cells"]) == list(results.KINDS)
    assert found["copies"] == -(-3 * 100_000 // (4 * 2 * 128 * 16 * 2))
    assert found["cells"]["eager"] == {"not_run": "why"}
    assert "no checkout" in found["cells"]["the authors' kernel"]["not_run"]
    ours = found["cells"]["flash_lazy"]
    assert ours["peak_bytes"] == 2000
    assert ours["blocks"] == {"forward": "some blocks"}
    assert 0 < ours["milliseconds"]["lower"] <= ours["milliseconds"]["median"] <= ours["milliseconds"]["upper"]
    decoded = measure(point(DECODE), "chunked", None, {}, rounds=2)["cells"]
    assert decoded["flash_lazy"]["difference"] == 0
    assert 0 < decoded["eager"]["difference"] < 0.01
    assert "difference" not in decoded["SDPA MATH"]


@pytest.mark.usefixtures("on_cpu")
def test_ceilings_are_rates(monkeypatch):
    times = {"copy": [2.0], "largest": [3.0], "sum": [1.0], "product 32": [1.0], "product 48": [8.0]}

    def timed(steps, rounds):  # noqa: ARG001
        assert [tuple(calls[0]().shape) for calls in steps.values()] == [(256,), (8,), (), (32, 32), (48, 48)]
        return times, {}

    monkeypatch.setattr(timing, "take_turns", timed)
    found = measure_ceilings(copied=1024, read=2048, sizes=(32, 48))
    assert found == {
        "copy_bytes": 2 * 1024 / 2e-3,
        "read_bytes": 2048 / 1e-3,
        "product_tflops": 2 * 32**3 / 1e-3 / 1e12,
    }


def test_blocks_are_timed_anew_at_every_point(monkeypatch):
    times = {64: [0.5] * 3, 128: [0.25] * 3, 256: [float("inf")] * 3}
    launched = []

    def query_gradient_kernel():
        raise AssertionError

    fake = SimpleNamespace(fn=query_gradient_kernel, run=lambda **options: launched.append(options["BLOCK_M"]))
    configs = [Config({"BLOCK_M": m, "BLOCK_N": 32}, num_warps=8, num_stages=2) for m in times]
    tuner = Autotuner(fake, ["size"], configs, ["size"], None, None, cache_results=True)
    tuner.cache_results = True  # else triton turns it off where it interprets
    monkeypatch.setattr(tuner, "_bench", lambda config, **_: times[config.kwargs["BLOCK_M"]])
    monkeypatch.setattr(Autotuner, "run", tuning._run_anew)
    monkeypatch.setattr(Autotuner, "check_disk_cache", lambda *_: pytest.fail("read a choice from disk"))
    tuning.forget()
    tuning.watch()
    tuner.run(size=4096)
    tuner.run(size=4096)
    names = [f"BLOCK_M {m}, BLOCK_N 32, 8 warps, 2 stages" for m in times]
    found = dict(zip(names, (0.5, 0.25, None), strict=True))
    assert tuning.chosen() == {"query_gradient": {"blocks": names[1], "milliseconds": found}}
    times[64] = [0.125] * 3
    tuning.watch()
    assert tuning.chosen() == {}
    tuner.run(size=4096)  # the next peer of the point, and the turns that all of them take
    tuning.forget()
    tuner.run(size=4096)
    assert launched == [128, 128, 128, 64]


def test_every_choice_of_a_list_can_be_taken():
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    given = configurations.choices("forward", q)
    taken = []
    for index in range(4):
        with tuning.choice(index):
            assert not configurations.AUTOTUNE
            taken.append(configurations.choices("forward", q)[0])
            assert sorted(configurations.choices("forward", q)) == sorted(given)
    assert taken == [*given, given[0]]


def test_a_worker_outlives_what_it_runs(tmp_path):
    """A value, an error, a death while it is idle, and a death at work."""
    with GpuWorker(partial(without_gpu.prepare, {}), tmp_path / "log") as worker:
        first = worker.run(os.getpid, 60)
        assert worker.run(partial(int, "x"), 60).failed == "ValueError: invalid literal for int() with base 10: 'x'"
        assert worker.run(os.getpid, 60) == first
        os.kill(first.value, signal.SIGKILL)
        time.sleep(0.1)
        assert worker.run(os.getpid, 60).failed == "the process died with status -9"
        second = worker.run(os.getpid, 60)
        assert second.value not in (None, first.value)
        assert worker.run(partial(os.kill, second.value, signal.SIGSEGV), 60).ended
        assert worker.run(without_gpu.leave_a_child, 60).failed == "the process died with status 5"
    log = (tmp_path / "log").read_text()
    assert "ValueError: invalid literal" in log
    assert "Fatal Python error: Segmentation fault" in log
    with pytest.raises(ProcessLookupError):
        os.kill(second.value, 0)


@pytest.fixture
def few_cases(monkeypatch):
    """Two cases that stand for POINTS, and one that stands for none."""
    names = ("bf16, D = 64", "two kv heads")
    monkeypatch.setattr(course, "GATE", {name: GATE[name] for name in (*names, "decode, D = 128")})
    monkeypatch.setattr(course, "GUARDS", {name: GUARDS[name] for name in names})


def run_course(out, faults, time_anyway=False, minutes=None):
    setup = partial(without_gpu.prepare, faults)
    status = Course(out, POINTS, "chunked", None, minutes, time_anyway, setup).run(fresh=False)
    return status, json.loads((out / "bench.json").read_text())


FIRST, GROUPED, DECODED = map(str, POINTS)


@pytest.mark.usefixtures("few_cases")
def test_what_goes_wrong_costs_that_alone(tmp_path, capsys):
    """A peer that raises, one that ends the process and one that breaks CUDA; a red case; then it is timed anyway."""
    faults = {"eager": "exit", "AdaSplash": "break", "FlexAttention, two calls": "raise", "two kv heads": "exit"}
    status, result = run_course(tmp_path, faults)
    assert status == 1
    records = result["points"]
    assert records[GROUPED] == {"point": POINTS[1]._asdict(), "blocked": ["two kv heads"]}
    for name in (FIRST, DECODED):
        cells = records[name]["cells"]
        assert cells["flash_lazy"]["milliseconds"]["median"] > 0
        assert cells["eager"] == {"not_run": "it ended the process: the process died with status 9"}
        assert cells["AdaSplash"] == {"not_run": "it ended the process: RuntimeError: no such thing"}
        assert cells["FlexAttention, two calls"] == {"not_run": "RuntimeError: no such thing"}
        assert sorted(records[name]["ended"]) == ["AdaSplash", "eager"]
    assert {row["case"]: row["passed"] for row in result["gate"]} == {
        "bf16, D = 64": True, "two kv heads": False, "decode, D = 128": True,
    }  # fmt: skip
    assert result["ceilings"]["product_tflops"] > 0
    assert "wrong: two kv heads: the process died with status 9" in capsys.readouterr().out
    text = (tmp_path / "bench.md").read_text()
    assert f"- {GROUPED}: blocked by the gate: two kv heads" in text
    before = {name: records[name] for name in (FIRST, DECODED)}
    status, result = run_course(tmp_path, {}, time_anyway=True)
    assert status == 1
    assert {name: result["points"][name] for name in before} == before
    assert result["points"][GROUPED]["red"] == ["two kv heads"]
    text = (tmp_path / "bench.md").read_text()
    assert "empty, RED |" in text
    assert "RED: timed although the gate is wrong in two kv heads." in text
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".new"]


def test_a_hang_costs_its_peer(monkeypatch, tmp_path):
    monkeypatch.setattr(course, "PEER_SECONDS", 3.0)
    monkeypatch.setattr(course, "GATE", {})
    monkeypatch.setattr(course, "GUARDS", {})
    at = Course(tmp_path, POINTS[:1], "chunked", None, None, False, partial(without_gpu.prepare, {"eager": "hang"}))
    assert at.run(fresh=False) == 0
    cells = at.result["points"][FIRST]["cells"]
    assert cells["eager"] == {"not_run": "it ended the process: took longer than 3 s and was killed"}
    assert "milliseconds" in cells["SDPA MATH"]
    assert "without_gpu.py" in (tmp_path / "bench.log").read_text()  # where it hung


def test_what_the_time_does_not_allow_is_left_for_the_next_command(monkeypatch, tmp_path, capsys):
    at = Course(tmp_path, POINTS, "chunked", None, 1.0, False)
    at.result = results.opened(tmp_path, {}, fresh=False)
    late = Outcome(None, "took longer than 1 s and was killed", "eager", ended=True, late=True)
    at.end = time.monotonic() - 2 * course.GRACE_SECONDS
    assert at.allowed(100.0) == 1.0
    at.measure(SimpleNamespace(run=lambda *_: late), POINTS[0], "title")
    assert capsys.readouterr().out == "title: the time was used up (--minutes)\n"
    monkeypatch.setattr(course, "side_by_side", lambda tasks, *_: [(name, late) for name in tasks])
    at.check(["bf16, D = 64"])
    at.compile_ahead(POINTS)
    assert at.result == results.opened(tmp_path, {}, fresh=False)


def test_every_configuration_is_compiled_ahead(monkeypatch, tmp_path, capsys):
    def compiled_with(tasks, *_):
        for key, task in tasks.items():
            asked.append((str(task.args[0]), *task.args[2:]))
            yield key, Outcome(None, "PassError: no" if len(asked) == 3 else None)

    asked = []
    monkeypatch.setattr(configurations, "AUTOTUNE", True)
    monkeypatch.setattr(course, "side_by_side", compiled_with)
    at = Course(tmp_path, POINTS, "chunked", None, None, False)
    at.result = results.opened(tmp_path, {}, fresh=False)
    at.compile_ahead([*QUICK[:2], *(p for p in QUICK if p.operation == DECODE)])  # decoding has one choice
    assert asked == [(str(QUICK[0]), index, skip) for index in range(4) for skip in (True, False)]
    assert capsys.readouterr().out == "compiled ahead: 7 of 8 choices; PassError: no\n"


def test_a_peer_that_ended_two_processes_is_left_out(tmp_path):
    at = Course(tmp_path, POINTS, "chunked", None, None, False)
    ended = {"cells": {}, "ended": ["eager"]}
    decodes = [p for p in FULL if p.operation == DECODE]
    at.result = {"points": {str(p): ended | {"point": p._asdict()} for p in (*decodes[:2], QUICK[0])}}
    assert at.struck(DECODE) == {"eager": "it ended the process at 2 other points"}
    assert at.struck(FORWARD) == {}


def test_a_point_that_no_peer_is_to_blame_for_is_lost_and_tried_again_last(tmp_path, capsys):
    at = Course(tmp_path, POINTS, "chunked", None, None, False)
    at.result = results.opened(tmp_path, {}, fresh=False)
    outcome = Outcome(None, "the process died with status -11", "taking turns", ended=True)
    at.measure(SimpleNamespace(run=lambda *_: outcome), POINTS[0], "title")
    assert at.result["points"][FIRST]["lost"] == "the process died with status -11 (taking turns)"
    assert "title: lost: the process died" in capsys.readouterr().out
    assert at.todo() == [POINTS[1], POINTS[2], POINTS[0]]
    assert f"- {FIRST}: lost: the process died with status -11" in (tmp_path / "bench.md").read_text()


def wait_for(what, seconds=60):
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def test_a_killed_command_is_resumed(monkeypatch, capsys, tmp_path):
    """SIGKILL at the second point: its worker ends too, the same command measures the rest; other code is refused."""
    arguments = ["--out", str(tmp_path)]
    killed = _CONTEXT.Process(target=without_gpu.run, args=(arguments, {"eager": "hang in training"}))
    killed.start()
    log = tmp_path / "bench.log"
    hung = wait_for(lambda: log.exists() and re.search(r"hangs in (\d+)\n", log.read_text()))
    before = json.loads((tmp_path / "bench.json").read_text())
    assert list(before["points"]) == [FIRST]
    assert f"- {DECODED}: not measured yet; the same command goes on with it" in (tmp_path / "bench.md").read_text()
    killed.kill()
    killed.join()
    wait_for(lambda: not os.path.exists(f"/proc/{hung[1]}"))

    assert without_gpu.run(arguments, {}, monkeypatch.setattr) == 0
    printed = capsys.readouterr().out
    assert "2 of 3 points to measure" in printed
    after = json.loads((tmp_path / "bench.json").read_text())
    assert after["points"][FIRST] == before["points"][FIRST]
    assert after["ceilings"] == before["ceilings"]
    assert set(after["points"]) == {FIRST, GROUPED, DECODED}
    assert after["made"]["GPU"] == "no GPU"

    (tmp_path / "bench.json").write_text(json.dumps(after | {"made": after["made"] | {"source": "other"}}))
    assert without_gpu.run(arguments, {}, monkeypatch.setattr) == 2
    source = after["made"]["source"]
    printed = capsys.readouterr().err
    assert f"bench.json was made with source other; now it is {source}: give another --out, or --fresh" in printed
    assert printed.count("\n") == 1
    assert json.loads((tmp_path / "bench.json").read_text())["made"]["source"] == "other"


def test_results_that_cannot_be_continued_are_refused_in_one_line(tmp_path):
    made = {"source": "a", "GPU": "one"}
    for text in ("{", "[]", '{"made": 3}', "{}"):
        (tmp_path / "bench.json").write_text(text)
        with pytest.raises(
            results.Refused, match=r"^.*bench\.json is no result of this command \([^\n]*--fresh[^\n]*$"
        ):
            results.opened(tmp_path, made, fresh=False)
    assert results.opened(tmp_path, made, fresh=True)["points"] == {}
    (tmp_path / "bench.json").write_text(json.dumps({"made": {"source": "a"}}))
    with pytest.raises(results.Refused, match="was made with GPU none; now it is one"):
        results.opened(tmp_path, made, fresh=False)


def test_a_gpu_that_cannot_be_used_is_reported(tmp_path, capsys):
    out = tmp_path / "new"
    setup = partial(without_gpu.go_wrong, "exit")
    assert Course(out, POINTS, "chunked", None, None, False, setup).run(fresh=False) == 1
    assert capsys.readouterr().out == "the GPU cannot be used: the process died with status 9\n"
    assert not out.exists()


def test_an_interrupt_is_one_line(monkeypatch, capsys, tmp_path):
    allowed = []

    class Interrupted(Course):
        def run(self, fresh):
            assert (self.points, self.backend, self.time_anyway, fresh) == (QUICK, "triton", False, True)
            assert self.authors == tmp_path
            allowed.append(self.end - time.monotonic())
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "Course", Interrupted)
    (tmp_path / "lazy_attention_triton.py").touch()
    arguments = ["--quick", "--fresh", "--authors", str(tmp_path), "--out", str(tmp_path)]
    assert main([*arguments, "--widths", "64"]) == 130
    printed = capsys.readouterr().err
    assert "--widths ignored: something is compiled only without a GPU" in printed
    assert f"interrupted; what was measured is in {tmp_path}" in printed
    assert main([*arguments, "--minutes", "3"]) == 130
    assert allowed == pytest.approx([60 * command.QUICK_MINUTES, 180], abs=10)


def test_on_a_gpu_a_folder_must_be_given(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["--quick"]) == 2
    assert capsys.readouterr().err == (
        "--out is missing: give the folder where results are written after every point\n"
    )


def test_versions_and_the_source_are_those_found(tmp_path):
    assert provenance._version("no-such-distribution") == "none"
    for name in ("bench", "flash_lazy/fused"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "flash_lazy/fused/a.py").write_text("1")
    first = provenance._source(tmp_path)
    (tmp_path / "flash_lazy/fused/b.md").write_text("2")
    assert provenance._source(tmp_path) == first
    (tmp_path / "flash_lazy/fused/a.py").write_text("2")
    assert provenance._source(tmp_path) != first


def made_up(points=FULL, red_share=None):
    """A result whose figures are invented: it is only there to be written."""
    records = {}
    for p in points:
        cells = {}
        for index, name in enumerate(results.KINDS):
            median = p.length / 4096 * (index + 2) * (1 - p.share / 2)
            times = {"lower": median / 2, "median": median, "upper": 2 * median}
            cells[name] = {"peak_bytes": 2**20 * (index + 1), "milliseconds": times, "difference": 0.004}
        cells["flash_lazy"]["blocks"] = {"forward": {"blocks": "BLOCK_M 128", "milliseconds": {}}}
        cells["AdaSplash"] = {"not_run": "ModuleNotFoundError: no adasplash"}
        wrong = ["most tiles empty: out"] if p.share == red_share else []
        records[str(p)] = {"point": p._asdict(), "share": p.share, "cells": cells, "red": wrong, "ended": []}
    ceilings = {"copy_bytes": 4.3e12, "read_bytes": 4.5e12, "product_tflops": 800.0}
    return {"made": {"commit": "abc"}, "ceilings": ceilings, "gate": [], "points": records}


def test_the_tables_show_every_cell():
    text = tables(made_up(), FULL)
    shapes = len({p.shape for p in FULL})
    assert text.count("\n## ") == shapes + 2  # what was not run, and the blocks
    assert "## forward, B 4, L 4096, H 16, D 128, W 512\n\n| | 0% empty | 30% empty | 60% empty | 90% empty |" in text
    assert "| flash_lazy | 2 [1, 4] 26% | 1.7 [0.85, 3.4] 24% |" in text  # 0.412 TFLOP in 2 ms, of 800
    assert "| AdaSplash | not run | not run | not run | not run | not run | - |" in text
    assert "- decode, B 8, L 32768, H 16, D 64, W 512: AdaSplash: ModuleNotFoundError: no adasplash\n" in text
    assert "Ceilings: copying 4.30 TB/s (read and written), reading 4.50 TB/s" in text
    assert "| forward, B 4, L 4096, H 16, D 128, W 512, 30% empty | flash_lazy | forward | BLOCK_M 128 |" in text


def test_plots_are_drawn(tmp_path):
    assert plots(made_up(QUICK[1:], red_share=0.6), tmp_path) is None
    assert {path.name for path in tmp_path.iterdir()} == {"roofline.png", "sparsity.png", "decode.png"}


def test_plots_are_left_out_without_matplotlib_or_points(tmp_path, monkeypatch):
    nothing = made_up() | {"points": {}}
    assert plots(nothing, tmp_path) == "the plots were left out: nothing that they show was measured"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots(made_up(), tmp_path) == "the plots were left out: matplotlib is not installed"
    assert not list(tmp_path.iterdir())


def test_the_share_of_the_ceiling_follows_from_share_and_time():
    p, ceilings = QUICK[0], {"read_bytes": 4e12, "product_tflops": 800.0}
    cell = {"milliseconds": {"median": 2.0}}
    entries = 4 * 16 * 4096 * 4097 / 2
    one = 2 * 128 * entries / 2e-3 / 800e12
    assert share_of_ceiling(p, 0.5, cell, "lazy", ceilings) == pytest.approx(2 * one)
    training = p._replace(operation=TRAINING)
    assert share_of_ceiling(training, 0.5, cell, "softmax", ceilings) == pytest.approx(7 * one)
    assert share_of_ceiling(p, 0.5, cell, None, ceilings) is None
    assert share_of_ceiling(p, 0.5, {"not_run": "why"}, "lazy", ceilings) is None
    decode = p._replace(operation=DECODE, batch=8, length=32768, kv_heads=4)
    size = 8 * 4 * 32768 * 128 * 2 * 2
    assert share_of_ceiling(decode, 0.5, cell, None, ceilings) == pytest.approx(size / 2e-3 / 4e12)


def test_on_a_cpu_costs_and_compiled_kernels_are_printed(monkeypatch, capsys, tmp_path):
    blocks = {"m": 64, "n": 64, "warps": 4, "stages": 2}
    row = {"kernel": "forward", "dtype": "bf16", "width": 64, "target": 90, "blocks": blocks}
    row |= compiled.Compiled(1024, 99, 0, (), ("wgmma",), True)._asdict()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "new" / "kernels"
    monkeypatch.setattr(configurations, "INTERPRETED", True)
    assert main(["--out", str(out), "--quick", "--time-anyway"]) == 2
    printed = capsys.readouterr().err
    assert "--quick, --time-anyway ignored: nothing is timed without a GPU" in printed
    assert "nothing is compiled where triton interprets" in printed
    assert not out.exists()
    monkeypatch.setattr(configurations, "INTERPRETED", False)
    monkeypatch.setattr(compiled, "report", lambda widths, every: [row] if (widths, every) == ((64,), True) else [])
    assert main(["--out", str(out), "--widths", "64", "--all-configurations"]) == 0
    text = (out / "compiled.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert "Nothing here is a measurement of speed" in text
    assert "| 5 + 6 f |" in text
    assert "wgmma (serialised)" in text
    found = json.loads((out / "compiled.json").read_text())
    assert found["rows"] == json.loads(json.dumps([row]))
    assert {"command", "date", "commit", "torch", "triton", "machine"} <= set(found["made"])


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    options = ("out", "quick", "minutes", "time-anyway", "fresh", "authors", "widths", "all-configurations")
    for option in options:
        assert f"--{option}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widths", "64,,128"], "argument --widths: it has '64,,128'"),
        (["--widths", "8"], "argument --widths: it has '8'; give whole numbers from 16 to 256"),
        (["--minutes", "0"], "argument --minutes: '0' is no time; give minutes above 0"),
        (["--minutes", "soon"], "argument --minutes: 'soon' is no time"),
        (["--authors", "nowhere"], "no lazy_attention_triton.py in 'nowhere'; give a checkout"),
        (["--out", __file__], "is no folder that can be written; give a folder"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())
