"""The step benchmark at a small size: its file records the measurement; its ratios follow from its rounds."""

import json
import statistics
import sys

import pytest
import torch
from torch_alone import ROOT, run_alone

from timings import step
from timings.measuring import Quartiles
from timings.step import QUICK

ALONE = """
import sys, torch
from pathlib import Path
sys.path.append({root!r})
from timings.step import QUICK, bench_step
torch.set_num_threads(2)
bench_step(**QUICK, out=Path({path!r}))
assert torch.get_num_threads() == 2
"""


@pytest.mark.long
@pytest.mark.xdist_group("bench step")  # one process, one benchmark
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_benchmark_run_small(tmp_path, torch_site):
    """In a process with only torch, like some GPU machines."""
    path = tmp_path / "new" / "bench-step.json"
    output = run_alone(ALONE.format(root=str(ROOT), path=str(path)), torch_site)
    result, text = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert result["environment"]["threads"] == "1"
    assert {"git_sha", "torch", "python", "machine", "cpu"} <= set(result["environment"])
    assert text in output
    untrained, local = result["rows"]
    for row, state in ((untrained, "untrained"), (local, "local")):
        assert (row["length"], row["state"]) == (64, state)
        for part in ("step", "attention"):
            rounds, ratio = row[part]["rounds"], row[part]["ratio"]
            assert len(rounds["softmax"]) == len(rounds["lazy"]) == QUICK["rounds"]
            ratios = [lazy / softmax for lazy, softmax in zip(rounds["lazy"], rounds["softmax"], strict=True)]
            assert ratio["median"] == pytest.approx(statistics.median(ratios))
            assert min(ratios) <= ratio["lower"] <= ratio["upper"] <= max(ratios)
            assert min(*rounds["softmax"], *rounds["lazy"]) > 0
        seconds = statistics.median(row["step"]["rounds"]["lazy"])
        assert row["tokens_per_second"]["lazy"] == pytest.approx(QUICK["tokens"] / seconds)
        # Four layers save at least ten activations of the model's width for the backward pass.
        assert min(row["peak_bytes"].values()) > 4 * 10 * 4 * QUICK["tokens"] * 256
        assert f"| 64 | {state} | {row['step']['ratio']['median']:.2f} [" in text
    # With near-uniform scores and tau = 1, about half of the entries are below the threshold (docs/method.md).
    assert 0.4 < untrained["entries_cut"] < 0.65
    assert untrained["entries_cut"] < local["entries_cut"] < 1
    assert 0 < untrained["mass_left"] < local["mass_left"] < 1


def test_empty_tiles_are_counted_per_head(monkeypatch):
    """With a bias so steep that a row keeps only its last key, only the tiles on the diagonal are not empty."""
    monkeypatch.setattr(step, "LOCAL_REACH", 0.01)
    survival = step._measure_survival(step._make_model("local", 256), step._draw_ids(256, 256))
    assert survival["empty_tiles"] == {"64": pytest.approx(6 / 10), "256": 0}
    # Row i keeps one of i keys; the first row keeps none.
    assert survival["entries_cut"] == pytest.approx(1 - 255 / (256 * 257 / 2), abs=1e-4)


def test_the_weights_stay_as_they_are():
    model = step._make_model("untrained", 16)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    step._make_step(model)(step._draw_ids(16, 32))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is not None for x in model.parameters())


def test_spread_is_median_and_quartiles():
    assert Quartiles.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Quartiles(median=3.0, lower=2.0, upper=4.0)
