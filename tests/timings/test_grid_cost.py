"""The grid benchmark, and costs that must not recur for every cell."""

import gc
import typing
from pathlib import Path

import forked
import pytest

from lit_lazy.grid.ablation import expand, prepare_rows, select_rows
from lit_lazy.grid.job import Job
from lit_lazy.grid.worker import prepare_process
from lit_lazy.support import checks
from timings import grid


@pytest.mark.long
def test_the_benchmark_on_cells_of_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = grid._load_lazy_config
    monkeypatch.setattr(grid, "_load_lazy_config", lambda _: whole("backcopy_tiny"))
    monkeypatch.setattr(grid, "CALIBRATION_STEPS", 20)
    out = tmp_path / "bench.json"
    result = forked.run_in_fork(lambda: grid.bench_grid((5,), 0.1, 2, out, print))
    seconds = result["overhead"]["wall_seconds"]
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys(
        ("measure", "fit", "cell", "fit in the cell"), 2
    )
    assert all(cell > fit > 0 for cell, fit in zip(seconds["cell"], seconds["fit in the cell"], strict=True))
    assert result["per_cell"][0]["cells"] == 5
    assert "A grid's cell, as a share of bare `Trainer.fit`" in out.with_suffix(".md").read_text()


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
    checks.field_types.cache_clear()
    assert len(expand(chosen, prepare_rows(chosen, base))) == 50
    assert read
    assert len([cls for cls in read if cls.__module__.startswith("lit_lazy")]) == len(set(read))
