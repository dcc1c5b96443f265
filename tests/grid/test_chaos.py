"""Grids under repeated kills: each cell is complete exactly once, with the results of an undisturbed grid."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos import CELLS, POINTS, Chaos, Soak, report

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.long
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("devices", [1, 2])
def test_ten_kills_lose_nothing(devices: int, tmp_path: Path, empty_store: Path) -> None:
    """Kills at random moments, in training, while writing a checkpoint or a result, before and after MLflow."""
    peace, chaos = (Chaos(tmp_path / name, 100, empty_store, devices) for name in ("peace", "grid"))
    peace.run(workers=2, kills=0)
    peace.check()
    outcome = chaos.run(workers=2, kills=10, between=(0.5, 1.5))
    assert outcome.kills.total() >= 10
    assert set(POINTS) <= set(outcome.kills), outcome
    assert devices == 1 or outcome.kills["a rank, at random"]
    chaos.check()
    assert chaos.metrics() == peace.metrics()
    assert chaos.table() == peace.table()


@pytest.mark.long
def test_workers_may_come_and_go(tmp_path: Path, empty_store: Path) -> None:
    """One worker starts, two more join by the same command, the first is stopped and restarted."""
    grid = Chaos(tmp_path / "grid", 1000, empty_store)
    first = grid.command(workers=1)
    _wait_until(grid, lambda: len(grid.results()) >= 1)
    second = grid.command(workers=2)
    _wait_until(grid, lambda: len(grid.processes("a worker")) == 3)
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=60) == 130
    again = grid.command(workers=1)
    _wait_until(grid, lambda: len(grid.processes("a worker")) == 3)
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
@pytest.mark.parametrize(("workers", "steps", "devices"), [(1, 3000, 1), (4, 5000, 1), (2, 1000, 2)])
@pytest.mark.usefixtures("empty_store", "forked_ranks")
def test_a_hundred_kills_lose_nothing(workers: int, steps: int, devices: int, tmp_path: Path) -> None:
    assert "killed" in report(tmp_path, Soak(100, workers, workers, steps, devices))
