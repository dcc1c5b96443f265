"""A grid whose databases and files are put back from copies that were made while it ran, each at another moment."""

import shutil
from itertools import product
from pathlib import Path

import pytest
from stores import forget_databases
from two_rows import two_rows

from lit_lazy.command.main import main
from lit_lazy.grid import mirror
from lit_lazy.grid.plan import read_grid
from lit_lazy.tracking.store import default_uri
from lit_lazy.tracking.tracker import Tracker

ID = "backup-backcopy_tiny"
COPIED = """
import shutil
from lit_lazy.training.result import RunResult
here, write = Path(__file__).parent, RunResult.write

def write_and_copy(self, folder):
    write(self, folder)
    for moment in [moment for moment in "12" if not (here / moment).exists()][:1]:
        shutil.copytree(here / "runs", here / moment)

RunResult.write = write_and_copy
"""
"""Code by which whoever trains copies everything at the end of each of the first two cells."""
MOMENTS = ("1", "2", "end")


@pytest.fixture
def whole(runs: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A finished grid and its copies; returns its command."""
    monkeypatch.setattr(mirror, "SYNC_SECONDS", 1e6)  # the first two copies of MLflow are whole, and lack all cells
    ablation = runs.with_name("backup.py")
    ablation.write_text(two_rows("backup", code=COPIED))
    command = ["ablate", "run", str(ablation), "--runs", str(runs), "--workers", "1", "--seeds", "0"]
    assert main(command) == 0
    shutil.copytree(runs, runs.with_name("end"))
    return command


def put_back(runs: Path, mlflow: str, queue: str, files: str) -> None:
    """Replace the runs folder; each argument is the moment of a copy."""
    shutil.rmtree(runs)
    shutil.copytree(runs.with_name(files), runs, ignore=shutil.ignore_patterns("queue*"))
    shutil.copy(runs.with_name(mlflow) / "mlflow.db", runs)
    for file in runs.with_name(queue).glob("queue*"):
        shutil.copy(file, runs)
    forget_databases()


@pytest.mark.long
def test_copies_of_any_moments_together_end_in_the_undisturbed_table(whole: list[str], runs: Path) -> None:
    table = (runs / ID / "table.csv").read_text()
    for moments in product(MOMENTS, repeat=3):
        put_back(runs, *moments)
        assert main(whole) == 0, moments
        assert (runs / ID / "table.csv").read_text() == table, moments
        assert [cell.status for cell in read_grid(runs / ID).cells] == ["complete"] * 2, moments
        cells = Tracker(default_uri(runs), runs, ID).find({"kind": "cell"})
        assert [cell.state for cell in cells] == ["complete"] * 2, moments
