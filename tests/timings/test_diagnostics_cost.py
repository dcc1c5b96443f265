"""The diagnostics benchmark at a small size: its file records the measurement; its shares follow from its rounds."""

import json
import statistics
import sys

import pytest
import torch

from timings.diagnostics import HEAD_DIM, QUICK, bench_diagnostics


@pytest.mark.long
@pytest.mark.xdist_group("bench diagnostics")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak in KiB")
def test_the_benchmark_run_small(tmp_path):
    path, lines, threads = tmp_path / "new" / "bench-diagnostics.json", [], torch.get_num_threads()
    result = bench_diagnostics(**QUICK, out=path, console=lines.append)
    assert torch.get_num_threads() == threads
    assert json.loads(path.read_text()) == result
    assert result["environment"]["threads"] == "1"
    assert {"git_sha", "torch", "python", "machine", "cpu"} <= set(result["environment"])
    summary, heads, length = result["summary"], QUICK["heads"], QUICK["length"]
    assert [summary[name] for name in ("length", "heads", "head_dim")] == [length, heads, HEAD_DIM]
    # Above the inputs and below the matrices of all scores and weights.
    assert 2 * 4 * heads * length * HEAD_DIM < summary["peak_bytes"] < 2 * 4 * heads * length**2

    [row] = result["training"]
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

    text = path.with_suffix(".md").read_text()
    assert lines[-1] == text
    assert f"| {length} | {heads} | {HEAD_DIM} | {summary['seconds']['median']:.2f} [" in text
    assert f"| backcopy_tiny | 6 | 6 | {row['seconds']['median']:.1f} [" in text
    assert f"| {100 * row['inside']['median']:.2f} [" in text
