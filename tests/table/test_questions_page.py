"""The pages of verdicts match the committed tables, and every number on them follows from the values there."""

import json
import math
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binom, t

from lit_lazy.command.main import main
from lit_lazy.report import question_verdicts
from lit_lazy.support.names_to_paths import list_available
from lit_lazy.table.build import read_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
first_round = SimpleNamespace(**runpy.run_path(str(RESULTS / "first_round.py")))
TABLES = [path for path in sorted(RESULTS.glob("*/table.json")) if json.loads(path.read_text()).get("declaration")]
MARKED = """
<!-- findings -->
<!-- end -->
<!-- verdicts -->
| old |
<!-- end -->
<!-- reviewers -->
<!-- end -->
"""


@pytest.fixture(scope="module")
def found() -> list[question_verdicts.QuestionResult]:
    return question_verdicts.read_questions(RESULTS)


def test_the_pages_are_made_of_the_committed_tables(found: list[question_verdicts.QuestionResult]) -> None:
    """Written by `lit-lazy ablate verdicts docs/results --insert README.md --insert docs/results/README.md`."""
    answers = question_verdicts.collect_answers(found, RESULTS)
    for page in (ROOT / "README.md", RESULTS / "README.md"):
        assert question_verdicts.fill_page(page.read_text(), answers, RESULTS, page.parent) == page.read_text()
    assert {answer.words.finding for answer in answers} == {"", *question_verdicts.THEMES}


def test_no_result_is_typed() -> None:
    """Decimals and percentages of the findings come from tables, but for the intervals' level and a rule's name."""
    readme = (ROOT / "README.md").read_text()
    findings = readme[readme.index("## What it finds") : readme.index("## From Python")]
    for text in (findings, (RESULTS / "README.md").read_text()):
        prose = re.sub(r"<!-- \w+ -->\n(?:\|.*\n)+<!-- end -->", "", text)
        typed = re.sub(r'\[(?:\\.|[^]\\])*\]\(\S+ "[^"]+"\)|95 %|1\.5-entmax', "", prose)
        assert re.findall(r".*(?:\d\.\d|\d %).*", typed) == []


def test_a_changed_value_changes_every_page(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    name, metric = "q_text_2-stdlib_small", "loss/bits_per_byte"
    shutil.copytree(RESULTS / name, tmp_path / "results" / name)
    words = (ROOT / "ablations" / "q_text_2.toml").read_text()
    (tmp_path / "ablations").mkdir()
    (tmp_path / "ablations" / "q_text_2.toml").write_text(f'{words}finding = "Loss"\n')
    file, page = tmp_path / "results" / name / "table.json", tmp_path / "page.md"
    table = json.loads(file.read_text())
    links = [f'(results/{name}/table.md "elastic: {of}validation loss")' for of in ("", "Δ ")]
    rows = {row["variant"]: row["metrics"][metric] for row in table["rows"]}
    for added, status in ((0.0, "supported"), (0.25, "refuted")):
        rows["elastic"] |= {seed: value + added for seed, value in rows["elastic"].items()}
        file.write_text(json.dumps(table))
        page.write_text(f"{MARKED}the loss []{links[0]}\nthe loss [a \\[b\\]]{links[1]}\n")
        assert main(["ablate", "verdicts", "results", "--insert", "page.md"]) == 0
        mean = fmean(rows["elastic"][seed] - rows["softmax"][seed] for seed in rows["elastic"])
        assert f"{mean:+.4f} " in capsys.readouterr().out
        findings, verdicts, reviewers = re.split("<!-- verdicts -->|<!-- reviewers -->", page.read_text())
        for text in (findings, verdicts):
            assert f"[{status}](results/{name}/table.md)" in text
            assert f"Elastic-Softmax - softmax: {mean:+.4f} " in text
        assert "| old |" not in verdicts
        assert f"| [q_text_2](results/{name}/table.md): {status} | " in reviewers
        value, difference = reviewers.splitlines()[-2:]
        loss, mean_link, link = fmean(rows["elastic"].values()), re.escape(f"{mean:+.4f}"), [*map(re.escape, links)]
        assert re.fullmatch(rf"the loss \[{loss:.4f} ±\S+ bits/byte\]{link[0]}", value)
        assert re.fullmatch(rf"the loss \[{mean_link} ±\S+, p\S+\]{link[1]}", difference)


def test_words_hold_no_result() -> None:
    """A number stands in the declaration, or is filled in from the table."""
    for name in (name for name in list_available("ablations") if name.startswith("q_")):
        words = question_verdicts.read_words(name)
        assert words.subject != "Other"
        assert words.claim
        declared = (ROOT / "ablations" / f"{name}.py").read_text() + "SmolLM2-135M"
        typed = re.sub(r"\{[^{}]*\}", "", f"{words.claim} {words.effect} {words.scope}")
        assert [x for x in re.findall(r"\d[\d,.]*", typed) if x.rstrip(",.") not in declared] == [], name


def test_mistakes_in_words_are_named(found, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ablations").mkdir()
    asked = [result for result in found if result.table.ablation == "q_text_2"]
    for text, said in (
        ('subject = "The sinc"', "has no words of a question .*subject='The sinc': must be one of Compute-optimal"),
        ("subject =", "has no words of a question"),
        ('effect = "{row: lasy}"', "effect: the table has no 'row: lasy'; it has row: softmax"),
    ):
        (tmp_path / "ablations" / "q_text_2.toml").write_text(text)
        with pytest.raises(ValueError, match=f"q_text_2.toml: {said}"):
            question_verdicts.collect_answers(asked, RESULTS)
    assert question_verdicts.read_words("q_of_mine") == question_verdicts.Words()


def test_the_first_round_s_page_is_made_of_its_values() -> None:
    assert (RESULTS / "first-round.md").read_text() == first_round.format_page()
    question = first_round.read_questions()["q_null"]
    question["rows"][1]["values"][question["primary"]]["10"] += 1.0
    with pytest.raises(ValueError, match="the values have the mean"):
        [first_round.compute_mean(question, contrast) for contrast in question["contrasts"]]


def test_a_question_is_listed_without_words_and_a_first_attempt_until_it_is_repeated(found, tmp_path, monkeypatch):
    listed = {answer.question for answer in question_verdicts.collect_answers(found, RESULTS)}
    repeated = {result.declared.after for result in found}
    assert listed == {result.table.ablation for result in found} - repeated | {"q_null", "q_length"}
    (scale,) = (result for result in found if result.table.ablation == "q_scale")
    again = scale._replace(table=replace(scale.table, declaration=replace(scale.declared, after="q_null")))
    assert "q_null" not in {answer.question for answer in question_verdicts.collect_answers([again], RESULTS)}
    monkeypatch.setattr("lit_lazy.report.question_verdicts.find_words", lambda _: None)
    (answer,) = question_verdicts.collect_answers([scale], tmp_path)
    assert answer.words.claim == scale.declared.claim
    assert answer.words.effect.startswith("slope of elastic - softmax: -0.0708 [")
    assert answer.words.scope == "stdlib_small, 10 seeds"


def test_a_file_without_markers_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, folder = tmp_path / "README.md", tmp_path / "results" / "q_text_2-stdlib_small"
    shutil.copytree(RESULTS / folder.name, folder)
    command = ["ablate", "verdicts", str(folder.parent), "--insert", str(page)]
    assert main(command) == 2
    assert "README.md': cannot be read (No such file or directory); name a file with a pair" in capsys.readouterr().err
    for text, said in (
        ("<!-- verdicts -->", "--insert: the file lacks <!-- verdicts -->, <!-- findings -->"),
        (f'{folder}/table.md "lasy: validation loss"', "q_text_2: the table has no 'lasy'; it has softmax, "),
        (f'{folder}/table.md "lazy: mass"', "q_text_2: table.md does not show 'mass'; link its table.json"),
        (f'{tmp_path}/none/table.md "lazy: loss"', "none/table.json': is no table.json"),
    ):
        content = text if text.startswith("<") else f"[0.1]({text})\n"
        page.write_text(content)
        assert main(command) == 2
        assert said in capsys.readouterr().err
        assert page.read_text() == content


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_a_verdict_at_looks_recomputed_from_the_values_by_hand(path: Path) -> None:
    """An independent implementation of docs/method.md, section 10, seed by seed."""
    table = json.loads(path.read_text())
    declared, verdict = table["declaration"], read_table(path).verdict
    assert verdict is not None
    rows = {row["variant"]: row["metrics"] for row in table["rows"]}
    primary, rule, m, k = declared["primary"], declared["rule"], declared["margin"], len(declared["contrasts"])
    statements = {statement["name"]: statement for statement in declared.get("statements", [])}
    yardstick = table.get("yardstick")

    def has_not_learned(row: str, seeds: list[int]) -> bool:
        losses = rows[row].get(yardstick["metric"], {}) if yardstick else {}
        return (
            bool(losses)
            and sum(losses.get(str(seed), -math.inf) >= yardstick["learned"] for seed in seeds) > len(seeds) / 2
        )

    def outcome(row: str, seed: int) -> float:
        return rows[row][primary][str(seed)]

    def compare(part: dict, seed: int, row: str) -> bool:
        bound = part["value"] * (1 if part["of"] is None else outcome(part["of"], seed))
        return outcome(row, seed) < bound if part["sign"] == "<" else outcome(row, seed) > bound

    def judge(name: str, n: int, rate: float) -> str:
        seeds, weights = declared["seeds"][:n], declared["contrasts"][name]
        unlearned = {row for row in weights if has_not_learned(row, seeds)}
        if statement := statements.get(name):
            given = [
                s for s in seeds if not statement["given"] or compare(statement["given"], s, statement["given"]["row"])
            ]
            rivals = [row for row in statement["rivals"] if row not in unlearned]
            if ({*weights} - {*statement["rivals"]}) & unlearned or n - len(given) > n / 4:
                return "undecided"
            met, *others = (
                sum(compare(statement["holds"], s, row) for s in given) for row in (statement["holds"]["row"], *rivals)
            )
            rare = [binom.cdf(count, n, 0.75) for count in (met, *others)]
            shared = any(binom.sf(count - 1, n, 0.5) <= rate / (k * len(others)) for count in others)
            if rare[0] <= rate / k or shared:
                return "refuted"
            enough = binom.sf(met - 1, n, 0.5) <= rate and all(p <= rate for p in rare[1:])
            return "supported" if enough and (rule == "mostly" or rivals) else "undecided"
        if {*weights} & unlearned:
            return "undecided"
        d = np.array([sum(weight * outcome(row, s) for row, weight in weights.items()) for s in seeds])
        d, error = d.mean() * (-1 if rule == "higher" else 1), d.std(ddof=1) / math.sqrt(n)
        a, b = (t.isf(level, n - 1) * error for level in (rate, rate / k))
        supported, refuted = {
            "lower": (d + a < 0, d - b > -m),
            "higher": (d + a < 0, d - b > -m),
            "same": (abs(d) + a < m, abs(d) - b > m / 2),
            "no_worse": (d + a < m, d - b > 0),
        }[rule]
        return "refuted" if refuted else "supported" if supported else "undecided"

    decided: dict[str, str] = {}
    for look, former, n in zip(verdict.looks, [0, *declared["looks"]], declared["looks"], strict=False):
        assert look.n == n
        rate = 0.025 * (n - former) / declared["looks"][-1]
        found = {name: decided.get(name) or judge(name, n, rate) for name in declared["contrasts"]}
        assert {part.name: part.status for part in look.parts} == found
        decided = {name: status for name, status in found.items() if status != "undecided"}
    worst = "refuted" if "refuted" in found.values() else "undecided" if len(decided) < k else "supported"
    assert verdict.status == worst


# The page of the ladder is made of its packed cells

LADDER = RESULTS / "frontier-frontier_100k"
ladder_page = SimpleNamespace(**runpy.run_path(str(LADDER / "page.py")))


@pytest.fixture(scope="module")
def ladder():
    return ladder_page.Ladder.read(ladder_page.CELLS)


def test_it_is_made_of_its_cells(ladder) -> None:
    assert (LADDER / "README.md").read_text() == ladder_page.format_page(ladder)


def test_another_loss_is_another_difference(ladder) -> None:
    place = ladder.usual[0]
    rules = {rule: dict(seeds) for rule, seeds in ladder.cells[place].items()}
    before = ladder.compare(place, "lazy", "softmax", "loss/val")
    for seed, result in rules["lazy"].items():
        rules["lazy"][seed] = replace(result, metrics=result.metrics | {"loss/val": result.metrics["loss/val"] + 0.5})
    changed = ladder_page.Ladder({**ladder.cells, place: rules})
    assert changed.compare(place, "lazy", "softmax", "loss/val").mean == pytest.approx(before.mean + 0.5)
    assert ladder_page.describe(changed)[0] != ladder_page.describe(ladder)[0]
    assert ladder_page.describe(changed)[1:4] == ladder_page.describe(ladder)[1:4]
