"""A question from declaration to verdict: the command, MLflow, its looks, and what makes it exploratory."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from asked_grid import ask_for_grid
from first_stage import use_stand_in

from lit_lazy.attention import Elastic
from lit_lazy.command import ablate_questions_search, templates
from lit_lazy.command.ablate_run import find_next_look
from lit_lazy.command.main import main
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import experiment, hash_uncommitted, load_attribute, load_experiment
from lit_lazy.grid.ablation import expand, prepare_rows, select_rows
from lit_lazy.grid.grid_folder import read_grid
from lit_lazy.grid.question import RESULTS, Question, load_ablation_or_question
from lit_lazy.measure.evaluation import require_measured
from lit_lazy.support.console import format_duration
from lit_lazy.support.names_to_paths import find, list_available
from lit_lazy.support.provenance import find_last_commit
from lit_lazy.table.build import read_table
from lit_lazy.table.declaration import Chance
from lit_lazy.table.records import Contrast
from lit_lazy.table.render import render_markdown
from lit_lazy.table.results_table import Table
from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker

SOURCE = """
from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS, INIT_COLUMNS
from lit_lazy.table.records import Contrast

RULE = "model.attention.normaliser"
question = Question(
    ablation=Ablation(
        name="q_mine",
        base="backcopy_tiny",
        baseline="softmax",
        seeds=(3, 4, 5, 6, 7),
        columns=COLUMNS,
        rows=(Row("softmax", {RULE: Softmax()}, "ours"), Row("elastic", {RULE: Elastic()}, "ours")),
        common={"train.steps": 6, "train.warmup_steps": 1, "train.val_every": 6, "train.checkpoint_every": 6},
    ),
    claim="Elastic-Softmax has less mass.",
    primary="mass/non_trigger",
    contrasts=(Contrast("elastic - softmax", {"elastic": 1, "softmax": -1}),),
    rule="lower",
    margin=0.1,
    source="R4",
    few_seeds_because="a test",
)
"""
OLDER = "some of its results may have been known before its declaration was committed"
QUESTIONS = [
    name for name in list_available("ablations") if load_attribute(find("ablations", name), "question") is not None
]
BASE = experiment("backcopy_tiny")
KEPT_TABLE = Path(__file__).parents[2] / "docs" / "results" / "table2-backcopy" / "table.json"
RUN = (sys.executable, "-P", "-m", "lit_lazy", "ablate", "run")


def commit(folder: Path, message: str, file: str = ".") -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (["init"], ["add", file], [*who, "commit", "-m", message]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A committed question."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("q_mine", "q_early"):
        (folder / f"{name}.py").write_text(SOURCE.replace("q_mine", name))
    commit(folder, "Ask")
    return folder / "q_mine.py"


def test_from_the_declaration_to_the_verdict(mine: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = forked.check([*RUN, str(mine), "--runs", str(runs), "--workers", "2"])
    table = read_table(runs / "q_mine-backcopy_tiny" / "table.json")
    assert table.declaration.commit == find_last_commit(mine) != ""
    assert table.verdict.status == "undecided"  # six steps teach nothing, whatever the masses are
    assert (table.primary, table.verdict.exploratory) == ("mass/non_trigger", ())
    said = " ".join(done.stdout.split())
    why = "- elastic - softmax: undecided, elastic and softmax did not learn the task:"
    assert re.search(rf"No row learned the task\..* Undecided \(n = 5\): Elastic-Softmax has less mass\..* {why}", said)

    tracker = Tracker(default_uri(runs), "q_mine-backcopy_tiny")
    (parent,) = tracker.find({"kind": "ablation"})
    assert parent.data.tags["verdict"] == table.verdict.sentence

    page = runs / "page.md"
    page.write_text("<!-- reviewers -->\n<!-- end -->\n")
    assert main(["ablate", "verdicts", str(runs), "--insert", str(page)]) == 0
    printed = capsys.readouterr().out
    assert table.verdict.sentence in printed
    assert table.declaration.digest in printed
    linked = "[q_mine](q_mine-backcopy_tiny/table.md): undecided"
    assert linked in next(line for line in page.read_text().splitlines() if line.startswith("| R4"))
    cells = runs.glob("q_mine-backcopy_tiny/cells/*/result.json")
    times = [json.loads(path.read_text())["timings"] for path in cells]
    assert table.seconds == round(sum(time["train_seconds"] + time["evaluate_seconds"] for time in times)) > 0
    assert f"Training and evaluation: {format_duration(table.seconds)}." in printed


@pytest.mark.long
def test_what_was_known_makes_a_verdict_exploratory(mine: Path, runs: Path) -> None:
    """Of a declaration that changed: test_plan.py."""
    forked.check([*RUN, str(mine), "--runs", str(runs), "--workers", "2"])
    # Two more questions take its trainings: one that was committed before them, and one that is committed now.
    late = mine.with_name("q_late.py")
    late.write_text(SOURCE.replace("q_mine", "q_late"))
    commit(mine.parent, "Ask what is known")
    for name, exploratory in (("q_early", ()), ("q_late", (OLDER,))):
        taken = forked.run([*RUN, str(mine.with_name(f"{name}.py")), "--runs", str(runs), "--workers", "1", "--brief"])
        assert "10 of 10 cells are taken from q_mine-backcopy_tiny" in taken.stdout, taken.stderr
        assert read_table(runs / f"{name}-backcopy_tiny" / "table.json").verdict.exploratory == exploratory

    # What was known is trained again: nothing is taken, but --fresh moved the results aside.
    for name in ("q_mine", "q_early"):
        shutil.rmtree(runs / f"{name}-backcopy_tiny")
    forked.check([*RUN, str(late), "--runs", str(runs), "--workers", "1", "--brief", "--fresh", "--rows", "softmax"])
    assert read_grid(runs / "q_late-backcopy_tiny").plan.declaration.exploratory == (OLDER,)


def test_settings_of_the_command_line_were_declared_nowhere(mine: Path) -> None:
    for overrides, commit in (([], find_last_commit(mine)), (["--train.lr=0.1"], "")):
        assert ask_for_grid(["ablate", "run", str(mine)], overrides).plan.declaration.commit == commit


def test_files_in_no_commit_are_named_by_their_hash(mine: Path) -> None:
    helper = mine.with_name("my_helper.py")
    helper.write_text("SEED = 3\n")
    assert hash_uncommitted([mine]) == {}
    mine.write_text(f"import my_helper\n{mine.read_text()}")
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in (helper, mine)}
    assert hash_uncommitted([mine]) == hashes
    assert find_last_commit(mine) == find_last_commit(mine.parents[1] / "elsewhere.py") == ""
    listed = ", ".join(f"{name} (SHA-256 {digest})" for name, digest in sorted(hashes.items()))
    assert f"In no commit: {listed}. With " in render_markdown(replace(read_table(KEPT_TABLE), files=hashes))


def ask() -> Question:
    """What a file of that source asks."""
    exec(SOURCE, names := {})
    return names["question"]


ASKED = ask()
ABLATION = ASKED.ablation


def test_the_digest_is_of_all_that_was_declared(mine: Path) -> None:
    asked = ask()
    digest = asked.declare("base", BASE, [mine]).digest
    assert digest == ask().declare("base", BASE, [mine]).digest
    assert asked.declare("base", BASE, [mine]).commit == find_last_commit(mine)
    (mine.parent / "base.py").touch()
    assert asked.declare("base", BASE, [mine, mine.parent / "base.py"]).commit == "", "its experiment is in none"
    (mine.parent / "rule.py").touch()
    mine.write_text(f"import rule\n{mine.read_text()}")
    commit(mine.parent, "Import", mine.name)
    assert asked.declare("base", BASE, [mine]).commit == "", "the rule that it imports is in none"
    commit(mine.parent, "Add the rule")
    assert asked.declare("base", BASE, [mine]).commit == find_last_commit(mine) != ""
    row = replace(ABLATION.rows[1], changes={"model.attention.normaliser": Elastic(tau_init=0.5)})
    others = (
        replace(asked, claim="It has much less mass."),
        replace(asked, margin=0.2),
        replace(asked, rule="same"),
        replace(asked, primary="sink/rate"),
        replace(asked, pilot_seeds=(0,)),
        replace(asked, contrasts=(Contrast("elastic - softmax", {"elastic": 2, "softmax": -2}),)),
        replace(asked, ablation=replace(ABLATION, seeds=(8, 9, 10, 11, 12))),
        replace(asked, ablation=replace(ABLATION, rows=(ABLATION.rows[0], row))),
    )
    digests = {other.declare("base", BASE, [mine]).digest for other in others}
    digests |= {asked.declare("other", BASE, [mine]).digest}
    digests |= {asked.declare("base", replace(BASE, train=replace(BASE.train, lr=0.5)), [mine]).digest}
    assert len(digests) == len(others) + 2
    assert digest not in digests


def test_a_published_declaration_keeps_its_commit_while_its_digest_is_the_same(mine, tmp_path, monkeypatch) -> None:
    """A file may change in other respects. What differs in the declaration was declared when the file was committed."""
    published = tmp_path / "published" / "q_mine-base"
    published.mkdir(parents=True)
    monkeypatch.setattr("lit_lazy.grid.question.RESULTS", published.parent)
    asked = replace(ASKED, after="q_first")
    first = replace(asked.declare("base", BASE, [mine]), earlier="Open.", earlier_seeds=(0, 1))
    (published / "table.json").write_text(
        json.dumps(replace(read_table(KEPT_TABLE), ablation="q_mine", declaration=first).to_json())
    )
    mine.write_text(f"# another comment\n{mine.read_text()}")
    assert asked.declare("base", BASE, [mine]) == replace(first, commit="")
    commit(mine.parent, "Comment")
    assert find_last_commit(mine) != first.commit
    assert asked.declare("base", BASE, [mine]) == first
    again = replace(asked, margin=0.2).declare("base", BASE, [mine])
    assert (again.commit, again.earlier) == (find_last_commit(mine), "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"primary": "loss/excel"}, r"primary 'loss/excel': is unknown \(did you mean loss/excess\?\); "),
        (
            {"contrasts": (Contrast("c", {"c": 1, "softmax": -1}),)},
            "contrast 'c': row 'c': is unknown; known are softmax",
        ),
        ({"contrasts": ASKED.contrasts * 2}, r"contrasts=\['elastic - softmax'\]: must each occur once"),
        ({"rule": "removed"}, "margin=0.1: is not used by the rule `removed`, whose bounds are"),
        ({"few_seeds_because": ""}, r"looks=\(5,\): start with at least 10 seeds, or say why not in few"),
        ({"ablation": replace(ABLATION, primary=("loss/excess",))}, r"ablation\.primary=.*leave it to"),
        (
            {"ablation": replace(ABLATION, rows=(replace(ABLATION.rows[0], seeds=(1,)), ABLATION.rows[1]))},
            r"seeds of rows=\['softmax'\]: all rows of a question have the ablation's seeds",
        ),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^question 'q_mine': {message}"):
        replace(ASKED, **changes)


def test_a_question_beside_another_ablation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q_piloted.py").write_text(SOURCE)
    pilot, same = tmp_path / "pilot.py", tmp_path / "same.py"
    pilot.write_text(
        "from dataclasses import replace\nfrom q_piloted import question\n"
        'ablation = replace(question.ablation, name="pilot")\n'
    )
    said = f"{pilot}: defines a `question` and another `ablation`; delete one, or import it under another name"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        load_ablation_or_question(pilot)
    same.write_text("from q_piloted import question\nablation = question.ablation\n")
    assert load_ablation_or_question(same)[0].name == "q_mine"


def test_an_outcome_that_the_data_do_not_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells would be trained, and an amended declaration would be exploratory."""
    path, runs = tmp_path / "q_moved.py", tmp_path / "runs"
    template = Path(templates.__file__).with_name("question.py").read_text()
    path.write_text(template.replace('base="backcopy_tiny"', 'base="recall_tiny"'))
    assert main(["ablate", "run", str(path), "--runs", str(runs)]) == 2
    said = "primary='sink/first_key_weight_non_trigger': is not measured on recall, which has sink/first_key_share_ab"
    assert said in capsys.readouterr().err
    assert not runs.exists()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*-backcopy/table.json")), ids=lambda path: path.parent.name)
def test_what_tables_hold_is_taken_for_measured(path: Path) -> None:
    """On the data of some row: rows may change it."""
    table = read_table(path)
    source = load_experiment(find("experiments", "backcopy")).data.load()
    watched = replace(source, watched_key=4)
    for key in {key for row in table.rows for key in row.metrics}:
        require_measured(key, [source, watched])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def question():\n    raise ValueError('no table yet')", "line 2: no table yet"),
        ("question = 3", "its `question` is a int; make it Question(...)"),
        ("def ablation():\n    return 'rows'", "its `ablation` is a str; make it Ablation(...)"),
    ],
)
def test_a_file_that_makes_none_is_told_with_line_and_kind(body: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(body)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {said}')}$"):
        load_ablation_or_question(path)


@pytest.mark.parametrize("name", QUESTIONS)
def test_shipped_questions_fit_their_experiment_and_use_no_seed_that_was_seen(name, tmp_path, monkeypatch) -> None:
    """Earlier tables used seeds 0 to 4, pilots 7 and 20."""
    use_stand_in(monkeypatch, tmp_path)
    ablation, asked = load_ablation_or_question(find("ablations", name))
    assert ablation.name == name
    assert not {*asked.ablation.seeds} & ({0, 1, 2, 3, 4, 7, 20} | {*asked.pilot_seeds})
    # The files that smollm2 needs are no part of a clone.
    base = replace_at(experiment(ablation.base.replace("smollm2", "smollm2_tiny")), ablation.common)
    cells = expand(prepare_rows(select_rows(ablation, [], [ablation.seeds[0]]), base))
    assert len(cells) == len(ablation.all_rows)


def test_questions_are_priced_and_what_does_not_fit_is_left_out(monkeypatch, tmp_path, capsys) -> None:
    use_stand_in(monkeypatch, tmp_path / "results")
    ran = []
    prices = {name: 600.0 * (i + 1) for i, name in enumerate(reversed(ablate_questions_search.list_questions()[0]))}
    monkeypatch.setattr(ablate_questions_search, "make_grid", lambda options, _: options.ablation)
    monkeypatch.setattr(ablate_questions_search, "_estimate_seconds", prices.__getitem__)
    monkeypatch.setattr(ablate_questions_search, "ablate_run", lambda options, _: ran.append(options.ablation) or 0)
    words = ["ablate", "questions", "--runs", str(tmp_path / "runs"), "--workers", "1"]
    assert main([*words, "--dry-run"]) == 0
    priced = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " about " in line]
    assert priced == list(prices)
    assert ran == []
    assert main([*words, "--limit", "15m"]) == 0
    assert ran == priced[:1]
    assert f"skipped by --limit: {', '.join(priced[1:])}" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    with pytest.raises(SystemExit, match="2"):
        main(["ablate", "questions", "--limit", "0m"])
    assert "'0m': must be minutes or hours above 0" in capsys.readouterr().err
    assert main(["ablate", "verdicts", str(tmp_path)]) == 2
    assert "holds no question's table.json" in capsys.readouterr().err


LOOKS = (
    SOURCE.replace("import Elastic, Softmax", "import Elastic, Softmax, SSMax")
    .replace("columns=COLUMNS,", "columns=COLUMNS[2:],")  # without losses: six steps learn nothing
    .replace("margin=0.1", "margin=0.1,\n    looks=(3, 4, 6)")
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


def write_question(folder: Path, contrasts: str) -> Path:
    folder.mkdir()
    path = folder / "q_mine.py"
    path.write_text(LOOKS.replace(ONE, contrasts))
    commit(folder, "Ask")
    return path


def run(capsys: pytest.CaptureFixture[str], question: Path, runs: Path, *words: str) -> tuple[Table, str]:
    """Run a question; returns its table and what was printed."""
    assert main(["ablate", "run", str(question), "--runs", str(runs), "--workers", "2", *words]) == 0
    return read_table(runs / "q_mine-backcopy_tiny" / "table.json"), capsys.readouterr().out


def dry_run(question: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["ablate", "run", str(question), "--runs", str(runs), "--dry-run"]) == 0
    return " ".join(capsys.readouterr().out.split())


def seeds(table: Table) -> dict[str, list[int]]:
    return {row.variant: row.seeds for row in table.rows}


@pytest.mark.long
def test_only_rows_with_an_open_contrast_go_on_and_a_resumed_question_equals_it(tmp_path, runs, capsys) -> None:
    question = write_question(tmp_path / "mine", OPEN)
    whole, printed = run(capsys, question, runs / "whole", "--looks", "3")
    six, three = [3, 4, 5, 6, 7, 8], [3, 4, 5]
    assert seeds(whole) == {"softmax": six, "elastic": three, "kept": six, "apart": three}
    assert "look 2 of 3: n = 4, 2 cells, about " in printed
    assert [look.n for look in whole.verdict.looks] == [3, 4, 6]
    assert [part.n for part in whole.verdict.parts] == [3, 6]
    assert find_next_look(whole, None, 3) is None
    assert "There is no look to make." in dry_run(question, runs / "whole", capsys)
    for number in (1, 2, 3):
        part, _ = run(capsys, question, runs / "parts", "--looks", "1")
        assert len(part.verdict.looks) == number
        if number == 1:
            check_next_look(part)
            printed = dry_run(question, runs / "parts", capsys)
            assert "2 cells of q_mine-backcopy_tiny" in printed
            assert "This is look 2 of 3, at n = 3, 4, 6." in printed
    # Packed after its first look, and continued in another folder.
    moved, packed = runs / "moved", tmp_path / "cells.jsonl.xz"
    run(capsys, question, runs / "first", "--looks", "1")
    assert main(["ablate", "pack", str(question), "--runs", str(runs / "first"), "--out", str(packed)]) == 0
    other, printed = run(capsys, question, moved, "--results", str(packed), "--looks", "3")
    assert "12 of 12 cells are taken from cells.jsonl.xz of q_mine-backcopy_tiny" in printed
    for name in ("verdict", "rows", "declaration"):
        assert getattr(part, name) == getattr(other, name) == getattr(whole, name)
    again, printed = run(capsys, question, runs / "parts")
    assert again.verdict == whole.verdict
    assert "nothing to do" in printed
    (cell,) = (
        cell
        for cell in read_grid(runs / "parts" / "q_mine-backcopy_tiny").cells
        if cell.seed == 6 and cell.variant == "kept"
    )
    metrics = {name: value for name, value in cell.result.metrics.items() if name != whole.declaration.primary}
    replace(cell.result, metrics=metrics).write(cell.folder)
    again, printed = run(capsys, question, runs / "parts", "--looks", "3")
    assert len(again.verdict.looks) == 1
    assert printed.count("Look 2 needs each of 4 seeds: kept lacks 6.") == 1, "it ends"


def check_next_look(table: Table) -> None:
    """Of a question that its first look left open: what stops it."""

    assert table.verdict.chances[0] == Chance(4, 0.0, 0.0)
    futile, decided = replace(table.verdict, futile=True), replace(table.verdict, status="refuted")
    for verdict, asked, made, number in (
        *((table.verdict, None, 1, 2), (table.verdict, 1, 1, None), (futile, None, 1, None), (futile, 2, 1, 2)),
        *((decided, 2, 1, None), (None, None, 0, None)),
    ):
        looked = SimpleNamespace(declaration=table.declaration, verdict=verdict)
        assert find_next_look(looked, asked, made) == number
