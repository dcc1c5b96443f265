"""A grid from the command line to the table: real workers, real queue, real MLflow store."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from mlflow.tracking import MlflowClient
from two_rows import WILD, two_rows

from lit_lazy.command.ablate_run import make_grid
from lit_lazy.command.main import main, make_parser
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.support.named_files import PROJECT, find
from lit_lazy.table.stored import read_table

ID = "pair-backcopy_tiny"


@pytest.fixture
def pair(tmp_path: Path) -> str:
    path = tmp_path / "pair.py"
    path.write_text(two_rows("pair", more=WILD))
    return str(path)


def cells(runs: Path) -> list[Path]:
    return sorted((runs / ID / "cells").iterdir())


def test_a_grid_from_start_to_table(runs: Path, pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One cell diverges: the others are executed, the exit status reports it, and a rerun executes only that cell."""
    command = ["ablate", "run", pair, "--runs", str(runs), "--workers", "2"]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "5 cells, 0 already finished, 5 to train" in out
    assert "4/5 cells done, 0 running, 1 failed" in out
    assert "Also in the table" not in out
    rows = {row.variant: row for row in read_table(runs / ID / "table.json").rows}
    assert rows["softmax"].n == rows["lazy"].n == 2
    assert (rows["wild"].n, rows["wild"].status) == (0, "failed")
    assert "DivergedError: training loss is" in (runs / ID / "table.md").read_text()
    done = {
        cell.name: (cell / "result.json").stat().st_mtime_ns for cell in cells(runs) if (cell / "result.json").exists()
    }
    assert len(done) == 4

    assert main(command) == 1
    assert "5 cells, 4 already finished, 1 to train" in capsys.readouterr().out
    after = {
        cell.name: (cell / "result.json").stat().st_mtime_ns for cell in cells(runs) if (cell / "result.json").exists()
    }
    assert after == done

    chosen = [*command, "--rows", "softmax,lazy", "--seeds", "0"]
    started = time.monotonic()
    assert main(chosen) == 0
    out = capsys.readouterr().out
    assert "2 cells, all finished: nothing to do" in out
    assert "\nAlso in the table, by earlier commands: softmax (seeds 1), lazy (seeds 1), wild (seeds 0).\n" in out
    assert time.monotonic() - started < 10

    check_mlflow(runs)
    written = (runs / ID / "table.md").read_text()
    shutil.rmtree(runs / ID)
    assert main(["ablate", "table", ID, "--runs", str(runs)]) == 0
    assert capsys.readouterr().out.strip().startswith("pair\n\nNo row learned the task.")
    assert (runs / ID / "table.md").read_text() == written


@pytest.mark.long
def test_the_command_imports_little() -> None:
    """Only workers and `train` train, only a new table is drawn: Lightning takes as long to import as all else."""
    code = (
        "import sys, lit_lazy.command.ablate_run, lit_lazy.grid.jobs.launch\n"
        "import lit_lazy.grid.runs_folder, lit_lazy.training.prepare\n"
        "print({'lightning', 'torchmetrics', 'transformers', 'matplotlib', 'scipy.stats'} & {*sys.modules})\n"
        "import lit_lazy.report.publish, lit_lazy.command.report\n"
        "print({'lightning', 'torchmetrics', 'transformers'} & {*sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout
    assert said.split("\n")[:2] == ["set()", "set()"]


def check_mlflow(runs: Path) -> None:
    """One parent with the table, one child per cell with tags, axes as params, and the right status."""
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(ID)
    found = client.search_runs([experiment.experiment_id])
    parents = [run for run in found if run.data.tags["kind"] == "ablation"]
    children = [run for run in found if run.data.tags["kind"] == "cell"]
    assert len(parents) == 1
    assert {"table.md", "table.csv", "table.tex", "table.json", "table.html", "effects.png", "config.yaml"} <= {
        artifact.path for artifact in client.list_artifacts(parents[0].info.run_id)
    }
    assert len(children) == 5
    for run in children:
        tags = run.data.tags
        assert tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert tags["ablation"] == ID
        assert {"variant", "seed", "cell", "source"} <= tags.keys()
        assert {"normaliser", "lr"} <= run.data.params.keys()
        assert "config.yaml" in {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
        wild = tags["variant"] == "wild"
        assert run.info.status == ("FAILED" if wild else "FINISHED")
        assert tags["state"] == ("failed" if wild else "complete")
        if not wild:
            assert {"git_sha", "environment", "backend"} <= tags.keys()
            history = client.get_metric_history(run.info.run_id, "train/loss")
            assert [point.step for point in history] == [1, 3, 5]
            assert {"loss/excess", "init/loss/excess", "val/loss"} <= run.data.metrics.keys()


def start(runs: Path, pair: str, *more: str) -> "subprocess.Popen[str]":
    """The command in this process; test_user_files.py uses real processes."""
    arguments = ["ablate", "run", pair, "--runs", str(runs), "--workers", "1", "--rows", "softmax,lazy", *more]
    return forked.Popen(
        [sys.executable, "-m", "lit_lazy.command", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_training(runs: Path, process: "subprocess.Popen[str]") -> tuple[str, Queue]:
    """Wait until a cell trains; returns the grid's id, which includes a hash of the overrides, and its queue."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None
        for checkpoint in runs.glob(f"{ID}-*/cells/*/checkpoints/last.ckpt"):
            grid = checkpoint.relative_to(runs).parts[0]
            return grid, Queue(f"sqlite:///{runs / 'queue.db'}", grid)
        time.sleep(0.1)
    raise AssertionError("no cell began to train")


LONG = (
    *("--seeds", "0", "--train.steps=200", "--train.checkpoint_every=20"),
    *("--train.val_every=1000", "--train.log_every=100"),
)
"""Two cells that train for a few seconds, long enough to be killed in training."""


@pytest.mark.long
def test_interrupt_and_resume(runs: Path, pair: str) -> None:
    """Ctrl-C exits once the cells are requeued; the same command resumes from checkpoints; nothing runs twice."""
    process = start(runs, pair, *LONG)
    grid, queue = wait_for_training(runs, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "the same command resumes" in out
    assert "running" not in queue.states().values()
    assert "interrupted" in [entry.reason for entry in queue.entries("waiting")], (out, queue.states())
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    number = client.get_experiment_by_name(grid).experiment_id
    statuses = {run.info.status for run in client.search_runs([number], "tags.kind = 'cell'")}
    assert statuses <= {"KILLED", "FINISHED"}

    command = ["ablate", "run", pair, "--runs", str(runs), "--workers", "2", "--rows", "softmax,lazy", *LONG]
    assert main(command) == 0
    assert set(queue.states().values()) == {"complete"}
    finished = client.search_runs([number], "tags.kind = 'cell'")
    assert len(finished) == 2
    assert {run.info.status for run in finished} == {"FINISHED"}


@pytest.mark.long
def test_fresh_moves_the_former_results_away(runs: Path, pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ablate", "run", pair, "--runs", str(runs), "--workers", "1", "--rows", "softmax", "--seeds", "0"]
    assert main(command) == 0
    assert main([*command, "--fresh"]) == 0
    out = capsys.readouterr().out
    assert "the former results are in" in out
    assert "1 cells, 0 already finished, 1 to train" in out
    aside = [path for path in runs.iterdir() if ".until-" in path.name]
    assert len(list(aside[0].glob("cells/*/result.json"))) == 1
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    number = client.get_experiment_by_name(ID).experiment_id
    assert len(client.search_runs([number])) == 2
    deleted = client.search_runs([number], run_view_type=2)
    assert len(deleted) == 2


@pytest.mark.long
def test_a_grid_whose_experiment_was_edited_is_refused(
    runs: Path, pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise one table would contain two trainings under one name."""
    base = tmp_path / "mine.py"
    text = (find("experiments", "backcopy_tiny")).read_text()
    command = ["ablate", "run", pair, "--base", str(base), "--runs", str(runs), "--workers", "1", "--rows", "softmax"]
    base.write_text(text)
    assert main([*command, "--seeds", "0"]) == 0
    forget(base)
    base.write_text(text.replace("steps=6", "steps=7"))
    assert main([*command, "--seeds", "1"]) == 2
    assert "row 'softmax': train.steps changed from 6 to 7 since this grid began" in capsys.readouterr().err
    assert len(list((runs / "pair-mine" / "cells").iterdir())) == 1


def enqueue(ablation: Path, runs: Path) -> None:
    """Begin a grid without training its cells."""
    grid = make_grid(make_parser().parse_args(["ablate", "run", str(ablation), "--runs", str(runs)]), [])
    Queue(default_storage(runs), grid.id).add_missing(grid.cells)


def test_the_status_says_that_a_row_was_edited_since_the_grid_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(two_rows("mine"))
    enqueue(path, tmp_path)
    command = ["ablate", "status", str(path), "--runs", str(tmp_path)]
    assert main(command) == 0
    assert "edited" not in capsys.readouterr().out
    forget(path)
    path.write_text(path.read_text().replace("Elastic()", "Elastic(tau_init=0.5)"))
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "mine-backcopy_tiny: 0/4 cells complete" in out
    changed = "row 'lazy': model.attention.normaliser.tau_init changed from 1.0 to 0.5 since this grid began"
    assert f"{path} was edited: {changed}; another name= in" in out


def test_the_status_says_that_a_declaration_was_edited_since_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "q_mask_2.py"
    shutil.copy(find("ablations", "q_mask_2"), path)
    enqueue(path, tmp_path)
    (tmp_path / "q_mask_2-backcopy").mkdir()
    shutil.copy(PROJECT / "docs" / "results" / "q_mask_2-backcopy" / "table.json", tmp_path / "q_mask_2-backcopy")
    command = ["ablate", "status", str(path), "--runs", str(tmp_path)]
    assert main(command) == 0
    assert "edited" not in capsys.readouterr().out
    forget(path)
    path.write_text(path.read_text().replace("= 0.1, 0.25", "= 0.1, 0.2"))
    assert main(command) == 0
    assert f"{path} was edited: its claim or rules changed since its run" in capsys.readouterr().out


def forget(path: Path) -> None:
    """Reload a file, as another process would."""
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(path)]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_a_dry_run_creates_nothing(tmp_path: Path, pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.iterdir())
    assert main(["ablate", "run", pair, "--dry-run", "--runs", str(tmp_path / "none"), "--workers", "2"]) == 0
    out = capsys.readouterr().out
    assert "5 cells of pair-backcopy_tiny" in out
    assert "Nothing was created" in out
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_tokenises_no_text_to_learn_what_is_finished(
    tmp_path: Path, pair: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    base, text = tmp_path / "mine.py", find("experiments", "stdlib_tiny").read_text()
    base.write_text(
        text.replace("data.stdlib import Stdlib", "data.text import Text").replace("Stdlib(", "Text('a.txt', ")
    )
    Queue(default_storage(tmp_path), "pair-mine")
    command = ["ablate", "run", pair, "--base", str(base), "--runs", str(tmp_path), "--workers", "1", "--dry-run"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("Which cells are finished is unknown until their text is tokenised;")
    assert "5 cells of pair-mine: about" in out
    assert not (tmp_path / "cache").exists()
