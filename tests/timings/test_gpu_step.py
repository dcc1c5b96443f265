"""The GPU step benchmark on a CPU with a tiny model: what it writes, and that a failing case affects no other."""

import json

import pytest
import torch

from timings import gpu_step
from timings.gpu_step import FULL, TINY, Case, bench_gpu_step, flops_per_token, main, measure, measure_in_process

pytestmark = pytest.mark.xdist_group("bench step")


def test_a_step_is_measured():
    softmax, lazy = (measure(Case(name, 32, False), TINY, "cpu") for name in ("softmax", "lazy, W = L"))
    # tau of every head, and its biases for 32 positions
    assert lazy["parameters"] - softmax["parameters"] == TINY.n_layers * TINY.n_heads * (1 + 32)
    for found in (softmax, lazy):
        assert 0 < found["seconds"]["lower"] <= found["seconds"]["median"] <= found["seconds"]["upper"]
        assert found["tokens_per_second"] == TINY.tokens / found["seconds"]["median"]
        assert found["mfu"] is None


@pytest.mark.long
def test_a_compiled_step_is_measured():
    assert measure(Case("lazy, W = L", 32, True), TINY, "cpu")["seconds"]["median"] > 0


def test_flops_are_those_of_the_products():
    """2 per multiplication, times 3 for forward and both gradients: blocks, head, and half of two L x L products."""
    d, ff, layers, vocabulary, length = 1024, 2816, 24, 32_000, 4096
    forward = 2 * (layers * (4 * d * d + 3 * d * ff) + d * vocabulary) + layers * 2 * 2 * d * length / 2
    parameters = layers * (4 * d * d + 3 * d * ff) + 2 * d * vocabulary
    assert flops_per_token(parameters, length, FULL) == pytest.approx(3 * forward)


@pytest.mark.long
def test_a_failing_case_costs_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_step, "TINY", TINY._replace(lengths=(32,)))
    monkeypatch.setattr(
        gpu_step, "make_cases", lambda lengths, _: [Case(n, *lengths, False) for n in ("nonsense", "lazy, W = L")]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path / "new")]) == 0
    result = json.loads((tmp_path / "new" / "gpu-step.json").read_text())
    failed, measured = result["rows"]
    assert failed == {"attention": "nonsense", "length": 32, "compiled": False, "not_run": "KeyError: 'nonsense'"}
    assert measured["tokens_per_second"] > 0
    text = (tmp_path / "new" / "gpu-step.md").read_text()
    assert text in capsys.readouterr().out
    assert "| nonsense | 32 | no | not run: KeyError: 'nonsense' |" in text
    assert f"`python3 -m timings.gpu_step --out {tmp_path / 'new'}`" in text


def test_a_hang_costs_its_case(monkeypatch):
    monkeypatch.setattr(gpu_step, "SECONDS", 0.01)
    found = measure_in_process(Case("lazy, W = L", 32, False), TINY, "cpu")
    assert found["not_run"] == "TimeoutError: no result within 0 s"


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file" / "x")]) == 2
    printed = capsys.readouterr().err
    assert str(tmp_path / "file" / "x") in printed
    assert printed.count("\n") == 1


def test_each_is_written_as_it_comes(tmp_path, monkeypatch):
    seen = []

    def fake(case, sizes, device):  # noqa: ARG001
        if (path := tmp_path / "gpu-step.json").exists():
            seen.append(len(json.loads(path.read_text())["rows"]))
        return {**case._asdict(), "not_run": "no"}

    monkeypatch.setattr(gpu_step, "measure_in_process", fake)
    bench_gpu_step(tmp_path, TINY, "cpu", lambda _: None)
    assert seen == list(range(1, 12))
    bench_gpu_step(tmp_path / "compiled", TINY, "cpu", lambda _: None, compiled=True)
    result = json.loads((tmp_path / "compiled" / "gpu-step.json").read_text())
    assert [row["compiled"] for row in result["rows"]] == [True] * 6
    assert result["command"].endswith("--compiled")


@pytest.mark.gpu
def test_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = measure(Case("lazy, W = L", 32, False), TINY, "cuda")
    assert found["peak_bytes"] > 0
    assert 0 < found["mfu"] < 1
