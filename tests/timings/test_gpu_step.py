"""The GPU step benchmark on a CPU with a tiny model: what it writes, and that a failing case affects no other."""

import json

import pytest
import torch

from timings import gpu_step
from timings.gpu_step import FULL, TINY, Case, bench_gpu_step, flops_per_token, main, measure, measure_in_process


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_step_is_measured(compiled):
    softmax, lazy = (measure(Case(name, 32, compiled), TINY, "cpu") for name in ("softmax", "lazy, W = L"))
    # tau of every head, and its biases for 32 positions
    assert lazy["parameters"] - softmax["parameters"] == TINY.n_layers * TINY.n_heads * (1 + 32)
    for found in (softmax, lazy):
        assert 0 < found["seconds"]["lower"] <= found["seconds"]["median"] <= found["seconds"]["upper"]
        assert found["tokens_per_second"] == TINY.tokens / found["seconds"]["median"]
        assert found["mfu"] is None


def test_flops_are_those_of_the_products():
    """2 per multiplication, times 3 for forward and both gradients: blocks, head, and half of two L x L products."""
    d, ff, layers, vocabulary, length = 1024, 2816, 24, 32_000, 4096
    forward = 2 * (layers * (4 * d * d + 3 * d * ff) + d * vocabulary) + layers * 2 * 2 * d * length / 2
    parameters = layers * (4 * d * d + 3 * d * ff) + 2 * d * vocabulary
    assert flops_per_token(parameters, length, FULL) == pytest.approx(3 * forward)


def test_a_failing_case_costs_itself_and_each_is_written_as_it_comes(tmp_path, monkeypatch, capsys):
    out, seen = tmp_path / "new", []

    def measure_here(case, sizes, device):
        if (path := out / "gpu-step.json").exists():
            seen.append(len(json.loads(path.read_text())["rows"]))
        if case.attention == "nonsense":
            return measure_in_process(case, sizes, device)
        return {**case._asdict(), **measure(case, sizes, device)}

    names = ("softmax", "nonsense", "lazy, W = L")
    monkeypatch.setattr(gpu_step, "TINY", TINY._replace(lengths=(32,)))
    monkeypatch.setattr(gpu_step, "make_cases", lambda lengths, _: [Case(name, *lengths, False) for name in names])
    monkeypatch.setattr(gpu_step, "measure_in_process", measure_here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(out)]) == 0
    assert seen == [1, 2]
    result, text = json.loads((out / "gpu-step.json").read_text()), (out / "gpu-step.md").read_text()
    _, failed, measured = result["rows"]
    assert failed == {"attention": "nonsense", "length": 32, "compiled": False, "not_run": "KeyError: 'nonsense'"}
    assert measured["tokens_per_second"] > 0
    assert text in capsys.readouterr().out
    assert "| nonsense | 32 | no | not run: KeyError: 'nonsense' |" in text
    assert f"`python3 -m timings.gpu_step --out {out}`" in text


def test_each_case_is_asked_for_compiled_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_step, "measure_in_process", lambda case, *_: {**case._asdict(), "not_run": "no"})
    for compiled, count in ((False, 12), (True, 6)):
        bench_gpu_step(tmp_path, TINY, "cpu", lambda _: None, compiled=compiled)
        result = json.loads((tmp_path / "gpu-step.json").read_text())
        assert len(result["rows"]) == count
        assert result["command"].endswith("--compiled") is compiled
    assert all(row["compiled"] for row in result["rows"])


def test_a_hang_costs_its_case(monkeypatch):
    monkeypatch.setattr(gpu_step, "SECONDS", 0.01)
    found = measure_in_process(Case("lazy, W = L", 32, False), TINY, "cpu")
    assert found["not_run"] == "TimeoutError: no result within 0 s"


@pytest.mark.gpu
def test_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = measure(Case("lazy, W = L", 32, False), TINY, "cuda")
    assert found["peak_bytes"] > 0
    assert 0 < found["mfu"] < 1
