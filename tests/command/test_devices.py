"""Runs and grids on several devices, as they are given on the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from mlflow.tracking import MlflowClient
from two_rows import two_rows

from lit_lazy.command.main import main
from lit_lazy.grid.cells import Holder
from lit_lazy.grid.plan import read_grid

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


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(holds, seconds: float = 60.0):
    """What becomes true, as soon as it does."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


SLOW = """
import time
from multiprocessing import parent_process
HERE = Path(__file__).parent

if parent_process():  # a worker
    from lit_lazy.training.module import LitLM
    train = LitLM.training_step

    def training_step(self, batch, index):
        if self.global_step == 4 and not (HERE / "go").exists():
            (HERE / "training").touch()
            while not (HERE / "go").exists():
                time.sleep(0.05)
        return train(self, batch, index)

    LitLM.training_step = training_step
"""


@pytest.mark.long
def test_a_grid_outlives_the_death_of_a_rank(runs: Path, tmp_path: Path) -> None:
    """Its cell is taken up again within half a minute, from the checkpoint, and nothing is there twice."""
    (tmp_path / "ranks.py").write_text(two_rows("ranks", code=SLOW))
    command = ["ablate", "run", str(tmp_path / "ranks.py"), *TWO, "--seeds", "0", "--workers", "1"]
    process = forked.Popen(
        [sys.executable, "-m", "lit_lazy.command", *command, "--runs", str(runs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for((tmp_path / "training").exists)
    (holder,) = map(Holder.read, runs.glob("*/cells/*"))
    assert holder is not None
    (rank,) = children(holder.pid)
    killed = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    (tmp_path / "go").touch()
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0, out
    assert time.monotonic() - killed < 60
    name = "ranks-backcopy_tiny"
    assert {cell.status for cell in read_grid(runs / name).cells} == {"complete"}
    assert "was ended by SIGKILL" in next((runs / name).glob("worker-*.log")).read_text()
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    cells = client.search_runs([client.get_experiment_by_name(name).experiment_id], "tags.kind = 'cell'")
    assert [cell.info.status for cell in cells] == ["FINISHED"] * 2
    for cell in cells:
        steps = [point.step for point in client.get_metric_history(cell.info.run_id, "train/loss")]
        assert steps == sorted(set(steps))
    assert all(result["execution"]["devices"] == 2 for result in results(runs).values())


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
