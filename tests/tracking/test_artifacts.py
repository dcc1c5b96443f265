"""Artifacts of a local store that is copied, moved, or mounted at a second path while a grid runs in it."""

import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import forked
import pytest
from two_rows import two_rows

from lit_lazy.config.user_files import load_module
from lit_lazy.tracking.store import default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.result import DIAGNOSTICS

screenshots = load_module(Path(__file__).resolve().parents[2] / "docs" / "screenshots.py")
EXPERIMENT = "an experiment #1"
MOUNT = 'mount --bind "$0" "$1" && shift && exec "$@"'
HELD = """
if Path(sys.argv[0]).stem == "worker":
    import time
    from lit_lazy.tracking.tracked_run import ActiveRun
    here, finish = Path(__file__).parent, ActiveRun.finish

    def finish_later(self, result):
        (here / "trained").touch()
        while not (here / "seen").exists():
            time.sleep(0.05)
        finish(self, result)

    ActiveRun.finish = finish_later
"""
"""Code by which a worker sends its result only once the test has looked."""


def track(runs: Path, text: str) -> str:
    """A run with one artifact; returns its id."""
    tracker = Tracker(default_uri(runs), runs, EXPERIMENT)
    run_id = tracker.create_run("a", {"kind": "run"})
    tracker.log_text(run_id, text, "note.txt")
    return run_id


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
    assert tracker.read_text(run_id, "note.txt") == "copied"
    assert tracker.read_bytes(run_id, "note.txt") == b"copied"
    assert tracker.read_bytes(run_id, "other.txt") is None
    assert (copied / "mlflow.db").read_bytes() == database
    assert not runs.exists()


def test_artifacts_that_lie_elsewhere_stay_there(runs: Path, tmp_path: Path) -> None:
    """Earlier versions stored them in the runs folder, also where MLFLOW_TRACKING_URI named another database."""
    run_id = track(runs, "original")
    database = tmp_path / "databases" / "mlflow.db"
    database.parent.mkdir()
    shutil.copy(runs / "mlflow.db", database)
    tracker = Tracker(f"sqlite:///{database}", runs, EXPERIMENT)
    assert tracker.read_text(run_id, "note.txt") == "original"
    tracker.log_text(run_id, "changed", "note.txt")
    assert Tracker(default_uri(runs), runs, EXPERIMENT).read_text(run_id, "note.txt") == "changed"


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
    tracker = Tracker(default_uri(moved), moved, EXPERIMENT)
    assert [tracker.read_text(run_id, "note.txt") for run_id in (first, second)] == ["first", "second"]
    assert not runs.exists()


@pytest.fixture
def mounting(tmp_path: Path) -> Iterator[list[str]]:
    """The beginning of a command that sees a folder at a second path: followed by folder, path and command."""
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    tried = (
        subprocess.run([*command, *folders, "true"], capture_output=True, text=True)
        if shutil.which("unshare")
        else None
    )
    if tried is None or tried.returncode:
        pytest.skip(f"needs a mount namespace: {tried.stderr.strip() if tried else 'no unshare on the PATH'}")
    return command


@pytest.mark.long
def test_a_table_read_through_another_mount_leaves_a_living_grid_alone(
    mounting: list[str], runs: Path, tmp_path: Path
) -> None:
    ablation, there = tmp_path / "held.py", tmp_path / "there"
    ablation.write_text(two_rows("held", code=HELD))
    there.mkdir()
    lit = [sys.executable, "-m", "lit_lazy.command"]
    command = [
        "ablate",
        "run",
        str(ablation),
        "--runs",
        str(runs),
        "--workers",
        "1",
        "--rows",
        "softmax",
        "--seeds",
        "0",
    ]
    grid = forked.Popen([*lit, *command], stdout=forked.PIPE, stderr=forked.STDOUT, text=True)
    wait_for(tmp_path / "trained", grid)
    addresses = read_addresses(runs)
    read = ["ablate", "table", "held-backcopy_tiny", "--runs", str(there)]
    shown = subprocess.run([*mounting, str(runs), str(there), *lit, *read], capture_output=True, text=True)
    (tmp_path / "seen").touch()
    out, _ = grid.communicate(timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert grid.returncode == 0, out
    assert read_addresses(runs) == addresses
    assert not any(there.iterdir())
    tracker = Tracker(default_uri(runs), runs, "held-backcopy_tiny")
    (cell,) = tracker.find({"kind": "cell"})
    kept = runs / "held-backcopy_tiny" / "cells" / cell.tags["cell"] / DIAGNOSTICS
    assert tracker.read_bytes(cell.run_id, DIAGNOSTICS) == kept.read_bytes()


def wait_for(file: Path, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
