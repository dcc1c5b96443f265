"""Runs and grids on several devices, as they are given on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from lit_lazy.command.main import main

TWO = ("--devices", "2")


pytestmark = pytest.mark.usefixtures("forked_ranks")


def results(folder: Path) -> dict[str, dict]:
    """What each run below a folder left, by its key."""
    return {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("result.json")}


@pytest.mark.long
def test_a_training_on_two_devices(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same run as on one that accumulates: its key, its metrics; MLflow shows how it was executed."""
    assert main(["train", "backcopy_tiny", *TWO, "--runs", str(runs)]) == 0
    assert "excess loss (nats)" in capsys.readouterr().out
    assert main(["train", "backcopy_tiny", "--micro-batch", "4", "--runs", str(tmp_path / "one")]) == 0
    (two,), (one,) = results(runs).items(), results(tmp_path / "one").items()
    assert two[0] == one[0]
    assert two[1]["metrics"] == one[1]["metrics"]
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("train-backcopy_tiny").experiment_id])
    assert "devices 2" in run.data.tags["execution"]


@pytest.mark.long
@pytest.mark.parametrize("start", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_real_processes(start: list[str], tmp_path: Path) -> None:
    """Those that rank 0 starts, and those of torchrun."""
    options = [] if start else [*TWO]
    command = [sys.executable, *start, "-m", "lit_lazy.command", "train", "backcopy_tiny", *options]
    subprocess.run([*command, "--runs", str(tmp_path / "two")], check=True, timeout=200)
    assert main(["train", "backcopy_tiny", "--micro-batch", "4", "--runs", str(tmp_path / "one")]) == 0
    (two,), (one,) = results(tmp_path / "two").values(), results(tmp_path / "one").values()
    assert two["metrics"] == one["metrics"]
    assert two["execution"]["devices"] == 2
