"""`python3 -m timings`: figures follow from times, small runs, pages of files; bad input precedes any measurement."""

import gc
import json
import os
import statistics
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch_alone import ROOT, run_alone

from lit_lazy.command.main import main
from lit_lazy.grid.ablation import expand, prepare_rows, select_rows
from lit_lazy.grid.work_records import Job
from lit_lazy.grid.worker import prepare_process
from lit_lazy.support import checked_fields
from timings import attention, cells, diagnostics, gpu_step, grid, looks, quarter_hour, significance, step
from timings.__main__ import make_parser
from timings.cells import QUICK, Shape, bench_cells, run_git
from timings.diagnostics import bench_diagnostics
from timings.gpu_step import FULL, TINY, Case, flops_per_token, measure, measure_in_process
from timings.step import bench_step

HISTORY = not subprocess.run(["git", "cat-file", "-e", cells.AGAINST], cwd=cells.ROOT, capture_output=True).returncode
NO_HISTORY = "the other commit is not in this clone"
needs_history = pytest.mark.skipif(not HISTORY, reason=NO_HISTORY)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc, peaks in KiB")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--out", "folder.json"], "folder.json exists and is not writable; name another file"),
        (["step", "--out", "/proc/x.json"], "--out '/proc': nothing can be written there"),
        (["step", "--out", "steps.txt"], "must end in .json"),
        (["gpu_step", "--out", "file/x"], "file/x"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.json").mkdir()
    Path("file").touch()
    try:
        status = gpu_step.main(words[1:]) if words[0] == "gpu_step" else main(words, make_parser)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("bench", "arguments", "message"),
    [
        (bench_step, {"lengths": (100,)}, "lengths has 100"),
        (bench_step, {"rounds": 1}, "rounds is 1"),
        (bench_diagnostics, {"rounds": 1}, "rounds is 1"),
        (bench_cells, {"sections": ("decode",)}, "--sections has 'decode': choose from attention, decoding, threads"),
        (bench_cells, {"sizes": QUICK._replace(pairs={"backcopy_tiny": 1})}, "pairs is 1"),
        (bench_cells, {"against": "--help"}, "--against '--help': no commit of this clone"),
    ],
)
def test_what_does_not_fit_is_named(bench: Callable[..., object], arguments: dict[str, Any], message: str) -> None:
    if bench is bench_cells and not HISTORY:
        pytest.skip(NO_HISTORY)
    with pytest.raises(ValueError, match=message):
        bench(**arguments)


@pytest.mark.parametrize(
    ("name", "format_page"),
    [
        ("bench-cells", cells.format_table),
        ("bench-diagnostics", diagnostics.format_table),
        ("bench-step", step.format_table),
        ("default-test", significance.format_markdown),
        ("looks", looks.format_markdown),
    ],
)
def test_a_committed_page_is_made_of_the_file_beside_it(name: str, format_page: Callable[[dict], str]) -> None:
    file = ROOT / "docs" / "results" / f"{name}.json"
    assert file.with_suffix(".md").read_text() == format_page(json.loads(file.read_text()))


# Cells

IDENTITY = {"code": "c0de", "against": "3b7b986717", "tokens": 128}


def test_every_measurement_is_saved_at_once_and_kept(tmp_path: Path) -> None:
    """Of this code; other code is measured anew, and other files are refused."""
    out, made = tmp_path / "bench.json", []
    kept = json.loads((ROOT / "docs" / "results" / "bench-cells.json").read_text())
    (pair, *_) = kept["measurements"]["cells"].values()
    empty = kept | {"identity": IDENTITY, "measurements": {}}

    def measure_one(name: str) -> dict[str, Any]:
        if name == "third" and len(made) == 2:
            raise RuntimeError("killed")
        made.append(name)
        return pair

    plan = {"cells": {name: lambda name=name: measure_one(name) for name in ("first", "second", "third")}}
    with pytest.raises(RuntimeError, match="killed"):
        cells.complete(json.loads(json.dumps(empty)), plan, out, print)
    result = empty | cells.read_known(out, IDENTITY, print)
    made.append("again")
    cells.complete(result, plan, out, print)
    assert made == ["first", "second", "again", "third"]
    assert json.loads(out.read_text()) == result
    for name in IDENTITY:
        assert cells.read_known(out, IDENTITY | {name: "other"}, print) == {"measurements": {}}
    out.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="is no result of this benchmark; name another file"):
        cells.read_known(out, IDENTITY, print)


@needs_history
def test_the_other_tree_goes_when_a_cell_fails() -> None:
    said = r"^the cell: ValueError: too long$"
    with pytest.raises(RuntimeError, match=said), cells.check_out(cells.AGAINST) as tree:  # noqa: PT012
        assert (tree / "lit_lazy").is_dir()
        cells.run_python("the cell", tree, "-c", "raise ValueError('too long')")
    assert not tree.exists()
    assert str(tree) not in run_git("worktree", "list")


@pytest.mark.parametrize(("state", "share"), [("softmax", 0), ("untrained", 0), ("local", 1 / 6)])
def test_empty_tiles_are_those_without_a_weight(state: str, share: float) -> None:
    """Four rows of tiles, of which the last two reach the second column: 6 tiles. With the local bias a query keeps no
    key beyond its 70 nearest, so that of the first column only the tile of queries 192 to 255 is empty."""
    inputs = attention.draw_inputs(Shape(2, 16, 256), 256)
    assert attention.measure_empty_tiles(inputs, state) == pytest.approx(share)


@pytest.mark.long
@needs_history
def test_the_benchmark_of_cells_run_small(tmp_path: Path) -> None:
    out, lines, given = tmp_path / "bench.json", [], {"experiments": ("backcopy_tiny",), "sizes": QUICK}
    measured = bench_cells(**given, out=out, console=lines.append)["measurements"]
    counts = {name: len(found) for name, found in measured.items()}
    assert counts == {"attention": 1, "threads": 1, "decoding": 1, "cells": 4}
    for cost in (pair[tree] for pair in measured["cells"].values() for tree in ("new", "old")):
        assert (cost["steps"], cost["seconds"]) == (4, pytest.approx(sum(cost["phases"].values())))
        assert all(seconds > 0 for seconds in cost["phases"].values())
    for section in ("attention", "decoding"):
        [found] = measured[section].values()
        times = found["seconds"]
        ratio = [a / b for a, b in zip(times["chunked local"], times["sdpa"], strict=True)]
        assert found["ratio"]["chunked local"]["median"] == pytest.approx(sum(ratio) / 2)
    again: list[str] = []
    assert bench_cells(**given, out=out, console=again.append)["measurements"] == measured
    assert again == [lines[-1]] == [out.with_suffix(".md").read_text()]


# The step

ALONE = """
import sys
from pathlib import Path
sys.path.append({root!r})
from timings.step import QUICK, bench_step
bench_step(**QUICK, out=Path({path!r}))
"""


@pytest.mark.long
@on_linux
def test_the_benchmark_of_a_step_run_small(tmp_path: Path, torch_site: Path) -> None:
    """In a process with only torch, like some GPU machines."""
    path = tmp_path / "new" / "bench-step.json"
    output = run_alone(ALONE.format(root=str(ROOT), path=str(path)), torch_site)
    assert path.with_suffix(".md").read_text() in output
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        for part in ("step", "attention"):
            rounds, ratio = row[part]["rounds"], row[part]["ratio"]
            ratios = [lazy / softmax for lazy, softmax in zip(rounds["lazy"], rounds["softmax"], strict=True)]
            assert (len(ratios), ratio["median"]) == (step.QUICK["rounds"], pytest.approx(statistics.median(ratios)))
            assert 0 < min(ratios) <= ratio["lower"] <= ratio["upper"] <= max(ratios)
        seconds = statistics.median(row["step"]["rounds"]["lazy"])
        assert row["tokens_per_second"]["lazy"] == pytest.approx(step.QUICK["tokens"] / seconds)
        # Four layers save at least ten activations of the model's width for the backward pass.
        assert min(row["peak_bytes"].values()) > 4 * 10 * 4 * step.QUICK["tokens"] * 256
    # With near-uniform scores and tau = 1, about half of the entries are below the threshold (docs/method.md).
    untrained, local = rows
    assert 0.4 < untrained["entries_cut"] < 0.65
    assert untrained["entries_cut"] < local["entries_cut"] < 1
    assert 0 < untrained["mass_left"] < local["mass_left"] < 1


def test_empty_tiles_are_counted_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias so steep that a row keeps only its last key, only the tiles on the diagonal are not empty."""
    monkeypatch.setattr(step, "LOCAL_REACH", 0.01)
    survival = step._measure_survival(step._make_model("local", 256), step._draw_ids(256, 256))
    assert survival["empty_tiles"] == {"64": pytest.approx(6 / 10), "256": 0}
    # Row i keeps one of i keys; the first row keeps none.
    assert survival["entries_cut"] == pytest.approx(1 - 255 / (256 * 257 / 2), abs=1e-4)


def test_a_gpu_step_is_measured() -> None:
    softmax, lazy = (measure(Case(name, 32, False), TINY, "cpu") for name in ("softmax", "lazy, W = L"))
    # tau of every head, and its biases for 32 positions
    assert lazy["parameters"] - softmax["parameters"] == TINY.n_layers * TINY.n_heads * (1 + 32)
    for found in (softmax, lazy):
        assert 0 < found["seconds"]["lower"] <= found["seconds"]["median"] <= found["seconds"]["upper"]
        assert found["tokens_per_second"] == TINY.tokens / found["seconds"]["median"]
        assert found["mfu"] is None


@pytest.mark.gpu
def test_a_gpu_step_on_a_gpu() -> None:
    found = measure(Case("lazy, W = L", 32, False), TINY, "cuda")
    assert found["peak_bytes"] > 0
    assert 0 < found["mfu"] < 1


def test_flops_are_those_of_the_products() -> None:
    """2 per multiplication, times 3 for forward and both gradients: blocks, head, and half of two L x L products."""
    d, ff, layers, vocabulary, length = 1024, 2816, 24, 32_000, 4096
    forward = 2 * (layers * (4 * d * d + 3 * d * ff) + d * vocabulary) + layers * 2 * 2 * d * length / 2
    parameters = layers * (4 * d * d + 3 * d * ff) + 2 * d * vocabulary
    assert flops_per_token(parameters, length, FULL) == pytest.approx(3 * forward)


def test_a_failing_case_costs_itself_and_each_is_written_as_it_comes(tmp_path, monkeypatch, capsys) -> None:
    out, seen = tmp_path / "new", []

    def measure_here(case: Case, *given: Any) -> dict[str, Any]:
        path = out / "gpu-step.json"
        seen.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        return measure_in_process(case, *given) if len(seen) == 2 else {**case._asdict(), "not_run": "no"}

    cases = [Case(name, 32, False) for name in ("softmax", "nonsense", "lazy, W = L")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_step, "make_cases", lambda *_: cases)
        patch.setattr(gpu_step, "measure_in_process", measure_here)
        assert gpu_step.main(["--out", str(out)]) == 0
    assert seen == [0, 1, 2]
    rows, text = json.loads((out / "gpu-step.json").read_text())["rows"], (out / "gpu-step.md").read_text()
    assert rows[1] == {**cases[1]._asdict(), "not_run": "KeyError: 'nonsense'"}
    assert text in capsys.readouterr().out
    assert "| nonsense | 32 | no | not run: KeyError: 'nonsense' |" in text
    monkeypatch.setattr(gpu_step, "SECONDS", 0.01)
    assert measure_in_process(cases[2], TINY, "cpu")["not_run"] == "TimeoutError: no result within 0 s"
    monkeypatch.setattr(gpu_step, "measure_in_process", lambda case, *_: {**case._asdict(), "not_run": "no"})
    for words, count in (([], 12), (["--lengths", "32", "--no-compiled"], 3)):
        assert gpu_step.main(["--out", str(out), *words]) == 0
        result, asked = json.loads((out / "gpu-step.json").read_text()), f"python3 -m timings.gpu_step --out {out}"
        assert (len(result["rows"]), result["command"]) == (count, f"{asked} {' '.join(words)}".strip())


@pytest.mark.long
@on_linux
def test_a_quarter_of_an_hour_on_a_gpu_is_rehearsed(tmp_path: Path) -> None:
    """On a CPU, in seconds; a process past its limit is killed, and what ran is written."""
    words = [sys.executable, "-m", "timings.quarter_hour", "--tiny", "--shards", "2", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "quarter-hour.json").read_text())["rows"]
    assert [row["phase"] for row in rows] == ["gate"] * 2 + ["passes"] + ["step"] * 2 + ["commands"] * 3 + ["bench"]
    assert " passed" in rows[0]["last"]
    assert (tmp_path / "long" / "gpu-step.json").exists()


def test_a_process_past_the_limit_of_its_phase_is_killed(tmp_path: Path) -> None:
    late = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    phase = quarter_hour.Phase("gate", 1.0, {"late": late, "wrong": [sys.executable, "-c", "raise SystemExit(3)"]})
    ledger = quarter_hour.Ledger(tmp_path)
    quarter_hour.run_phase(phase, ledger, dict(os.environ))
    found = {row["process"]: (row["ended"], row["last"]) for row in ledger.result["rows"]}
    assert found == {"late": ("at its limit", "begun"), "wrong": ("with status 3", "")}
    assert "| gate | wrong |" in (tmp_path / "quarter-hour.md").read_text()


# Diagnostics and grids


@pytest.mark.long
@on_linux
def test_the_benchmark_of_diagnostics_run_small(tmp_path: Path) -> None:
    path, lines, quick = tmp_path / "new" / "bench-diagnostics.json", [], diagnostics.QUICK
    result = bench_diagnostics(**quick, out=path, console=lines.append)
    assert json.loads(path.read_text()) == result
    # Above the inputs and below the matrices of all scores and weights.
    inputs = 2 * 4 * quick["heads"] * quick["length"]
    assert inputs * diagnostics.HEAD_DIM < result["summary"]["peak_bytes"] < inputs * quick["length"]
    [row] = result["training"]
    without, watched = row["rounds"]["without"], row["rounds"]["with"]
    paired = [a["processor_seconds"] / b["processor_seconds"] - 1 for a, b in zip(watched, without, strict=True)]
    assert row["paired"]["median"] == pytest.approx(statistics.median(paired))
    assert row["inside"]["median"] == pytest.approx(statistics.median(x["inside"] / x["seconds"] for x in watched))
    # Six steps: logs before training, after steps 1, 2 and 4, and at the validations after steps 3 and 6.
    assert (row["steps"], row["looks"]) == (6, 6)
    assert {(x["inside"], x["looks"]) for x in without} == {(0, 0)}
    assert lines[-1] == path.with_suffix(".md").read_text()


@pytest.mark.long
def test_the_benchmark_of_grids_on_cells_of_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = grid._load_lazy_config
    monkeypatch.setattr(grid, "_load_lazy_config", lambda _: whole("backcopy_tiny"))
    monkeypatch.setattr(grid, "CALIBRATION_STEPS", 20)
    out = tmp_path / "bench.json"
    result = forked.run_in_fork(lambda: grid.bench_grid((5,), 0.1, 2, out, print))
    seconds = result["overhead"]["wall_seconds"]
    assert {len(times) for times in seconds.values()} == {2}
    assert all(cell > fit > 0 for cell, fit in zip(seconds["cell"], seconds["fit in the cell"], strict=True))
    assert result["per_cell"][0]["cells"] == 5
    assert out.with_suffix(".md").exists()


def test_what_is_imported_is_not_looked_through_after_every_cell(tmp_path: Path) -> None:
    job = Job(tmp_path, "", threads=1, files=())

    def looked_through() -> tuple[int, int]:
        gc.unfreeze()
        before = len(gc.get_objects())
        prepare_process(job)
        return before, len(gc.get_objects())

    before, after = forked.run_in_fork(looked_through)
    assert after < before / 10


def test_types_are_read_once_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    base = grid._load_lazy_config("backcopy_tiny")
    chosen = select_rows(grid._make_ablation(10, 5), [], [])
    read: list[type] = []
    hints = typing.get_type_hints
    monkeypatch.setattr(typing, "get_type_hints", lambda cls, **more: read.append(cls) or hints(cls, **more))
    checked_fields.field_types.cache_clear()
    assert len(expand(prepare_rows(chosen, base))) == 50
    assert read
    assert len([cls for cls in read if cls.__module__.startswith("lit_lazy")]) == len(set(read))
