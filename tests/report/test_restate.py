"""Committed tables: their pages follow from their values, and reports are made of them on demand."""

import html
import json
import shutil
from pathlib import Path

import pytest

from lit_lazy.command.main import main
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import load_experiment
from lit_lazy.grid.question import load_ablation_or_question
from lit_lazy.support import console
from lit_lazy.support.names_to_paths import find
from lit_lazy.table.build import read_table, recompute_statistics
from lit_lazy.table.render import FILES, render_text, save

RESULTS = Path(__file__).parents[2] / "docs" / "results"
KEPT = sorted(RESULTS.glob("*/table.json"))
MOST_BYTES, MOST_FILES = 12_000_000, 160
RESTATE = ["ablate", "table", "q_mask_2"]
QUESTION = RESULTS / "q_mask_2-backcopy"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_committed_tables_say_what_their_values_and_todays_statistics_give(path: Path, tmp_path: Path) -> None:
    """A question is declared today as it was."""
    table = read_table(path)
    file = find("ablations", table.ablation)
    ablation, asked = load_ablation_or_question(file)
    assert recompute_statistics(table, ablation.columns, ablation.all_contrasts, ablation.primary) == table
    if asked is not None:
        experiment = find("experiments", table.base)
        base = replace_at(load_experiment(experiment), ablation.common)
        assert asked.declare(table.base, base, [file, experiment]).digest == table.declaration.digest
    for file in save(table, tmp_path, ("table.md", "table.json")):
        assert path.with_name(file.name).read_text() == file.read_text(), file.name


def test_the_results_are_small() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    assert len(files) <= MOST_FILES


@pytest.mark.parametrize(
    "folder",
    [path.parent if path.parent == QUESTION else pytest.param(path.parent, marks=pytest.mark.long) for path in KEPT],
    ids=lambda folder: folder.name,
)
def test_a_report_is_made_of_a_committed_table(folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr(console, "open_page", opened.append)
    assert main(["report", "--from", str(folder), "--open"]) == 0
    made = tmp_path / "dist" / folder.name
    assert opened == [(made / "report.html").as_uri()]
    assert capsys.readouterr().out == f"report:     dist/{folder.name}/report.html\n"
    table, page = read_table(folder / "table.json"), (made / "report.html").read_text("ascii")
    assert page.index("<h1>") < page.index('<section id="table">') < page.index('<section id="reading">')
    if table.verdict is not None:
        assert html.escape(table.verdict.sentence) in page
        assert "<h2>What the verdict rests on</h2>" in page
        assert (made / "verdict.png").stat().st_size
    assert page.count("<figure") == len(list(made.glob("*.png")))
    assert FILES.keys() <= {path.name for path in made.iterdir()}
    assert (made / "table.md").read_text() == (folder / "table.md").read_text()


def test_the_command_restates_a_table_by_what_is_declared_now(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    kept = RESULTS / "rivals-stdlib"
    stale = json.loads((kept / "table.json").read_text())
    stale["columns"][0]["title"], stale["columns"][1]["digits"] = "another title", 1
    (tmp_path / "table.json").write_text(json.dumps(stale))
    (tmp_path / "table.md").write_text("stale")
    assert main(["ablate", "table", "rivals", "--from", str(tmp_path / "table.json")]) == 0
    expected = render_text(read_table(kept / "table.json"), tmp_path / "table.json")
    assert capsys.readouterr().out.strip() == expected.strip()
    assert {path.name for path in tmp_path.iterdir()} == {"table.json", "table.md"}
    for name in ("table.json", "table.md"):
        assert (tmp_path / name).read_bytes() == (kept / name).read_bytes()


def doctored(tmp_path: Path, **changes: object) -> Path:
    """A copy of a question's table with a changed declaration."""
    folder = tmp_path / "{q}" / QUESTION.name
    shutil.copytree(QUESTION, folder)
    table = json.loads((folder / "table.json").read_text())
    table["declaration"] = table["declaration"] | changes if changes != {"declaration": None} else None
    (folder / "table.json").write_text(json.dumps(table))
    return folder / "table.json"


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        (["report", "--from", "none"], {}, "'none/table.json': is no table.json (FileNotFoundError"),
        (["report", "--from", str(QUESTION), "table2"], {}, "--from, NAME: a stored table has no runs; leave one"),
        (["report", "--from", "a", "--from", ".", "--out", "x"], {}, "--out 'x': is one file, --from names 2 folders"),
        (["ablate", "table", "table2"], {}, "is a table of 'q_mask_2', not of 'table2'"),
        (RESTATE, {"margin": 9.0, "claim": "Pigs fly."}, "declare another claim, margin; a"),
        (RESTATE, {"declaration": None}, "the table declares nothing, the question's file does"),
    ],
)
def test_what_is_no_table_of_it_is_named_and_left_as_it_was(words, changes, said, tmp_path, monkeypatch, capsys):
    """A verdict is on what was declared before its run, so file and question must declare the same."""
    table = doctored(tmp_path, **changes)
    before = table.read_bytes()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main([*words, *(["--from", str(table)] if words[0] == "ablate" else [])]) == 2
    assert said in capsys.readouterr().err
    assert table.read_bytes() == before
    assert not list(Path().iterdir())


def test_verdicts_follow_from_the_values_whatever_a_file_says(tmp_path, capsys) -> None:
    kept = doctored(tmp_path)
    table, verdict = json.loads(kept.read_text()), read_table(kept).verdict
    assert verdict is not None
    kept.write_text(json.dumps(table | {"verdict": {"status": "refuted", "sentence": "Refuted: fake"}}))
    assert main(["ablate", "verdicts", str(kept.parents[1])]) == 0
    printed = capsys.readouterr().out
    assert verdict.sentence in printed
    assert "fake" not in printed
    table["rows"].append(table["rows"][0])
    kept.write_text(json.dumps(table))
    assert main(["ablate", "verdicts", str(kept.parents[1])]) == 2
    assert "given twice" in capsys.readouterr().err
