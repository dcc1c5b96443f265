"""Stores of several people, whose runs stay apart; artifacts of copied and moved stores."""

import os
import shutil
import sqlite3
import sys
import tarfile
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import forked
import pytest
from mlflow.tracking import MlflowClient

from lit_lazy.command.main import main
from lit_lazy.config.user_files import load_module
from lit_lazy.tracking.serve import make_addresses_relative
from lit_lazy.tracking.store_address import PARENT, RUN_ID, default_uri, read_run_address
from lit_lazy.tracking.tracker import MirroredRun, Tracker

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
    words, given = [sys.executable, "-m", "lit_lazy", *TRAIN, str(first)], os.environ | {"OMP_NUM_THREADS": "1"}
    other = forked.Popen(words, stdout=forked.PIPE, stderr=forked.STDOUT, text=True, env=given)
    end = time.monotonic() + 60
    while not list(first.glob(f"*/*/{RUN_ID}")):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert main([*TRAIN, str(second)]) == 0
    out, _ = other.communicate(timeout=60)
    assert other.returncode == 0, out
    runs = Tracker(shared, EXPERIMENT).find({"kind": "run"})
    assert {run.info.run_id for run in runs} == {
        read_run_address(path.parent)[0] for folder in (first, second) for path in folder.glob(f"*/*/{RUN_ID}")
    }
    assert [run.data.tags["state"] for run in runs] == ["complete"] * 2


def test_a_training_has_the_run_that_its_folder_names(runs: Path, tmp_path: Path) -> None:
    """Also one of an earlier version, which tagged its owner; a run that others began from the same settings stays."""
    tracker = Tracker(default_uri(runs), EXPERIMENT)
    tags = {"kind": "run", "cell": "abc", "grid": "mine"}
    theirs, former = (tracker.create_run("a", tags | {"grid": "theirs", "owner": owner}) for owner in ("them", "me"))
    folder = tmp_path / "mine" / EXPERIMENT / "abc"
    folder.mkdir(parents=True)

    def begin() -> str:
        MirroredRun(tracker, folder, "a", tags, {}, {}).sync(None)
        run_id, experiment_id = read_run_address(folder)
        assert experiment_id == tracker.experiment_id
        return run_id

    (folder / RUN_ID).write_text(former)
    assert begin() == former
    tracker.delete_run(former)
    mine = begin()
    assert begin() == mine
    assert {run.info.run_id for run in tracker.find({"kind": "run"})} == {theirs, mine}


def test_a_run_that_was_not_named_in_its_folder_is_found_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("lit_lazy.tracking.tracker.write_run_address", Mock(side_effect=OSError("no space")))
        assert main([*TRAIN, str(runs)]) == 1
    assert main([*TRAIN, str(runs)]) == 0
    found = Tracker(default_uri(runs), EXPERIMENT).find({"kind": "run"})
    assert [run.data.tags["state"] for run in found] == ["complete"]


def test_a_deletion_that_was_killed_is_completed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(default_uri(runs), "a")
    parent = tracker.create_run("parent", {"grid": "mine"})
    for n in range(2):
        tracker.create_run(f"cell {n}", {PARENT: parent})
    deleting = Mock(wraps=tracker.client.delete_run, side_effect=[DEFAULT, KeyboardInterrupt, *[DEFAULT] * 3])
    monkeypatch.setattr(tracker.client, "delete_run", deleting)
    with pytest.raises(KeyboardInterrupt):
        tracker.delete_run(parent)
    for run in tracker.find({"grid": "mine"}):
        tracker.delete_run(run.info.run_id)
    assert not tracker.client.search_runs([tracker.experiment_id])


screenshots = load_module(Path(__file__).resolve().parents[2] / "docs" / "screenshots.py")
ODD = "an experiment #1"


def track(runs: Path, text: str) -> str:
    """A run with one artifact; returns its id."""
    tracker = Tracker(default_uri(runs), ODD)
    run_id = tracker.create_run("a", {"kind": "run"})
    tracker.update(run_id, files={"note.txt": text.encode()})
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
    tracker = Tracker(default_uri(copied), "cells")  # as `lit-lazy lm-eval` takes it
    tracker.update(run_id, files={"note.txt": b"copied"})
    assert read_files(runs) == original
    shutil.rmtree(runs)
    assert read(copied, run_id) == "copied"
    assert (copied / "mlflow.db").read_bytes() == database
    assert not runs.exists()


def test_addresses_of_an_earlier_version_become_those_of_its_folder(runs: Path) -> None:
    """Wherever it was; those of other programs stay as they are."""
    with tarfile.open(Path(__file__).parents[1] / "grid" / "runs-82aa2800.tar.xz") as archive:
        archive.extractall(runs.parent, filter="data")
    theirs = "file:///home/them/mlartifacts/5"
    MlflowClient(default_uri(runs)).create_experiment("theirs", theirs)
    before = read_addresses(runs)
    for _ in range(2):
        make_addresses_relative(runs / "mlflow.db")
    (folder,) = (runs / "mlartifacts").iterdir()
    here = {f"file:mlartifacts/{folder.name}/{run.name}/artifacts" for run in folder.iterdir()}
    assert {*read_addresses(runs)} - {*before} == here | {f"file:mlartifacts/{folder.name}"}
    assert theirs in read_addresses(runs)


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
