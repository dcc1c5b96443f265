"""Folders, experiments and rows whose names mean something to a URL, a terminal, a spreadsheet, LaTeX or HTML."""

import csv
import io
import json
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
from lit_lazy.table.render import save
from lit_lazy.tracking.store_address import default_uri, sqlite_file, sqlite_url

FOLDER = "a #b ünï 'q' \"d\" ;&=+@ \\ [red] $H {x} `y`"
NAMES = ("lazy [/x] {0} %s 'it''s'", "=1+cmd|'/C'!A0 $\\frac{ ^_ <b>&amp; `q` :smile:")
NO_MLFLOW = ("a?b", "a?mode=ro", "100%25")
"""MLflow makes a folder of the path as the URL quotes it."""


def test_studies_are_in_the_folder_that_was_named(tmp_path: Path) -> None:
    name = f"{FOLDER} a?b 100%25"
    grid, database = tmp_path / name / "grid", tmp_path / name / "x.db"
    grid.mkdir(parents=True)
    assert sqlite_file(sqlite_url(database)) == database
    for storage in (None, sqlite_url(database)):
        assert open_study(storage, grid).trials == []
    assert {path.name for path in database.parent.iterdir()} == {"grid", "x.db"}
    assert (grid / "optuna.journal").exists()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_training_in_an_odd_folder_is_in_mlflow(place, monkeypatch) -> None:
    runs = place / FOLDER
    runs.mkdir()
    monkeypatch.chdir(runs)  # MLflow would write it into a statement, unescaped
    assert main(["train", "backcopy_tiny", "--runs", str(runs), "--threads", "1"]) == 0
    assert [path.name for path in place.iterdir()] == [FOLDER]
    client = MlflowClient(default_uri(runs))
    experiment = client.get_experiment_by_name("train-backcopy_tiny")
    (run,) = client.search_runs([experiment.experiment_id])
    assert client.list_artifacts(run.info.run_id)
    assert [*(runs / "mlartifacts").rglob("config.yaml")]


def test_each_format_of_a_table_holds_the_names_as_text(tmp_path: Path) -> None:
    made = MadeGrid(tmp_path, rows=NAMES)
    for name in NAMES:
        made.finish(name, 0, {"loss/excess": 1.0})
    save(made.read().build_table(), tmp_path)
    read = {kind: (tmp_path / f"table.{kind}").read_text() for kind in ("csv", "json", "html", "tex", "md")}
    assert {line["variant"] for line in csv.DictReader(io.StringIO(read["csv"]))} == {NAMES[0], f"'{NAMES[1]}"}
    assert [row["variant"] for row in json.loads(read["json"])["rows"]] == [*NAMES]
    assert "<b>" not in read["html"]
    assert r"\$\textbackslash{}frac\{" in read["tex"]
    assert r"lazy \[/x\] {0} %s" in read["md"]


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
