"""The benchmark of cells: its figures follow from its times, and a file keeps the measurements of one code only."""

import json
import time
from pathlib import Path

import pytest
import torch
from test_main import needs_history

from timings import attention, cells
from timings.cells import QUICK, Shape, bench_cells, run_git, summarise_cells
from timings.one_cell import PHASES, PhaseClock

IDENTITY = {"code": "c0de", "against": "3b7b986717", "tokens": 128}


def make_cost(seconds: float, outcome: float = 0.0, forward: float = 0.5) -> dict:
    phases = dict.fromkeys(PHASES, 0.0) | {"forward": forward, "backward": 1.0, "optimiser": 0.5}
    phases["rest"] = seconds - sum(phases.values())
    return {
        "backend": "chunked",
        "steps": 4,
        "flops_per_step": 1e9,
        "seconds": seconds,
        "wall_seconds": seconds + 1,
        "phases": phases,
        "product_rate": 1e10,
        "metrics": {"loss/excess": outcome},
    }


def make_pair(new: float, old: float) -> dict:
    return {"experiment": "backcopy", "row": "lazy", "new": make_cost(new), "old": make_cost(old)}


def make_result(measurements: dict) -> dict:
    environment = dict.fromkeys(("git_sha", "torch", "python", "machine", "cpu"), "x")
    return {
        "command": "bench",
        "date": "today",
        "environment": environment,
        "identity": IDENTITY,
        "measurements": measurements,
    }


def test_the_figures_of_a_cell_are_those_of_its_pairs() -> None:
    summary = summarise_cells([make_pair(4, 8), make_pair(5, 5), make_pair(6, 18)])
    assert summary["cells_per_core_hour"]["new"]["median"] == 720
    assert summary["cells_per_core_hour"]["old"]["median"] == 450
    # The median of 2, 1 and 3; the medians of the times would give 1.6.
    assert summary["ratio"] == {"median": 2, "lower": 1.5, "upper": 2.5}
    # Four steps of 1e9 FLOPs in 2 s, on a machine of 1e10 FLOP/s.
    assert summary["step_seconds"]["median"] == 0.5
    assert summary["share_of_product_rate"]["median"] == pytest.approx(0.2)
    assert summary["phases"]["new"]["backward"] == 0.2
    assert summary["phases"]["old"]["backward"] == 0.125


def test_the_table_shows_a_cell_from_its_second_pair() -> None:
    pairs = {"1": make_pair(4, 8)}
    assert "backcopy" not in cells.format_table(make_result({"cells": pairs}))
    text = cells.format_table(make_result({"cells": pairs | {"2": make_pair(4, 8)}}))
    assert "| backcopy lazy | chunked | 4.0 [4.0, 4.0] | 5.0 [5.0, 5.0] | 900 [900, 900] | 450 [450, 450] |" in text
    assert "| 12.5% | 25.0% | 37.5% | 12.5% |" in text  # forward, backward, both, optimiser


def test_two_commits_agree_if_the_interval_is_within_the_margin() -> None:
    """Differences 1, 2 and 3 e-5 have mean 2e-5, sd 1e-5 and half an interval of 4.303 sd / sqrt(3)."""

    def show(*differences: float) -> str:
        costs = [{"new": make_cost(4, 1 + d), "old": make_cost(4, 1.0)} for d in differences]
        pairs = {str(i): {"experiment": "backcopy", "row": "lazy"} | cost for i, cost in enumerate(costs)}
        lines = cells.format_table(make_result({"cells": pairs})).splitlines()
        return next((line for line in lines if line.startswith("| backcopy lazy | loss/excess")), "")

    assert show(1e-5, 2e-5) == ""  # too few to tell
    expected = "| 3 | 1.00000 | +2.0e-05 | -4.8e-06 to +4.5e-05 | 1.0e-05 | 0.0001 | agree |"
    assert show(1e-5, 2e-5, 3e-5).endswith(expected)
    assert show(1e-4, 2e-4, 3e-4).endswith("| not shown to agree |")
    assert show(-1e-3, 0, 1e-3).endswith("| not shown to agree |")


def test_every_measurement_is_saved_at_once_and_kept(tmp_path: Path) -> None:
    out, made = tmp_path / "bench.json", []

    def measure(name: str) -> dict:
        if name == "third" and len(made) == 2:
            raise RuntimeError("killed")
        made.append(name)
        return make_pair(4, 8)

    plan = {"cells": {name: lambda name=name: measure(name) for name in ("first", "second", "third")}}
    with pytest.raises(RuntimeError, match="killed"):
        cells.complete(make_result({}), plan, out, print)
    assert "900 [900, 900]" in out.with_suffix(".md").read_text()
    lines: list[str] = []
    result = make_result({}) | cells.read_known(out, IDENTITY, lines.append)
    made.append("again")
    cells.complete(result, plan, out, lines.append)
    assert made == ["first", "second", "again", "third"]
    assert lines == ["cells: third"]
    assert json.loads(out.read_text()) == result


@pytest.mark.parametrize("name", IDENTITY)
def test_other_code_is_measured_anew_and_said(name: str, tmp_path: Path) -> None:
    out, lines = tmp_path / "bench.json", []
    out.write_text(json.dumps(make_result({"attention": {"1x64": {}}})))
    assert cells.read_known(out, IDENTITY, print)["measurements"] == {"attention": {"1x64": {}}}
    assert cells.read_known(out, IDENTITY | {name: "other"}, lines.append) == {"measurements": {}}
    assert lines == [f"{out} is of other {name} and will be replaced"]


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    out.write_text(text)
    with pytest.raises(ValueError, match="is no result of this benchmark; name another file"):
        cells.read_known(out, IDENTITY, print)


def test_the_code_is_told_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "ROOT", tmp_path)
    run_git("init")
    (tmp_path / "timings").mkdir()
    file = tmp_path / "timings" / "step.py"
    hashes = [cells.hash_code()]
    for text in ("1", "2"):
        file.write_text(text)
        hashes.append(cells.hash_code())
    (tmp_path / "result.json").write_text("not code")
    assert len(set(hashes)) == 3
    assert cells.hash_code() == hashes[-1]


def test_a_phase_inside_another_counts_for_itself_only() -> None:
    clock = PhaseClock()
    with clock.time("optimiser"):
        burn(0.02)
        with clock.time("forward"):
            burn(0.06)
    clock.charge()
    assert clock.seconds["forward"] >= 0.06
    assert 0.02 <= clock.seconds["optimiser"] < 0.06
    assert clock.seconds["rest"] < 0.02


def test_an_optimisers_closure_is_not_its_own_time() -> None:
    clock = PhaseClock()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    clock.wrap_step(optimizer)
    optimizer.step(lambda: burn(0.05))
    clock.charge()
    assert 0 < clock.seconds["optimiser"] < 0.05 <= clock.seconds["rest"]


def burn(seconds: float) -> float:
    """Use the CPU."""
    started = time.process_time()
    while time.process_time() - started < seconds:
        pass
    return 0.0


@needs_history
def test_the_other_tree_goes_when_the_block_fails() -> None:
    with pytest.raises(RuntimeError, match="failed"), cells.check_out(cells.AGAINST) as tree:  # noqa: PT012
        assert (tree / "lit_lazy").is_dir()
        raise RuntimeError("failed")
    assert not tree.exists()
    assert str(tree) not in run_git("worktree", "list")


def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^the cell: ValueError: too long$"):
        cells.run_python("the cell", tmp_path, "-c", "raise ValueError('too long')")


@pytest.mark.parametrize("state", attention.STATES)
def test_empty_tiles_are_those_without_a_weight(state: str) -> None:
    inputs = attention.draw_inputs(Shape(2, 16, 256), 256)
    share = attention.measure_empty_tiles(inputs, state)
    # Four rows of tiles, of which the last two reach the second column: 6 tiles. With the local bias a query keeps no
    # key beyond its 70 nearest, so that of the first column only the tile of queries 192 to 255 is empty.
    assert share == pytest.approx({"softmax": 0, "untrained": 0, "local": 1 / 6}[state])


@pytest.mark.long
@needs_history
@pytest.mark.xdist_group("bench cells")
def test_the_benchmark_run_small(tmp_path: Path) -> None:
    out, lines, threads = tmp_path / "bench.json", [], torch.get_num_threads()
    result = bench_cells(experiments=("backcopy_tiny",), sizes=QUICK, out=out, console=lines.append)
    assert torch.get_num_threads() == threads
    measured = result["measurements"]
    counts = {name: len(found) for name, found in measured.items()}
    assert counts == {"attention": 1, "threads": 1, "decoding": 1, "cells": 4}
    for pair in measured["cells"].values():
        for cost in (pair["new"], pair["old"]):
            assert cost["steps"] == 4
            assert cost["seconds"] == pytest.approx(sum(cost["phases"].values()))
            assert all(seconds > 0 for seconds in cost["phases"].values())
            assert cost["product_rate"] > 1e8
    for section in ("attention", "decoding"):
        [found] = measured[section].values()
        times = found["seconds"]
        ratio = [a / b for a, b in zip(times["chunked local"], times["sdpa"], strict=True)]
        assert found["ratio"]["chunked local"]["median"] == pytest.approx(sum(ratio) / 2)
    assert lines[-1] == out.with_suffix(".md").read_text()
    assert json.loads(out.read_text()) == result

    again: list[str] = []
    assert bench_cells(experiments=("backcopy_tiny",), sizes=QUICK, out=out, console=again.append)["measurements"] == (
        measured
    )
    assert again == [lines[-1]]
