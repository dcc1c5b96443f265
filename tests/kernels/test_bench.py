"""Inputs, peers, correctness gate and workloads of the kernel benchmark."""

import json
import lzma
from pathlib import Path
from statistics import fmean

import pytest
import torch
from without_gpu import make_workload

from bench import __main__ as command
from bench import correctness
from bench import peers as peers_module
from bench.correctness import CASES, check_cases
from bench.peers import Inputs, compute_empty_share, draw, draw_with_share, eager_attention, peers, set_recency
from bench.workloads import DECODE, FULL, GUARDS, LARGEST, QUICK, TRAINED, TRAINING, find_gate_failures, plan_seconds
from flash_lazy import lazy_attention

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "docs/results"


def peers_named(authors):
    return {peer.name: peer for peer in peers("chunked", authors)}


def random_inputs(length, recency=20.0, **shape):
    inputs = draw(make_workload(length=length, batch=2, **shape), CPU, torch.float64)
    set_recency(inputs, recency)
    return Inputs(*(x.double() for x in inputs))


def tiles_alive(inputs):
    """Whether a weight survives, by row and tile of 64 keys: the values are one-hot tile indices, in float64."""
    q, k, _, tau, bias = (x.double() for x in inputs)
    blocks = k.shape[2] // 64
    names = torch.nn.functional.one_hot(torch.arange(k.shape[2]) // 64).double().expand(*k.shape[:2], -1, -1)
    width = max(blocks, q.shape[3])
    q, k, names = (torch.nn.functional.pad(x, (0, width - x.shape[3])) for x in (q, k, names))
    return lazy_attention(q, k, names, tau, bias, scale=inputs.q.shape[3] ** -0.5)[..., :blocks] > 0


@pytest.mark.parametrize(("requested", "length"), [(0.0, 512), (0.3, 1024), (0.6, 1024), (0.9, 2048)])
def test_the_share_of_empty_tiles_is_set(requested, length):
    one_head = make_workload(length=length, heads=1, kv_heads=1, width=32, share=requested)
    inputs, share, _ = draw_with_share(one_head, CPU)
    assert share == pytest.approx(requested, abs=0.03)
    alive, blocks = tiles_alive(inputs)[0, 0].unflatten(0, (-1, 64)).any(1), length // 64
    assert share == pytest.approx(1 - alive.sum().item() / (blocks * (blocks + 1) / 2), abs=0.03)


def test_a_sample_of_row_blocks_estimates_the_share():
    inputs, _, _ = draw_with_share(make_workload(length=1024, width=32, share=0.6), CPU)
    assert compute_empty_share(inputs, sampled=8) == pytest.approx(compute_empty_share(inputs, sampled=10**6), abs=0.03)


def test_a_decoded_tile_is_empty_if_no_query_of_its_kv_head_needs_it():
    inputs, share, _ = draw_with_share(make_workload(DECODE, 2, 1024, 4, 2, 32, share=0.5), CPU)
    alive = tiles_alive(inputs)[:, :, 0].unflatten(1, (2, 2)).any(2)
    assert share == pytest.approx(0.5, abs=0.05)
    assert share == pytest.approx(1 - alive.float().mean().item(), abs=0.03)


def reference(*inputs):
    return lazy_attention(*inputs, backend="reference")


def test_eager_computes_the_function():
    leaves = Inputs(*(x.requires_grad_() for x in random_inputs(100)))
    outs = eager_attention(*leaves), reference(*leaves)
    torch.testing.assert_close(*outs)
    for found, expected in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in outs), strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(eager_attention(leaves.q[:, :, -1:], *leaves[1:]), outs[1][:, :, -1:])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kv_heads", [1, pytest.param(2, marks=pytest.mark.long)])
def test_flex_attention_accepts_the_two_calls(monkeypatch, kv_heads):
    """Without compilation, which takes minutes; FlexAttention's internal torch.compile still runs, eagerly."""
    torch_compile = torch.compile
    compile = lambda function, **options: torch_compile(function, **options) if "backend" in options else function  # noqa: E731
    monkeypatch.setattr(torch, "compile", compile)
    flex = peers_named(None)["FlexAttention, two calls"].attend
    inputs = random_inputs(128, kv_heads=kv_heads)
    expected = reference(*inputs)
    torch.testing.assert_close(flex(*inputs), expected)
    torch.testing.assert_close(flex(inputs.q[:, :, -1:], *inputs[1:]), expected[:, :, -1:])
    peers_module._compile_flex.cache_clear()


def test_peers_of_others_are_called_or_say_why_not(tmp_path, monkeypatch):
    """The authors' tau has the opposite sign."""
    source = "def lazy_attention_triton(q, k, v, bias, tau, window_size=None, varlen=None):\n    return tau\n"
    (tmp_path / "lazy_attention_triton.py").write_text(source)
    found, inputs = peers_named(tmp_path), random_inputs(64)
    authors = found["the authors' kernel"]
    torch.testing.assert_close(authors.attend(*inputs), -inputs.tau)
    monkeypatch.setattr(peers_module, "MAX_SCORES", 2 * 2 * 64 * 64)
    for peer, given, why in (
        (authors, inputs._replace(q=inputs.q[:, :, -1:]), "does not support decoding"),
        (authors, random_inputs(64, kv_heads=1), "does not support grouped heads"),
        (found["eager"], random_inputs(128), r"keeps all 6.6e\+04 scores; measured only up to 1.6e\+04"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            peer.attend(*given)


@pytest.mark.usefixtures("on_cpu")
def test_the_gate_passes_a_correct_backend():
    decodes = "decode, two kv heads"
    cases = ["bf16, D = 64", "fp32, D = 64", "documents", "a tau per position", "ragged", "window", "renormalised"]
    rows = check_cases("chunked", [*cases, "most tiles empty", decodes])
    assert all(row["passed"] for row in rows)
    assert {row["result"] for row in rows} == {"out", "out, training", "q", "k", "v", "tau", "bias", "slopes"}
    assert [row["result"] for row in rows if row["case"] == decodes] == ["out"]


@pytest.mark.parametrize("fault", ["scale", "nan", "raise", "unsteady"])
@pytest.mark.usefixtures("on_cpu")
def test_the_gate_fails_a_wrong_backend(monkeypatch, fault):
    calls = []

    def wrong(*args, backend, **kwargs):
        out = lazy_attention(*args, backend=backend, **kwargs)
        if backend == "reference":
            return out
        calls.append(fault)
        if fault == "raise":
            raise RuntimeError("out of resource\nand more")
        return out * {"scale": 1.02, "nan": float("nan"), "unsteady": 1 + 0.01 * (len(calls) > 2)}[fault]

    monkeypatch.setattr(correctness, "lazy_attention", wrong)
    rows = check_cases("chunked", ["bf16, D = 64"])
    assert not any(row["passed"] for row in rows if row.get("result") in (None, "out"))
    if fault == "raise":
        assert rows == [{"case": "bf16, D = 64", "passed": False, "failed": "RuntimeError: out of resource"}]


def test_a_failed_row_blocks_the_workloads_that_depend_on_its_case():
    def names(case, result=None):
        row = {"case": case, "passed": False} | ({"result": result} if result else {})
        good = {"case": case, "result": "tau", "passed": True}
        return [p for p in FULL if find_gate_failures(p, [good, row])]

    assert set(GUARDS) < set(CASES)
    assert names("documents") == names("fp32, D = 64") == []
    assert names("bf16, D = 64", "k") == [p for p in FULL if p.width == 64 and p.operation == TRAINING]
    assert names("bf16, D = 64") == [p for p in FULL if p.width == 64 and p.operation != DECODE]
    assert names("decode, D = 128", "out") == [p for p in FULL if p.width == 128 and p.operation == DECODE]
    assert names("one kv head") == [p for p in FULL if p.kv_heads == 4 and p.operation != DECODE]
    assert all(any(guards(p) for guards in GUARDS.values()) for p in FULL)


def test_the_shares_of_trained_models_match_their_table():
    recorded = json.loads(lzma.decompress((RESULTS / "first-round.json.xz").read_bytes()))["questions"]
    rows = recorded["q_sparsity"]["rows"]
    found = [row["values"]["sparsity/block_64"].values() for row in rows if row["variant"] != "softmax"]
    shares = [share for values in found for share in values]
    assert (fmean(shares), max(shares)) == pytest.approx((TRAINED, LARGEST), abs=0.005)


def test_the_workloads_fit_their_documented_times():
    assert len(set(FULL)) == len(FULL)
    assert FULL[: len(QUICK)] == QUICK
    assert plan_seconds(QUICK) < 60 * command.QUICK_MINUTES
    assert plan_seconds(FULL) < 60 * 2 * 9  # two commands, as documented in the README
