"""The complete benchmark with a stubbed torch.cuda: workers, tuning, alternating steps, results, failures."""

import json
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import without_gpu
from without_gpu import WORKLOADS, make_workload

from bench import benchmark, results, tuning
from bench.benchmark import Benchmark
from bench.correctness import CASES
from bench.timing import measure, take_turns
from bench.worker import _CONTEXT
from bench.workloads import DECODE, GUARDS, TRAINING


@pytest.mark.usefixtures("on_cpu")
def test_a_failing_step_does_not_affect_the_others():
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
def test_a_workload_is_measured(monkeypatch):
    """Every peer has figures or a reason; differences are relative to the first peer's output."""
    monkeypatch.setattr(tuning, "list_chosen_blocks", lambda: {"forward": "some blocks"})
    found = measure(make_workload(TRAINING), "chunked", None, {"eager": "why"}, rounds=2)
    assert list(found["cells"]) == list(results.KINDS)
    assert found["copies"] == -(-3 * 100_000 // (4 * 2 * 128 * 16 * 2))
    assert found["cells"]["eager"] == {"not_run": "why"}
    assert "needs --authors" in found["cells"]["the authors' kernel"]["not_run"]
    ours = found["cells"]["flash_lazy"]
    assert ours["peak_bytes"] == 2000
    assert ours["blocks"] == {"forward": "some blocks"}
    assert 0 < ours["milliseconds"]["lower"] <= ours["milliseconds"]["median"] <= ours["milliseconds"]["upper"]
    decoded = measure(make_workload(DECODE), "chunked", None, {}, rounds=2)["cells"]
    assert decoded["flash_lazy"]["difference"] == 0
    assert 0 < decoded["eager"]["difference"] < 0.01
    assert "difference" not in decoded["SDPA MATH"]


@pytest.fixture
def few_cases(monkeypatch):
    """Two cases on which WORKLOADS depend, and one on which none does."""
    names = ("bf16, D = 64", "two kv heads")
    monkeypatch.setattr(benchmark, "CASES", {name: CASES[name] for name in (*names, "decode, D = 128")})
    monkeypatch.setattr(benchmark, "GUARDS", {name: GUARDS[name] for name in names})


def run_benchmark(out, faults, time_anyway=False):
    setup = partial(without_gpu.prepare, faults)
    status = Benchmark(out, WORKLOADS, "chunked", None, None, time_anyway, setup).run(fresh=False)
    return status, json.loads((out / "bench.json").read_text())


FIRST, GROUPED, DECODED = map(str, WORKLOADS)


@pytest.mark.long
@pytest.mark.usefixtures("few_cases")
def test_a_failure_affects_only_its_peer_or_workload(tmp_path, capsys, monkeypatch):
    """A peer that raises, one that exits, one that hangs and one that breaks CUDA; a wrong case, then timed anyway."""
    monkeypatch.setattr(benchmark, "PEER_SECONDS", 10.0)
    faults = {"eager": "exit", "AdaSplash": "break", "FlexAttention, two calls": "raise", "two kv heads": "exit"}
    status, result = run_benchmark(tmp_path, faults | {"SDPA MATH": "hang"})
    assert status == 1
    records = result["points"]
    assert records[GROUPED] == {"point": WORKLOADS[1]._asdict(), "blocked": ["two kv heads"]}
    for name in (FIRST, DECODED):
        cells = records[name]["cells"]
        assert cells["flash_lazy"]["milliseconds"]["median"] > 0
        reasons = {
            peer: cell["not_run"].removeprefix("crashed its process: ")
            for peer, cell in cells.items()
            if "not_run" in cell
        }
        assert reasons == {
            "eager": "the process died with status 9",
            "SDPA MATH": "took longer than 10 s and was killed",
            "AdaSplash": "RuntimeError: no such thing",
            "FlexAttention, two calls": "RuntimeError: no such thing",
        }
        assert sorted(records[name]["ended"]) == ["AdaSplash", "SDPA MATH", "eager"]
    assert {row["case"] for row in result["gate"] if not row["passed"]} == {"two kv heads"}
    assert result["ceilings"]["product_tflops"] > 0
    assert "wrong: two kv heads: the process died with status 9" in capsys.readouterr().out
    assert f"- {GROUPED}: blocked by the gate: two kv heads" in (tmp_path / "bench.md").read_text()
    assert "without_gpu.py" in (tmp_path / "bench.log").read_text()  # where it hung
    status, result = run_benchmark(tmp_path, {}, time_anyway=True)
    assert status == 1
    assert {name: result["points"][name] for name in (FIRST, DECODED)} == {
        name: records[name] for name in (FIRST, DECODED)
    }
    assert result["points"][GROUPED]["red"] == ["two kv heads"]
    assert "RED: timed despite wrong results in two kv heads." in (tmp_path / "bench.md").read_text()


@pytest.mark.long
def test_a_killed_command_is_resumed(monkeypatch, capsys, tmp_path):
    """After SIGKILL at the second workload the worker exits and the command resumes."""
    arguments = ["--out", str(tmp_path)]
    killed = _CONTEXT.Process(target=without_gpu.run, args=(arguments, {"eager": "hang in training"}))
    killed.start()
    log = tmp_path / "bench.log"
    while not log.exists() or not (hung := re.search(r"hangs in (\d+)\n", log.read_text())):
        time.sleep(0.05)
    before = json.loads((tmp_path / "bench.json").read_text())
    assert list(before["points"]) == [FIRST]
    assert f"- {DECODED}: not measured yet; repeat the command" in (tmp_path / "bench.md").read_text()
    killed.kill()
    killed.join()
    while Path(f"/proc/{hung[1]}").exists():
        time.sleep(0.05)

    assert without_gpu.run(arguments, {}, monkeypatch.setattr) == 0
    assert "2 of 3 workloads to measure" in capsys.readouterr().out
    after = json.loads((tmp_path / "bench.json").read_text())
    assert after["points"][FIRST] == before["points"][FIRST]
    assert after["ceilings"] == before["ceilings"]
    assert set(after["points"]) == {FIRST, GROUPED, DECODED}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, r"not a result of this command \(.*--fresh") for text in ("{", '{"made": 3}')),
        ('{"made": {"source": "a"}}', "made with GPU none, not one"),
        ('{"made": {"source": "b", "GPU": "one"}}', "made with source b, not a"),
    ],
)
def test_results_that_cannot_be_continued_are_a_one_line_error(text, said, tmp_path):
    (tmp_path / "bench.json").write_text(text)
    made = {"source": "a", "GPU": "one"}
    with pytest.raises(results.RefusedError, match=rf"^.*bench\.json .*{said}") as error:
        results.open_results(tmp_path, made, fresh=False)
    assert "\n" not in str(error.value)
    assert results.open_results(tmp_path, made, fresh=True)["points"] == {}
