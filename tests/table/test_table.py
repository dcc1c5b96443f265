"""The table reports what was measured and what is missing, and nothing else, in every format.

`python tests/table/test_table.py` writes the pages in `pages/`, which show every kind of cell and line.
"""

import csv
import functools
import io
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lit_lazy.support.console import PlainConsole
from lit_lazy.support.stored_records import NewerFormatError
from lit_lazy.table.build import TableSpec, build_table, recompute_statistics
from lit_lazy.table.comparison import compare_tables, format_comparison
from lit_lazy.table.finding_text import describe_findings, describe_unlearned
from lit_lazy.table.records import Column, Contrast, Measure, Observation, RowInfo, Table, Yardstick, format_csv
from lit_lazy.table.render import (
    DETAILS,
    FILES,
    MOST_COLUMNS,
    choose_columns,
    format_effect,
    is_saved,
    render_brief,
    render_html,
    render_html_parts,
    render_latex,
    render_markdown,
    render_summary,
    render_text,
    save,
)
from lit_lazy.table.statistics import Effect, compute_contrast, minimum_detectable_effect, tost
from lit_lazy.table.stored import parse_table, read_table

PAGES = Path(__file__).parent / "pages"
RESULTS = Path(__file__).parents[2] / "docs" / "results"
STORED = RESULTS / "q_window_2-stdlib_small" / "table.json"
SHA, WHOLE = "3f9c2ab", Path(DETAILS)

LOSS = Column("loss", "loss", "lower", unit="nats")
PLOTTED = replace(LOSS, plotted=True)
EXCESS = Column("loss/excess", "excess loss", "lower", 4, "nats", plotted=True)
SINK = Column("sink", "sink", "lower", plotted=True)
SPARSITY = Column("sparsity", "sparsity", None, digits=1, unit="%", scale=100)
PARAMETERS = Column("parameters", "parameters", None, digits=",.0f")
SHARE = Column("share", "share", digits=1, unit="%", scale=100, bounds=(0.0, 1.0))


def rows(*variants: str, seeds: Sequence[int] = (0, 1, 2)) -> list[RowInfo]:
    return [RowInfo(variant, "ours", tuple(seeds), "tiny") for variant in variants]


def observe(key: str = "loss", **values: Sequence[float | None]) -> list[Observation]:
    """Complete cells of rows with these values by seed."""
    return [
        Observation(name, seed, "complete", {key: value}, git_sha=SHA)
        for name, of in values.items()
        for seed, value in enumerate(of)
    ]


def table(asked: Sequence[RowInfo], cells: Sequence[Observation], *columns: Column, **more: Any) -> Table:
    baseline = more.pop("baseline", asked[0].variant)
    settings = {"contrasts": (), "command": "make table2", **more}
    return build_table(TableSpec("study-tiny", "tiny", baseline, asked, columns or (LOSS,), **settings), cells)


def of_values(*columns: Column, seeds: int = 3, **values: Sequence[float | None]) -> Table:
    """The first row is the baseline; the values are the first column's."""
    key = columns[0].key if columns else "loss"
    return table(rows(*values, seeds=range(seeds)), observe(key, **values), *columns)


def measure(found: Table, variant: str, key: str = "loss") -> Measure:
    return found.collect_measures(key)[variant]


def make_kinds() -> Table:
    """Every kind of cell, note and warning."""
    rate = Column("rate", "sink rate", "lower", 1, "%", scale=100, bounds=(0.0, 1.0), plotted=True)
    tau = Column("tau", "tau", None, 2, by_construction="rows start apart")
    loss = replace(PLOTTED, margin=0.5, note="of the loss")
    values = {
        "lazy": ((2.0, 2.1, 2.2), (0.0, 0.0, 0.0), (0.4, 0.5, 0.6)),
        "near": ((2.01, 2.09, 2.2), (0.2, 0.4, 0.9), (1.0, 0.99, 1.0)),
        "far": ((3.0, 3.1, 3.4), (0.0, 1.0, 1.0), (0.0, 0.001, 0.01)),
        "tied": ((2.0, 2.1, 2.2), (0.3, 0.5, 0.2), (0.5, None, math.nan)),
        "flat": ((2.0, 2.0, 2.0), (1.0, 1.0, 1.0), (0.5, 0.6, None)),
        "good": ((1.0, 1.101, 1.2), (0.1, 0.2, 0.3), (0.2, 0.1, 1.2)),
        "dead": ((9.0, 9.1, 9.3), (0.9, 0.8, 0.7), (0.9, 0.91, 0.93)),
    }
    cells = []
    for i, (name, (losses, rates, shares)) in enumerate(values.items()):
        for s in range(3):
            metrics = {"loss": losses[s], "rate": rates[s], "share": shares[s], "tau": i + 0.01 * s * (s + i)}
            sha, backend = (f"{SHA}-dirty", "triton") if name == "far" and s else (SHA, "chunked")
            about = {"environment": f"torch {2 + bool(s)}", "taken_from": "runs/a" * bool(s)}
            metrics |= {"parameters": 1000 + i}
            cells.append(Observation(name, s, "complete", metrics, {"backend": backend}, sha, **about))
    cells += [*observe(two=(1.0, 2.0), extra=(4.0,)), Observation("half", 0, "failed", {"loss": 31337.0}, reason="OOM")]
    cells += [Observation("busy", s, "running", {"loss": 31337.0}) for s in range(3)]
    cells.append(Observation("lazy", 7, "complete", {"loss": 31337.0}))
    infos = [*rows(*values), *rows("two", seeds=(0, 1)), *rows("half", "busy")]
    infos[1] = replace(infos[1], base="other", note="a note", source="paper")
    contrasts = [Contrast("mean", {"far": 0.5, "near": 0.5, "lazy": -1}), Contrast("far", {"far": 1, "lazy": -1})]
    columns = (rate, loss, tau, SHARE, PARAMETERS, Column("typo", "typo", "higher"))
    more: dict[str, Any] = {"labels": ("backend",), "alternatives": ("triton", "chunked"), "files": {"a.py": "abc"}}
    more |= {"primary": ("absent", "loss"), "contrasts": contrasts, "warnings": ("Undertrained.",)}
    more["yardstick"] = Yardstick("loss", 5.0, {"optimum": 1.0, "chance": 9.5})
    return replace(table(infos, cells, *columns, **more), seconds=3726.0)


YARDSTICK = Yardstick("loss/excess", 0.349, {"optimum": 0.0, "chance": 0.698})


def make_learned(yardstick: Yardstick | None = YARDSTICK) -> Table:
    """Of a baseline, a row that learned, and one that did not in 4 of 5 cells and has no sink."""
    losses = {"lazy": [0.01] * 5, "good": [0.02] * 5, "dead": [0.6, 0.7, 0.65, 0.3, 0.69]}
    sinks, noise = {"lazy": 0.4, "good": 0.2, "dead": 0.1}, np.random.default_rng(0).normal
    cells = [
        Observation(
            name, seed, "complete", {"loss/excess": loss + 1e-4 * noise(), "sink": sinks[name] + 1e-3 * noise()}
        )
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    return table(rows(*losses, seeds=range(5)), cells, EXCESS, SINK, yardstick=yardstick)


def make_wide() -> Table:
    """Seventeen rows, twelve columns, five seeds, in shuffled order."""
    rng = np.random.default_rng(0)
    names = [f"variant_{i:02d}" for i in range(17)]
    columns = [Column(f"m{i}", f"metric {i}", (None, "lower", "higher")[i % 3], digits=i % 4) for i in range(12)]
    values = 10 + rng.normal(size=(17, 5, 12)) + np.arange(17)[:, None, None] % 3
    cells = [
        Observation(name, seed, "complete", {f"m{j}": x for j, x in enumerate(of)}, {"backend": "cpu"}, SHA)
        for name, by_seed in zip(names, values.tolist(), strict=True)
        for seed, of in enumerate(by_seed)
    ]
    random.Random(1).shuffle(cells)
    contrast = Contrast("interaction", {names[0]: 1, names[1]: -1, names[2]: -1, names[8]: 1})
    return table(rows(*names, seeds=range(5)), cells, *columns, contrasts=[contrast], labels=("backend",))


HOSTILE = "a|b_c 50% &lt; <b>x</b> {$#~^\\} *em* `code` [l](u)"


def make_hostile() -> Table:
    infos = [RowInfo("lazy", "authors' code", (0, 1, 2), "tiny"), RowInfo(HOSTILE, "ours", (0, 1, 2), "o|ther")]
    cells = [*observe(lazy=(2.0, 2.1, 2.3)), Observation(HOSTILE, 0, "failed", reason="boom | <i>\nat line & 7%")]
    columns = Column("loss", HOSTILE, "lower", note="100% & _more_")
    return table(infos, cells, columns, warnings=(HOSTILE,), command="a_b & c | d % e")


TABLES: dict[str, Callable[[], Table]] = {
    "kinds": make_kinds,
    "learned": make_learned,
    "wide": make_wide,
    "hostile": make_hostile,
}
anything = pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)


def make_pages() -> dict[str, str]:
    return {
        "kinds.markdown": render_markdown(make_kinds()),
        "kinds.brief": render_brief(make_kinds()),
        "kinds.txt": render_summary(make_kinds(), WHOLE),
    }


@pytest.mark.parametrize("name", ["kinds.markdown", "kinds.brief", "kinds.txt"])
def test_pages_of_every_kind_of_cell(name: str) -> None:
    assert make_pages()[name] == (PAGES / name).read_text()


# Numbers


def compute(row: Sequence[float], baseline: Sequence[float]):
    by_seed = {name: dict(enumerate(values)) for name, values in {"row": row, "baseline": baseline}.items()}
    return compute_contrast(by_seed, {"row": 1.0, "baseline": -1.0})


def test_the_numbers_are_those_of_the_statistics() -> None:
    a, b, c = [2.0, 2.1, 2.4], [1.7, 1.9, 2.0], [2.1, 2.3, 2.5]
    found = of_values(lazy=a, b=b, c=c, tied=a, short=(2.0, 2.2))
    assert (found.baseline, found.git_sha, found.rows[1].n, found.rows[1].status) == ("lazy", SHA, 3, "complete")
    got, expected = measure(found, "b"), compute(b, a)
    assert (got.mean, got.ci95) == pytest.approx((np.mean(b), stats.t.isf(0.025, 2) * stats.sem(b)))
    assert got.values == {"0": 1.7, "1": 1.9, "2": 2.0}
    difference = got.difference
    # Three rows of three seeds, one of them with the baseline's values, and one of too few.
    assert difference == replace(expected, p_adj=3 * expected.p, mde=minimum_detectable_effect(expected))
    p = compute(c, a).p
    assert measure(found, "c").difference.p_adj == pytest.approx(max(3 * expected.p, 2 * p))
    tied, short = measure(found, "tied").difference, measure(found, "short").difference
    assert (tied.test, tied.mean, tied.p_adj) == ("tie", 0.0, None)
    assert (short.n, short.p, short.p_adj, short.mde) == (2, None, None, None)
    assert short.ci95 > 0
    assert {*vars(measure(found, "lazy").difference).values()} == {None, 0}


def test_a_row_is_compared_over_the_seeds_that_it_shares_with_the_baseline() -> None:
    lazy, values = [2.0, 2.3, 2.1, 2.4, 2.2], {0: 1.0, 2: 1.3, 4: 1.1}
    cells = observe(lazy=lazy) + [Observation("b", s, "complete", {"loss": v}) for s, v in values.items()]
    found = table(rows("lazy", seeds=range(5)) + rows("b", seeds=(0, 2, 4)) + rows("apart", seeds=(5, 6)), cells)
    difference = measure(found, "b").difference
    assert (difference.n, difference.mean) == (3, pytest.approx(3.4 / 3 - 6.3 / 3))
    assert difference.p == compute(list(values.values()), lazy[::2]).p
    assert measure(found, "apart").difference.mean is None
    assert "Seeds: 0, 1, 2, 3, 4; 0, 2, 4 in b; 5, 6 in apart." in render_markdown(found)


def test_each_column_says_what_it_can_separate_at_each_n() -> None:
    a, b, more, same = [2.0, 2.1, 2.4], [1.0, 1.11, 1.39], [1.9, 2.2, 2.3, 2.1], [2.1, 2.0, 2.41]
    infos, cells = (
        [*rows("lazy", "b", "same"), *rows("more", seeds=range(4))],
        observe(lazy=a, b=b, same=same, more=more),
    )
    summary = table(infos, cells).summaries["loss"]
    tested = [compute(row, a) for row in (b, same, more)]
    (three,) = summary.detectable  # the baseline has three seeds, so no difference has more
    assert three.n == 3
    for found, alpha in ((three.mde, 0.05), (three.mde_holm, 0.05 / 3)):
        assert found == pytest.approx(np.median([minimum_detectable_effect(e, alpha) for e in tested]))
    assert (summary.separates, summary.compared, summary.tested, summary.seeds) == (("b",), 3, 3, (3,))
    infos[0] = replace(infos[0], seeds=(0, 1, 2, 3))
    again = table(infos, [*cells, Observation("lazy", 3, "complete", {"loss": 2.2})]).summaries["loss"]
    assert [at.n for at in again.detectable] == [3, 4]


def test_equivalence_and_contrasts_are_adjusted_over_their_own_families() -> None:
    near, far, lazy = [2.01, 2.09, 2.2], [3.0, 3.1, 3.4], [2.0, 2.1, 2.2]
    contrasts = [Contrast("sum", {"lazy": -1, "near": 0.5, "far": 0.5}), Contrast("far", {"lazy": -1, "far": 1})]
    cells = observe(lazy=lazy, near=near, far=far)
    found = table(rows("lazy", "near", "far"), cells, replace(LOSS, margin=0.5), contrasts=contrasts)
    assert measure(found, "near").p_same == pytest.approx(2 * tost(compute(near, lazy), 0.5))
    assert found.summaries["loss"].same == ("near",)
    by_seed = {name: dict(enumerate(v)) for name, v in {"lazy": lazy, "near": near, "far": far}.items()}
    p = [compute_contrast(by_seed, c.weights).p for c in contrasts]
    assert [c.metrics["loss"].p for c in found.contrasts] == p
    assert min(c.metrics["loss"].p_adj for c in found.contrasts) == pytest.approx(2 * min(p))
    assert measure(of_values(lazy=lazy, near=near), "near").p_same is None, "nobody gave a margin"


def test_no_number_that_was_not_measured() -> None:
    empty = table(rows("lazy", "b"), [], contrasts=[Contrast("c", {"lazy": 1, "b": -1})])
    for found in [measure(empty, "b").flatten(), vars(empty.contrasts[0].metrics["loss"])]:
        assert {*found.values()} <= {None, 0}
    grid = [line for line in render_markdown(empty).splitlines() if line.startswith("| ")]
    assert {number for line in grid for number in re.findall(r"\d+", line)} == {"0", "3"}  # "0/3"
    single = of_values(lazy=[7.125], b=[9.375], seeds=1)
    grid = "".join(line for line in render_markdown(single).splitlines() if line.startswith("| "))
    assert set(re.findall(r"[-+]?\d[\d.]*", grid)) == {"1", "7.125", "9.375", "+2.250"}
    kinds = make_kinds()
    assert "31337" not in render_markdown(kinds) + json.dumps(kinds.to_json()) + kinds.to_csv()
    assert [(row.n, row.status) for row in kinds.rows[-2:]] == [(0, "failed"), (0, "running")]


@pytest.mark.parametrize(("name", "there"), [("rivals-backcopy", False), ("table2-backcopy", True)])
def test_a_column_that_the_baseline_has_no_value_in_is_not_compared(name: str, there: bool) -> None:
    """Softmax has no sparsity, Lazy Attention does."""
    compared = read_table(RESULTS / name / "table.json").compared
    assert ("sparsity/zero" in compared) == there
    assert compared[0] == "loss/excess", "the primary outcome comes first"


def test_small_values_are_not_shown_as_zero_and_rounding_is() -> None:
    column = Column("x", "x")
    assert [column.format(v) for v in (0.0, 0.0004, -0.00002, 0.0006)] == ["0.000", "4e-04", "-2e-05", "0.001"]
    assert PARAMETERS.format(-1234567.0, "+") == "-1,234,567"
    assert SPARSITY.format(0.5958) == "59.6"
    shown = [format_effect(Effect(1.0, None, 3, p_adj=p), LOSS) for p in (0.0009, 0.0012, 0.04996, 0.0502)]
    assert [text.partition(", ")[2] for text in shown] == ["p<0.001*", "p=0.001*", "p=0.0500*", "p=0.0502"]
    text = render_text(of_values(lazy=(-2.0, 0.0, 2.0 + 4e-16), b=(-4.0, 0.0, 4.0 + 8e-16)), WHOLE)
    assert text.count(" 0.000 ±") == 2
    assert "e-16" not in text


def test_an_interval_ends_at_a_bound_of_its_metric_that_no_value_exceeds() -> None:
    mass = replace(SHARE, unit="", scale=1.0, digits=3)
    values = {
        "lazy": [0.9, 0.99, 1.0 + 1e-7],  # the rounding of a float32 sum is within the bound
        "tau below 0": [1.1, 1.2, 1.25],
        "own rule": [0.8, 0.9, 1.0115],
        "signed": [-0.02, 0.1, 0.05],
        "low": [0.0, 0.001, 0.01],
    }
    text = render_text(of_values(mass, **values), WHOLE)
    shown = ["0.963 [0.827, 1.000]", "1.183 ±0.190*", "0.904 ±0.263", "0.043 ±0.150*", "0.004 [0.000, 0.017]*"]
    for name, cell in zip(values, shown, strict=True):
        assert re.search(rf"^{name} .* {re.escape(cell)}$", text, re.M), name


# Findings


def test_the_finding_groups_every_row() -> None:
    far = {f"far {i}": (9.0 + i, 9.15 + i, 9.2 + i) for i in range(6)}
    near = {"near": (1.0, 1.101, 1.2), "wide": (0.5, 1.0, 1.6), "flat": (1.0, 1.0, 1.0), "good": (0.1, 0.25, 0.3)}
    found = of_values(replace(PLOTTED, margin=0.5), lazy=(1.0, 1.1, 1.2), **far, **near)
    assert describe_findings(found) == [
        "Loss against lazy (n = 3): worse: far 0, far 1, far 2, far 3 and 2 others; better: good; the same within "
        "±0.500 nats: near; undecided: wide; not tested: flat."
    ]
    still = {"base": (0.3, 0.4, 0.5), "a": (0.0, 0.0, 0.0), "b": (0.31, 0.39, 0.5), "c": (0.6, 0.6, 0.6)}
    assert describe_findings(of_values(replace(PLOTTED, bounds=(0.0,)), **still)) == [
        "Loss against base (n = 3): undecided: b; without a test, but above it in every seed: c; without a test, but "
        "below it in every seed: a."
    ]
    assert describe_findings(of_values(PLOTTED, lazy=(1.0,), b=(2.0,), seeds=1)) == [
        "Loss against lazy: no test: it needs 3 seeds that a row shares with the baseline, here at most 1."
    ]
    assert describe_findings(of_values(PLOTTED, lazy=(1.0, 1.1, 1.2))) == []


def test_rows_beyond_a_baseline_that_never_varies_are_named_without_a_test() -> None:
    """As in Table 2: `lazy` has no weight on the first key in any seed."""
    plotted = replace(PLOTTED, bounds=(0.0,))
    values = {"a": (0.1, 0.2, 0.4), "b": (0.0, 0.3, 0.9)} | {f"far {i}": (0.5, 0.6, 0.7 + i) for i in range(6)}
    assert describe_findings(of_values(plotted, lazy=(0.0, 0.0, 0.0), **values)) == [
        "Loss (n = 3): lazy has 0.000 nats in every seed, so there is no test; above it in every seed: "
        "far 5 (0.500 to 5.700), far 4 (0.500 to 4.700), far 3 (0.500 to 3.700), far 2 (0.500 to 2.700) and 3 others."
    ]
    nothing = ["Loss against lazy: no test, all seeds of the baseline, or of every other row, have the same value."]
    still, full = (0.0, 0.0, 0.0), (1.0, 2.0, 3.0)
    for close in ({"a": still}, {"a": (1e-9, 2e-9, 3e-4)}, {"a": (1.0, math.nan, None), "b": still}):
        assert describe_findings(of_values(plotted, lazy=still, **close)) == nothing
    assert describe_findings(of_values(plotted, seeds=4, lazy=(*still, 0.0), a=(*full, None))) == nothing


def test_a_share_at_one_seed_is_told_as_one_and_a_loss_is_not() -> None:
    """That softmax has a sink and Lazy Attention none is seen at once; that a loss is lower may be the seed."""
    cells = [
        Observation(name, 0, "complete", {"loss/excess": loss, "share": share, "sink": share})
        for name, loss, share in (("lazy", 0.01, 0.0), ("softmax", 0.02, 0.4), ("twin", 0.03, 0.0), ("dead", 0.6, 0.9))
    ]
    infos, columns = rows("lazy", "softmax", "twin", "dead", seeds=(0,)), (EXCESS, replace(SHARE, plotted=True), SINK)
    found = table(infos, cells, *columns, primary=("loss/excess",), yardstick=YARDSTICK)
    assert describe_findings(found)[1:] == [
        "Excess loss against lazy: no test: it needs 3 seeds that a row shares with the baseline, here at most 1.",
        "Share (n = 1): lazy has 0.0 % at one seed, so there is neither interval nor test; above it at one seed: "
        "softmax (40.0).",
    ]
    assert len(describe_findings(replace(found, baseline="dead"))) == 2, "nothing is compared with what did not learn"


def test_rows_that_are_one_training_are_named_as_such() -> None:
    """Whatever the reason, such as a setting that has no effect: a tie alone could be chance."""
    losses = {"lazy": (0.5, 0.25), "twin": (0.5, 0.25), "near": (0.5, 0.25 + 2**-54), "third": (None, 0.25)}
    found = of_values(EXCESS, **losses, absent=(), seeds=2)
    assert found.find_twins() == [["lazy", "twin", "third"]]
    assert "to the last bit, in every seed: lazy, twin, third. What" in render_markdown(found)
    assert not of_values(LOSS, lazy=(1.0,), b=(1.0,)).find_twins(), "of no loss of the task"


def test_a_row_that_did_not_learn_says_so_first_and_wins_nothing() -> None:
    learned = make_learned()
    assert learned.unlearned == {"dead": "4 of 5"}
    dead, loss, sink = describe_findings(learned)
    assert "dead (4 of 5)" in dead
    assert "worse: good, dead" in loss
    assert "dead" not in sink, "its missing sink is no merit"
    for text in (render_latex(learned), render_html(learned), *render_html_parts(learned)[1:]):
        assert "did not learn (4 of 5)" in text
    states = {line["variant"]: line["state"] for line in csv.DictReader(io.StringIO(learned.to_csv()))}
    assert states == {"lazy": "", "good": "", "dead": "did not learn (4 of 5)"}
    assert "dead (4 of 5)" in describe_findings(replace(learned, baseline="dead"))[0]


def test_how_many_rows_did_not_learn() -> None:
    none = make_learned(None)
    assert "better: good, dead" in describe_findings(none)[1], "without a yardstick nothing is known of learning"
    assert "learn" not in render_markdown(none) + none.to_csv()
    said, *rest = describe_findings(make_learned(Yardstick("loss/excess", 0.001, {"optimum": 0.0})))
    assert said == "No row learned the task. Only the losses say anything."
    remedied = make_learned(Yardstick("loss/excess", 0.001, {"optimum": 0.0}, "--base larger shows more."))
    assert render_brief(remedied).splitlines()[2] == f"{said} --base larger shows more."
    assert parse_table(json.dumps(remedied.to_json()), "it") == remedied
    assert "remedy" not in make_learned().to_json()["yardstick"]
    assert [sentence.partition(" ")[0] for sentence in rest] == ["Excess"], "nothing is left to say of the sink"
    losses = {"lazy": [0.1, 0.1]} | {f"dead {index}": [0.5, 0.5] for index in range(20)}
    many = replace(of_values(EXCESS, **losses, seeds=2), yardstick=YARDSTICK)
    (said,) = describe_unlearned(many)
    assert said.count(" (2 of 2)") == 12
    assert "dead 11 (2 of 2) and 8 others. Only" in said
    assert render_markdown(many).count("did not learn (2 of 2)") == 20


def test_which_rows_did_not_learn_is_determined_once_per_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value of a row asks: determined each time, 2,500 rows took minutes."""
    asked, find_failures = [], Table.find_failures
    monkeypatch.setattr(Table, "find_failures", lambda self: asked.append(self) or find_failures(self))
    found = make_learned()
    for render in (render_markdown, render_latex, render_html, Table.to_csv):
        render(found)
    assert len(asked) == 1


# Cells that were asked for, and mistakes


def test_the_order_of_the_observations_does_not_matter() -> None:
    cells = [*observe(lazy=(0.0, 0.2, 0.3), b=(0.1, 0.2, -0.7), c=(0.2, 0.2, -1.7), extra=(1.0, 2.0))]
    cells += [Observation("d", s, "failed", reason="boom") for s in range(3)]
    reference = table(rows("lazy", "b", "c", "d"), cells)
    assert "Left out, because the ablation does not ask for them: extra seed 0, extra seed 1." in reference.notes
    for seed in range(5):
        random.Random(seed).shuffle(cells)
        assert table(rows("lazy", "b", "c", "d"), cells) == reference


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: table(rows("lazy", "b"), [], baseline="lasy"), "baseline: no row is called 'lasy'; the rows are lazy"),
        (lambda: table(rows("lazy", "b", "b"), []), "variant: 'b' is given twice"),
        (lambda: table(rows("lazy"), [], LOSS, LOSS), "column: 'loss' is given twice"),
        (lambda: table(rows("lazy"), observe(lazy=(1.0,)) * 2), "cell: 'lazy, seed 0' is given twice"),
        (lambda: table(rows("b"), [], contrasts=[Contrast("x", {"b": 1, "z": -1})]), "contrast 'x': no row is called"),
        (
            lambda: Contrast("c", {"lazy": 1.0, "b": -0.5}),
            "weights={'lazy': 1.0, 'b': -0.5}: must add up",
        ),
        (lambda: Column("x", "x", "less"), "column 'x': better='less': must be one of lower, higher or None"),
        (lambda: Column("x", "x", digits=".3q"), "column 'x': digits='.3q': must be 0 to 20 decimals"),
        (lambda: Column("x", "x", margin=0.0), "column 'x': margin=0.0: must be above 0"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


# Files


@anything
def test_json_is_strict_and_comes_back_whole(make: Callable[[], Table]) -> None:
    found = make()
    whole = json.dumps(found.to_json(), allow_nan=False)
    assert parse_table(whole, "it") == found
    assert recompute_statistics(found, found.columns, found.contrasts, [found.primary or ""]) == found
    former = json.loads(whole)  # as format 1, which had the statistics
    del former["format"]
    for row in former["rows"]:
        row |= {"n": 5, "metrics": {key: {"mean": 0.0, "values": values} for key, values in row["metrics"].items()}}
    assert parse_table(json.dumps(former), "it") == found


def test_a_table_is_restated_by_what_is_declared_now() -> None:
    found = make_wide()
    contrasts = [*found.contrasts, Contrast("x", {"absent": 1, "variant_00": -1})]
    now = recompute_statistics(found, [replace(found.columns[1], margin=3.0)], contrasts, ("m1",))
    assert (now.primary, now.columns[1].margin, now.columns[0]) == ("m1", 3.0, found.columns[0])
    assert [contrast.name for contrast in now.contrasts] == ["interaction"]
    assert replace(found, seconds=0.6).to_json()["seconds"] == 1


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠"])
def test_csv_holds_no_formula(sign: str) -> None:
    """Spreadsheets would execute it; numbers, also negative ones, are not text."""
    lines = list(csv.reader(io.StringIO(format_csv([[f"{sign}1+1", f"a{sign}b", -1.5, "", None]]), newline="")))
    assert lines == [[f"'{sign}1+1", f"a{sign}b", "-1.5", "", ""]]


@anything
def test_csv_is_tidy_and_exact(make: Callable[[], Table]) -> None:
    found = make()
    lines = {(line["variant"], line["metric"]): line for line in csv.DictReader(io.StringIO(found.to_csv()))}
    assert len(lines) == len(found.rows) * len(found.columns)
    for row in found.rows:
        for key, of in row.metrics.items():
            own, difference = vars(of), vars(of.difference)
            expected = {name: own[name] for name in ("mean", "ci95", "n", "undefined", "p_same")}
            expected |= {name: difference[name] for name in ("test", "p", "p_adj", "mde")}
            expected |= {f"diff_{name}": difference[name] for name in ("ci95", "n", "se", "df", "low", "high")}
            shown = {name: lines[row.variant, key][name] for name in ("diff", *expected)}
            expected |= {"diff": difference["mean"]}
            assert shown == {name: "" if value is None else str(value) for name, value in expected.items()}
    wide = pd.read_csv(io.StringIO(found.to_csv())).pivot(index="variant", columns="metric", values="mean")
    assert wide.shape == (len(found.rows), len(found.columns))


def markdown_grids(text: str) -> list[list[list[str]]]:
    blocks = [b.splitlines() for b in text.split("\n\n") if b.startswith("| ")]
    return [[[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block] for block in blocks]


@anything
def test_markdown_is_rectangular_aligned_and_shows_every_row_and_column_in_order(make: Callable[[], Table]) -> None:
    found = make()
    text = render_markdown(found)
    for block in [b.splitlines() for b in text.split("\n\n") if b.startswith("| ")]:
        assert len({len(line) for line in block}) == 1
        assert max(map(len, block)) <= 120 or make is make_hostile
    grids = markdown_grids(text)
    for grid in grids:
        assert len({len(line) for line in grid}) == 1
        assert all(re.fullmatch(r"-+:?", c) for c in grid[1])
    if make is make_wide:
        means = [grid for grid in grids if grid[0][0] == "Variant" and not grid[0][1].startswith("Δ")]
        assert len(means) > 1
        assert all([line[0] for line in grid[2:]] == [row.variant for row in found.rows] for grid in means)
        headings = [heading for grid in means for heading in grid[0][1:]]
        assert headings == ["Source", "backend", "n", *(column.heading for column in found.columns)]


@anything
def test_the_page_that_a_person_reads_is_one_table(make: Callable[[], Table]) -> None:
    found = make()
    text, whole = render_brief(found), render_markdown(found)
    (grid,) = markdown_grids(text)
    assert [line[0] for line in grid[2:]] == [line[0] for line in markdown_grids(whole)[0][2:]], "every row"
    (shown, compared), headings = choose_columns(found), [h for h in grid[0][1:] if h not in ("State", "n")]
    assert len(headings) == len(shown) + len(compared) <= MOST_COLUMNS
    assert [heading for heading in headings if "Δ" in heading] == [f"Δ to {found.baseline}"] * len(compared)
    assert shown[0].key == (found.primary or shown[0].key)
    *others, _, caveats = text.split("\n\n")
    assert caveats.count("\n") == 1, "one line"
    assert all(block in whole for block in others), "details.md has all"


def test_a_page_without_anything_to_compare_shows_no_differences() -> None:
    for found in (of_values(PLOTTED, lazy=(1.0, 1.1, 1.2)), table(rows("lazy", "b"), observe(b=(1.0, 1.1)), PLOTTED)):
        assert "Δ" not in render_brief(found) + render_summary(found, WHOLE)
        assert "differs from" not in render_brief(found)
    assert "One seed a row: no interval, no test." in render_brief(of_values(PLOTTED, lazy=(1.0,), b=(2.0,), seeds=1))


def test_a_table_without_its_baseline_compares_nothing() -> None:
    found = table(
        rows("a", "b"), observe(a=(1.0, 1.1, 1.3), b=(2.0, 2.1, 2.2)), PLOTTED, primary=("loss",), baseline=""
    )
    assert (found.compared, describe_findings(found)) == ([], [])
    assert parse_table(json.dumps(found.to_json()), "it") == found
    for text in (render_brief(found), render_markdown(found), render_summary(found, WHOLE), render_latex(found)):
        assert "1.133 ±0.379" in text.replace(r"$\pm$", "±")
        assert not re.search("Δ|Baseline|Differences|Exploratory|separate|Detectable", text.partition("± 95")[0])


def test_markdown_escapes_what_would_open_markup() -> None:
    text = render_markdown(make_hostile())
    assert r"a\|b_c 50% &amp;lt; &lt;b>x&lt;/b>" in text
    assert r"\*em* \`code\` \[l\](u)" in text
    assert r"100% & \_more\_" in text
    assert r"failed (boom \| &lt;i> at line & 7%)" in text


@anything
def test_latex_is_well_formed(make: Callable[[], Table]) -> None:
    text = render_latex(make())
    bare = re.sub(r"\\[\\{}%&_#$]", "", text)
    assert bare.count("{") == bare.count("}")
    assert "&" not in re.sub(r"\\begin\{tabular\}.*?\\end\{tabular\}", "", bare, flags=re.S)
    assert not set("%#~<>|") & set(bare)
    assert not re.search(r"[_^]", re.sub(r"\$[^$]*\$", "", bare))
    tabulars = re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, flags=re.S)
    shape = [(len(grid[0]), len(grid) - 1) for grid in markdown_grids(render_markdown(make()))]
    lines = [re.findall(r"^  (?!\\(?:top|mid|bottom)rule)(.*) \\\\$", body, flags=re.M) for _, body in tabulars]
    assert [(len(form), len(of)) for (form, _), of in zip(tabulars, lines, strict=True)] == shape
    for (form, body), of in zip(tabulars, lines, strict=True):
        assert [body.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
        assert {len(re.split(r"(?<!\\)&", line)) for line in of} == {len(form)}


def test_no_latex_command_takes_a_text_for_its_argument() -> None:
    names = ("[0.5em] lazy", "[b]")
    text = render_latex(table(rows(*names), [], warnings=("[a]",)))
    assert "{}[0.5em] lazy" in text
    assert not re.search(r"(\\\\|\\\w+rule|\\item|\\par)\s*\[", text)


@anything
def test_html_is_a_self_contained_fragment_with_markdown_s_cells(make: Callable[[], Table]) -> None:
    found = make()
    text = render_html(found)
    assert text.isascii()
    assert not re.search(r"url\(|@import", text)
    root = ElementTree.fromstring(text)
    assert root.tag == "section"
    tags = {element.tag for element in root.iter()}
    assert tags <= {"section", "style", "h2", "h3", "h4", "p", "strong", "div", "table", "thead", "tbody", "tr", "th",
                    "td", "ul", "li", "details", "summary"}  # fmt: skip
    assert not {name for element in root.iter() for name in element.attrib} - {"class", "data-label"}
    for grid in root.iter("table"):
        names = [cell.text for cell in grid.iter("th")]
        for row in grid.iter("tr"):
            assert [cell.get("data-label") for cell in row.iter("td")] in ([], names), "named where a row is a card"
    if make is make_wide:
        shown = [["".join(cell.itertext()) for cell in line] for line in root.find(".//table").iter("tr")]
        grids = markdown_grids(render_markdown(found))
        means = [grid for grid in grids if grid[0][0] == "Variant" and not grid[0][1].startswith("Δ")]
        joined = [sum((grid[i][1:] for grid in means[1:]), means[0][i]) for i in range(len(means[0])) if i != 1]
        assert shown == joined


def test_a_report_shows_the_columns_that_are_drawn_and_folds_the_others() -> None:
    cells = [replace(o, metrics={**o.metrics, "sparsity": 0.1 * o.seed}) for o in observe(lazy=(1, 2, 3), b=(1, 2, 3))]

    def heads_of(*columns: Column, **more: object) -> list[tuple[list[str | None], bool]]:
        root = ElementTree.fromstring(render_html_parts(table(rows("lazy", "b"), cells, *columns, **more))[1])
        folded = {head for fold in root.iter("details") for head in fold.iter("thead")}
        heads = [([cell.text for cell in head.iter("th")], head in folded) for head in root.iter("thead")]
        return [(names, there) for names, there in heads if not (names[1] or "").startswith("Δ")]

    whole = ["Variant", "Source", "n", "loss (nats) ↓", "sparsity (%)"]
    few = ["Variant", "n", "loss (nats) ↓", "Δ to lazy"]
    assert heads_of(LOSS, SPARSITY, primary=("loss",)) == [(few, False), (whole, True)]
    assert heads_of(LOSS, SPARSITY) == [(whole, False)], "nothing says which are the few"
    assert heads_of(LOSS, primary=("loss",)) == [(whole[:-1], False)], "all are few"


# The terminal


def test_a_terminal_gets_text_without_markup() -> None:
    text = render_text(make_hostile(), WHOLE, width=110)
    assert not re.search(r"^(#|\||>)|\\[|_]", text, re.M)
    assert max(map(len, text.splitlines())) <= 110


def test_a_command_prints_the_first_rows_and_where_the_others_are() -> None:
    names = [f"row {index}" for index in range(2000)]
    found = of_values(EXCESS, **{name: [0.5] for name in ("lazy", *names)}, seeds=2)
    text = render_text(found, WHOLE)
    assert "1,941 more rows are in details.md." in text
    assert "1,941 more lines are in details.md." in text, "cells without a result"
    assert "\nrow 58 " in text
    assert "\nrow 60 " not in text
    assert text.count("\n") < 250
    assert len(markdown_grids(render_markdown(found))[0]) == 2003
    assert "more rows" in render_summary(found, WHOLE)
    assert "more rows" not in render_text(make_learned(), WHOLE)


@pytest.mark.parametrize("seeds", [1, 5])
def test_a_summary_explains_p_where_it_shows_one(seeds: int) -> None:
    noise = np.random.default_rng(0).normal(1, 0.1, (2, seeds)).tolist()
    text = render_summary(of_values(PLOTTED, lazy=noise[0], b=noise[1], seeds=seeds), WHOLE)
    assert ("p=" in text, "p is adjusted" in text) == (seeds > 1, seeds > 1)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_or_lost_file_is_not_saved(name: str, tmp_path: Path) -> None:
    save(make_learned(), tmp_path)
    assert is_saved(make_learned(), tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert not is_saved(make_learned(), tmp_path)
    file.unlink()
    assert not is_saved(make_learned(), tmp_path)
    file.mkdir()
    assert not is_saved(make_learned(), tmp_path)


# Files of others

CONTROLS = "\x1b[31m\x07\x9b2J\u202e\x7f"


def test_others_texts_cannot_control_a_terminal() -> None:
    """Neither on one nor in a file that is shown there."""
    whole = json.loads(STORED.read_text())
    for name in ("ablation", "base", "command", "environment"):
        whole[name] = CONTROLS
    whole["warnings"] = whole["notes"] = [CONTROLS]
    for row in whole["rows"]:
        row |= {"git_shas": [CONTROLS], "labels": {CONTROLS: CONTROLS}, "note": CONTROLS, "source": CONTROLS}
        row |= {"reasons": {"0": CONTROLS}, "normaliser": CONTROLS, "position": CONTROLS}
    found = parse_table(json.dumps(whole), "it")
    shown = [render_text(found, Path("all")), render_markdown(found), render_latex(found), render_html(found)]
    shown += [found.to_csv(), format_comparison(compare_tables(("a", "b"), (found, found), [], (None, None)))]
    PlainConsole(file=(printed := io.StringIO()), force_terminal=True, highlight=False).print(CONTROLS)
    for text in [*shown, printed.getvalue()]:
        assert "x1b" in text
        assert not set(CONTROLS) - set("[31m2J") & set(text)


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to the values in dicts, and to the first ones in lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from list_paths(inner, (*path, name))


ODD = (1.7e308, math.nan, 10**400, -1, "\ud800", "\x1b[31m", None, {}, [[]])


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
def test_a_table_of_others_is_compared_or_refused(odd: Any) -> None:
    """Whichever of its values is odd."""
    whole = json.loads(STORED.read_text())
    text = json.dumps(whole | {name: whole[name][:2] for name in ("rows", "columns", "contrasts")})
    by_names = {tuple(step for step in path if isinstance(step, str)): path for path in list_paths(json.loads(text))}
    assert len(by_names) > 50
    for path in by_names.values():
        changed = json.loads(text)
        functools.reduce(lambda inner, step: inner[step], path[:-1], changed)[path[-1]] = odd
        try:
            found = parse_table(json.dumps(changed), "it")
            compared = compare_tables(("a", "b"), (found, found), [], (None, None))
        except (ValueError, NewerFormatError):
            continue
        assert "\x1b" not in format_comparison(compared), path


if __name__ == "__main__":
    for page, content in make_pages().items():
        (PAGES / page).write_text(content)
