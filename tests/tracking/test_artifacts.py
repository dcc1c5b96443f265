"""Artifacts of a local store that is copied or moved."""

import shutil
import sqlite3
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from lit_lazy.config.user_files import load_module
from lit_lazy.tracking.store import default_uri
from lit_lazy.tracking.tracker import Tracker

screenshots = load_module(Path(__file__).resolve().parents[2] / "docs" / "screenshots.py")
EXPERIMENT = "an experiment #1"


def track(runs: Path, text: str) -> str:
    """A run with one artifact; returns its id."""
    tracker = Tracker(default_uri(runs), runs, EXPERIMENT)
    run_id = tracker.create_run("a", {"kind": "run"})
    tracker.log_text(run_id, text, "note.txt")
    return run_id


def read(runs: Path, run_id: str) -> str:
    """The artifact of a run in the folder beside the database."""
    return (runs / "mlartifacts" / EXPERIMENT / run_id / "artifacts" / "note.txt").read_text()


def read_files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_addresses(runs: Path) -> list[str]:
    """All addresses of artifacts in the database."""
    query = "SELECT artifact_location FROM experiments UNION ALL SELECT artifact_uri FROM runs"
    with closing(sqlite3.connect(runs / "mlflow.db")) as database:
        return [address for (address,) in database.execute(query)]


def test_a_copy_has_artifacts_of_its_own_and_its_database_is_only_read(runs: Path, tmp_path: Path) -> None:
    run_id = track(runs, "original")
    copied = tmp_path / "a copy"
    shutil.copytree(runs, copied)
    original, database = read_files(runs), (copied / "mlflow.db").read_bytes()
    tracker = Tracker(default_uri(copied), copied, EXPERIMENT)
    tracker.log_text(run_id, "copied", "note.txt")
    assert read_files(runs) == original
    shutil.rmtree(runs)
    assert read(copied, run_id) == "copied"
    assert (copied / "mlflow.db").read_bytes() == database
    assert not runs.exists()


def test_artifacts_that_lie_elsewhere_stay_there(runs: Path, tmp_path: Path) -> None:
    """Earlier versions stored them in the runs folder, also where MLFLOW_TRACKING_URI named another database."""
    run_id = track(runs, "original")
    database = tmp_path / "databases" / "mlflow.db"
    database.parent.mkdir()
    shutil.copy(runs / "mlflow.db", database)
    tracker = Tracker(f"sqlite:///{database}", runs, EXPERIMENT)
    tracker.log_text(run_id, "changed", "note.txt")
    assert read(runs, run_id) == "changed"
    assert not (database.parent / "mlartifacts").exists()


@pytest.mark.long
def test_the_dashboard_of_a_moved_folder_shows_its_artifacts(runs: Path, tmp_path: Path) -> None:
    """MLflow's server takes addresses from the database; those that it is given are right at every path."""
    first, moved = track(runs, "first"), tmp_path / "moved"
    runs.rename(moved)
    with screenshots.served_links(moved) as links:
        second = track(moved, "second")
        for run_id, text in ((first, "first"), (second, "second")):
            asked = f"{links['runs'].partition('/#')[0]}/get-artifact?path=note.txt&run_uuid={run_id}"
            with urllib.request.urlopen(asked) as answer:
                assert answer.read().decode() == text
    assert not any(str(tmp_path) in address for address in read_addresses(moved))
    assert [read(moved, run_id) for run_id in (first, second)] == ["first", "second"]
    assert not runs.exists()
