"""A grid whose two databases and files are put back from copies that were made while it ran, each at another moment."""

import shutil
from itertools import product
from pathlib import Path

import pytest
from test_recovery import forget_databases
from two_rows import two_rows

from lit_lazy.command.main import main
from lit_lazy.grid.jobs import launch
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.tracking.store import default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.result import DIAGNOSTICS

ID = "backup-backcopy_tiny"
COPIED = """
if Path(sys.argv[0]).stem == "worker" and not Path(__file__).with_name("2").exists():
    import shutil
    from lit_lazy.tracking.tracked_run import ActiveRun
    here, finish, moments = Path(__file__).parent, ActiveRun.finish, iter("12")

    def copy_and_finish(self, result):
        shutil.copytree(here / "runs", here / next(moments))
        finish(self, result)

    ActiveRun.finish = copy_and_finish
"""
"""Code by which the first worker copies everything when it has trained a cell, of two, and not yet sent its result."""
MOMENTS = ("1", "2", "end")


@pytest.fixture
def whole(runs: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A finished grid and its copies; returns its command."""
    monkeypatch.setattr(launch, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(launch, "LOOK_SECONDS", 0.2)
    ablation = runs.with_name("backup.py")
    ablation.write_text(two_rows("backup", code=COPIED))
    command = ["ablate", "run", str(ablation), "--runs", str(runs), "--workers", "1", "--seeds", "0"]
    assert main(command) == 0
    shutil.copytree(runs, runs.with_name("end"))
    return command


def put_back(runs: Path, mlflow: str, queue: str, files: str) -> None:
    """Replace the runs folder; each argument is the moment of a copy."""
    shutil.rmtree(runs)
    shutil.copytree(runs.with_name(files), runs)
    shutil.copy(runs.with_name(mlflow) / "mlflow.db", runs)
    shutil.copy(runs.with_name(queue) / "queue.db", runs)
    forget_databases()


@pytest.mark.long
def test_copies_of_any_moments_together_end_in_the_undisturbed_table(whole: list[str], runs: Path) -> None:
    table = (runs / ID / "table.csv").read_text()
    for moments in product(MOMENTS, repeat=3):
        put_back(runs, *moments)
        assert main(whole) == 0, moments
        assert (runs / ID / "table.csv").read_text() == table, moments
        assert set(Queue(default_storage(runs), ID).states().values()) == {"complete"}, moments
        tracker = Tracker(default_uri(runs), runs, ID)
        cells = tracker.find({"kind": "cell"})
        assert [cell.state for cell in cells] == ["complete"] * 2, moments
        for cell in cells:
            kept = runs / ID / "cells" / cell.tags["cell"] / DIAGNOSTICS
            assert not kept.exists() or tracker.read_bytes(cell.run_id, DIAGNOSTICS) == kept.read_bytes(), moments
