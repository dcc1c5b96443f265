"""Several people train one configuration with one MLflow: each retires only runs of their own folder."""

import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
from two_rows import two_rows

from lit_lazy.command.main import main
from lit_lazy.grid.plan import GRID_ID, find_parent
from lit_lazy.tracking.owner import OWNER_ID, read_owner
from lit_lazy.tracking.store import default_uri
from lit_lazy.tracking.tracked_run import RUN_ID, ActiveRun
from lit_lazy.tracking.tracker import Tracker

EXPERIMENT, GRID = "train-backcopy_tiny", "pair-backcopy_tiny"
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
        path.read_text() for folder in (first, second) for path in folder.glob(f"*/*/{RUN_ID}")
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


@pytest.mark.long
def test_two_people_run_the_same_grid_with_one_mlflow(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = f"sqlite:///{runs / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared)
    (tmp_path / "pair.py").write_text(two_rows("pair"))
    for folder, rows in (("first", "softmax,lazy"), ("second", "softmax")):
        grid = ["ablate", "run", str(tmp_path / "pair.py"), "--rows", rows, "--seeds", "0", "--workers", "1"]
        assert main([*grid, "--runs", str(tmp_path / folder)]) == 0
    tracker = Tracker(shared, tmp_path / "first", GRID)
    assert [run.state for run in tracker.find({"kind": "cell"})] == ["complete"] * 3
    table = tmp_path / "first" / GRID / "table.json"
    table.unlink()
    assert main(["ablate", "table", GRID, "--runs", str(tmp_path / "first")]) == 0
    assert [row["variant"] for row in json.loads(table.read_text())["rows"]] == ["softmax", "lazy"]


def test_a_table_is_of_the_grid_in_the_runs_folder(runs: Path) -> None:
    """Else of the newest: someone who only reads has no grid of their own."""
    tracker = Tracker(default_uri(runs), runs, GRID)
    mine, theirs = [tracker.create_run(name, {"kind": "ablation", "grid": name}) for name in ("mine", "theirs")]
    assert find_parent(tracker) == theirs
    (runs / GRID).mkdir()
    (runs / GRID / GRID_ID).write_text("mine")
    assert find_parent(tracker) == mine
    (runs / GRID / GRID_ID).write_bytes(b"\xff")
    assert find_parent(tracker) == theirs
