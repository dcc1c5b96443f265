"""Verdicts on simulated outcomes of all three kinds, their error rates, and JSON round trips."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy.stats import t

from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.declaration import Declaration, Verdict
from lit_lazy.table.records import Column, Contrast, Observation, RowInfo, Table
from lit_lazy.table.render import render_markdown
from lit_lazy.table.verdicts import add_verdict, describe_bounds, describe_contrasts, judge

SEEDS = (10, 11, 12, 13, 14)
LOSS = Column("loss", "loss", "lower", 3, "nats")
PAIR = {"new - old": {"new": 1.0, "old": -1.0}}
DECLARED = Declaration(
    claim="New is lower than old.", source="R5", primary="loss", contrasts=PAIR, rule="lower", margin=0.1, seeds=SEEDS,
    digest="0123456789ab", commit="abc",
)  # fmt: skip


def table_of(rows: dict[str, list[float]], seeds=SEEDS, column=LOSS) -> Table:
    infos = [RowInfo(name, "ours", seeds, "base") for name in rows]
    cells = [
        Observation(name, seed, "complete", {column.key: value})
        for name, values in rows.items()
        for seed, value in zip(seeds, values, strict=True)
    ]
    return build_table(TableSpec("q", "base", next(iter(rows)), infos, [column], [], "command"), cells)


def around(mean: float, spread: float) -> list[float]:
    """Five values of exactly this mean and standard deviation."""
    return (mean + spread * np.array([-1, -1, 0, 1, 1])).tolist()


def apart(mean: float, spread: float) -> list[float]:
    """Five values of this mean and standard deviation, uncorrelated with `around` over seeds."""
    return (mean + spread * np.array([-1, 1, 0, -1, 1])).tolist()


def verdict(rule: str, new: list[float], old: list[float], **changes) -> Verdict:
    found = judge(dataclasses.replace(DECLARED, rule=rule, **changes), table_of({"old": old, "new": new}))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("rule", "difference", "spread", "status", "why"),
    [
        ("lower", -1.0, 0.1, "supported", "lower"),
        ("lower", 1.0, 0.1, "refuted", "higher"),
        ("lower", 0.0, 0.01, "refuted", "the same within ±0.1 nats"),
        ("lower", -0.05, 0.01, "refuted", "the same within ±0.1 nats"),
        ("lower", -0.05, 0.3, "undecided", "neither different nor shown to be the same"),
        ("higher", 1.0, 0.1, "supported", "higher"),
        ("higher", -1.0, 0.1, "refuted", "lower"),
        ("same", 0.0, 0.01, "supported", "the same within ±0.1 nats"),
        ("same", 0.5, 0.05, "refuted", "differs by more than 0.1 nats"),
        ("same", 0.11, 0.2, "undecided", "neither different nor shown to be the same"),
    ],
)
def test_each_rule_has_each_outcome(rule, difference, spread, status, why):
    found = verdict(rule, apart(2 + difference, spread), around(2, spread))
    assert (found.status, found.parts[0].why, found.n) == (status, why, 5)
    assert found.sentence.startswith(f"{status.capitalize()} (n = 5): New is lower than old.")
    assert found.parts[0].mean == pytest.approx(difference)


@pytest.mark.parametrize(
    ("new", "old", "status", "why"),
    [
        (around(0.01, 0.005), around(0.45, 0.02), "supported", "below 0.1 nats where it is above 0.3 nats otherwise"),
        ([0.0] * 5, around(0.45, 0.02), "supported", "below 0.1 nats where it is above 0.3 nats otherwise"),
        (around(0.5, 0.02), around(0.45, 0.02), "refuted", "above 0.3 nats as well"),
        (around(0.2, 0.02), around(0.45, 0.02), "undecided", "between the bounds"),
        (around(0.01, 0.005), around(0.05, 0.01), "undecided", "nothing to remove: below 0.3 nats anyway"),
        (around(0.01, 0.005), around(0.35, 0.2), "undecided", "between the bounds"),
    ],
)
def test_what_is_removed_is_seen_in_levels(new, old, status, why):
    found = verdict("removed", new, old)
    assert (found.status, found.parts[0].why) == (status, why)


@pytest.mark.parametrize(
    ("others", "status", "why"),
    [
        ({"old": 0.45, "older": 0.6}, "supported", "below 0.1 nats where it is above 0.3 nats otherwise"),
        ({"old": 0.45, "older": 0.02}, "refuted", "1 of 2 others are below 0.1 nats as well"),
        ({"old": 0.45, "older": 0.2}, "undecided", "nothing to remove: below 0.3 nats anyway"),
    ],
)
def test_what_another_removes_too_is_not_removed_alone(others, status, why):
    rows = {name: around(mean, 0.01) for name, mean in others.items()} | {"new": apart(0.03, 0.01)}
    weights = {"new": 1.0, "old": -0.5, "older": -0.5}
    found = judge(dataclasses.replace(DECLARED, rule="alone", contrasts={"all": weights}), table_of(rows))
    assert found is not None
    assert (found.status, found.parts[0].why) == (status, why)
    # The rule `removed` leaves it undecided: its other rows are not rivals.
    found = judge(dataclasses.replace(DECLARED, rule="removed", contrasts={"all": weights}), table_of(rows))
    assert found is not None
    assert found.status == ("supported" if status == "supported" else "undecided")
    refuted = rows | {"new": apart(0.5, 0.01), "older": around(0.6, 0.01)}
    found = judge(dataclasses.replace(DECLARED, rule="alone", contrasts={"all": weights}), table_of(refuted))
    assert found is not None
    assert (found.status, found.parts[0].why) == ("refuted", "above 0.3 nats as well")


def test_the_interval_is_welch_s_at_bonferroni_s_level():
    rng = np.random.default_rng(0)
    rows = {name: rng.normal(size=5).tolist() for name in ("old", "new", "newer")}
    contrasts = {"a": {"new": 1.0, "old": -1.0}, "b": {"newer": 1.0, "old": -1.0}}
    # Without correlation of the rows, seeds count as independent.
    rows["newer"] = [-x for x in rows["old"]]
    found = judge(dataclasses.replace(DECLARED, contrasts=contrasts), table_of(rows))
    assert found is not None
    old, new = np.array(rows["old"]), np.array(rows["new"])
    parts = old.var(ddof=1) / 5, new.var(ddof=1) / 5
    df = sum(parts) ** 2 / sum(x**2 / 4 for x in parts)
    half = t.isf(0.05 / 2 / 2, df) * math.sqrt(sum(parts))
    mean = new.mean() - old.mean()
    assert (found.parts[0].low, found.parts[0].high) == pytest.approx((mean - half, mean + half))


def test_a_row_that_no_seed_moves_makes_no_claim_stronger():
    """Five seeds at exactly 100 % are at most as certain as five seeds near 100 %."""
    share = dataclasses.replace(LOSS, bounds=(0.0, 1.0))
    old = around(0.7, 0.29)
    found = []
    for new in ([1.0] * 5, [1.0, 1.0, 1.0, 1.0, 1 - 1e-5]):
        judged_one = judge(
            dataclasses.replace(DECLARED, rule="higher"), table_of({"old": old, "new": new}, column=share)
        )
        assert judged_one is not None
        found.append(judged_one.parts[0])
    assert max(old) < 1
    assert [part.status for part in found] == ["undecided", "undecided"]
    low, high = (found[0].low, found[0].high)
    assert (found[1].low, found[1].high) == pytest.approx((low, high), abs=1e-3)
    half = t.isf(0.025, 4) * np.std(old, ddof=1) / math.sqrt(5)
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half))
    assert found[0].needed == pytest.approx(found[1].needed, abs=1)


def test_a_row_at_either_bound_enters_with_its_range():
    share = dataclasses.replace(LOSS, bounds=(0.0, 1.0))
    old, new = around(0.4, 0.01), [1.0, 1.0, 1.0, 1.0, 0.0]
    found = judge(dataclasses.replace(DECLARED, rule="higher"), table_of({"old": old, "new": new}, column=share))
    assert found is not None
    half = t.isf(0.025, 4) * np.std(old, ddof=1) / math.sqrt(5)
    assert (found.parts[0].low, found.parts[0].high) == pytest.approx((-0.4 - half, 0.6 + half))
    assert found.parts[0].mean == pytest.approx(0.4)
    assert (found.status, found.parts[0].needed) == ("undecided", None)


def test_rows_without_any_spread_differ_by_their_range():
    found = verdict("lower", [1.0] * 5, [2.0] * 5)
    assert (found.status, found.parts[0].low, found.parts[0].high) == ("supported", -1.0, -1.0)


def test_each_of_many_rivals_is_tested_at_its_share():
    """Of seven rivals each may seem to lack the sink by chance; one that does refutes the claim.

    Of one alone nobody claims that others keep it: without a sink there is none to remove.
    """
    half = t.isf(0.0125, 4) * np.std(around(0, 1), ddof=1) / math.sqrt(5)
    near = around(0.1 - 1.01 * half * 0.01, 0.01)  # at half the level its interval lies just below 0.1
    rows = {"old": near, **{f"old {i}": around(0.5, 0.01) for i in range(6)}, "new": apart(0.03, 0.01)}
    for others, status in ((1, "undecided"), (2, "refuted"), (7, "undecided")):
        names = list(rows)[:others]
        weights = {"new": 1.0, **dict.fromkeys(names, -1 / others)}
        found = judge(dataclasses.replace(DECLARED, rule="alone", contrasts={"all": weights}), table_of(rows))
        assert found is not None
        assert found.status == status


def test_one_refuted_contrast_refutes_the_claim_and_one_undecided_leaves_it_open():
    rows = {"old": around(2, 0.1), "good": around(1, 0.1), "bad": around(3, 0.1), "vague": around(1.9, 0.5)}

    def status(*names):
        contrasts = {name: {name: 1.0, "old": -1.0} for name in names}
        found = judge(dataclasses.replace(DECLARED, contrasts=contrasts), table_of(rows))
        return found and found.status

    assert status("good") == "supported"
    assert status("good", "vague") == "undecided"
    assert status("good", "vague", "bad") == "refuted"


def test_an_undecided_contrast_names_the_seeds_that_would_decide_it():
    found = verdict("lower", apart(1.8, 0.3), around(2, 0.3))
    assert found.status == "undecided"
    assert found.outlook is not None
    needed, how = found.outlook
    assert how == "supported"
    assert f"than old. {needed} seeds would support it, if means and spreads stay." in found.sentence
    assert f"; {needed} seeds would support it" in describe_contrasts(DECLARED, found, LOSS)[0]
    # Twice as many seeds with the same means and spreads decide it, half as many do not.
    for n, decided in ((2 * needed // 5, True), (needed // 2 // 5, False)):
        seeds = tuple(range(5 * n))
        spread = 0.3 * math.sqrt((5 * n - 1) / (4 * n))  # gives the same sample standard deviation
        table = table_of({"old": around(2, spread) * n, "new": apart(1.8, spread) * n}, seeds)
        again = judge(dataclasses.replace(DECLARED, seeds=seeds), table)
        assert again is not None
        assert (again.status != "undecided") == decided


@pytest.mark.parametrize("rule", ["lower", "same"])
def test_the_seeds_that_would_decide_are_satterthwaite_s(rule):
    """One seed fewer does not decide, tested on tables of that size with the same means and standard deviations."""

    def of(n: int) -> Verdict:
        ranks = np.arange(n) - (n - 1) / 2
        ends = (ranks == ranks.max()).astype(float) + (ranks == ranks.min())  # has no linear trend
        unlike = ends - ends.mean()
        rows = {"old": 2 + 0.2 * ranks / ranks.std(ddof=1), "new": 1.9 + 0.1 * unlike / unlike.std(ddof=1)}
        seeds = tuple(range(n))
        declared = dataclasses.replace(DECLARED, rule=rule, margin=0.15, seeds=seeds)
        found = judge(declared, table_of({name: row.tolist() for name, row in rows.items()}, seeds))
        assert found is not None
        return found

    assert of(8).outlook is not None
    needed, how = of(8).outlook
    assert needed > 10
    assert (of(needed).status, of(needed - 1).status) == (how, "undecided")


def test_the_fewest_seeds_that_refute_one_contrast_decide_the_claim():
    """Even if other contrasts need more seeds for support, or are never decided."""
    rows = {"old": around(2, 0.3), "good": apart(1.75, 0.3), "bad": apart(2.3, 0.3)}
    contrasts = {name: {name: 1.0, "old": -1.0} for name in ("good", "bad")}
    found = judge(dataclasses.replace(DECLARED, contrasts=contrasts, margin=0.01), table_of(rows))
    assert found is not None
    good, bad = found.parts
    assert (good.would, bad.would) == ("supported", "refuted")
    assert good.needed is not None
    assert bad.needed is not None
    assert good.needed > bad.needed
    assert found.outlook == (bad.needed, "refuted")
    assert f"{bad.needed} seeds would refute it" in found.sentence


def test_an_open_question_that_no_number_of_seeds_decides_says_so():
    found = verdict("removed", around(0.2, 0.001), around(0.45, 0.001))
    assert found.outlook is None
    assert "than old. No number of seeds up to 1000 would decide it" in found.sentence


@pytest.mark.parametrize("rule", ["lower", "higher", "same"])
def test_a_true_claim_s_opposite_is_seldom_supported(rule):
    """200 simulated questions with three contrasts at the boundary of the claim: at most 5 % errors (+3 sd)."""
    rng = np.random.default_rng(1)
    edge = {"lower": 0.0, "higher": 0.0, "same": 0.1}[rule]
    names = ("a", "b", "c")
    contrasts = {name: {name: 1.0, "old": -1.0} for name in names}
    declared = dataclasses.replace(DECLARED, rule=rule, contrasts=contrasts, margin=0.1)
    wrong, trials = 0, 200
    for _ in range(trials):
        rows = {"old": rng.normal(2, 0.05, 5).tolist()}
        rows |= {name: rng.normal(2 + edge, 0.05, 5).tolist() for name in names}
        found = judge(declared, table_of(rows))
        assert found is not None
        wrong += any(part.status == "supported" for part in found.parts)
    assert wrong / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_there_is_no_verdict_while_a_declared_seed_is_missing():
    whole = table_of({"old": around(2, 0.1), "new": around(1, 0.1)})
    assert judge(DECLARED, whole) is not None
    assert judge(dataclasses.replace(DECLARED, seeds=(*SEEDS, 15)), whole) is None
    assert judge(dataclasses.replace(DECLARED, primary="other"), whole) is None
    more = table_of({"old": [*around(2, 0.1), 90.0], "new": [*around(1, 0.1), -90.0]}, (*SEEDS, 0))
    assert judge(DECLARED, more) == judge(DECLARED, whole), "other seeds are not the declared ones"


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, ()),
        (
            {"commit": ""},
            ("its declaration, its experiment or a file that they import was not committed before its run",),
        ),
        ({"changed": True}, ("its declaration changed after its run began",)),
        ({"pilot_seeds": (3, 12)}, ("some of its seeds were used in a pilot",)),
    ],
)
def test_what_was_not_declared_before_is_exploratory(changes, reasons):
    found = verdict("lower", around(1, 0.1), around(2, 0.1), **changes)
    assert found.exploratory == reasons
    assert found.sentence.endswith("".join(f" Exploratory: {reason}." for reason in reasons) or DECLARED.claim)


def test_a_judged_table_survives_json_and_is_judged_the_same_from_it_alone():
    table = add_verdict(table_of({"old": around(2, 0.1), "new": around(1, 0.1)}), DECLARED)
    again = Table.from_json(json.loads(json.dumps(table.to_json())))
    assert (again.declaration, again.verdict) == (DECLARED, table.verdict)
    assert judge(again.declaration, again) == table.verdict
    assert add_verdict(table, None).verdict is None, "a verdict without a declaration is none"
    assert Table.from_json(table_of({"a": around(1, 1)}).to_json()).verdict is None


def test_a_table_says_its_verdict_first_or_what_it_still_needs():
    table = table_of({"old": around(2, 0.1), "new": around(1, 0.1)})
    for commit, where in (
        ("abc", "Declared in commit abc (digest "),
        ("", "Declared and not committed before its run (digest "),
    ):
        assert where in render_markdown(add_verdict(table, dataclasses.replace(DECLARED, commit=commit)))
    done = render_markdown(add_verdict(table, DECLARED)).splitlines()
    assert done[2] == "Supported (n = 5): New is lower than old."
    assert done[4].startswith("- new - old: supported, lower: ")
    open_ = render_markdown(add_verdict(table, dataclasses.replace(DECLARED, seeds=(*SEEDS, 15)))).splitlines()
    assert open_[2] == (
        "Not decided yet: New is lower than old. Its verdict needs each of 6 seeds: new lacks 15 (2 rows lack some)."
    )
    other = render_markdown(add_verdict(table, dataclasses.replace(DECLARED, primary="loss/nope"))).splitlines()
    assert other[2] == "Not decided yet: New is lower than old. No cell has measured its primary outcome, loss/nope."


def test_lines_give_the_numbers_as_the_column_does():
    found = verdict("lower", around(1, 0.1), around(2, 0.1))
    part = found.parts[0]
    assert describe_contrasts(DECLARED, found, LOSS) == [
        f"new - old: supported, lower: -1.000 [{part.low:+.3f}, {part.high:+.3f}] nats"
    ]


def test_an_interval_below_the_columns_digits_is_given_by_its_half_width():
    found = verdict("lower", around(1, 1e-5), around(2, 3e-5))
    part = found.parts[0]
    (line,) = describe_contrasts(DECLARED, found, LOSS)
    assert line == f"new - old: supported, lower: -1.000 ± {(part.high - part.low) / 2:.1g} nats"


def test_bounds_have_the_unit_of_what_they_are_compared_with():
    share = dataclasses.replace(LOSS, unit="%", scale=100)
    assert describe_bounds(DECLARED, share) == ("margin 10 points",)
    assert describe_bounds(dataclasses.replace(DECLARED, rule="removed"), share) == (
        "removed below 10 %",
        "there above 30 %",
    )
    assert describe_bounds(DECLARED, dataclasses.replace(LOSS, unit="")) == ("margin 0.1",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "better"}, "rule='better': must be one of lower, higher, same, no_worse, mostly, removed, alone"),
        ({"margin": 0.0}, r"margin=0\.0: must be above 0"),
        ({"seeds": (1, 2, 3)}, r"seeds=\(1, 2, 3\): needs at least 5"),
        ({"seeds": (1, 2, 3, 4, 4)}, r"seeds=\(1, 2, 3, 4, 4\): each must occur once"),
        ({"contrasts": {}}, "contrasts=0: must be 1 to 5"),
        ({"contrasts": {str(i): {"a": 1.0} for i in range(6)}}, "contrasts=6: must be 1 to 5"),
        ({"removed": 0.4}, r"removed=0\.4: must be below kept=0\.3"),
    ],
)
def test_mistakes_in_a_declaration_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DECLARED, **changes)


def test_contrast_weights_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="add up to zero"):
        Contrast("a", {"new": 1.0})
