"""Folders, experiments and rows whose names mean something to a URL, a terminal, a spreadsheet, LaTeX or HTML."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from made_grid import MadeGrid
from mistakes import expect_refusal
from mlflow.tracking import MlflowClient
from rich.console import Console

from lit_lazy.command.main import main
from lit_lazy.grid.cell_state import claim
from lit_lazy.grid.progress import Progress, print_status
from lit_lazy.grid.study import open_study
from lit_lazy.support.console import plain_console
from lit_lazy.support.names_to_paths import find
from lit_lazy.tracking.store_address import default_uri, sqlite_file, sqlite_url

FOLDER = "a #b ünï 'q' \"d\" ;&=+@ \\ [red] $H {x} `y`"
EXPERIMENT = "é?p #1 100%25 [red] it's"
NAMES = ("lazy [/x] {0} %s 'it''s'", "=1+cmd|'/C'!A0 $\\frac{ ^_ <b>&amp; `q` :smile:")
ROWS = f"""
from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

NAMES = {NAMES!r}
ablation = Ablation(
    name="odd", baseline=NAMES[0], seeds=(0,), columns=COLUMNS, base={f"{EXPERIMENT}.py"!r},
    rows=tuple(Row(name, {{"model.attention.normaliser": Elastic(tau_init=1 + i)}}, "ours", note=name)
               for i, name in enumerate(NAMES)),
    contrasts=(Contrast("=" + NAMES[1], {{NAMES[0]: 1, NAMES[1]: -1}}),),
)
"""
NO_MLFLOW = ("a?b", "a?mode=ro", "100%25")
"""MLflow makes a folder of the path as the URL quotes it."""


@pytest.mark.parametrize("name", [*NO_MLFLOW, FOLDER])
def test_studies_are_in_the_folder_that_was_named(name: str, tmp_path: Path) -> None:
    grid, database = tmp_path / name / "grid", tmp_path / name / "x.db"
    grid.mkdir(parents=True)
    assert sqlite_file(sqlite_url(database)) == database
    for storage in (None, sqlite_url(database)):
        assert open_study(storage, grid).trials == []
    assert {path.name for path in database.parent.iterdir()} == {"grid", "x.db"}
    assert (grid / "optuna.journal").exists()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.long
def test_a_grid_of_odd_names(place, empty_store, monkeypatch, capsys) -> None:
    """From the command to table and report, all that it writes is in the folder that was named."""
    monkeypatch.setenv("COLUMNS", "200")
    runs = place / FOLDER
    runs.mkdir()
    shutil.copy(empty_store, runs / "mlflow.db")
    shutil.copy(find("experiments", "backcopy_tiny"), place / f"{EXPERIMENT}.py")
    (place / "odd.py").write_text(ROWS)
    named = ["odd.py", "--runs", str(runs)]
    assert main(["ablate", "run", *named, "--workers", "1"]) == 0, capsys.readouterr()
    capsys.readouterr()
    for command in (["ablate", "status", *named], ["ablate", "table", *named]):
        assert main(command) == 0
    assert main(["ablate", "run", *named, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
    assert {path.name for path in place.iterdir()} == {FOLDER, f"{EXPERIMENT}.py", "odd.py"}
    grid = f"odd-{EXPERIMENT}"
    client = MlflowClient(default_uri(runs))
    experiment = client.get_experiment_by_name(grid)
    found = client.search_runs([experiment.experiment_id])
    assert {run.data.tags.get("variant") for run in found} == {*NAMES, None}
    kept = {path.name for path in (runs / "mlartifacts").rglob("*") if path.is_file()}
    assert {"table.csv", "report.html", "config.yaml", "plan.json"} <= kept
    check_table(runs / grid)


def check_table(folder: Path) -> None:
    """Each format holds the names, as text."""
    with (folder / "table.csv").open(newline="") as file:
        variants = {line["variant"] for line in csv.DictReader(file)}
    assert variants == {f"'{name}" if name[0] in "=+-@" else name for name in NAMES}
    rows = json.loads((folder / "table.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == list(NAMES)
    assert "<b>" not in (folder / "table.html").read_text()
    assert r"\$\textbackslash{}frac\{" in (folder / "table.tex").read_text()
    assert r"lazy \[/x\] {0} %s" in (folder / "table.md").read_text()
    assert "<b>&amp;" not in (folder / "report.html").read_text()


def test_the_terminal_shows_names_and_reasons_as_they_are(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    names = ("lazy [/x]", "[red]b[/red] :smile:")
    made = MadeGrid(tmp_path, rows=(*names, "c [/z]"))
    for name in names:
        made.fail(name, 0, f"[/y] \x1b[31m of {name}")
    monkeypatch.setattr("socket.gethostname", lambda: "[h]")
    lock = claim(made.train("c [/z]", 0, range(1, 2)))
    assert lock is not None
    console = plain_console()
    print_status(made.read(), console)
    terminal = Console(file=io.StringIO(), force_terminal=True, markup=False, emoji=False)
    with lock, Progress(dict, terminal, notes=lambda: ["[/note]"]) as progress:
        progress.show_running(["[/x] by process"])
        progress.update({})
    shown = capsys.readouterr().out + terminal.file.getvalue()
    for text in (*names, r"[/y] \x1b[31m of lazy [/x]", "c [/z] seed 0", "[h]", "[/note]", "[/x] by process"):
        assert text in shown


@pytest.mark.parametrize("name", NO_MLFLOW)
def test_a_folder_that_mlflow_cannot_use(name, place, monkeypatch, capsys) -> None:
    run = ["ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", "softmax", "--seeds", "0"]
    for command in (["train", "backcopy_tiny"], run, ["dashboard"]):
        said = expect_refusal([*command, "--runs", name], capsys)
        assert f"--runs '{place / name}': MLflow supports no database whose path contains ? or %; name another" in said
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/100%25/mlflow.db")
    assert "MLFLOW_TRACKING_URI" in expect_refusal(["train", "backcopy_tiny"], capsys)
