"""Commands on a folder of finished runs."""

import html
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import unquote

import pytest
from chromium import Browser
from filelock import FileLock
from mistakes import expect_refusal, snapshot_tree

from lit_lazy.command.main import main
from lit_lazy.grid.cell_state import claim
from lit_lazy.grid.run import IN_USE
from lit_lazy.report.diagnose_checkpoint import Request
from lit_lazy.report.index_and_search_pages import list_entries
from lit_lazy.support.locks import hold_shared
from lit_lazy.tracking.serve import show_links
from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DUO = "duo-backcopy_tiny"
RUN = ["ablate", "run", "--keep-checkpoint", "--brief", "--workers", "1"]
pytestmark = [
    pytest.mark.xdist_group("duo"),  # one process makes the folder
    pytest.mark.usefixtures("no_pictures"),
]


@pytest.fixture
def duo(duo_runs: Path) -> Path:
    """The ablation's file."""
    return duo_runs.with_name("duo.py")


@pytest.fixture
def runs(duo_runs: Path, place: Path) -> Path:
    """A copy of finished runs, in the current folder."""
    return shutil.copytree(duo_runs, place / "runs")


def test_tables_are_compared_with_the_settings_of_cells_and_of_packed_cells(runs, capsys) -> None:
    assert main(["ablate", "pack", DUO]) == 0
    Path("kept").mkdir()
    for name in ("table.json", "cells.jsonl.xz"):
        shutil.copy(runs / DUO / name, "kept")
    assert main(["ablate", "compare", "duo", "kept", "--columns", "loss/excess", "--out", "new/found.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "A  runs/duo-backcopy_tiny: duo on backcopy_tiny, 4 of 4 cells" in lines
    assert sum(line.endswith("tie    paired, n = 2") for line in lines) == 2
    assert lines[-1] == "The rows have the same settings."
    found = json.loads(Path("new/found.json").read_text())
    assert (found["names"], list(found["columns"]), found["settings"]) == ([f"runs/{DUO}", "kept"], ["loss/excess"], [])
    Path("kept/cells.jsonl.xz").unlink()
    assert main(["ablate", "compare", "kept/table.json", DUO]) == 0
    assert "Settings of the rows are unknown" in capsys.readouterr().out


WRONG = [
    ("ablate compare duo-backcopy_tini BOTH", "'duo-backcopy_tini': no such table (did you mean duo-backcopy_tiny?)"),
    ("ablate compare wrong.json BOTH", "'wrong.json': is no table.json (ValueError: lacks ablation"),
    ("ablate compare BOTH BOTH --columns loss/exces", "--columns 'loss/exces': is not in both tables (did you mean"),
    ("ablate compare -- --output=y:x --output=y:x", "git shows no such file"),  # is no option of git
    ("report --base stdlib", "--base 'stdlib': is for the report of one ablation; give its NAME too"),
    ("runs rm duo-backcopy_tini", "'runs' has no such results (did you mean duo-backcopy_tiny?); it has duo-again, du"),
    ("runs rm notes --yes", "'notes': is no ablation, search, training or diagnosis; remove the folder yourself"),
    ("runs --runs nowhere", "--runs 'nowhere': does not exist"),
]


def test_mistakes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words_of_git in ("init -q", "-c user.name=a -c user.email=b commit -qm c --allow-empty"):
        subprocess.run(["git", *words_of_git.split()], check=True)
    for folder in ("runs/notes", "y:./x"):
        Path(folder).mkdir(parents=True)
    Path("wrong.json").write_text('{"rows": []}')
    shutil.copytree(runs / DUO, runs / "duo-again")
    for words, message in WRONG:
        assert message in expect_refusal(words.replace("BOTH", DUO).split(), capsys), words


ODD = "<b>&#x%'\" é"


def fill(runs: Path) -> None:
    """Add a question's results, and folders of odd names without a table, with a damaged one and with a search's."""
    shutil.copytree(RESULTS / "q_window_2-stdlib_small", runs / "q_window_2-stdlib_small")
    (runs / "q_window_2-stdlib_small" / "report.html").touch()
    (runs / ODD / "cells" / "a").mkdir(parents=True)
    (runs / ODD / "cells" / "a" / "result.json").touch()
    for name in (f"{ODD}-damaged", "search-odd"):
        (runs / name).mkdir()
        (runs / name / "table.json").write_text("{}")
        (runs / name / "table.html").touch()


def test_the_page_over_all_results_links_to_each(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(runs)
    assert main(["report", "--out", "elsewhere/deep/all.html"]) == 0
    file = Path(capsys.readouterr().out.split()[-1])
    assert file == Path("elsewhere/deep/all.html")
    page = file.read_text("ascii")
    targets = [html.unescape(found) for found in re.findall(r'(?:href|src)="([^"#][^"]*)"', page)]
    files = [(file.parent / unquote(target)).resolve() for target in targets]
    assert all(path.is_file() for path in files)
    wanted = f"{DUO}/report.html", f"{DUO}/table.html", "q_window_2-stdlib_small/report.html"
    assert {(runs / path).resolve() for path in wanted} < {*files}
    assert not {"script", "link", "img", "b"} & {*re.findall(r"<([a-z0-9]+)", page)}
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())
    assert "refuted Refuted at look 1 of 4 (n = 10, 2 of 2 contrasts refuted): Elastic-Softmax, which sees" in text
    assert f"{ODD} unfinished `lit-lazy ablate status {ODD}` shows its cells 1 finished" in text
    assert f"{ODD}-damaged damaged table.json: is no table.json (KeyError: 'rows')" in text
    assert text.index("q_window_2-stdlib_small") < text.index(f"{DUO} complete") < text.index("search-odd")
    trainings = runs / "train-backcopy_tiny"
    shutil.copytree(next(trainings.glob("*/")), trainings / "another")
    (finding,) = (entry.finding for entry in list_entries(runs) if entry.folder == trainings)
    assert finding.startswith("Newest run: validation loss ")


@pytest.mark.browser
def test_a_browser_shows_the_page_over_all_results(runs: Path, tmp_path: Path) -> None:
    fill(runs)
    assert main(["report"]) == 0
    with Browser(tmp_path / "profile", 1400, 1000) as browser:
        browser.open((runs / "index.html").resolve().as_uri())
        for width in (390, 1400):
            browser.resize(width, 1000)
            assert browser.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            grids = "[...document.querySelectorAll('.grid')]"
            assert browser.evaluate(f"{grids}.every(grid => grid.scrollWidth <= grid.clientWidth)")
            header = browser.evaluate("getComputedStyle(document.querySelector('thead')).display")
            assert header == ("none" if width == 390 else "table-header-group")


def test_a_page_is_opened_or_its_place_said(runs, monkeypatch, capsys) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) < 3)
    monkeypatch.setattr("lit_lazy.tracking.serve._run_server", lambda *given: show_links(*given[2::2]) or 0)
    assert main(["report", "--open"]) == 0
    assert main(["dashboard", "--open", "--port", "5001"]) == 0
    assert "no browser" not in capsys.readouterr().out
    assert main(["dashboard", "duo", "--open"]) == 0
    assert opened[:2] == [(runs / "index.html").resolve().as_uri(), "http://127.0.0.1:5001"]
    assert opened[2].startswith("http://127.0.0.1:5000/#/experiments/")
    assert f"  {'by variant':21} {opened[2]}" in (said := capsys.readouterr().out.splitlines())
    assert said[-1] == f"there is no browser here; open {opened[2]} in one"


def list_names(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The words behind each name that `lit-lazy runs` lists."""
    capsys.readouterr()
    assert main(["runs"]) == 0
    head, *lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert head.split() == ["name", "kind", "cells", "state", "size", "last", "change"]
    return {words[0]: words[1:] for words in map(str.split, lines)}


def find_folders(runs: Path) -> tuple[Path, Path]:
    """A cell of the grid, and the training."""
    return sorted((runs / DUO / "cells").iterdir())[0], next((runs / "train-backcopy_tiny").glob("*/"))


def read_table(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["ablate", "table", DUO]) == 0
    return capsys.readouterr().out


def test_results_are_listed(runs, capsys) -> None:
    (runs / "notes").mkdir()
    aside = f"{DUO}.until-20260101-000000"
    (runs / aside / "cells").mkdir(parents=True)
    found = list_names(capsys)
    kinds = {name: " ".join(words[:5]) for name, words in found.items()}
    listed = {DUO: "ablation 4 of 4 complete", "train-backcopy_tiny": "training 1 of 1 complete"}
    assert kinds.items() >= (listed | {aside: "ablation 0 of 0 moved"}).items()
    assert kinds["notes"].startswith("other other files")
    assert "mlartifacts" not in found


def test_garbage_is_collected_and_nothing_that_is_needed(runs, duo, capsys) -> None:
    cell, training = find_folders(runs)
    (runs / "shell-tiny" / "cells" / "a" / "checkpoints").mkdir(parents=True)
    for folder in (cell, training, runs / "lost-tiny" / "cells" / "a"):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "last.ckpt").write_bytes(bytes(1000))
    table = read_table(capsys)
    leftover = runs / DUO / f".table.md.{socket.gethostname()}.0123abcd"
    leftover.write_text("half a ta")
    (runs / DUO / ".table.md.elsewhere.0123abcd").write_text("another machine's")
    before = snapshot_tree(runs)
    assert main(["runs", "gc", "--models"]) == 0
    said = capsys.readouterr().out
    assert "Nothing was removed; --yes removes it." in said
    assert snapshot_tree(runs).keys() == before.keys()
    assert main(["runs", "gc", "--yes"]) == 0
    listed = (cell / "checkpoints", training / "checkpoints", runs / "shell-tiny", leftover)
    assert all(str(path.relative_to(runs.parent)) in said for path in listed)
    gone = {path for path in before for whole in listed if path.is_relative_to(whole)}
    assert before.keys() - snapshot_tree(runs).keys() == gone
    assert main(["runs", "gc", "--models", "--yes"]) == 0
    assert [path.name for path in runs.rglob("final.ckpt")] == ["final.ckpt"]  # of the single training
    assert len(list((runs / DUO).rglob("result.json"))) == 4
    assert main(["runs", "gc", "--models", "--yes"]) == 0
    assert capsys.readouterr().out.endswith("runs: holds nothing that could be removed\n")
    assert read_table(capsys) == table
    assert main([*RUN, str(duo), "--runs", str(runs)]) == 0
    assert "4 cells, all finished: nothing to do" in capsys.readouterr().out


def test_a_model_that_an_unfinished_cell_starts_from_stays(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = sorted((runs / DUO / "cells").glob("*/final.ckpt"))
    unfinished = others[0].parent
    (unfinished / "result.json").unlink()
    settings = json.loads((unfinished / "cell.json").read_text())
    settings["config"]["init_from"] = str(first.resolve())
    (unfinished / "cell.json").write_text(json.dumps(settings))
    assert list_names(capsys)[DUO][1:5] == ["3", "of", "4", "unfinished"]
    assert main(["runs", "gc", "--models", "--yes"]) == 0
    assert first.exists()
    assert [path.exists() for path in others] == [True, False, False]  # the cell's own is of no finished one
    (unfinished / "cell.json").write_text(json.dumps(settings | {"config": settings["config"] | {"init_from": None}}))
    others[1].touch()
    (training := runs / "train-backcopy_tiny" / "begun").mkdir()
    (training / "cell.json").write_text(json.dumps(settings))
    assert main(["runs", "gc", "--models", "--yes"]) == 0
    assert (first.exists(), others[1].exists()) == (True, False), "that of a training"
    shutil.rmtree(training)
    (runs / "search-x" / "cells").mkdir(parents=True)
    (runs / "search-x" / "search.json").write_text(json.dumps({"base": settings["config"]}))
    assert main(["runs", "gc", "--models", "--yes"]) == 0
    assert first.exists(), "that of a search"
    shutil.rmtree(unfinished)  # a cell waits whose start is unknown
    others[1].touch()
    assert main(["runs", "gc", "--models", "--yes"]) == 0
    assert others[1].exists()


def test_results_are_removed_everywhere(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, name in (("duo", DUO), ("train-backcopy_tiny", "train-backcopy_tiny")):
        folder = runs / name
        assert main(["runs", "rm", given]) == 0
        assert f"runs/{name}: " in (said := capsys.readouterr().out)
        assert said.endswith("Nothing was removed; --yes removes it.\n")
        assert folder.exists()
        assert main(["runs", "rm", given, "--yes"]) == 0
        assert not folder.exists()
        assert not (runs / "mlartifacts" / name).exists()
        assert name not in list_names(capsys)
    assert main(["train", "backcopy_tiny", "--threads", "1"]) == 0  # in an experiment of its own
    assert "6 steps, from the beginning" in capsys.readouterr().out
    assert list_names(capsys)["train-backcopy_tiny"][1:4] == ["1", "of", "1"]
    refused = "'nosuch': 'runs' has no such results; it has no ablation or search\n"
    assert expect_refusal(["ablate", "status", "nosuch"], capsys).endswith(refused)


@pytest.mark.long
def test_a_diagnosis_is_removed_with_its_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = next((runs / "train-backcopy_tiny").glob("*/final.ckpt"))
    assert main(["diagnose", str(model), "--sequences", "2", "--threads", "1"]) == 0
    found = list_names(capsys)
    folder = Request(model, sequences=2, runs=runs).folder.name
    assert (found["diagnose"][:4], found[folder][:2]) == (["diagnosis", "runs", "in", "MLflow"], ["diagnosis", "files"])
    tracker = Tracker(default_uri(runs), "diagnose")
    for name in (folder, "diagnose"):
        assert main(["runs", "rm", name, "--yes"]) == 0
        assert name == "diagnose" or not tracker.find({"kind": "diagnose"})
        assert name not in list_names(capsys)
    assert not (runs / folder).exists()
    assert not (runs / "mlartifacts" / "diagnose").exists()


def test_runs_of_others_stay_in_a_store_that_is_shared(runs, monkeypatch, capsys) -> None:
    """A removal that is killed is completed by the next."""
    (runs / "mlflow.db").rename("shared.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := f"sqlite:///{Path('shared.db').resolve()}")
    for name, tags in {DUO: {"kind": "ablation", "grid": "theirs"}, "train-backcopy_tiny": {"kind": "run"}}.items():
        tracker = Tracker(uri, name)
        other = tracker.create_run("theirs", tags | {"owner": "they", "cell": "a"})
        assert len(tracker.find({})) > 1
        with monkeypatch.context() as killed:
            killed.setattr(Tracker, "delete_run", Mock(side_effect=KeyboardInterrupt))
            main(["runs", "rm", name, "--yes"])
        assert main(["runs", "rm", name, "--yes"]) == 0
        assert "its MLflow experiment, only the runs of this folder" in capsys.readouterr().out
        assert [run.info.run_id for run in tracker.find({})] == [other]
    assert not {DUO, "train-backcopy_tiny"} & list_names(capsys).keys()


def test_what_is_in_use_is_not_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell, training = find_folders(runs)
    (cell / "checkpoints").mkdir()
    lock = claim(first := runs / DUO / "cells" / "another")
    assert lock is not None
    with lock, FileLock(training / "lock"):
        assert list_names(capsys)[DUO][4] == "running"
        pid = f"'{DUO}': is in use (process {os.getpid()} on {socket.gethostname()}); stop that first, or wait for its"
        for words in (["rm", DUO], ["rm", DUO, "--yes"], ["gc"], ["gc", "--yes"]):
            assert pid in expect_refusal(["runs", *words], capsys)
        busy = "'train-backcopy_tiny': is in use (a training)"
        assert busy in expect_refusal(["runs", "rm", "train-backcopy_tiny", "--yes"], capsys)
    shutil.rmtree(first)
    with hold_shared(runs / DUO / IN_USE):
        for words in (["rm", DUO, "--yes"], ["gc", "--yes"]):
            assert f"'{DUO}': is in use (a command)" in expect_refusal(["runs", *words], capsys)
    assert main(["runs", "gc", "--yes"]) == 0
    assert not (cell / "checkpoints").exists()


def make_other(runs: Path) -> None:
    """A folder like a grid's outside the runs, with what a removal looks for."""
    (cell := Path("other/cells/k")).joinpath("checkpoints").mkdir(parents=True)
    (cell / "checkpoints" / "last.damaged").touch()
    (cell / "final.ckpt").touch()
    shutil.copy(next(runs.glob(f"{DUO}/cells/*/result.json")), cell)


@pytest.mark.parametrize("name", ["..", "{here}/other", f"{DUO}/../../other", "mlartifacts"])
def test_a_stored_name_is_never_a_path(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever reaches MLflow can give any name to an experiment."""
    name = name.format(here=Path.cwd())
    make_other(runs)
    with closing(sqlite3.connect(runs / "mlflow.db")) as database, database:
        database.execute("UPDATE experiments SET name = ? WHERE name LIKE 'train%'", [name])
    before = {path for path in snapshot_tree(Path.cwd()) if path.name != "final.ckpt"}
    assert main(["runs", "gc", "--models", "--yes"]) == 0
    assert main(["runs", "list"]) == 0
    expect_refusal(["runs", "rm", name, "--yes"], capsys)
    if "/" in name:
        expect_refusal(["ablate", "status", name], capsys)
    assert before <= snapshot_tree(Path.cwd()).keys()


def test_removal_does_not_follow_links(runs: Path) -> None:
    make_other(runs)
    before = snapshot_tree(Path("other"))
    for where in ("", "cells", "cells/k", "cells/k/checkpoints"):
        link = runs / "linked" / where
        shutil.copytree("other", runs / "linked")
        shutil.rmtree(link)
        link.symlink_to(Path("other").resolve() / where)
        for words in (["gc", "--models"], ["rm", "linked"]):
            assert main(["runs", *words, "--yes"]) == 0
            assert snapshot_tree(Path("other")) == before
        assert not (runs / "linked").is_symlink(), where
        assert not (runs / "linked").exists(), where
