"""Grids that are killed at every turn: each cell is complete exactly once, and its results are those of peace."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos import CELLS, POINTS, Chaos, report

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Chaos:
    """The undisturbed run."""
    peace = Chaos(tmp_path_factory.mktemp("peace") / "grid", 100, empty_store)
    peace.run(workers=2, kills=0)
    peace.check()
    return peace


@pytest.mark.long
def test_ten_kills_lose_nothing(peace: Chaos, tmp_path: Path, empty_store: Path) -> None:
    """At random moments, and in training, in a checkpoint's and a result's writing, and on either side of MLflow."""
    chaos = Chaos(tmp_path / "grid", 100, empty_store)
    outcome = chaos.run(workers=2, kills=10, between=(0.5, 3.0))
    assert sum(outcome.kills.values()) >= 10
    assert set(POINTS) <= set(outcome.kills), outcome
    chaos.check()
    assert chaos.metrics() == peace.metrics()
    assert chaos.table() == peace.table()


@pytest.mark.long
def test_workers_may_come_and_go(tmp_path: Path, empty_store: Path) -> None:
    """One worker begins, two more join by the same command, the first is sent away and comes back."""
    grid = Chaos(tmp_path / "grid", 1000, empty_store)
    first = grid.command(workers=1)
    _wait_until(grid, lambda: len(grid.results()) >= 1)
    second = grid.command(workers=2)
    _wait_until(grid, lambda: len(grid.workers()) == 3)
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=60) == 130
    again = grid.command(workers=1)
    _wait_until(grid, lambda: len(grid.workers()) == 3)
    assert len(grid.results()) < CELLS
    assert second.wait(timeout=300) == 0
    assert again.wait(timeout=300) == 0
    grid.check()


def _wait_until(grid: Chaos, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < end, grid.log.read_text()
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize(("workers", "steps"), [(1, 3000), (4, 5000)])
def test_a_hundred_kills_lose_nothing(workers: int, steps: int, tmp_path: Path) -> None:
    assert "killed" in report(tmp_path, kills=100, seed=workers, workers=workers, steps=steps)
