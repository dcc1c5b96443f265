"""Verdicts look by look: bounds, rules, rows that go on, what cannot decide, chances of later looks, and words."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from lit_lazy.command.ablate_run import describe_next_look
from lit_lazy.support.stored_records import make_record
from lit_lazy.table.build import TableSpec, build_table, parse_table
from lit_lazy.table.declaration import Comparison, Declaration, Statement, Verdict
from lit_lazy.table.records import Column, Observation, RowInfo, Yardstick
from lit_lazy.table.results_table import Table
from lit_lazy.table.sequential_looks import compute_critical, find_open_rows, judge_looks

LOOKS = (10, 20, 40, 80)
LOSS = Column("loss", "loss", "lower", 3, "nats")
DECLARED = Declaration(
    claim="New is lower than old.", source="R5", primary="loss", contrasts={"new - old": {"new": 1.0, "old": -1.0}},
    rule="lower", margin=0.1, seeds=tuple(range(100, 180)), looks=LOOKS, commit="abc", digest="0123",
)  # fmt: skip
SINK = Statement("sink", Comparison("new", "<", 0.25, "old"), given=Comparison("old", ">", 0.1))
COUNTED = replace(DECLARED, rule="mostly", statements=(SINK,), contrasts={"sink": SINK.weights})
OF_FIRST_ROUND = {name: value for name, value in DECLARED.to_json().items() if name not in ("rules", "looks")}


def declare(rule: str, k: int = 1, **changes) -> Declaration:
    contrasts = {f"c{i}": {f"new {i}": 1.0, "old": -1.0} for i in range(k)}
    return replace(DECLARED, rule=rule, contrasts=contrasts, **changes)


def table_of(declared: Declaration, rows: dict[str, list[float]]) -> Table:
    """A table of rows that may have unequal numbers of seeds."""
    infos = [RowInfo(name, "ours", declared.seeds[: len(values)], "base") for name, values in rows.items()]
    cells = [
        Observation(name, seed, "complete", {"loss": value})
        for name, values in rows.items()
        for seed, value in zip(declared.seeds, values, strict=False)
    ]
    return build_table(TableSpec("q", "base", next(iter(rows)), infos, [LOSS], [], "command"), cells)


def judge(declared: Declaration, table: Table) -> Verdict | None:
    return replace(table, declaration=declared).verdict


def judge_rows(declared: Declaration, rows: dict[str, list[float]]) -> Verdict:
    found = judge(declared, table_of(declared, rows))
    assert found is not None
    return found


def around(mean: float, sd: float, n: int) -> list[float]:
    x = np.tile([-1.0, 1.0], n)[:n]
    return (mean + sd * (x - x.mean()) / x.std(ddof=1)).tolist()


def test_the_bounds_are_those_of_the_tables() -> None:
    """Quantiles of t at the shares 1/8, 1/8, 1/4 and 1/2 of 0.025, of four claims at a fourth, and binomial tails."""
    found = [compute_critical(declare("lower", k=4), j) for j in range(4)]
    assert [round(c.t_support, 2) for c in found] == [3.55, 3.07, 2.62, 2.28]
    assert [round(c.t_refute, 2) for c in found] == [4.47, 3.69, 3.15, 2.81]
    assert [c.fewest_met for c in found] == [10, 17, 29, 51]


def alone(*rivals: str) -> Declaration:
    statement = replace(SINK, rivals=rivals)
    return replace(COUNTED, rule="alone", statements=(statement,), contrasts={"sink": statement.weights})


NULL = [0.05] * 3 + [0.4] * 7
LEVELS = {"old": 0.4, "new": 0.0, "kept": 0.4, "too": 0.4, "also": 0.4, "gone": 0.01}
RIVALS = {name: [level] * 20 for name, level in LEVELS.items()} | {"half": [0.01, 0.4] * 10}


@pytest.mark.parametrize(
    ("declared", "rows", "status", "n"),
    [
        *(
            (declare(rule), {"old": [1.0] * 10, "new 0": around(1 + difference, sd, 10)}, status, 10)
            for rule, difference, sd, status in (
                ("lower", -0.2, 0.1, "supported"),
                ("lower", 0.0, 0.05, "refuted"),
                ("lower", -0.05, 0.2, "undecided"),
                ("lower", -0.05, 0.02, "refuted"),  # lower, but not by the margin: both hold, refutation comes first
                ("lower", -0.5, 0.0, "undecided"),  # no seed moves it, so its spread is unknown
                ("higher", 0.2, 0.1, "supported"),
                ("higher", -0.2, 0.1, "refuted"),
                ("same", 0.0, 0.05, "supported"),
                ("same", 0.2, 0.05, "refuted"),
                ("same", 0.0, 0.5, "undecided"),
                ("no_worse", 0.0, 0.05, "supported"),
                ("no_worse", 0.3, 0.1, "refuted"),
                ("no_worse", 0.05, 0.3, "undecided"),
            )
        ),
        *(
            (declare("removed"), {"old": around(old, 0.01, 10), "new 0": around(new, 0.01, 10)}, status, 10)
            for new, old, status in ((0.02, 0.5, "supported"), (0.6, 0.5, "refuted"), (0.2, 0.5, "undecided"))
        ),
        (declare("removed"), {"old": around(0.2, 0.01, 10), "new 0": around(0.02, 0.01, 10)}, "undecided", 10),
        (COUNTED, {"old": [0.4] * 10, "new": [0.0] * 10}, "supported", 10),
        (COUNTED, {"old": [0.4] * 10, "new": [0.3] * 10}, "refuted", 10),
        (COUNTED, {"old": [0.4] * 10, "new": [0.0] * 9 + [0.3]}, "undecided", 10),
        (COUNTED, {"old": NULL, "new": [0.0] * 10}, "undecided", 10),
        (alone("kept"), RIVALS, "supported", 10),
        (alone("kept", "gone"), RIVALS, "refuted", 10),
        # At 10 seeds 2^-10 is above the error rate of one of four rivals.
        (alone("kept", "too", "also", "gone"), RIVALS, "refuted", 20),
        (alone("kept", "half"), RIVALS, "undecided", 20),
    ],
)
def test_each_rule_has_each_outcome(declared: Declaration, rows: dict[str, list[float]], status: str, n: int) -> None:
    found = judge_rows(declared, rows)
    assert (found.status, found.n) == (status, n)
    part = found.parts[0]
    if declared.rule == "mostly":
        met = sum(new < 0.25 * old and old > 0.1 for new, old in zip(rows["new"], rows["old"], strict=True))
        absent = "; what it presumes is absent in 3" if rows["old"] == NULL else ""
        assert part.why.startswith(f"met in {met} of 10 seeds{absent}")
    elif declared.rule in ("lower", "higher", "same", "no_worse") and part.low is not None:
        d = np.subtract(rows["new 0"], rows["old"])
        half = compute_critical(declared, 0).t_refute * d.std(ddof=1) / 10**0.5
        assert (part.mean, part.low, part.high) == pytest.approx((d.mean(), d.mean() - half, d.mean() + half))


def test_a_rival_that_did_not_learn_decides_nothing() -> None:
    outcomes = {name: dict(zip(DECLARED.seeds, values, strict=False)) for name, values in RIVALS.items()}
    declared = alone("kept", "gone")
    for dead, status in ((("gone",), "supported"), (("kept", "gone"), "undecided"), (("new",), "undecided")):
        looks = judge_looks(declared, outcomes, dict.fromkeys(dead, DECLARED.seeds))
        assert looks[-1].parts[0].status == status, dead
    weighed = replace(table_of(declared, RIVALS), yardstick=Yardstick("loss", 0.35, {"chance": 0.7}))
    assert weighed.unlearned == dict.fromkeys(("old", "kept", "too", "also"), "20 of 20")


def test_rows_without_an_open_contrast_stop_and_decided_contrasts_stay() -> None:
    declared = declare("lower", k=2)
    rows = {"old": around(1, 0.001, 20), "new 0": around(0.5, 0.1, 10), "new 1": around(0.95, 0.3, 20)}
    found = judge_rows(declared, rows)
    assert [look.n for look in found.looks] == [10, 20]
    assert [part.status for part in found.parts] == ["supported", "undecided"]
    assert [part.n for part in found.parts] == [10, 20]
    assert find_open_rows(declared, found.looks) == ["new 1", "old"]
    # More seeds of a decided row, or of a decided claim, change nothing.
    assert judge_rows(declared, rows | {"new 0": [*rows["new 0"], *[9.0] * 10]}) == found
    decided = judge_rows(declare("lower"), {"old": [1.0] * 20, "new 0": [*around(0.5, 0.1, 10), *[9.0] * 10]})
    assert (decided.status, decided.n) == ("supported", 10)


def test_a_question_is_futile_from_the_second_look_on_unless_a_later_one_would_decide_it() -> None:
    rows = {"old": [1.0] * 20, "new 0": around(0.95, 0.5, 20)}
    found = judge_rows(declare("lower"), rows)
    assert found.futile
    assert "Futile to continue" in found.sentence
    assert not judge_rows(declare("lower"), {name: x[:10] for name, x in rows.items()}).futile
    assert not judge_rows(declare("lower"), {"old": [1.0] * 20, "new 0": around(0.92, 0.25, 20)}).futile
    # The look at 81 spends most of the error rate, the last one next to none.
    declared = declare("lower", looks=(10, 20, 81, 82), seeds=tuple(range(82)), margin=0.5)
    found = judge_rows(declared, {"old": [1.0] * 20, "new 0": around(0.7, 1.0, 20)})
    assert not found.futile
    assert found.chances[0].supported + found.chances[0].refuted > 0.8


def test_a_look_whose_rows_did_not_learn_has_no_chance_to_tell() -> None:
    table = table_of(declare("lower"), {"old": around(1, 0.1, 10), "new 0": around(0.5, 0.1, 10)})
    grid = SimpleNamespace(cells=(), taken={})

    def describe(learned: float) -> list[str]:
        weighed = replace(table, yardstick=Yardstick("loss", learned, {}))
        looked = replace(weighed, declaration=declare("lower", margin=0.5))
        return [line.split(":")[0].strip() for line in describe_next_look(looked, grid, workers=1).splitlines()]

    assert describe(learned=2.0) == ["look 1 of 4", "c0", "Probability that it is decided", "look 2 of 4"]
    assert describe(learned=0.0) == ["look 1 of 4", "c0", "look 2 of 4"]


@pytest.mark.parametrize("rule", ["lower", "same", "mostly"])
def test_chances_are_those_of_simulated_futures(rule: str) -> None:
    """Over claims whose truth varies widely, the mean chance to be decided by n is the share that is decided."""
    rng = np.random.default_rng(5)
    declared = COUNTED if rule == "mostly" else declare(rule, k=2)

    def draw(n: int) -> dict[str, list[float]]:
        if rule == "mostly":
            return {"old": [0.4] * n, "new": np.where(rng.random(n) < rng.random(), 0.0, 0.4).tolist()}
        shared, means = rng.normal(0, 0.1, n), rng.uniform(0.8, 1.1, 2)
        new = {f"new {i}": (means[i] + shared + rng.normal(0, 0.1, n)).tolist() for i in (0, 1)}
        return {"old": [1.0] * n} | new

    decided, said = [], []
    for _ in range(80):
        rows = draw(80)
        first = judge_rows(declared, {name: x[:10] for name, x in rows.items()})
        if first.chances:
            said.append([chance.supported + chance.refuted for chance in first.chances])
            whole = judge_rows(declared, rows)
            decided.append([whole.status != "undecided" and whole.n <= chance.n for chance in first.chances])
    assert len(decided) > 30
    assert all(a <= b for chances in said for a, b in pairwise(chances))
    assert np.mean(said, axis=0) == pytest.approx(np.mean(decided, axis=0), abs=0.12)


def test_a_judged_table_survives_json_and_is_judged_the_same_from_it_alone() -> None:
    declared = replace(COUNTED, after="q", earlier=f"Undecided: {COUNTED.claim}", earlier_seeds=(3,))
    table = replace(table_of(declared, {"old": [0.4] * 10, "new": [0.0] * 10}), declaration=declared)
    again = parse_table(json.dumps(table.to_json()), "it")
    assert (again.declaration, again.verdict) == (declared, table.verdict)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Comparison("a", "<=", 1.0), "sign='<=': must be < or >"),
        (lambda: Comparison("a", "<", "b"), "value='b': must be a number; the row that it is times is `of`"),
        (lambda: Comparison("a", "<", 1.0, "a"), "of='a': must be another row"),
        (lambda: Statement("s", SINK.holds, rivals=("new",)), "statement 's': rivals=['new']: must be rows that"),
        (lambda: make_record(Declaration, OF_FIRST_ROUND), "which first-round.md's questions lack"),
        *(
            (partial(replace, DECLARED, **changes), message)
            for changes, message in (
                ({"rules": 1}, "rules=1: must be version 2; docs/results/first-round.md has the questions"),
                ({"removed": 0.4}, "removed=0.4: must be below kept=0.3"),
                ({"contrasts": {str(i): {"a": 1.0} for i in range(6)}}, "contrasts=6: must be 1 to 5"),
                ({"seeds": (4, *range(1, 80))}, "each must occur once"),
                ({"looks": (10, 10)}, "looks=(10, 10): must grow from one to the next, and start at 2 seeds or more"),
                ({"looks": (5, 80)}, "looks=(5, 80): start with at least 10 seeds, or say why not in few_seeds_becau"),
                ({"looks": (10, 20)}, "seeds='80 seeds': must have one seed per training of the last look, 20"),
                ({"rule": "mostly"}, "contrasts=['new - old']: must be Statement(...) for the rules mostly and alone"),
                ({"statements": (SINK,)}, "Contrast(...) for all others"),
                ({"rule": "alone", "statements": (SINK,)}, "rivals=(): the rule `alone` needs at least one"),
            )
        ),
    ],
)
def test_mistakes_in_a_declaration_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


OLD_AND_NEW = {"old": around(2, 0.1, 10), "new": around(1, 0.2, 10)}


def test_there_is_no_verdict_while_a_declared_seed_is_missing() -> None:
    whole = table_of(DECLARED, OLD_AND_NEW)
    assert judge(replace(DECLARED, seeds=(9, *DECLARED.seeds[1:])), whole) is None
    assert judge(replace(DECLARED, primary="other"), whole) is None
    seeds = (*DECLARED.seeds[:10], *range(70))
    more = table_of(replace(DECLARED, seeds=seeds), {name: [*x, 90.0] for name, x in OLD_AND_NEW.items()})
    assert more.rows[0].n == 11
    assert judge(DECLARED, more) == judge_rows(DECLARED, OLD_AND_NEW), "other seeds are not the declared ones"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"commit": ""}, "its declaration, its experiment or a file that they import was not committed before its run"),
        ({"changed": True}, "its declaration changed after its run began"),
        ({"pilot_seeds": (3, 112)}, "some of its seeds were used in a pilot"),
        ({"after": "q", "earlier_seeds": (3, 4)}, ""),
        ({"after": "q", "earlier_seeds": (3, 100)}, "some of its seeds were used in q"),
    ],
)
def test_what_was_not_declared_before_is_exploratory(changes: dict[str, object], reason: str) -> None:
    found = judge_rows(replace(DECLARED, **changes), OLD_AND_NEW)
    assert found.exploratory == ((reason,) if reason else ())
    assert found.sentence.endswith(f" Exploratory: {reason}." if reason else DECLARED.claim)
