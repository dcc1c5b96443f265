"""docs/questions.md matches the committed tables, whose verdicts follow from the values in table.json."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, t

from lit_lazy.command.main import main
from lit_lazy.report.verdicts import SUBJECTS, format_page, read_questions, replace_findings

ROOT = Path(__file__).parents[2]
TABLES = [
    path for path in sorted(ROOT.glob("docs/results/*/table.json")) if json.loads(path.read_text()).get("declaration")
]


def test_the_page_and_the_readme_are_made_of_the_committed_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by `lit-lazy ablate verdicts docs/results --out docs/questions.md --readme README.md`."""
    monkeypatch.chdir(ROOT)
    found = read_questions(Path("docs/results"))
    assert (ROOT / "docs" / "questions.md").read_text() == format_page(found, Path("docs"))
    readme = (ROOT / "README.md").read_text()
    assert replace_findings(readme, found) == readme


def test_each_question_has_one_line_and_a_repeated_one_its_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = read_questions(Path("docs/results"))
    answers, _, details = (ROOT / "docs" / "questions.md").read_text().partition("## Questions of the reviewers")
    first = {line.split("|")[1].strip(): line for line in answers.splitlines() if line.startswith("| q_")}
    names = {result.table.ablation for result in found}
    repeated = {name for name in names if f"{name}_2" in names and name != "q_sink"}
    assert {*first} == names - repeated
    for name in repeated:
        (earlier,) = (result.table for result in found if result.table.ablation == name)
        assert earlier.verdict is not None
        assert f" {name}: {earlier.verdict.status} " in first[f"{name}_2"]
    assert all(f"## {name} on " in details for name in names)
    assert "### Other" not in answers


def test_every_shipped_question_has_a_subject() -> None:
    names = {re.sub(r"_\d+$", "", path.stem) for path in (ROOT / "ablations").glob("q_*.py")}
    assert names <= {name for phrases in SUBJECTS.values() for name in phrases}


def test_a_readme_without_markers_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    command = ["ablate", "verdicts", str(ROOT / "docs" / "results"), "--readme", str(readme)]
    assert main(command) == 2
    assert "README.md': cannot be read (No such file or directory); name a file with both" in capsys.readouterr().err
    readme.write_text("<!-- verdicts -->\n")
    assert main(command) == 2
    assert (
        "--readme: the file lacks the lines <!-- verdicts --> and <!-- end of verdicts -->" in capsys.readouterr().err
    )
    assert readme.read_text() == "<!-- verdicts -->\n"


FIXED = [path for path in TABLES if "looks" not in json.loads(path.read_text())["declaration"]]
LOOKS = [path for path in TABLES if path not in FIXED]


@pytest.mark.parametrize("path", LOOKS, ids=lambda path: path.parent.name)
def test_a_verdict_at_looks_recomputed_from_the_values_by_hand(path: Path) -> None:
    """An independent implementation of docs/method.md, section 10, seed by seed."""
    table = json.loads(path.read_text())
    declared, verdict = table["declaration"], table["verdict"]
    rows = {row["variant"]: row["metrics"] for row in table["rows"]}
    primary, rule, m, k = declared["primary"], declared["rule"], declared["margin"], len(declared["contrasts"])
    statements = {statement["name"]: statement for statement in declared.get("statements", [])}
    yardstick = table.get("yardstick")

    def has_not_learned(row: str, seeds: list[int]) -> bool:
        losses = rows[row].get(yardstick["metric"], {}).get("values", {}) if yardstick else {}
        return (
            bool(losses)
            and sum(losses.get(str(seed), -math.inf) >= yardstick["learned"] for seed in seeds) > len(seeds) / 2
        )

    def outcome(row: str, seed: int) -> float:
        return rows[row][primary]["values"][str(seed)]

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
    for look, former, n in zip(verdict["looks"], [0, *declared["looks"]], declared["looks"], strict=False):
        assert look["n"] == n
        rate = 0.025 * (n - former) / declared["looks"][-1]
        found = {name: decided.get(name) or judge(name, n, rate) for name in declared["contrasts"]}
        assert {part["name"]: part["status"] for part in look["parts"]} == found
        decided = {name: status for name, status in found.items() if status != "undecided"}
    worst = "refuted" if "refuted" in found.values() else "undecided" if len(decided) < k else "supported"
    assert verdict["status"] == worst


@pytest.mark.parametrize("path", FIXED, ids=lambda path: path.parent.name)
def test_a_verdict_recomputed_from_the_values_by_hand(path: Path) -> None:
    """An independent implementation of docs/method.md, section 10, in numpy."""
    table = json.loads(path.read_text())
    declared, verdict = table["declaration"], table["verdict"]
    seeds = [str(seed) for seed in declared["seeds"]]
    rows = {
        row["variant"]: np.array([row["metrics"][declared["primary"]]["values"][seed] for seed in seeds])
        for row in table["rows"]
    }
    spread = {name: x for name, x in rows.items() if np.ptp(x) > 1e-6 * np.abs(x).max() and np.ptp(x) > 1e-12}
    pairs = [np.corrcoef(a, b)[0, 1] for a, b in itertools.combinations(spread.values(), 2)]
    together = max(0.0, 1 - (1 - np.mean(pairs)) * len(spread) / (len(spread) - 1)) if pairs else 0.0
    count, n, found = len(declared["contrasts"]), len(seeds), []

    def interval(weights: dict[str, float], level: float, m: int = n) -> tuple[float, float]:
        ends = [(weight * rows[name].min(), weight * rows[name].max()) for name, weight in weights.items()]
        still = [sorted(pair) for pair, name in zip(ends, weights, strict=True) if name not in spread]
        lowest, highest = sum(low for low, _ in still), sum(high for _, high in still)
        weights = {name: weight for name, weight in weights.items() if name in spread}
        if not weights:
            return lowest, highest
        v = {name: rows[name].var(ddof=1) for name in weights}
        own = {name: weights[name] ** 2 * v[name] / n for name in weights}
        shared = sum(
            weights[a] * weights[b] * together * min(v[a], v[b]) / n for a, b in itertools.permutations(weights, 2)
        )
        df = sum(own.values()) ** 2 / sum(x**2 / (m - 1) for x in own.values())
        half = t.isf(level / 2, df) * math.sqrt((sum(own.values()) + shared) * n / m)
        mean = sum(weight * rows[name].mean() for name, weight in weights.items())
        return lowest + mean - half, highest + mean + half

    def status(weights: dict[str, float], m: int) -> str:
        """The status at m seeds with today's means and spreads."""
        (low, high), inner = interval(weights, 0.05 / count, m), interval(weights, 0.1 / count, m)
        small = max(map(abs, inner)) < declared["margin"]
        if declared["rule"] in ("removed", "alone"):
            plus = [interval({name: 1.0}, 0.05 / count, m) for name, weight in weights.items() if weight > 0]
            rivals = [name for name, weight in weights.items() if weight < 0]
            minus = [interval({name: 1.0}, 0.05 / count, m) for name in rivals]
            each = [interval({name: 1.0}, 0.05 / count / len(rivals), m) for name in rivals]
            if declared["rule"] == "alone" and len(rivals) > 1 and any(x[1] < declared["removed"] for x in each):
                return "refuted"
            if any(x[1] < declared["kept"] for x in minus) or not all(x[0] > declared["kept"] for x in minus):
                return "undecided"
            if all(x[1] < declared["removed"] for x in plus):
                return "supported"
            return "refuted" if all(x[0] > declared["kept"] for x in plus) else "undecided"
        if declared["rule"] == "same":
            outside = low > declared["margin"] or high < -declared["margin"]
            return "supported" if small else "refuted" if outside else "undecided"
        sign = 1 if declared["rule"] == "higher" else -1
        as_claimed, against = min(sign * low, sign * high) > 0, max(sign * low, sign * high) < 0
        return "refuted" if small or against else "supported" if as_claimed else "undecided"

    seeds_that_would: dict[str, list[int]] = {"supported": [], "refuted": []}
    for part, weights in zip(verdict["parts"], declared["contrasts"].values(), strict=True):
        low, high = interval(weights, 0.05 / count)
        assert (part["low"], part["high"]) == pytest.approx((low, high), rel=1e-6, abs=1e-9)
        found.append(status(weights, n))
        assert part["status"] == found[-1]
        if part["status"] == "undecided":
            decided = (m for m in range(n + 1, 1001) if status(weights, m) != "undecided")
            assert part["needed"] == next(decided, None)
            if part["needed"]:
                assert part["would"] == status(weights, part["needed"])
                seeds_that_would[part["would"]].append(part["needed"])
    worst = "refuted" if "refuted" in found else "undecided" if "undecided" in found else "supported"
    assert verdict["status"] == worst
    if worst == "undecided":
        refute, support = seeds_that_would["refuted"], seeds_that_would["supported"]
        if refute:
            assert f" {min(refute)} seeds would refute it" in verdict["sentence"]
        elif len(support) == found.count("undecided"):
            assert f" {max(support)} seeds would support it" in verdict["sentence"]
        else:
            assert "No number of seeds up to 1000 would decide it" in verdict["sentence"]
