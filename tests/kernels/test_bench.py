"""The kernel benchmark, all of it that needs no GPU: cost model, inputs, peers, gate, tables, and one compilation."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as command
from bench import compiled, timing
from bench import peers as peers_module
from bench.__main__ import main
from bench.peers import Inputs, Peer, draw, draw_with_share, eager, empty_share, gate, peers, two_calls
from bench.results import plots, tables
from bench.timing import measure, measure_all, take_turns, useful_tflops
from flash_lazy import lazy_attention
from flash_lazy.fused import configurations

CPU = torch.device("cpu")


def random_inputs(length, dtype=torch.float64, batch=2, heads=2, width=16, recency=20.0):
    return Inputs(*(x.to(dtype) for x in draw(batch, heads, length, width, recency, CPU, dtype)))


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
    assert found["looped_spills"] == 0


def test_compiling_needs_a_process_that_does_not_interpret(monkeypatch):
    monkeypatch.setattr(configurations, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match=r"^compiling needs a process without TRITON_INTERPRET=1[^\n]*$"):
        compiled.compile_kernel("decode_scores", None, 90)


def test_decoding_has_no_packed_variant():
    with pytest.raises(ValueError, match="decode_values has neither packed nor stats"):
        compiled.launch_arguments("decode_values", torch.bfloat16, 64, compiled.Variant(packed=True))


def test_spills_count_in_innermost_product_loops_alone():
    listing = """
        /*0000*/                   STL [R1], R2 ;
        /*0010*/                   LDL R2, [R1] ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/                   LDL.64 R4, [R1+0x8] ;
        /*0040*/              @!P0 BRA 0x20 ;
        /*0050*/                   STL.64 [R1], R2 ;
        /*0060*/               @P1 BRA 0x10 ;
        /*0070*/                   LDL R2, [R1] ;
        /*0080*/               @P1 BRA 0x70 ;
"""
    assert compiled.looped_spills(listing) == 1
    assert compiled.looped_spills("") == 0


def test_the_compiled_table_shows_limits_and_failures():
    row = {
        "kernel": "forward",
        "dtype": "bf16",
        "width": 64,
        "target": 80,
        "blocks": {"m": 128, "n": 64, "warps": 8, "stages": 3},
    }
    good = row | compiled.Compiled(170 * 1024, 255, 16, 3, ("mma.sync",), False)._asdict()
    text = compiled.table([good, row | {"target": 100, "failed": "PassError: a | b"}])
    assert "| sm_80 | 128 x 64, 8, 3 | 170.0 (over) | 163 | no | 255 | 16 | 3 | mma.sync |" in text
    assert "failed" in text.splitlines()[-1]
    assert {line.count("|") for line in text.splitlines()} == {13}


@pytest.mark.parametrize(("asked", "length"), [(0.0, 512), (0.3, 1024), (0.6, 1024), (0.9, 2048)])
def test_the_share_of_empty_tiles_is_set(asked, length):
    inputs, share, _ = draw_with_share(asked, 1, 1, length, 32, CPU)
    assert share == pytest.approx(asked, abs=0.03)
    # Counted again from the statistics of the function itself, tile by tile.
    q, k, _, tau, bias = (x.double() for x in inputs)
    tile = torch.arange(length) // 64
    indicator = torch.nn.functional.one_hot(tile).double()[None, None]
    blocks = length // 64
    width = max(blocks, 32)
    indicator = torch.nn.functional.pad(indicator, (0, width - blocks))
    q, k = (torch.nn.functional.pad(x, (0, width - 32)) for x in (q, k))
    weights = lazy_attention(q, k, indicator, tau, bias, scale=32**-0.5)[0, 0, :, :blocks]
    alive = weights.unflatten(0, (blocks, 64)).amax(1) > 0
    assert share == pytest.approx(1 - alive.sum().item() / (blocks * (blocks + 1) / 2), abs=0.03)


def test_a_sample_of_row_blocks_stands_for_all():
    inputs, _, _ = draw_with_share(0.6, 1, 2, 1024, 32, CPU)
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


def dense_attention(q, k, v, *, score_mod, block_mask, return_aux):  # noqa: ARG001
    """What FlexAttention computes, on whole matrices, with gradients on a CPU; `block_mask` is a bool matrix."""
    batch, head, row, key = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = score_mod(q @ k.mT * q.shape[3] ** -0.5, batch, head, row, key)
    scores = scores.masked_fill(~block_mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return scores.softmax(-1).masked_fill(empty, 0) @ v, SimpleNamespace(lse=lse)


def test_the_two_calls_are_the_function():
    """Gradients included: the logarithm of a weight that is cut must not turn them into NaN."""
    inputs = random_inputs(96)
    causal = torch.ones(96, 96, dtype=torch.bool).tril()
    found = gradients(lambda *x: two_calls(*x, causal, dense_attention), inputs)
    expected = gradients(reference, inputs)
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_takes_the_two_calls():
    from torch.nn.attention.flex_attention import flex_attention

    inputs = random_inputs(128)
    mask = peers_module._causal_mask(128, "cpu")
    expected = reference(*inputs)
    torch.testing.assert_close(two_calls(*inputs, mask, flex_attention), expected)
    last = two_calls(inputs.q[:, :, -1:], *inputs[1:], peers_module._causal_mask(1, "cpu"), flex_attention)
    torch.testing.assert_close(last, expected[:, :, -1:])


def test_the_authors_kernel_is_loaded_from_a_checkout(tmp_path):
    """Their tau is added; and a peer that is not there says why."""
    source = "def lazy_attention_triton(q, k, v, bias, tau, window_size=None, varlen=None):\n    return tau\n"
    (tmp_path / "lazy_attention_triton.py").write_text(source)
    inputs = random_inputs(64)
    given = {peer.name: peer for peer in peers("chunked", tmp_path)}["the authors' kernel"]
    torch.testing.assert_close(given.attend(*inputs), -inputs.tau)
    missing = [peer for peer in peers("chunked", None) if peer.name in ("the authors' kernel", "AdaSplash")]
    cells = measure(missing, "decode", inputs, 2, lambda: False)
    assert cells["the authors' kernel"] == {"not_run": "FileNotFoundError: no checkout was given (--authors)"}
    assert cells["AdaSplash"] == {"not_run": "NotImplementedError: it has no decoding"}


def test_the_gate_passes_a_right_backend():
    rows = gate("chunked", CPU, ["bf16, D = 64", "fp32, D = 64", "documents", "a tau per position", "ragged", "decode"])
    assert all(row["passed"] for row in rows)
    assert {row["result"] for row in rows} == {"out", "out, training", "q", "k", "v", "tau", "bias"}
    assert [row["result"] for row in rows if row["case"] == "decode"] == ["out"]


@pytest.mark.parametrize("fault", ["scale", "nan", "raise", "unsteady"])
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

    monkeypatch.setattr(peers_module, "lazy_attention", wrong)
    rows = gate("chunked", CPU, ["bf16, D = 64"])
    assert not any(row["passed"] for row in rows if row.get("result") in (None, "out"))
    if fault == "raise":
        assert rows == [{"case": "bf16, D = 64", "passed": False, "failed": "RuntimeError: out of resource"}]


def test_nothing_is_timed_on_a_red_gate(monkeypatch, capsys, tmp_path):
    red = {"case": "window", "result": "k", "error": 0.5, "bound": 0.01, "passed": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "check", lambda *_: [red, red | {"passed": True}])
    monkeypatch.setattr(command, "measure_all", lambda *_: pytest.fail("timed"))
    assert main(["--out", str(tmp_path / "new")]) == 1
    assert "wrong: window: k: error 5.00e-01, bound 1.00e-02" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_step_that_fails_leaves_the_others():
    calls = []

    def breaks():
        calls.append(0)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("out of memory, tried\nto allocate")

    times, failed = take_turns({"good": lambda: None, "bad": breaks}, 5, CPU)
    assert len(times["good"]) == 5
    assert min(times["good"]) >= 0
    assert failed == {"bad": "OutOfMemoryError: out of memory, tried"}
    assert len(calls) == 3


@pytest.fixture(scope="module")
def measured():
    """The whole course of a run on a GPU, on a CPU: its times are a CPU's and mean nothing."""

    def broken(*_):
        raise ValueError("no such thing")

    wanted = ("flash_lazy", "flash_lazy, nothing skipped", "SDPA MATH", "eager")
    candidates = [peer for peer in peers("chunked", None) if peer.name in wanted]
    candidates.append(Peer("broken", broken, None, False))
    points = measure_all(candidates, (128,), (16,), CPU, lambda: False, tokens=256, heads=2, rounds=2, console=str)
    result = {"made": {"commit": "abc"}, "tokens": 256, "heads": 2, "rounds": 2, "ceiling_tflops": 1.0, "gate": []}
    return candidates, result | {"points": points}


def test_every_peer_is_measured_or_says_why_not(measured):
    candidates, result = measured
    assert [(p["length"], p["batch"], p["width"], p["asked"]) for p in result["points"]] == [
        (128, 2, 16, share) for share in timing.SHARES
    ]
    for point in result["points"]:
        for operation in timing.OPERATIONS:
            assert list(point[operation]) == [peer.name for peer in candidates]
            assert point[operation].pop("broken") == {"not_run": "ValueError: no such thing"}
            for cell in point[operation].values():
                times = cell["milliseconds"]
                assert 0 < times["lower"] <= times["median"] <= times["upper"]
            point[operation]["broken"] = {"not_run": "ValueError: no such thing"}
        assert point["forward"]["flash_lazy"]["difference"] == 0
        if point["asked"] == 0:  # large scores, which the recency makes, are rounded by `eager` in bfloat16
            assert 0 < point["forward"]["eager"]["difference"] < 0.01
        assert "difference" not in point["forward"]["SDPA MATH"]


def test_what_the_time_did_not_allow_reads_not_run(measured):
    candidates, _ = measured
    points = measure_all(candidates, (128,), (16,), CPU, lambda: True, tokens=256, heads=2, console=str)
    assert len(points) == len(timing.SHARES)
    for point in points:
        assert point["forward"]["eager"] == {"not_run": timing.USED_UP}
    result = measured[1] | {"points": points}
    assert "| eager | not run | not run | not run | not run | not run | - |" in tables(result)


def made_up():
    """A result whose figures are invented: it is only there to be written."""
    names = [peer.name for peer in peers("chunked", None)]
    points = []
    for length in (1024, 4096):
        for width in (64, 128):
            for asked in timing.SHARES:
                times = {"lower": 1.0, "median": 2.0, "upper": 4.0}
                cells = {
                    name: {"peak_bytes": 2**20 * (index + 1), "milliseconds": times, "difference": 0.004}
                    for index, name in enumerate(names)
                }
                cells["AdaSplash"] = {"not_run": "ModuleNotFoundError: no adasplash"}
                point = {"length": length, "batch": 16384 // length, "width": width, "asked": asked, "share": asked}
                points.append(point | {operation: dict(cells) for operation in timing.OPERATIONS})
    result = {"made": {"commit": "abc"}, "tokens": 16384, "heads": 16, "rounds": 20, "ceiling_tflops": 700.0}
    return result | {"gate": [], "points": points}


def test_the_tables_show_every_cell():
    text = tables(made_up())
    assert text.count("\n## ") == 3 * 2 * 2 + 1
    assert "## forward+backward, B 4, L 4096, D 128\n\n| | 0% empty | 30% empty | 60% empty | 90% empty |" in text
    assert "| eager | " + "2 [1, 4] | " * 4 + "8 | 4.0e-03 |" in text
    assert "| AdaSplash | not run | not run | not run | not run | not run | - |" in text
    assert "- decode, B 16, L 1024, D 64: AdaSplash: ModuleNotFoundError: no adasplash\n" in text


def test_plots_are_drawn(tmp_path):
    assert plots(made_up(), peers("chunked", None), tmp_path) is None
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{suffix}" for name in ("roofline", "sparsity") for suffix in ("svg", "png")
    }
    assert "flash_lazy" in (tmp_path / "sparsity.svg").read_text()


def test_plots_are_left_out_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    left_out = plots(made_up(), peers("chunked", None), tmp_path)
    assert left_out == "the plots were left out: matplotlib is not installed"
    assert not list(tmp_path.iterdir())


def test_useful_products_follow_from_share_and_time():
    point = made_up()["points"][-1] | {"share": 0.5}
    lazy, softmax = (peer for peer in peers("chunked", None) if peer.name in ("flash_lazy", "SDPA MATH"))
    entries = 4 * 16 * 4096 * 4097 / 2
    assert useful_tflops(point, "forward", lazy) == pytest.approx(2 * 2 * 128 * entries / 2e-3 / 1e12)
    assert useful_tflops(point, "forward+backward", softmax) == pytest.approx(7 * 2 * 128 * entries / 2e-3 / 1e12)
    assert useful_tflops(point, "decode", lazy) is None


def test_on_a_cpu_costs_and_compiled_kernels_are_printed(monkeypatch, capsys, tmp_path):
    blocks = {"m": 64, "n": 64, "warps": 4, "stages": 2}
    row = {"kernel": "forward", "dtype": "bf16", "width": 64, "target": 90, "blocks": blocks}
    row |= compiled.Compiled(1024, 99, 0, 0, ("wgmma",), True)._asdict()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "new" / "kernels"
    monkeypatch.setattr(configurations, "INTERPRETED", True)
    assert main(["--out", str(out)]) == 2
    assert "nothing is compiled where triton interprets" in capsys.readouterr().err
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
    for option in ("--out", "--lengths", "--widths", "--authors", "--quick", "--minutes", "--all-configurations"):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "1000"], "argument --lengths: it has '1000'; give multiples of 64 from 128 on"),
        (["--lengths", "64"], "argument --lengths: it has '64'"),
        (["--lengths", "128,,256"], "argument --lengths: it has '128,,256'"),
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
