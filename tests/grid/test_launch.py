"""A grid from the command line to the table: real trainings, workers and MLflow store."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import forget_user_files
from mlflow.tracking import MlflowClient
from two_rows import WILD, two_rows

from lit_lazy.command.ablate_run import make_grid
from lit_lazy.command.main import main, make_parser
from lit_lazy.grid.run import save_plan
from lit_lazy.support.named_files import PROJECT, find
from lit_lazy.table.stored import read_table
from lit_lazy.training.run_folder import locate_cell, write_settings

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
    assert "DivergedError: training loss is" in (runs / ID / "details.md").read_text()
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
    (runs / ID / "table.md").unlink()
    assert main(["ablate", "table", ID, "--runs", str(runs)]) == 0
    assert capsys.readouterr().out.strip().startswith(f"pair on {ID.removeprefix('pair-')}\n\nNo row learned the task.")
    assert (runs / ID / "table.md").read_text() == written


@pytest.mark.long
def test_the_command_imports_little() -> None:
    """Only workers and `train` train, only a new table is drawn: Lightning takes as long to import as all else."""
    code = (
        "import sys, lit_lazy.command.ablate_run, lit_lazy.grid.run\n"
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
    assert {"table.md", "details.md", "table.csv", "table.tex", "table.json", "table.html", "config.yaml"} <= {
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
    forget_user_files()
    base.write_text(text.replace("steps=6", "steps=7"))
    assert main([*command, "--seeds", "1"]) == 2
    assert "row 'softmax': train.steps changed from 6 to 7 since this grid began" in capsys.readouterr().err
    assert len(list((runs / "pair-mine" / "cells").iterdir())) == 1


def begin(ablation: Path, runs: Path) -> None:
    """Begin a grid without training its cells, each of which has its settings."""
    grid = make_grid(make_parser().parse_args(["ablate", "run", str(ablation), "--runs", str(runs)]), [])
    grid.folder.mkdir()
    save_plan(grid)
    for cell in grid.cells:
        folder = locate_cell(grid.folder, cell.key)
        folder.mkdir(parents=True)
        write_settings(folder, cell.key, "data", cell.config)


def test_the_status_says_that_a_row_was_edited_since_the_grid_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(two_rows("mine"))
    begin(path, tmp_path)
    command = ["ablate", "status", str(path), "--runs", str(tmp_path)]
    assert main(command) == 0
    assert "edited" not in capsys.readouterr().out
    forget_user_files()
    path.write_text(path.read_text().replace("Elastic()", "Elastic(tau_init=0.5)"))
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "mine-backcopy_tiny: 0/4 cells complete" in out
    changed = "row 'lazy': model.attention.normaliser.tau_init changed from 1.0 to 0.5 since this grid began"
    assert f"{path} was edited: {changed}; --changed trains it anew" in out


def test_the_status_says_that_a_declaration_was_edited_since_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "q_mask_2.py"
    shutil.copy(find("ablations", "q_mask_2"), path)
    shutil.copy(find("ablations", "q_mask_2").with_suffix(".toml"), tmp_path)
    begin(path, tmp_path)
    shutil.copy(PROJECT / "docs" / "results" / "q_mask_2-backcopy" / "table.json", tmp_path / "q_mask_2-backcopy")
    command = ["ablate", "status", str(path), "--runs", str(tmp_path)]
    assert main(command) == 0
    assert "edited" not in capsys.readouterr().out
    forget_user_files()
    path.write_text(path.read_text().replace("margin=REMOVED", "margin=0.04"))
    assert main(command) == 0
    assert f"{path} was edited: its claim or rules changed since its run" in capsys.readouterr().out


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
    (tmp_path / "pair-mine").mkdir()
    plan = make_grid(make_parser().parse_args(["ablate", "run", pair, "--runs", str(tmp_path)]), []).plan
    (tmp_path / "pair-mine" / "plan.json").write_text(plan.to_json())
    command = ["ablate", "run", pair, "--base", str(base), "--runs", str(tmp_path), "--workers", "1", "--dry-run"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("Which cells are finished is unknown until their text is tokenised;")
    assert "5 cells of pair-mine: about" in out
    assert not (tmp_path / "cache").exists()
