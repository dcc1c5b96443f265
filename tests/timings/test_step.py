"""The step benchmark at a small size: its file records the measurement; its ratios follow from its rounds."""

import json
import statistics
import sys

import pytest
import torch
from torch_alone import ROOT, run_alone

from lit_lazy.support.timing import Quartiles
from timings import step
from timings.step import QUICK, bench_step

pytestmark = pytest.mark.xdist_group("bench step")  # one process, one benchmark
ALONE = """
import sys, torch
from pathlib import Path
sys.path.append({root!r})
from timings.step import QUICK, bench_step
torch.set_num_threads(2)
bench_step(**QUICK, out=Path({path!r}))
assert torch.get_num_threads() == 2
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory, torch_site):
    """File, result and output of the benchmark in a process with only torch, like some GPU machines."""
    path = tmp_path_factory.mktemp("bench") / "new" / "bench-step.json"
    output = run_alone(ALONE.format(root=str(ROOT), path=str(path)), torch_site)
    return path, json.loads(path.read_text()), output


@pytest.mark.long
def test_the_file_holds_the_result_and_where_it_came_from(measured):
    _, result, _ = measured
    assert result["environment"]["threads"] == "1"
    assert {"git_sha", "torch", "python", "machine", "cpu"} <= set(result["environment"])
    assert result["tokens"] == QUICK["tokens"]
    assert [(row["length"], row["state"]) for row in result["rows"]] == [(64, "untrained"), (64, "local")]


@pytest.mark.long
@pytest.mark.parametrize("part", ["step", "attention"])
def test_ratios_are_those_of_the_paired_rounds(measured, part):
    for row in measured[1]["rows"]:
        rounds = row[part]["rounds"]
        assert len(rounds["softmax"]) == len(rounds["lazy"]) == QUICK["rounds"]
        ratios = [lazy / softmax for lazy, softmax in zip(rounds["lazy"], rounds["softmax"], strict=True)]
        assert row[part]["ratio"]["median"] == pytest.approx(statistics.median(ratios))
        assert min(ratios) <= row[part]["ratio"]["lower"] <= row[part]["ratio"]["upper"] <= max(ratios)
        assert min(*rounds["softmax"], *rounds["lazy"]) > 0
    assert row["tokens_per_second"]["lazy"] == pytest.approx(
        QUICK["tokens"] / statistics.median(row["step"]["rounds"]["lazy"])
    )


@pytest.mark.long
def test_the_states_differ_in_what_survives(measured):
    untrained, local = measured[1]["rows"]
    # With near-uniform scores and tau = 1, about half of the entries are below the threshold (docs/method.md).
    assert 0.4 < untrained["entries_cut"] < 0.65
    assert untrained["entries_cut"] < local["entries_cut"] < 1
    assert 0 < untrained["mass_left"] < local["mass_left"] < 1


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_peaks_are_measured(measured):
    for row in measured[1]["rows"]:
        # Four layers save at least ten activations of the model's width for the backward pass.
        assert min(row["peak_bytes"].values()) > 4 * 10 * 4 * QUICK["tokens"] * 256


@pytest.mark.long
def test_the_table_shows_the_rows(measured):
    path, result, output = measured
    text = path.with_suffix(".md").read_text()
    assert text in output
    for row in result["rows"]:
        assert f"| {row['length']} | {row['state']} | {row['step']['ratio']['median']:.2f} [" in text
    assert result["environment"]["git_sha"] in text


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": (100,)}, "lengths has 100"),
        ({"lengths": (1,)}, "lengths has 1"),
        ({"lengths": (8192,), "tokens": 8192}, "lengths has 8192"),
        ({"rounds": 1}, "rounds is 1"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bench_step(**arguments)
