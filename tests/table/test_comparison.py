"""Two tables side by side: the right test of each difference, and what else differs."""

import json
from dataclasses import replace

import pytest
from scipy import stats

from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.compare_tables import compare_tables, format_comparison
from lit_lazy.table.records import Column, Observation, RowInfo
from lit_lazy.table.results_table import Table

LOSS, SINK = Column("loss", "loss", "lower", unit="nats"), Column("sink", "sink", bounds=(0.0, 1.0), plotted=True)
NAMES = ("runs/a", "runs/b")


def make_table(rows: dict[str, dict[int, float]], base: str = "tiny", **more: object) -> Table:
    """A table with these losses by row and seed."""
    infos = [RowInfo(name, "ours", tuple(values), base) for name, values in rows.items()]
    cells = [
        Observation(name, seed, "complete", {"loss": value, "sink": 0.5}, git_sha="3f9c2ab")
        for name, values in rows.items()
        for seed, value in values.items()
    ]
    spec = TableSpec("study", base, next(iter(rows)), infos, (LOSS, SINK), (), "make it", primary=("loss",))
    return replace(build_table(spec, cells), **more)


def compare(first: Table, second: Table, *columns: str):
    return compare_tables(NAMES, (first, second), columns, (None, None))


FIRST, SECOND = {0: 1.0, 1: 1.5, 2: 2.5, 3: 2.0}, {0: 0.75, 1: 1.5, 2: 1.75, 3: 1.75}


@pytest.mark.parametrize("base", ["tiny", "tiny-0a1b2c", "tiny-steps=9-normaliser.tau_init=0.5"])
def test_equal_seeds_of_one_experiment_are_pairs(base: str) -> None:
    """Also if one of the tables has further ones."""
    paired = stats.ttest_rel(list(SECOND.values()), list(FIRST.values())).confidence_interval()
    for second, said in ((SECOND, "n = 4"), (SECOND | {4: 8.0, 5: 9.0}, "n = 4 in both of 4 and 6")):
        found = compare(make_table({"lazy": FIRST}), make_table({"lazy": second}, base=base))
        (row,) = found.columns["loss"]
        assert row.paired
        assert row.effect.mean == -0.3125
        assert row.effect.ci95 == pytest.approx((paired.high - paired.low) / 2)
        assert f"paired, {said}" in format_comparison(found)


@pytest.mark.parametrize(("shift", "base"), [(0, "other"), (4, "tiny"), (3, "tiny")])
def test_other_seeds_or_experiments_are_compared_by_welch(shift: int, base: str) -> None:
    """One common seed makes no pairs."""
    values = {seed + shift: value for seed, value in SECOND.items()}
    found = compare(make_table({"lazy": FIRST}), make_table({"lazy": values}, base=base))
    (row,) = found.columns["loss"]
    welch = stats.ttest_ind(list(SECOND.values()), list(FIRST.values()), equal_var=False)
    interval = welch.confidence_interval()
    assert not row.paired
    assert row.effect.p == pytest.approx(welch.pvalue)
    assert row.effect.ci95 == pytest.approx((interval.high - interval.low) / 2)
    assert "Welch, n = 4 and 4" in format_comparison(found)


def test_rows_columns_and_facts() -> None:
    first = make_table({"lazy": FIRST, "softmax": FIRST, "gone": FIRST})
    second = make_table({"softmax": FIRST, "lazy": FIRST, "new": SECOND}, environment="torch 3", command="make more")
    settings = {name: {"train.steps": "6", "train.lr": "0.1"} for name in ("lazy", "softmax")}
    changed = {"lazy": settings["lazy"] | {"train.steps": "8"}, "softmax": {"train.steps": "8"}}
    found = compare_tables(NAMES, (first, second), (), (settings, changed))
    assert [row.variant for row in found.columns["loss"]] == ["lazy", "softmax"]  # the primary outcome alone, A's order
    assert all(row.effect.test == "tie" for row in found.columns["loss"])
    assert found.only == (["gone"], ["new"])
    facts = {"baseline": ("lazy", "softmax"), "made with": ("", "torch 3"), "command": ("make it", "make more")}
    assert found.facts == facts
    assert found.settings == {("train.steps", "6", "8"): ["lazy", "softmax"], ("train.lr", "0.1", "–"): ["softmax"]}
    text = format_comparison(found)
    assert "Only in A: gone" in text
    assert "train.steps  6    8  all rows" in text
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["settings"][1][3] == ["softmax"]
    assert list(compare(first, second, "sink", "loss").columns) == ["sink", "loss"]
    with pytest.raises(ValueError, match=r"--columns 'los': is not in both tables \(did you mean loss\?\); both"):
        compare(first, second, "los")
    with pytest.raises(ValueError, match=r"'runs/a', 'runs/b': share no row; runs/a has lazy; runs/b has softmax"):
        compare(make_table({"lazy": FIRST}), make_table({"softmax": FIRST}))


def test_what_has_no_spread_has_no_interval() -> None:
    found = compare(make_table({"lazy": FIRST}), make_table({"lazy": FIRST}, base="other"), "sink")
    assert "0.500 =  0.500 =  +0.000  Welch, n = 4 and 4; no interval, as one has no spread" in format_comparison(found)
    assert "Settings of the rows are unknown" in format_comparison(found)
