"""Several people train one configuration with one MLflow: each retires only runs of their own folder."""

import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest

from lit_lazy.command.main import main
from lit_lazy.tracking.active_run import ActiveRun
from lit_lazy.tracking.run_files import RUN_ID, read_run_id
from lit_lazy.tracking.store import default_uri
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
    earlier = tracker.start_run("a", {"kind": "run", "cell": "abc"}, {}, {})
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
