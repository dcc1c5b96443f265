"""`--limit`: no cell starts after it, those that run are finished, and the same command resumes."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from test_interrupts import STUDY, two_cells
from two_rows import two_rows

from lit_lazy.command.main import main
from lit_lazy.grid.jobs import job
from lit_lazy.grid.jobs.worker import Worker
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.report import publish
from lit_lazy.table.stored import read_table
from lit_lazy.tracking.store import default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training import run

ID = "pair-backcopy_tiny"


@pytest.fixture
def _ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets any limit pass while the first cell is trained."""
    passed, train = tmp_path / "passed", run.fit

    def train_and_end(*args: Any) -> Any:
        passed.touch()
        return train(*args)

    monkeypatch.setattr(run, "fit", train_and_end)
    monkeypatch.setattr(job, "time", SimpleNamespace(time=lambda: time.time() + 1e9 * passed.exists()))


@pytest.mark.usefixtures("_ending")
def test_a_grid_ends_between_cells_and_resumes(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publish, "draw_table_figures", lambda _: {})
    monkeypatch.setattr(publish, "write_report", lambda *_: [])
    (tmp_path / "pair.py").write_text(two_rows("pair"))
    command = ["ablate", "run", str(tmp_path / "pair.py"), "--runs", str(runs), "--workers", "1", "--brief"]
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    assert main([*command, "--limit", "90m"]) == 1
    out = capsys.readouterr().out
    assert f"1 of 4 cells of {ID} are trained" in out
    assert out.splitlines()[-1] == "ended by --limit: 3 of 4 cells wait; the same command resumes"
    assert [row.n for row in read_table(runs / ID / "table.json").rows] == [1, 0]
    number = client.get_experiment_by_name(ID).experiment_id
    assert [run.info.status for run in client.search_runs([number], "tags.kind = 'ablation'")] == ["KILLED"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "4 cells, 1 already finished, 3 to train" in out
    assert [run.info.status for run in client.search_runs([number], "tags.kind = 'ablation'")] == ["FINISHED"]


@pytest.mark.long
def test_a_limit_that_the_preparation_takes_lets_each_worker_start_a_cell(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that a command that is given again and again ends the grid, and not one cell more."""
    monkeypatch.setattr(publish, "draw_table_figures", lambda _: {})
    monkeypatch.setattr(publish, "write_report", lambda *_: [])
    monkeypatch.setattr(job, "time", SimpleNamespace(time=lambda: time.time() + 1e9))
    (tmp_path / "pair.py").write_text(two_rows("pair"))
    command = ["ablate", "run", str(tmp_path / "pair.py"), "--runs", str(runs), "--workers", "1", "--brief"]
    command += ["--rows", "softmax", "--limit", "90m"]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "--limit: the preparation took all of it; each worker starts one cell" in out
    assert f"1 of 2 cells of {ID} are trained" in out
    assert out.splitlines()[-1] == "ended by --limit: 1 of 2 cells wait; the same command resumes"


def test_a_worker_that_starts_after_the_limit_claims_nothing(runs: Path) -> None:
    """As a task does that a Ray cluster had no room for until then."""
    queue = two_cells("local", default_storage(runs))
    worker = Worker(queue, Tracker(default_uri(runs), runs, STUDY), "parent", runs / STUDY, until=time.time())
    worker.work(most=1)
    assert set(queue.states().values()) == {"waiting"}


@pytest.mark.parametrize("limit", ["90", "0m", "-1h", "1d", "m"])
def test_what_is_no_duration_is_one_line(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ablate", "run", "table2", f"--limit={limit}"])
    assert f"--limit: '{limit}': must be minutes or hours above 0" in capsys.readouterr().err
