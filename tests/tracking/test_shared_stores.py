"""Stores of several people, who retire only runs of their own folder; artifacts of copied and moved stores."""

import os
import shutil
import sqlite3
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import forked
import pytest

from lit_lazy.command.main import main
from lit_lazy.config.user_files import load_module
from lit_lazy.tracking.active_run import ActiveRun
from lit_lazy.tracking.store import RUN_ID, default_uri, read_run_id
from lit_lazy.tracking.tracker import OWNER_ID, Tracker, read_owner

EXPERIMENT = "train-backcopy_tiny"
TRAIN = ["train", "backcopy_tiny", "--train.steps=30", "--runs"]


@pytest.fixture
def shared(request: pytest.FixtureRequest, runs: Path) -> str:
    """The address of a store that belongs to no runs folder: a database, or a real server."""
    if request.param == "server":
        return request.getfixturevalue("mlflow_server").url
    return f"sqlite:///{runs / 'mlflow.db'}"


@pytest.mark.parametrize("shared", ["database", pytest.param("server", marks=pytest.mark.long)], indirect=True)
def test_two_people_train_the_same_at_once(shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared)
    first, second = tmp_path / "first", tmp_path / "second"
    other = forked.Popen(
        [sys.executable, "-m", "lit_lazy.command", *TRAIN, str(first)],
        stdout=forked.PIPE,
        stderr=forked.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + 60
    while not list(first.glob(f"*/*/{RUN_ID}")):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert main([*TRAIN, str(second)]) == 0
    out, _ = other.communicate(timeout=60)
    assert other.returncode == 0, out
    runs = Tracker(shared, second, EXPERIMENT).find({"kind": "run"})
    assert {run.run_id for run in runs} == {
        read_run_id(path.parent) for folder in (first, second) for path in folder.glob(f"*/*/{RUN_ID}")
    }
    assert [run.state for run in runs] == ["complete"] * 2


def begin(uri: str, runs: Path, **owned: str) -> str:
    """Start the run of a training whose folder was lost; returns its id."""
    runs.mkdir(exist_ok=True)
    tags = {"kind": "run", "cell": "abc", **owned}
    return ActiveRun(Tracker(uri, runs, EXPERIMENT), runs / EXPERIMENT / "abc", "a", tags, {}, {}).get_run_id()


def find_ids(uri: str, runs: Path) -> set[str]:
    return {run.run_id for run in Tracker(uri, runs, EXPERIMENT).find({"kind": "run"})}


def test_ones_own_run_is_retired_where_its_folder_was_lost(runs: Path, tmp_path: Path) -> None:
    uri, mine, theirs = default_uri(runs), tmp_path / "mine", tmp_path / "theirs"
    other = begin(uri, theirs, owner="them")
    begin(uri, mine, owner="me")
    shutil.rmtree(mine / EXPERIMENT)
    again = begin(uri, mine, owner="me")
    assert find_ids(uri, mine) == {other, again}


def test_a_run_of_an_earlier_version_is_retired_only_in_the_folders_own_database(runs: Path, tmp_path: Path) -> None:
    """It does not say whose it is."""
    uri, elsewhere = default_uri(runs), tmp_path / "elsewhere"
    tracker = Tracker(uri, runs, EXPERIMENT)
    earlier = tracker.create_run("a", {"kind": "run", "cell": "abc"})
    theirs = begin(uri, elsewhere, owner="them")
    assert find_ids(uri, runs) == {earlier, theirs}
    mine = begin(uri, runs, owner="me")
    assert find_ids(uri, runs) == {theirs, mine}


def test_a_runs_folder_has_one_owner(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        (owner,) = set(threads.map(read_owner, [tmp_path] * 8))
    assert read_owner(tmp_path) == owner
    (tmp_path / OWNER_ID).write_bytes(b"\xff' OR")
    assert read_owner(tmp_path) not in (owner, "")


screenshots = load_module(Path(__file__).resolve().parents[2] / "docs" / "screenshots.py")
ODD = "an experiment #1"


def track(runs: Path, text: str) -> str:
    """A run with one artifact; returns its id."""
    tracker = Tracker(default_uri(runs), runs, ODD)
    run_id = tracker.create_run("a", {"kind": "run"})
    tracker.log_text(run_id, text, "note.txt")
    return run_id


def read(runs: Path, run_id: str) -> str:
    """The artifact of a run in the folder beside the database."""
    return (runs / "mlartifacts" / ODD / run_id / "artifacts" / "note.txt").read_text()


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
    tracker = Tracker(default_uri(copied), copied, ODD)
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
    tracker = Tracker(f"sqlite:///{database}", runs, ODD)
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
