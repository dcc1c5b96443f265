"""A question with looks, run by the command: which rows go on, where it stops, and that it resumes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import forked
import pytest
from test_question import RUN, SOURCE, git

from lit_lazy.command.ablate_run import find_next_look
from lit_lazy.command.main import main
from lit_lazy.table.declaration import Chance
from lit_lazy.table.records import Table
from lit_lazy.table.stored import read_table

LOOKS = (
    SOURCE.replace("import Elastic, Softmax", "import Elastic, Softmax, SSMax")
    .replace("columns=COLUMNS,", "columns=COLUMNS[2:],")  # without losses: six steps learn nothing
    .replace("MARGIN", "MARGIN,\n    looks=(3, 4, 6)")
    .replace("seeds=(3, 4, 5, 6, 7)", "seeds=(3, 4, 5, 6, 7, 8)")
    .replace(
        'Row("elastic", {RULE: Elastic()}, "ours")',
        'Row("elastic", {RULE: Elastic()}, "ours"), Row("kept", {RULE: SSMax()}, "ours"), '
        'Row("apart", {RULE: Elastic(tau_init=0.5)}, "ours")',
    )
)
"""Elastic-Softmax has less mass at once; softmax and SSMax have 1 in every seed, which decides nothing."""
ONE = 'Contrast("elastic - softmax", {"elastic": 1, "softmax": -1}),'
OPEN = ONE + ' Contrast("kept - softmax", {"kept": 1, "softmax": -1}),'


def write_question(folder: Path, contrasts: str, margin: str = "0.1") -> Path:
    folder.mkdir()
    path = folder / "q_mine.py"
    path.write_text(LOOKS.replace("MARGIN", margin).replace(ONE, contrasts))
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "Ask")
    return path


Run = Callable[..., tuple[Table, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a question; returns its table and what was printed."""

    def run(question: Path, runs: Path, *words: str) -> tuple[Table, str]:
        assert main(["ablate", "run", str(question), "--runs", str(runs), "--workers", "2", *words]) == 0
        return read_table(runs / "q_mine-backcopy_tiny" / "table.json"), capsys.readouterr().out

    return run


def dry_run(question: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["ablate", "run", str(question), "--runs", str(runs), "--dry-run"]) == 0
    return " ".join(capsys.readouterr().out.split())


def seeds(table: Table) -> dict[str, list[int]]:
    return {row.variant: row.seeds for row in table.rows}


@pytest.mark.long
def test_only_rows_with_an_open_contrast_go_on(tmp_path, runs, run, capsys) -> None:
    whole, printed = run(write_question(tmp_path / "mine", OPEN), runs, "--looks", "3")
    assert seeds(whole) == {
        "softmax": [3, 4, 5, 6, 7, 8],
        "elastic": [3, 4, 5],
        "kept": [3, 4, 5, 6, 7, 8],
        "apart": [3, 4, 5],
    }
    assert "look 2 of 3: n = 4, 2 cells, about " in printed
    assert [look.n for look in whole.verdict.looks] == [3, 4, 6]
    assert [part.n for part in whole.verdict.parts] == [3, 6]
    assert find_next_look(whole, None, 3) is None
    printed = dry_run(tmp_path / "mine" / "q_mine.py", runs, capsys)
    assert "There is no look to make." in printed


@pytest.mark.long
def test_a_resumed_question_equals_an_undisturbed_one(tmp_path, runs, run, capsys) -> None:
    question = write_question(tmp_path / "mine", OPEN)
    whole, _ = run(question, runs / "whole", "--looks", "3")
    for number in (1, 2, 3):
        part, _ = run(question, runs / "parts", "--looks", "1")
        assert len(part.verdict.looks) == number
        if number == 1:
            check_next_look(part)
            printed = dry_run(question, runs / "parts", capsys)
            assert "2 cells of q_mine-backcopy_tiny" in printed
            assert "This is look 2 of 3, at n = 3, 4, 6." in printed
    # Packed after its first look, and continued in another folder.
    moved, packed = runs / "moved", tmp_path / "cells.jsonl.xz"
    run(question, runs / "first", "--looks", "1")
    assert main(["ablate", "pack", str(question), "--runs", str(runs / "first"), "--out", str(packed)]) == 0
    other, printed = run(question, moved, "--results", str(packed), "--looks", "3")
    assert "12 of 12 cells are taken from cells.jsonl.xz of q_mine-backcopy_tiny" in printed
    for name in ("verdict", "rows", "declaration"):
        assert getattr(part, name) == getattr(other, name) == getattr(whole, name)
    again, printed = run(question, runs / "parts")
    assert again.verdict == whole.verdict
    assert "nothing to do" in printed


def check_next_look(table: Table) -> None:
    """Of a question that its first look left open: what stops it."""
    assert table.verdict.chances[0] == Chance(4, 0.0, 0.0)
    assert find_next_look(table, None, 1) == 2
    assert find_next_look(table, 1, 1) is None
    futile = replace(table, verdict=replace(table.verdict, futile=True))
    assert find_next_look(futile, None, 1) is None
    assert find_next_look(futile, 2, 1) == 2
    decided = replace(table, verdict=replace(table.verdict, status="refuted"))
    assert find_next_look(decided, 2, 1) is None
    assert find_next_look(replace(table, verdict=None), None, 0) is None


@pytest.mark.long
def test_a_decided_question_stops_at_its_look(tmp_path: Path, runs: Path, run: Run) -> None:
    table, printed = run(write_question(tmp_path / "mine", ONE), runs)
    assert (table.verdict.status, table.verdict.n, table.verdict.exploratory) == ("supported", 3, ())
    assert seeds(table) == {name: [3, 4, 5] for name in ("softmax", "elastic", "kept", "apart")}
    assert "Supported at look 1 of 3 (n = 3): Elastic-Softmax has less mass." in printed
    assert "look 1 of 3: n = 3, alpha spent 0.0125, nothing open" in printed


@pytest.mark.long
def test_a_question_that_was_changed_between_its_looks_is_exploratory(tmp_path: Path, runs: Path) -> None:
    """Each look in its own process, since one process loads a file once."""
    question = write_question(tmp_path / "mine", OPEN)
    command = [*RUN, str(question), "--runs", str(runs), "--workers", "2", "--looks", "1"]
    assert forked.run(command).returncode == 0
    question.write_text(question.read_text().replace("looks=(3, 4, 6)", "looks=(3, 5, 6)"))
    git(question.parent, "commit", "-am", "Look elsewhere")
    assert forked.run(command).returncode == 0
    table = read_table(runs / "q_mine-backcopy_tiny" / "table.json")
    assert table.verdict.exploratory == ("its declaration changed after its run began",)


def test_a_dry_run_prices_the_first_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "run", "q_mask_2", "--base", "backcopy_tiny", "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "80 cells of q_mask_2-backcopy_tiny" in printed
    assert "This is look 1 of 4, at n = 10, 20, 40, 80." in printed
