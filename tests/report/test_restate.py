"""Committed tables are restated from their values by a command, without their runs."""

import html
import json
import re
import shutil
from pathlib import Path

import pytest

from lit_lazy.command.main import main
from lit_lazy.grid.question import load_ablation_or_question
from lit_lazy.report.page import draw_table_figures, replace_table
from lit_lazy.support.named_files import find
from lit_lazy.table.build import recompute_statistics
from lit_lazy.table.records import Table
from lit_lazy.table.render import render_html_parts, render_text, save

RESULTS = Path(__file__).parents[2] / "docs" / "results"
KEPT = sorted(RESULTS.glob("*/table.json"))
REPORTS = sorted(RESULTS.glob("*/report.html"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_committed_tables_say_what_their_values_and_todays_statistics_give(path: Path, tmp_path: Path) -> None:
    table = Table.from_json(json.loads(path.read_text()))
    ablation, _ = load_ablation_or_question(find("ablations", table.ablation))
    assert recompute_statistics(table, ablation.columns, ablation.all_contrasts, ablation.primary) == table
    for file in save(table, tmp_path / "table"):
        kept = path.with_name(file.name)
        assert not kept.exists() or kept.read_text() == file.read_text(), file.name
    assert path.with_suffix(".md").exists()
    assert table.primary in ablation.primary


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_committed_reports_are_small_and_say_what_their_table_says(path: Path) -> None:
    assert path.stat().st_size < 1_000_000
    table, text = Table.from_json(json.loads(path.with_name("table.json").read_text())), path.read_text()
    opening, numbers = (part.rstrip("\n") for part in render_html_parts(table))
    assert text.index(opening) < text.index('<section id="finding">') < text.index(numbers)
    if table.verdict is not None:
        assert html.escape(table.verdict.sentence) in opening
        assert "<h2>What the verdict rests on</h2>" in text


@pytest.mark.long
@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_figures_of_a_table_in_its_committed_report_are_todays(path: Path) -> None:
    table = Table.from_json(json.loads(path.with_name("table.json").read_text()))
    assert replace_table(path, table, draw_table_figures(table)) == path.read_text()


def test_every_committed_table_has_a_report_or_the_cells_to_make_one_of() -> None:
    packed = [path.parent for path in RESULTS.glob("*/cells.jsonl.xz") if path.with_name("table.json").exists()]
    assert sorted([*(path.parent for path in REPORTS), *packed]) == [path.parent for path in KEPT]


@pytest.mark.parametrize("name", ["rivals", pytest.param("rivals-stdlib", marks=pytest.mark.long)])
def test_the_command_writes_every_format_and_figure_in_place(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    kept = RESULTS / "rivals-stdlib"
    stale = json.loads((kept / "table.json").read_text())
    for row in stale["rows"]:
        for measure in row["metrics"].values():
            measure["p"] = measure["p_adj"] = 0.5
    (tmp_path / "table.json").write_text(json.dumps(stale))
    assert main(["ablate", "table", name, "--from", str(tmp_path / "table.json")]) == 0
    table = Table.from_json(json.loads((kept / "table.json").read_text()))
    expected = render_text(table, tmp_path / "table.md")
    assert capsys.readouterr().out.strip() == expected.strip()
    for name in ("table.json", "table.md", "table.csv", "table.tex"):
        assert (tmp_path / name).read_bytes() == (kept / name).read_bytes()
    assert {path.name for path in tmp_path.glob("*.png")} == {"effects.png", "loss_against_sparsity.png"}


def test_a_question_s_folder_gets_the_figure_of_its_verdict(tmp_path: Path) -> None:
    table = doctored(tmp_path)
    for figure in table.parent.glob("*.png"):
        figure.unlink()
    assert main(["ablate", "table", "q_mask", "--from", str(table)]) == 0
    drawn = {path.name for path in table.parent.glob("*.png")}
    assert drawn == {"verdict.png", "effects.png", "loss_against_sparsity.png"}


def test_a_table_of_another_ablation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(RESULTS / "rivals-stdlib" / "table.json", tmp_path)
    before = (tmp_path / "table.json").read_bytes()
    assert main(["ablate", "table", "table2", "--from", str(tmp_path / "table.json")]) == 2
    assert "is a table of 'rivals', not of 'table2'" in capsys.readouterr().err
    assert (tmp_path / "table.json").read_bytes() == before


def doctored(tmp_path: Path, **changes: object) -> Path:
    """A copy of a question's folder with a changed declaration."""
    folder = tmp_path / "{q_mask}" / "q_mask-backcopy"
    shutil.copytree(RESULTS / folder.name, folder)
    table = json.loads((folder / "table.json").read_text())
    table["declaration"] |= changes
    (folder / "table.json").write_text(json.dumps(table))
    return folder / "table.json"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rule": "lower"}, "the table and the question declare another rule; a verdict is on what was declared"),
        ({"margin": 9.0, "claim": "Pigs fly."}, "the table and the question declare another claim, margin; a verdict"),
        ({"seeds": [10] * 5}, "seeds=(10, 10, 10, 10, 10): each must occur once"),
    ],
)
def test_a_verdict_is_on_what_was_declared(
    changes: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = doctored(tmp_path, **changes)
    before = table.read_bytes()
    assert main(["ablate", "table", "q_mask", "--from", str(table)]) == 2
    assert said in capsys.readouterr().err
    assert table.read_bytes() == before


def test_a_question_and_its_table_both_declare_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = doctored(tmp_path)
    table.write_text(json.dumps(json.loads(table.read_text()) | {"declaration": None}))
    assert main(["ablate", "table", "q_mask", "--from", str(table)]) == 2
    assert "the table declares nothing, the question's file does" in capsys.readouterr().err


def test_verdicts_follow_from_the_values_whatever_a_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = doctored(tmp_path)
    table = json.loads(kept.read_text())
    was = table["verdict"]["sentence"]
    table["verdict"] |= {"status": "supported", "sentence": "Supported: fake"}
    kept.write_text(json.dumps(table))
    assert main(["ablate", "verdicts", str(kept.parents[1])]) == 0
    printed = capsys.readouterr().out
    assert was in printed
    assert "fake" not in printed
    table["rows"].append(table["rows"][0])
    kept.write_text(json.dumps(table))
    assert main(["ablate", "verdicts", str(kept.parents[1])]) == 2
    assert "there twice" in capsys.readouterr().err


@pytest.mark.long
def test_a_report_beside_the_table_gets_the_new_one_and_keeps_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "q_tau-backcopy"
    shutil.copytree(RESULTS / folder.name, folder)
    report = (folder / "report.html").read_text()
    table = Table.from_json(json.loads((folder / "table.json").read_text()))
    assert table.verdict is not None
    (folder / "report.html").write_text(report.replace(html.escape(table.verdict.sentence), "An older sentence."))
    assert main(["ablate", "table", "q_tau", "--from", str(folder / "table.json")]) == 0
    assert (folder / "report.html").read_text() == report
    (against,) = re.findall(
        r'<figure[^>]*><div class="scroll"><img [^>]*alt="Loss against sparsity: .*?</figure>', report
    )
    (folder / "report.html").write_text(report.replace(against, against.replace("base64,", "base64,AAAA")))
    assert main(["ablate", "table", "q_tau", "--from", str(folder / "table.json")]) == 0
    assert (folder / "report.html").read_text() == report, "what is drawn of the table is drawn anew"
    for other in ("<p>something else</p>", report.replace("<!-- part figures -->", "")):
        (folder / "report.html").write_text(other)
        capsys.readouterr()
        assert main(["ablate", "table", "q_tau", "--from", str(folder / "table.json")]) == 2
        assert "is no report of this version; move it away" in capsys.readouterr().err
        assert (folder / "report.html").read_text() == other


def test_an_experiment_beside_a_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    table = str(RESULTS / "q_mask-backcopy" / "table.json")
    assert main(["ablate", "table", "q_mask", "--base", "stdlib", "--from", table]) == 2
    assert "--base stdlib: a table.json names its experiment" in capsys.readouterr().err
