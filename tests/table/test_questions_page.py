"""docs/questions.md matches the committed tables, whose verdicts follow from the values in table.json."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, t

from lit_lazy.report.verdicts import TOPICS, format_page, read_questions, update_readme
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import Column, Observation, RowInfo
from lit_lazy.table.verdicts import add_verdict

ROOT = Path(__file__).parents[2]
TABLES = [
    path for path in sorted(ROOT.glob("docs/results/*/table.json")) if json.loads(path.read_text()).get("declaration")
]


def test_the_page_is_made_of_the_committed_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by `lit-lazy ablate verdicts docs/results --out docs/questions.md --readme README.md`."""
    monkeypatch.chdir(ROOT)
    found = read_questions(Path("docs/results"))
    assert Path("docs/questions.md").read_text() == format_page(found, Path("docs"))
    readme = Path("README.md").read_text()
    assert readme == update_readme(readme, found, "docs/questions.md")


def made_up(folder: Path, name: str, values: list[float], after: str = "", **changes: object) -> None:
    """Write the table of a question whether `new` is lower than `old`, by these differences by seed."""
    cells = [
        Observation(row, seed, "complete", {"loss": x})
        for row, shift in (("old", None), ("new", values))
        for seed, x in enumerate([1.0 + 0.01 * (-1) ** i for i in range(len(values))] if shift is None else shift)
    ]
    seeds = tuple(range(len(values)))
    infos = [RowInfo(row, "ours", seeds, "base") for row in ("old", "new")]
    loss = Column("loss", "loss", "lower", 3, "nats")
    settings = {"rules": 2, "looks": (10, 20, 40, 80), "seeds": tuple(range(80)), "commit": "abc", "digest": "0123"}
    declared = Declaration(
        f"{name} is lower.", "R5", "loss", {"new - old": {"new": 1, "old": -1}}, "lower", 0.1,
        after=after, **settings | changes,
    )  # fmt: skip
    table = build_table(TableSpec(name, "base", "old", infos, [loss], [], "make"), cells)
    (folder / name).mkdir()
    decided = add_verdict(replace(table, seconds=1800.0), declared)
    (folder / name / "table.json").write_text(json.dumps(decided.to_json()))


def lines_of(page: str, topic: str) -> dict[str, list[str]]:
    """The cells of a topic's lines, by question."""
    section = page.split(f"## {topic}\n")[1].split("\n## ")[0]
    rows = [re.split(r" *\| *", line)[1:-1] for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[2:]}


def around(mean: float, n: int, sd: float = 0.02) -> list[float]:
    return [mean + sd * (1 if i % 4 < 2 else -1) for i in range(n)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    made_up(tmp_path, "q_text", around(0.95, 5, 0.3), rules=1, looks=(), seeds=tuple(range(5)))
    made_up(tmp_path, "q_text_2", around(0.5, 10), after="q_text")
    made_up(tmp_path, "q_bias_gain", around(0.9, 20, 0.4), after="q_text")
    made_up(tmp_path, "q_odd", around(1.2, 10))
    made_up(tmp_path, "q_odder", around(1.2, 4))
    return tmp_path


def test_the_newest_attempt_has_a_line_and_names_the_earlier_one(results: Path) -> None:
    found = read_questions(results)
    page = format_page(found, results)
    line = lines_of(page, "Quality on text")
    assert line.keys() == {"q_text_2"}, "the first attempt has no line of its own"
    claim, verdict, decided, *rest = line["q_text_2"]
    assert (claim, verdict) == ("q_text_2 is lower.", "supported; first attempt: undecided (n = 5)")
    assert decided == "new - old: -0.496 \\[-0.522, -0.470\\] nats"
    assert rest == ["10", "1 of 4", "0.50"]
    (bias,) = lines_of(page, "The bias and positions").values()
    assert bias[1] == "undecided; first attempt: undecided (n = 5)"
    assert bias[3:5] == ["20", "2 of 4"]
    others = lines_of(page, "Other questions")
    assert (others["q_odd"][1], others["q_odder"][1:5]) == ("refuted", ["not decided yet", *["–"] * 3])
    assert "All questions together took 2.50 core-hours." in page
    assert "- look 2 of 4: n = 20, alpha spent 0.00625, open: new - old" in page
    assert "Second attempt, with other seeds. The first, q_text" in page
    assert page.index("## q_text on base") > page.index("## Questions of the reviewers")


def test_the_readme_has_the_newest_verdicts_in_short(results: Path) -> None:
    found = read_questions(results)
    empty = "Before.\n<!-- part verdicts -->\n<!-- end verdicts -->\nBehind.\n"
    text = update_readme(empty, found, "questions.md")
    assert text == (
        "Before.\n<!-- part verdicts -->\n"
        '- [Questions](questions.md) about Elastic-Softmax ("it"), declared before their runs. '
        "Supported: it lowers the loss on text.\n- Refuted: q_odd is lower.\n- Undecided: the bias lowers the loss on text.\n"
        "- Not decided yet: q_odder is lower.\n<!-- end verdicts -->\nBehind.\n"
    )
    assert update_readme(text, found, "questions.md") == text
    with pytest.raises(ValueError, match=r"^the README has no place for the verdicts: add the lines '<!-- part verd"):
        update_readme("Nothing.", found, "questions.md")


def test_every_shipped_question_has_a_topic() -> None:
    for path in sorted((ROOT / "ablations").glob("q_*.py")):
        after = re.search(r'after="(\w+)"', path.read_text())
        names = {path.stem, after[1] if after else ""}
        assert any(names & claims.keys() for claims in TOPICS.values()), path.stem


FIXED = [path for path in TABLES if "looks" not in json.loads(path.read_text())["declaration"]]
LOOKS = [path for path in TABLES if path not in FIXED]


@pytest.mark.parametrize("path", LOOKS, ids=lambda path: path.parent.name)
def test_a_verdict_at_looks_recomputed_from_the_values_by_hand(path: Path) -> None:
    """An independent implementation of docs/method.md, section 10, seed by seed."""
    table = json.loads(path.read_text())
    declared, verdict = table["declaration"], table["verdict"]
    rows = {row["variant"]: row["metrics"] for row in table["rows"]}
    primary, rule, m, k = (declared[name] for name in ("primary", "rule", "margin")) + (len(declared["contrasts"]),)
    statements = {statement["name"]: statement for statement in declared.get("statements", [])}
    unlearned = set()
    if table.get("yardstick"):
        loss, bound = table["yardstick"]["metric"], table["yardstick"]["learned"]
        for name, metrics in rows.items():
            values = list(metrics[loss]["values"].values()) if loss in metrics else []
            if sum(value >= bound for value in values) > len(values) / 2:
                unlearned.add(name)

    def outcome(row: str, seed: int) -> float:
        return rows[row][primary]["values"][str(seed)]

    def compare(part: dict, seed: int, row: str) -> bool:
        bound = part["value"] * (1 if part["of"] is None else outcome(part["of"], seed))
        return outcome(row, seed) < bound if part["sign"] == "<" else outcome(row, seed) > bound

    def judge(name: str, n: int, rate: float) -> str:
        seeds, weights = declared["seeds"][:n], declared["contrasts"][name]
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
