"""The diagnostics benchmark at a small size: its file records the measurement; its shares follow from its rounds."""

import json
import statistics
import sys

import pytest
import torch

from timings.diagnostics import HEAD_DIM, QUICK, bench_diagnostics

pytestmark = pytest.mark.xdist_group("bench diagnostics")  # one process, one measurement


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "new" / "bench-diagnostics.json"
    lines = []
    threads = torch.get_num_threads()
    result = bench_diagnostics(**QUICK, out=path, console=lines.append)
    assert torch.get_num_threads() == threads
    return path, result, lines


@pytest.mark.long
def test_the_file_holds_the_result_and_where_it_came_from(measured):
    path, result, _ = measured
    assert json.loads(path.read_text()) == result
    assert result["environment"]["threads"] == "1"
    assert {"git_sha", "torch", "python", "machine", "cpu"} <= set(result["environment"])
    summary = result["summary"]
    assert [summary[name] for name in ("length", "heads", "head_dim")] == [QUICK["length"], QUICK["heads"], HEAD_DIM]
    assert min(summary["rounds"]) > 0


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak in KiB")
def test_the_peak_is_above_the_inputs_and_below_the_matrices_of_all_scores_and_weights(measured):
    heads, length = QUICK["heads"], QUICK["length"]
    assert 2 * 4 * heads * length * HEAD_DIM < measured[1]["summary"]["peak_bytes"] < 2 * 4 * heads * length**2


@pytest.mark.long
def test_shares_are_those_of_the_rounds(measured):
    [row] = measured[1]["training"]
    without, watched = row["rounds"]["without"], row["rounds"]["with"]
    assert len(without) == len(watched) == QUICK["rounds"]
    paired = [a["processor_seconds"] / b["processor_seconds"] - 1 for a, b in zip(watched, without, strict=True)]
    assert row["paired"]["median"] == pytest.approx(statistics.median(paired))
    assert row["inside"]["median"] == pytest.approx(statistics.median(x["inside"] / x["seconds"] for x in watched))
    assert all(0 < x["inside"] < x["seconds"] for x in watched)
    assert row["seconds"]["median"] == pytest.approx(statistics.median(x["seconds"] for x in without))
    # Six steps: logs before training, after steps 1, 2 and 4, and at the validations after steps 3 and 6.
    assert (row["steps"], row["looks"]) == (6, 6)
    assert {(x["inside"], x["looks"]) for x in without} == {(0, 0)}


@pytest.mark.long
def test_the_table_shows_the_rows(measured):
    path, result, lines = measured
    text = path.with_suffix(".md").read_text()
    assert lines[-1] == text
    assert (
        f"| {QUICK['length']} | {QUICK['heads']} | {HEAD_DIM} | {result['summary']['seconds']['median']:.2f} [" in text
    )
    [row] = result["training"]
    assert f"| backcopy_tiny | 6 | 6 | {row['seconds']['median']:.1f} [" in text
    assert f"| {100 * row['inside']['median']:.2f} [" in text
    assert result["environment"]["git_sha"] in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"rounds": 1}, "rounds is 1"), ({"experiments": ("nothing",)}, "experiment 'nothing': unknown; there are ")],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bench_diagnostics(**arguments)
