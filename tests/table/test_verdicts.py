"""Verdicts: when there is one, what it says, and the mistakes of a declaration. `test_looks.py` has the rules."""

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
from lit_lazy.table.stored import parse_table
from lit_lazy.table.verdicts import add_verdict, describe_bounds, describe_contrasts, judge

SEEDS = (10, 11, 12, 13, 14)
LOSS = Column("loss", "loss", "lower", 3, "nats")
DECLARED = Declaration(
    claim="New is lower than old.", source="R5", primary="loss", contrasts={"new - old": {"new": 1.0, "old": -1.0}},
    rule="lower", margin=0.1, seeds=SEEDS, looks=(5,), few_seeds_because="a test", digest="0123456789ab", commit="abc",
)  # fmt: skip
SIX = dataclasses.replace(DECLARED, seeds=(*SEEDS, 15), looks=(6,))


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


def verdict(new: list[float], old: list[float], **changes) -> Verdict:
    found = judge(dataclasses.replace(DECLARED, **changes), table_of({"old": old, "new": new}))
    assert found is not None
    return found


def test_one_refuted_contrast_refutes_the_claim_and_one_undecided_leaves_it_open():
    rows = {"old": [2.0] * 5, "good": around(1, 0.1), "bad": around(3, 0.1), "vague": around(1.9, 0.5)}

    def status(*names):
        contrasts = {name: {name: 1.0, "old": -1.0} for name in names}
        found = judge(dataclasses.replace(DECLARED, contrasts=contrasts), table_of(rows))
        return found and found.status

    assert status("good") == "supported"
    assert status("good", "vague") == "undecided"
    assert status("good", "vague", "bad") == "refuted"


def test_there_is_no_verdict_while_a_declared_seed_is_missing():
    whole = table_of({"old": around(2, 0.1), "new": around(1, 0.2)})
    assert judge(DECLARED, whole) is not None
    assert judge(SIX, whole) is None
    assert judge(dataclasses.replace(DECLARED, primary="other"), whole) is None
    more = table_of({"old": [*around(2, 0.1), 90.0], "new": [*around(1, 0.2), -90.0]}, (*SEEDS, 0))
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
    found = verdict(around(1, 0.1), around(2, 0.2), **changes)
    assert found.exploratory == reasons
    assert found.sentence.endswith("".join(f" Exploratory: {reason}." for reason in reasons) or DECLARED.claim)


def test_a_judged_table_survives_json_and_is_judged_the_same_from_it_alone():
    table = add_verdict(table_of({"old": around(2, 0.1), "new": around(1, 0.2)}), DECLARED)
    again = parse_table(json.dumps(table.to_json()), "it")
    assert again == table
    assert add_verdict(table, None).verdict is None, "a verdict without a declaration is none"
    assert parse_table(json.dumps(table_of({"a": around(1, 1)}).to_json()), "it").verdict is None


def test_a_declaration_of_the_first_round_is_refused():
    first = {name: value for name, value in DECLARED.to_json().items() if name not in ("rules", "looks")}
    with pytest.raises(ValueError, match=r"rules=1: must be version 2; docs/results/first-round\.md has the questions"):
        Declaration.from_json(first)


def test_a_table_says_its_verdict_first_or_what_it_still_needs():
    table = table_of({"old": around(2, 0.1), "new": around(1, 0.2)})
    for commit, where in (
        ("abc", "Declared in commit abc (digest "),
        ("", "Declared and not committed before its run (digest "),
    ):
        assert where in render_markdown(add_verdict(table, dataclasses.replace(DECLARED, commit=commit)))
    done = render_markdown(add_verdict(table, DECLARED)).splitlines()
    assert done[2] == "Supported (n = 5): New is lower than old."
    assert done[4].startswith("- new - old: supported, lower: ")
    open_ = render_markdown(add_verdict(table, SIX)).splitlines()
    assert open_[2] == (
        "Not decided yet: New is lower than old. Its first look needs each of 6 seeds: new lacks 15 (2 rows lack some)."
    )
    other = render_markdown(add_verdict(table, dataclasses.replace(DECLARED, primary="loss/nope"))).splitlines()
    assert other[2] == "Not decided yet: New is lower than old. No cell has measured its primary outcome, loss/nope."


def test_lines_give_the_numbers_as_the_column_does():
    found = verdict(around(1, 0.1), [2.0] * 5)
    half = t.isf(0.025, 4) * 0.1 / math.sqrt(5)
    assert describe_contrasts(DECLARED, found, LOSS) == [
        f"new - old: supported, lower: -1.000 [{-1 - half:+.3f}, {-1 + half:+.3f}] nats"
    ]


def test_an_interval_below_the_columns_digits_is_given_by_its_half_width():
    found = verdict(around(1, 1e-5), [2.0] * 5)
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
        ({"looks": ()}, r"looks=\(\): must be numbers of seeds, such as \(10, 20, 40, 80\)"),
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
