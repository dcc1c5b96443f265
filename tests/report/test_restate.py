"""The committed tables: restated from their own values by a command, without the runs that they are of."""

import html
import json
import shutil
from pathlib import Path

import pytest

from lit_lazy.command.main import main
from lit_lazy.config.files import find
from lit_lazy.grid.question import load_asked
from lit_lazy.table.build import restated
from lit_lazy.table.records import Table
from lit_lazy.table.render import save

RESULTS = Path(__file__).parents[2] / "docs" / "results"
KEPT = sorted(RESULTS.glob("*/table.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_committed_tables_say_what_their_values_and_todays_statistics_give(path: Path, tmp_path: Path) -> None:
    table = Table.from_json(json.loads(path.read_text()))
    ablation, _ = load_asked(find("ablations", table.ablation))
    assert restated(table, ablation.columns, ablation.contrasts, ablation.primary) == table
    for file in save(table, tmp_path / "table"):
        kept = path.with_name(file.name)
        assert not kept.exists() or kept.read_text() == file.read_text(), file.name
    assert path.with_suffix(".md").exists()
    assert table.primary in ablation.primary


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/report.html")), ids=lambda path: path.parent.name)
def test_committed_reports_are_small_and_say_the_verdict_of_their_table(path: Path) -> None:
    assert path.stat().st_size < 1_000_000
    table = Table.from_json(json.loads(path.with_name("table.json").read_text()))
    if table.verdict is not None:
        assert html.escape(table.verdict.sentence) in path.read_text()


def test_the_command_writes_every_format_and_figure_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = RESULTS / "rivals-stdlib"
    stale = json.loads((kept / "table.json").read_text())
    for row in stale["rows"]:
        for measure in row["metrics"].values():
            measure["p"] = measure["p_adj"] = 0.5
    (tmp_path / "table.json").write_text(json.dumps(stale))
    assert main(["ablate", "table", "rivals", "--from", str(tmp_path / "table.json")]) == 0
    assert capsys.readouterr().out.strip() == (kept / "table.md").read_text().strip()
    for name in ("table.json", "table.md", "table.csv", "table.tex"):
        assert (tmp_path / name).read_bytes() == (kept / name).read_bytes()
    assert {path.name for path in tmp_path.glob("*.png")} == {"effects.png", "loss_against_sparsity.png"}


def test_a_table_of_another_ablation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(RESULTS / "rivals-stdlib" / "table.json", tmp_path)
    before = (tmp_path / "table.json").read_bytes()
    assert main(["ablate", "table", "table2", "--from", str(tmp_path / "table.json")]) == 2
    assert "is a table of 'rivals', not of 'table2'" in capsys.readouterr().err
    assert (tmp_path / "table.json").read_bytes() == before
