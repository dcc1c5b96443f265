"""The table reports what was measured and what is missing, and nothing else, in every format."""

import csv
import functools
import io
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lit_lazy.support.console import PlainConsole
from lit_lazy.support.formats import NewerFormatError
from lit_lazy.table.build import TableSpec, build_table, recompute_statistics
from lit_lazy.table.comparison import compare_tables, format_comparison
from lit_lazy.table.finding_text import describe_findings, describe_unlearned
from lit_lazy.table.records import Column, Contrast, Observation, RowInfo, Table, Yardstick, format_csv
from lit_lazy.table.render import (
    is_saved,
    render_html,
    render_html_parts,
    render_latex,
    render_markdown,
    render_summary,
    render_text,
    save,
)
from lit_lazy.table.statistics import compute_contrast, minimum_detectable_effect, tost
from lit_lazy.table.stored import parse_table, read_table

LOSS = Column("loss", "loss", "lower", unit="nats")
SPARSITY = Column("sparsity", "sparsity", None, digits=1, unit="%", scale=100)
PARAMETERS = Column("parameters", "parameters", None, digits=",.0f")

STORED = Path(__file__).parents[2] / "docs" / "results" / "q_window_2-stdlib_small" / "table.json"
SHA = "3f9c2ab"


def rows(*variants, seeds=(0, 1, 2), source="ours"):
    return [RowInfo(variant, source, tuple(seeds), "tiny") for variant in variants]


def cell(variant, seed, value, **metrics):
    return Observation(variant, seed, "complete", {"loss": value, **metrics}, git_sha=SHA)


def cells(variant, *values):
    return [cell(variant, seed, value) for seed, value in enumerate(values)]


def table(row_infos, observations, columns=(LOSS,), baseline="lazy", **more):
    settings = {"contrasts": (), "command": "make table2", **more}
    return build_table(TableSpec("study-tiny", "tiny", baseline, row_infos, columns, **settings), observations)


def effect(row, baseline):
    """The effect between rows with these values by seed."""
    values = {name: dict(enumerate(v)) for name, v in {"row": row, "baseline": baseline}.items()}
    return compute_contrast(values, {"row": 1.0, "baseline": -1.0})


def row(result, variant):
    found = next(row for row in result.rows if row.variant == variant)
    metrics = {key: measure.flatten() | {"values": measure.values} for key, measure in found.metrics.items()}
    return vars(found) | {"n": found.n, "status": found.status, "metrics": metrics}


def seventeen():
    """Seventeen rows, twelve columns, five seeds, with every kind of gap, in shuffled order."""
    rng = np.random.default_rng(0)
    names = ["lazy", *(f"variant_{i:02d}" for i in range(1, 17))]
    columns = [Column(f"m{i}", f"metric {i}", (None, "lower", "higher")[i % 3], digits=i % 4) for i in range(12)]
    common = rng.normal(size=(5, 12))
    observations = []
    for i, name in enumerate(names):
        shift = rng.normal(size=12) * (i % 3)
        for seed in range(5):
            values = (10 + common[seed] + shift + 0.2 * rng.normal(size=12)).tolist()
            metrics = {f"m{j}": value for j, value in enumerate(values)}
            if i == 3:
                metrics |= {"m1": None, "m2": math.nan}
            if i == 4 and seed == 2:
                observations.append(Observation(name, seed, "failed", {"m0": 777.0}, reason="loss is NaN at step 40"))
            elif i == 5 and seed > 2:
                observations.append(Observation(name, seed, "running", {"m0": 777.0}))
            elif i != 6:
                labels = {"backend": "chunked" if i != 7 or seed else "reference"}
                observations.append(Observation(name, seed, "complete", metrics, labels, SHA))
    random.Random(1).shuffle(observations)
    interaction = Contrast("interaction", {names[0]: 1, names[1]: -1, names[2]: -1, names[8]: 1})
    return table(
        rows(*names, seeds=range(5)), observations, columns, contrasts=[interaction], labels=("backend",),
        warnings=("Undertrained: the loss still falls.",),
    )  # fmt: skip


def test_the_contract_keys_and_the_numbers_in_them():
    a, b, c = [2.0, 2.1, 2.4], [1.7, 1.9, 2.0], [2.1, 2.0, 2.6]
    result = table(rows("lazy", "b", "c"), cells("lazy", *a) + cells("b", *b) + cells("c", *c))
    data = result.to_json()
    assert {k: data[k] for k in ("ablation", "base", "command", "baseline")} == {
        "ablation": "study-tiny", "base": "tiny", "command": "make table2", "baseline": "lazy",
    }  # fmt: skip
    assert result.git_sha == SHA
    got = row(result, "b")
    assert (got["source"], got["base"], got["n"], got["status"]) == ("ours", "tiny", 3, "complete")
    measure = got["metrics"]["loss"]
    expected = {"b": effect(b, a), "c": effect(c, a)}
    p = {name: e.p for name, e in expected.items()}
    assert p["b"] < p["c"]
    assert measure["mean"] == pytest.approx(np.mean(b))
    assert measure["ci95"] == pytest.approx(stats.t.isf(0.025, 2) * stats.sem(b))
    assert measure["diff"] == pytest.approx(np.mean(b) - np.mean(a))
    assert measure["diff_ci95"] == pytest.approx(expected["b"].ci95)
    assert (measure["diff_se"], measure["diff_df"]) == pytest.approx((expected["b"].se, expected["b"].df))
    assert (measure["diff_low"], measure["diff_high"]) == pytest.approx((-0.4, -0.2))
    assert measure["p_adj"] == pytest.approx(2 * p["b"])
    assert row(result, "c")["metrics"]["loss"]["p_adj"] == pytest.approx(max(2 * p["b"], p["c"]))
    assert measure["values"] == {"0": 1.7, "1": 1.9, "2": 2.0}
    baseline = row(result, "lazy")["metrics"]["loss"]
    assert (baseline["diff"], baseline["diff_ci95"], baseline["p_adj"]) == (None, None, None)


def test_holm_counts_ties_and_keeps_metrics_apart():
    a, b = [2.0, 2.1, 2.4], [1.7, 1.9, 2.0]
    observations = [*cells("lazy", *a), *cells("tied", *a), *cells("b", *b), *cells("short", 2.0, 2.2)]
    result = table(rows("lazy", "tied", "b", "short"), observations)
    # Two rows of three seeds, one with the baseline's values, and one of too few.
    assert row(result, "b")["metrics"]["loss"]["p_adj"] == pytest.approx(2 * effect(b, a).p)
    tied = row(result, "tied")["metrics"]["loss"]
    assert (tied["test"], tied["diff"], tied["p_adj"]) == ("tie", 0.0, None)
    assert re.search(r"\| tied +\| +tie +\|", render_markdown(result))


def test_each_column_says_what_it_can_separate_at_each_n():
    a, b, more, same = [2.0, 2.1, 2.4], [1.0, 1.11, 1.39], [1.9, 2.2, 2.3, 2.1], [2.1, 2.0, 2.41]
    infos = [*rows("lazy", "b", "same"), *rows("more", seeds=range(4))]
    observed = cells("lazy", *a) + cells("b", *b) + cells("same", *same) + cells("more", *more)
    result = table(infos, observed)
    column = result.summaries["loss"]
    tested = [effect(row, a) for row in (b, same, more)]
    (three,) = column.detectable  # the baseline has three seeds, so no difference has more
    assert three.n == 3
    for key, alpha in (("mde", 0.05), ("mde_holm", 0.05 / 3)):
        assert getattr(three, key) == pytest.approx(np.median([minimum_detectable_effect(e, alpha) for e in tested]))
    assert (column.separates, column.compared, column.tested) == (("b",), 3, 3)
    text = render_markdown(result)
    assert "loss: separates 1 of 3 rows from lazy (Holm p < 0.05); better: b. " in text
    assert f"Detectable at n = 3: {three.mde:.3f} nats; at Holm's first step: {three.mde_holm:.3f} nats." in text
    infos[0] = replace(infos[0], seeds=(0, 1, 2, 3))
    detectable = table(infos, [*observed, cell("lazy", 3, 2.2)]).summaries["loss"].detectable
    assert [at.n for at in detectable] == [3, 4]
    # mean 3.5 / 3; s = 0.20109, times 4.302653 / sqrt(3)
    assert re.search(r"\| b +\| ours +\| +3 \| +1\.167 ±0\.500\* \|", text)
    assert re.search(r"\| same +\| ours +\| +3 \| +2\.170 ±0\.531  \|", text)


def test_below_three_seeds_there_is_no_p_and_at_one_no_interval():
    two = table(rows("lazy", "b", seeds=(0, 1)), cells("lazy", 2.0, 2.1) + cells("b", 1.0, 1.2))
    measure = row(two, "b")["metrics"]["loss"]
    assert measure["p"] is measure["p_adj"] is measure["mde"] is None
    assert measure["diff_ci95"] > 0
    assert "p=" not in render_markdown(two)
    assert "loss: no test: it needs 3 seeds that a row shares with the baseline, here at most 2" in render_markdown(two)
    one = table(rows("lazy", "b", seeds=(0,)), cells("lazy", 2.0) + cells("b", 1.0))
    measure = row(one, "b")["metrics"]["loss"]
    assert (measure["mean"], measure["ci95"], measure["diff"], measure["diff_ci95"]) == (1.0, None, -1.0, None)
    assert re.search(r"\| b +\| ours +\| +1 \| +1\.000 \|", render_markdown(one))
    assert re.search(r"\| b +\| +-1\.000 \|", render_markdown(one))


def test_each_row_is_compared_over_the_seeds_that_it_shares_with_the_baseline():
    infos = rows("lazy", seeds=range(5)) + rows("b", seeds=(0, 2, 4))
    lazy, values = [2.0, 2.3, 2.1, 2.4, 2.2], {0: 1.0, 2: 1.3, 4: 1.1}
    result = table(infos, cells("lazy", *lazy) + [cell("b", s, v) for s, v in values.items()])
    measure = row(result, "b")["metrics"]["loss"]
    expected = compute_contrast({"b": values, "lazy": dict(enumerate(lazy))}, {"b": 1.0, "lazy": -1.0})
    assert (measure["diff_n"], measure["diff"]) == (3, pytest.approx(3.4 / 3 - 6.3 / 3))
    assert measure["p"] == pytest.approx(expected.p)
    assert "Seeds: 0, 1, 2, 3, 4; 0, 2, 4 in b." in render_markdown(result)
    apart = table(rows("lazy") + rows("b", seeds=(3, 4, 5)), [*cells("lazy", 2.0, 2.1, 2.4), cell("b", 3, 1.0)])
    assert row(apart, "b")["metrics"]["loss"]["diff"] is None
    assert re.search(r"\| b +\| +– \|", render_markdown(apart))


def test_missing_failed_and_running_cells_are_shown_as_such():
    observations = [
        *cells("lazy", 2.0, 2.1, 2.2),
        *cells("half", 1.0),
        Observation("half", 1, "failed", {"loss": 99.5}, reason="CUDA out of memory"),
        *(Observation("busy", seed, "running", {"loss": 99.5}) for seed in range(3)),
        *(Observation("queued", seed, "waiting") for seed in range(3)),
    ]
    result = table(rows("lazy", "half", "busy", "queued", "never"), observations)
    assert [(r.variant, r.n, r.status) for r in result.rows] == [
        ("lazy", 3, "complete"), ("half", 1, "failed"), ("busy", 0, "running"), ("queued", 0, "waiting"),
        ("never", 0, "missing"),
    ]  # fmt: skip
    text = render_markdown(result)
    assert "**Warning:** Not complete: 4 of 15 cells have a result (1 failed, 4 missing, 3 waiting, 3 running)" in text
    assert "- half, seed 1: failed (CUDA out of memory)" in text
    assert render_summary(result, Path("table.md")).endswith("\n- half, seed 1: failed (CUDA out of memory)\n")
    assert "- half, seed 2: missing" in text
    assert re.search(r"\| half +\| ours +\| 1/3 \| +1\.000 +\|", text)
    assert re.search(r"\| busy +\| ours +\| 0/3 \| +running +\|", text)
    assert "99.5" not in text + json.dumps(result.to_json())


def test_without_a_baseline_there_is_nothing_to_compare():
    result = table(rows("lazy", "b"), cells("b", 1.0, 1.1, 1.3))
    assert row(result, "b")["metrics"]["loss"]["diff"] is None
    assert re.search(r"\| b +\| +– \|", render_markdown(result))
    assert "loss: nothing to compare" in render_markdown(result)


def test_no_number_that_was_not_measured():
    empty = table(rows("lazy", "b"), [], contrasts=[Contrast("c", {"lazy": 1, "b": -1})])
    for measure in [r.metrics["loss"].flatten() for r in empty.rows] + [
        vars(c.metrics["loss"]) for c in empty.contrasts
    ]:
        assert {*measure.values()} <= {None, 0}
    grid = [line for line in render_markdown(empty).splitlines() if line.startswith("| ")]
    assert {number for line in grid for number in re.findall(r"\d+", line)} == {"0", "3"}  # "0/3"

    single = table(rows("lazy", "b", seeds=(0,)), [cell("lazy", 0, 7.125), cell("b", 0, 9.375)])
    grid = "".join(line for line in render_markdown(single).splitlines() if line.startswith("| "))
    assert set(re.findall(r"[-+]?\d[\d.]*", grid)) == {"1", "7.125", "9.375", "+2.250"}


def test_undefined_metrics_are_a_dash_and_counted():
    observations = [cell("lazy", s, 2.0 + s, sparsity=0.5 + s / 100) for s in range(3)]
    observations += [cell("softmax", s, 2.5 + s, sparsity=None) for s in range(3)]
    observations += [cell("b", s, 2.5 + s, sparsity=math.nan if s == 1 else 0.61) for s in range(3)]
    observations += [cell("absent", s, 2.7 + s) for s in range(3)]
    result = table(rows("lazy", "softmax", "b", "absent"), observations, (LOSS, SPARSITY))
    for name, undefined in (("softmax", 3), ("b", 1), ("absent", 3)):
        assert row(result, name)["metrics"]["sparsity"]["undefined"] == undefined
    assert result.summaries["sparsity"].undefined == 7
    for name in ("softmax", "absent"):
        assert re.search(rf"\| {name} +\| ours +\| +3 \|[^|]+\| +– +\|", render_markdown(result))
    assert "61.0 = (n=2)" in render_markdown(result)
    everywhere = table(rows("lazy"), cells("lazy", 1.0, 2.0, 3.0), (LOSS, Column("typo", "typo")))
    assert "typo: no cell reports the metric 'typo'." in render_markdown(everywhere)


def test_deterministic_columns_are_not_tested():
    observations = [cell("lazy", s, 2.0 + s, parameters=123456) for s in range(3)]
    observations += [cell("b", s, 2.5 + s * s, parameters=124000) for s in range(3)]
    result = table(rows("lazy", "b"), observations, (LOSS, PARAMETERS))
    measure = row(result, "b")["metrics"]["parameters"]
    assert (measure["diff"], measure["test"], measure["p"], measure["p_adj"]) == (544.0, "constant", None, None)
    assert "124,000 =" in render_markdown(result)
    assert (
        "parameters: no test, all seeds of the baseline, or of every other row, have the same value."
        in render_markdown(result)
    )


def test_a_row_at_its_bound_has_a_range_and_no_test():
    """A sink in all sequences, in none, or in all of some seeds."""
    rate = Column("rate", "sink rate", "lower", 1, "%", scale=100, bounds=(0.0, 1.0))
    values = {"lazy": (0.0, 0.0, 0.0), "some": (0.2, 0.4, 0.9), "both": (0.0, 1.0, 1.0), "too": (0.3, 0.5, 0.2)}
    observations = [cell(name, s, 1.0 + s, rate=v) for name, row in values.items() for s, v in enumerate(row)]
    result = table(rows(*values), observations, (rate,))
    measures = {name: row(result, name)["metrics"]["rate"] for name in values}
    assert {name: m["test"] for name, m in measures.items()} == {"lazy": None} | dict.fromkeys(
        ("some", "both", "too"), "saturated"
    )
    text = render_markdown(result)
    assert re.search(r"\| lazy +\|.*\| +0\.0 = \|", text)
    assert re.search(r"\| both +\|.*\| +66\.7 \(0\.0 to 100\.0\) \|", text)
    assert re.search(r"\| some +\| +\+50\.0 \(\+20\.0 to \+90\.0\) \|", text)
    assert "sink rate: no test, all seeds of the baseline, or of every other row, have the same value." in text
    other = table(rows(*values), observations, (rate,), baseline="too")
    assert row(other, "some")["metrics"]["rate"]["test"] == "t"
    assert "; 2 not tested, without a measured spread" in render_markdown(other)


def test_what_holds_by_construction_is_named_and_not_tested():
    tau = Column("tau", "tau", None, 2, by_construction="the rows differ in where it starts")
    starts = (("lazy", 1), ("b", 0))
    observations = [cell(n, s, 2.0 + s, tau=start + 0.01 * s * s**start) for n, start in starts for s in range(3)]
    result = table(rows("lazy", "b"), observations, (LOSS, tau))
    measure = row(result, "b")["metrics"]["tau"]
    assert (measure["test"], measure["p"], measure["p_adj"], measure["mde"]) == ("construction", None, None, None)
    assert measure["diff_ci95"] > 0
    text = render_markdown(result)
    assert "Not tested, since rows differ there by construction (the rows differ in where it starts): tau." in text
    assert "- tau: no test, rows differ by construction (the rows differ in where it starts)." in text
    assert "*" not in "".join(line for line in text.splitlines() if line.startswith("| b "))


def test_the_same_is_said_with_its_margin_alone():
    near, far = [2.01, 2.09, 2.2], [3.0, 3.1, 3.4]
    column = replace(LOSS, margin=0.5)
    observations = cells("lazy", 2.0, 2.1, 2.2) + cells("near", *near) + cells("far", *far)
    result = table(rows("lazy", "near", "far"), observations, (column,))
    p = tost(effect(near, [2.0, 2.1, 2.2]), 0.5)
    assert row(result, "near")["metrics"]["loss"]["p_same"] == pytest.approx(2 * p)
    assert result.summaries["loss"].same == ("near",)
    assert "; the same within ±0.500 nats: near. " in render_markdown(result)
    assert "; the same within ±0.001 nats: none. " in render_markdown(
        table(rows("lazy", "near", "far"), observations, (replace(LOSS, margin=0.001),))
    )
    assert "the same within" not in render_markdown(table(rows("lazy", "near", "far"), observations))


def test_one_outcome_is_primary_and_the_rest_exploratory():
    observations = [
        cell(name, s, 2.0 + s**power, sparsity=0.1 * s**power)
        for power, name in ((1, "lazy"), (2, "b"))
        for s in range(3)
    ]
    other = Column("other", "other loss", "lower")
    observations = [replace(o, metrics={**o.metrics, "other": 1.0 + o.seed}) for o in observations]
    contrasts = [Contrast("c", {"b": 1, "lazy": -1})]
    settings = {"columns": (other, SPARSITY, LOSS), "contrasts": contrasts}
    result = table(rows("lazy", "b"), observations, primary=("absent", "loss"), **settings)
    assert result.primary == result.to_json()["primary"] == "loss"
    before, after = render_markdown(result).split("### Exploratory")
    assert "Primary outcome: loss. All other columns are exploratory." in before
    assert re.search(r"\| Variant +\| +Δ loss", before)
    assert re.search(r"\| Contrast +\| +Δ loss", before)
    assert "- loss: separates" in before
    assert "Δ other loss" not in before
    assert re.search(r"\| Variant +\| +Δ other loss", after)
    assert re.search(r"\| Contrast +\| +Δ other loss", after)
    assert "- sparsity: " in after
    assert render_markdown(result).count("- c = +1 b -1 lazy") == 1
    assert "Δ loss" not in after
    undirected = render_markdown(table(rows("lazy", "b"), observations, primary=("sparsity",), **settings))
    assert re.search(r"\| Variant +\| +Δ sparsity", undirected)
    nothing = table(rows("lazy", "b"), observations, primary=("absent",), **settings)
    assert nothing.primary is None
    assert "xploratory" not in render_markdown(nothing)


def test_the_finding_comes_first():
    """Every row is in one group; a table without a test has the reason, a table of one row has no sentence."""
    names = [f"far {i}" for i in range(6)]
    far = [cells(name, 9.0 + i, 9.15 + i, 9.2 + i) for i, name in enumerate(names)]
    near = [
        ("near", (1.0, 1.101, 1.2)),
        ("wide", (0.5, 1.0, 1.6)),
        ("flat", (1.0, 1.0, 1.0)),
        ("good", (0.1, 0.25, 0.3)),
    ]
    observations = sum([*far, *(cells(name, *values) for name, values in near)], cells("lazy", 1.0, 1.1, 1.2))
    asked = rows("lazy", *names, *(name for name, _ in near))
    result = table(asked, observations, (replace(LOSS, plotted=True, margin=0.5),))
    assert describe_findings(result) == [
        "Loss against lazy (n = 3): worse: far 0, far 1, far 2, far 3 and 2 others; better: good; the same within "
        "±0.500 nats: near; undecided: wide; not tested: flat."
    ]
    text = render_markdown(result)
    assert text.index("Loss against lazy") < text.index("| Variant") < text.index("### Provenance")
    plotted = (replace(LOSS, plotted=True),)
    assert describe_findings(table(rows("lazy", "b"), cells("lazy", 1.0) + cells("b", 2.0), plotted)) == [
        "Loss against lazy: no test: it needs 3 seeds that a row shares with the baseline, here at most 1."
    ]
    assert describe_findings(table(rows("lazy"), cells("lazy", 1.0, 1.1, 1.2), plotted)) == []


def test_rows_beyond_a_baseline_that_never_varies_are_named_without_a_test():
    """As in Table 2: `lazy` has no weight on the first key in any seed."""
    plotted = replace(LOSS, plotted=True, bounds=(0.0,))
    observations = sum(
        [
            cells("a", 0.1, 0.2, 0.4),
            cells("b", 0.0, 0.3, 0.9),
            *(cells(f"far {i}", 0.5, 0.6, 0.7 + i) for i in range(6)),
        ],
        cells("lazy", 0.0, 0.0, 0.0),
    )
    asked = rows("lazy", "a", "b", *(f"far {i}" for i in range(6)))
    assert describe_findings(table(asked, observations, (plotted,))) == [
        "Loss (n = 3): lazy has 0.000 nats in every seed, so there is no test; above it in every seed: "
        "far 5 (0.500 to 5.700), far 4 (0.500 to 4.700), far 3 (0.500 to 3.700), far 2 (0.500 to 2.700) and 3 others."
    ]
    nothing = ["Loss against lazy: no test, all seeds of the baseline, or of every other row, have the same value."]
    for values in ((0.0, 0.0, 0.0), (1e-9, 2e-9, 3e-4)):
        close = [*cells("lazy", 0.0, 0.0, 0.0), *cells("a", *values)]
        assert describe_findings(table(rows("lazy", "a"), close, (plotted,))) == nothing, "alike as shown"
    few = [*cells("lazy", 0.0, 0.0, 0.0), *cells("a", 1.0, float("nan"), None), *cells("b", 0.0, 0.0, 0.0)]
    assert describe_findings(table(rows("lazy", "a", "b"), few, (plotted,))) == nothing, "not in every seed"


def test_a_row_that_never_varies_is_named_where_it_lies_beyond_the_baseline():
    """As for the rivals' first key: softmax varies, `lazy` has no weight on it in any seed."""
    plotted = replace(LOSS, plotted=True, bounds=(0.0,))
    values = {"base": (0.3, 0.4, 0.5), "a": (0.0, 0.0, 0.0), "b": (0.31, 0.39, 0.5), "c": (0.6, 0.6, 0.6)}
    observations = [one for name, of in values.items() for one in cells(name, *of)]
    assert describe_findings(table(rows(*values), observations, (plotted,), baseline="base")) == [
        "Loss against base (n = 3): undecided: b; without a test, but above it in every seed: c; without a test, but "
        "below it in every seed: a."
    ]


def test_the_primary_outcome_comes_first_among_the_effects():
    observations = [cell(name, seed, 1.0 + seed, sparsity=0.1 * seed) for name in ("lazy", "b") for seed in range(3)]
    columns = (replace(LOSS, plotted=True), SPARSITY, PARAMETERS)
    assert table(rows("lazy", "b"), observations, columns, primary=("sparsity",)).compared == ["sparsity", "loss"]
    assert table(rows("lazy", "b"), observations, columns).compared == ["loss"]


def test_a_table_is_restated_from_its_own_values():
    result = seventeen()
    columns, contrasts = result.columns, [Contrast(c.name, c.weights) for c in result.contrasts]
    assert recompute_statistics(result, columns, contrasts, ()) == result
    former = result.to_json()  # as format 1, which had the statistics
    del former["format"]
    for known in former["rows"]:
        known |= {"n": 5, "status": "complete"}
        known["metrics"] = {key: {"mean": 0.0, "values": values} for key, values in known["metrics"].items()}
    assert parse_table(json.dumps(former), "it") == result
    now = recompute_statistics(
        result, [replace(columns[1], margin=3.0)], [*contrasts, Contrast("x", {"absent": 1, "lazy": -1})], ("m1",)
    )
    assert now.primary == "m1"
    assert len(now.contrasts) == len(contrasts)
    assert now.columns[1].margin == 3.0
    assert now.columns[0] == columns[0]


def test_small_values_are_not_shown_as_zero():
    column = Column("x", "x")
    assert [column.format(v) for v in (0.0, 0.0004, -0.00002, 0.0006)] == ["0.000", "4e-04", "-2e-05", "0.001"]
    assert PARAMETERS.format(-1234567.0, "+") == "-1,234,567"
    assert SPARSITY.format(0.5958) == "59.6"


def test_a_mean_that_is_rounding_beside_its_interval_is_shown_as_zero() -> None:
    columns = (LOSS, Column("tau", "tau"))
    losses, noise = (0.5, 0.25, 0.75), (-2.0, 0.0, 2.0 + 4e-16)
    seen = [cell("lazy", seed, loss, tau=tau) for seed, (loss, tau) in enumerate(zip(losses, noise, strict=True))]
    shifted = enumerate(zip(losses, noise, strict=True))
    seen += [cell("other", seed, loss + shift, tau=1.0) for seed, (loss, shift) in shifted]
    text = render_text(table(rows("lazy", "other"), seen, columns), Path("table.md"))
    assert "+0.000 ±4.968, p=1.000" in text
    assert "0.500 ±0.621  0.000 ±4.968\n" in text
    assert "e-16" not in text


def test_percentages_differ_by_points():
    accuracy = Column("accuracy", "accuracy", "higher", 1, "%", 100)
    observations = [
        cell(variant, seed, 2.0, accuracy=value + 0.01 * seed * (seed + shift))
        for variant, value, shift in (("lazy", 0.5, 0), ("b", 0.6, 1))
        for seed in range(3)
    ]
    text = render_markdown(table(rows("lazy", "b"), observations, columns=(LOSS, accuracy)))
    assert "accuracy (%) ↑ |" in text
    assert "Δ loss (nats) ↓ | Δ accuracy (points) ↑ |" in text
    assert re.search(
        r"accuracy: separates .* Detectable at n = 3: \d\.\d points; at Holm's first step: \S+ points\.", text
    )


def test_mixed_and_dirty_commits_and_labels_are_named():
    observations = cells("lazy", 2.0, 2.1, 2.2)
    observations += [
        Observation("b", s, "complete", {"loss": 1.0 + s * s}, {"backend": backend}, sha)
        for s, (sha, backend) in enumerate([(SHA, "triton"), ("77aa01e-dirty", "chunked"), (SHA, "triton")])
    ]
    result = table(rows("lazy", "b"), observations, labels=("backend",))
    assert result.git_sha == f"mixed: {SHA}, 77aa01e-dirty"
    assert row(result, "b")["labels"] == {"backend": "mixed: chunked, triton"}
    text = render_markdown(result)
    assert f"- {SHA}: lazy, b\n" in text
    assert "- 77aa01e-dirty: b (with uncommitted changes)" in text
    assert "### Commits" not in render_markdown(table(rows("lazy"), cells("lazy", 2.0, 2.1, 2.2)))


def test_contrasts_are_tested_with_holm_over_the_contrasts():
    rng = np.random.default_rng(5)
    values = {name: rng.normal(size=4) for name in ("lazy", "b", "c", "d")}
    observations = [o for name, v in values.items() for o in cells(name, *v.tolist())]
    first = {"lazy": 1, "b": -1, "c": -1, "d": 1}
    second = {"lazy": 0.5, "b": 0.5, "c": -1}
    contrasts = [Contrast("interaction", first), Contrast("main", second)]
    result = table(rows(*values, seeds=range(4)), observations, contrasts=contrasts)
    by_seed = {name: dict(enumerate(v.tolist())) for name, v in values.items()}
    p = [compute_contrast(by_seed, c.weights).p for c in contrasts]
    got = [vars(c.metrics["loss"]) for c in result.contrasts]
    assert [c["p"] for c in got] == pytest.approx(p)
    assert min(c["p_adj"] for c in got) == pytest.approx(2 * min(p))
    assert "interaction = +1 lazy -1 b -1 c +1 d" in render_markdown(result)
    with pytest.raises(ValueError, match=r"contrast 'c': weights=.*: must add up to zero"):
        Contrast("c", {"lazy": 1.0, "b": -0.5})


def test_the_order_of_the_observations_does_not_matter():
    observations = [o for i, name in enumerate(("lazy", "b", "c")) for o in cells(name, 0.1 * i, 0.2, 0.3 - i)]
    observations += cells("extra", 1.0, 2.0) + [Observation("d", s, "failed", reason="boom") for s in range(3)]
    reference = table(rows("lazy", "b", "c", "d"), observations)
    for seed in range(5):
        random.Random(seed).shuffle(observations)
        again = table(rows("lazy", "b", "c", "d"), iter(observations))
        assert again == reference
        assert render_markdown(again) == render_markdown(reference)


def test_cells_that_were_not_asked_for_are_left_out_and_named():
    observations = [*cells("lazy", 2.0, 2.1, 2.2), *cells("b", 1.0, 1.5, 1.1, 4711.0), *cells("old", 3.0)]
    result = table(rows("lazy", "b"), observations)
    assert row(result, "b")["n"] == 3
    assert "Left out, because the ablation does not ask for them: b seed 3, old seed 0." in render_markdown(result)
    assert "4711" not in json.dumps(result.to_json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": "lasy"}, "baseline: no row is called 'lasy'; the rows are lazy, b"),
        ({"row_infos": rows("lazy", "b", "b")}, "variant: 'b' is given twice"),
        ({"columns": (LOSS, LOSS)}, "column: 'loss' is given twice"),
        ({"observations": cells("b", 1.0) * 2}, "cell: 'b, seed 0' is given twice"),
        ({"contrasts": [Contrast("x", {"b": 1, "z": -1})]}, "contrast 'x': no row is called 'z'"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        table(**{"row_infos": rows("lazy", "b"), "observations": []} | change)


def test_wrong_columns_are_named():
    with pytest.raises(ValueError, match="column 'x': better='less': must be one of lower, higher or None"):
        Column("x", "x", "less")
    with pytest.raises(ValueError, match=r"column 'x': digits='.3q': must be 0 to 20 decimals"):
        Column("x", "x", digits=".3q")


def test_json_is_strict_and_comes_back_whole():
    result = seventeen()
    text = json.dumps(result.to_json(), allow_nan=False)
    assert parse_table(text, "it") == result
    assert render_markdown(parse_table(text, "it")) == render_markdown(result)


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠"])
def test_csv_holds_no_formula(sign):
    """Spreadsheets would execute it; numbers, also negative ones, are not text."""
    lines = list(csv.reader(io.StringIO(format_csv([[f"{sign}1+1", f"a{sign}b", -1.5, "", None]]), newline="")))
    assert lines == [[f"'{sign}1+1", f"a{sign}b", "-1.5", "", ""]]


def test_csv_is_tidy_and_exact():
    result = seventeen()
    lines = {(line["variant"], line["metric"]): line for line in csv.DictReader(io.StringIO(result.to_csv()))}
    assert len(lines) == 17 * 12
    for r in result.rows:
        for key, measure in r.metrics.items():
            for name in ("mean", "ci95", "diff", "diff_ci95", "p", "p_adj", "mde"):
                shown = lines[r.variant, key][name]
                assert (float(shown) if shown else None) == measure.flatten()[name]
    frame = pd.read_csv(io.StringIO(result.to_csv()))
    wide = frame.pivot(index="variant", columns="metric", values="mean")
    assert wide.shape == (17, 12)


HOSTILE = "a|b_c 50% & <b>x</b> {$#~^\\} *em* `code` [l](u)"


def hostile():
    columns = (Column("loss", HOSTILE, "lower", note="100% & _more_"),)
    infos = [RowInfo("lazy", "authors' code", (0, 1, 2), "tiny"), RowInfo(HOSTILE, "ours", (0, 1, 2), "o|ther")]
    observations = [*cells("lazy", 2.0, 2.1, 2.3), Observation(HOSTILE, 0, "failed", reason="boom | <i>\nat line & 7%")]
    return table(infos, observations, columns, warnings=(HOSTILE,), command="a_b & c | d % e")


def markdown_grids(text):
    blocks = [b.splitlines() for b in text.split("\n\n") if b.startswith("| ")]
    return [[[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block] for block in blocks]


@pytest.mark.parametrize("make", [seventeen, hostile])
def test_markdown_is_rectangular_and_aligned(make):
    text = render_markdown(make())
    for block in [b.splitlines() for b in text.split("\n\n") if b.startswith("| ")]:
        assert len({len(line) for line in block}) == 1
        assert max(map(len, block)) <= 120 or make is hostile
    for grid in markdown_grids(text):
        assert len({len(line) for line in grid}) == 1
        assert all(re.fullmatch(r"-+:?", c) for c in grid[1])


def test_markdown_shows_every_row_and_column_in_order():
    result = seventeen()
    grids = markdown_grids(render_markdown(result))
    means = [g for g in grids if g[0][0] == "Variant" and not g[0][1].startswith("Δ")]
    assert len(means) > 1
    for grid in means:
        assert [line[0] for line in grid[2:]] == [r.variant for r in result.rows]
    headings = [h for g in means for h in g[0][1:]]
    assert headings == ["Source", "backend", "n", *(c.heading for c in result.columns)]
    assert render_markdown(result).index("Undertrained") < render_markdown(result).index("| Variant")
    assert "variant_07" in render_markdown(result)
    assert "mixed: chunked, reference" in render_markdown(result)


def test_markdown_escapes_what_would_open_markup():
    text = render_markdown(hostile())
    assert r"a\|b_c 50% & &lt;b>x&lt;/b>" in text
    assert r"\*em* \`code\` \[l\](u)" in text
    assert r"100% & \_more\_" in text
    assert r"failed (boom \| &lt;i> at line & 7%)" in text


def latex_parse(text):
    """The cells of every tabular; fails on invalid LaTeX."""
    bare = re.sub(r"\\[\\{}%&_#$]", "", text)
    assert bare.count("{") == bare.count("}")
    outside = re.sub(r"\\begin\{tabular\}.*?\\end\{tabular\}", "", bare, flags=re.S)
    assert "&" not in outside
    assert not set("%#~") & set(bare)
    assert not re.search(r"[_^]", re.sub(r"\$[^$]*\$", "", bare))
    assert not set("<>|") & set(bare)
    parsed = []
    for form, body in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, flags=re.S):
        assert [body.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
        lines = re.findall(r"^  (?!\\(?:top|mid|bottom)rule)(.*) \\\\$", body, flags=re.M)
        grid = [re.split(r"(?<!\\)&", line) for line in lines]
        assert {len(line) for line in grid} == {len(form)}
        parsed.append([[c.strip() for c in line] for line in grid])
    return parsed


@pytest.mark.parametrize("make", [seventeen, hostile])
def test_latex_is_well_formed(make):
    result = make()
    grids = latex_parse(render_latex(result))
    assert len(grids) == len(markdown_grids(render_markdown(result)))
    assert all(len(grid) in (1 + len(result.rows), len(result.rows), 2) for grid in grids)


def test_no_latex_command_takes_a_text_for_its_argument():
    names = ("[0.5em] lazy", "[b]")
    result = table(rows(*names), [cell(name, 0, 1.0) for name in names], baseline=names[0], warnings=("[a]",))
    text = render_latex(result)
    assert "{}[0.5em] lazy" in text
    assert not re.search(r"(\\\\|\\\w+rule|\\item|\\par)\s*\[", text)


@pytest.mark.parametrize("make", [seventeen, hostile])
def test_html_is_a_self_contained_fragment(make):
    result = make()
    text = render_html(result)
    assert text.isascii()
    root = ElementTree.fromstring(text)
    assert root.tag == "section"
    tags = {element.tag for element in root.iter()}
    assert tags <= {"section", "style", "h2", "h3", "p", "strong", "div", "table", "thead", "tbody", "tr", "th", "td",
                    "ul", "li", "details", "summary"}  # fmt: skip
    assert not {name for element in root.iter() for name in element.attrib} - {"class", "data-label"}
    for grid in root.iter("table"):
        names = [cell.text for cell in grid.iter("th")]
        for row in grid.iter("tr"):
            assert [cell.get("data-label") for cell in row.iter("td")] in ([], names), "named where a row is a card"
    assert "url(" not in text
    assert "@import" not in text
    first = root.find(".//tbody")
    assert [line.find("td").text for line in first] == [r.variant for r in result.rows]
    for grid in root.iter("table"):
        assert len({len(line) for line in grid.iter("tr")}) == 1


def test_a_report_shows_the_columns_that_are_drawn_and_folds_the_others():
    observations = [cell(name, seed, 1.0 + seed, sparsity=0.1 * seed) for name in ("lazy", "b") for seed in range(3)]

    def heads_of(columns, **more):
        _, numbers = render_html_parts(table(rows("lazy", "b"), observations, columns, **more))
        root = ElementTree.fromstring(numbers)
        folded = {head for fold in root.iter("details") for head in fold.iter("thead")}
        return [
            ([cell.text for cell in head.iter("th")], head in folded)
            for head in root.iter("thead")
            if not head.find(".//th[2]").text.startswith("Δ")
        ]

    whole = ["Variant", "Source", "n", "loss (nats) ↓", "sparsity (%)"]
    assert heads_of((LOSS, SPARSITY), primary=("loss",)) == [(["Variant", "n", "loss (nats) ↓"], False), (whole, True)]
    assert heads_of((LOSS, SPARSITY)) == [(whole, False)], "nothing says which are the few"
    assert heads_of((LOSS,), primary=("loss",)) == [(whole[:-1], False)], "all are few"


def test_the_formats_show_the_same_cells():
    result = seventeen()
    root = ElementTree.fromstring(render_html(result))
    first = root.find(".//table")
    shown = [["".join(c.itertext()) for c in line] for line in first.iter("tr")]
    grids = [g for g in markdown_grids(render_markdown(result)) if g[0][0] == "Variant" and not g[0][1].startswith("Δ")]
    joined = [sum((g[i][1:] for g in grids[1:]), grids[0][i]) for i in range(len(grids[0])) if i != 1]
    assert shown == joined


def test_the_environment_is_named_and_mixed_ones_are_told():
    made = [replace(cell("lazy", seed, 1.0 + seed), environment="torch 2.13.0") for seed in range(2)]
    assert "With torch 2.13.0." in render_markdown(table(rows("lazy", seeds=range(2)), made))
    mixed = [made[0], replace(made[1], environment="torch 2.14.0")]
    assert "With mixed: torch 2.13.0, torch 2.14.0." in render_markdown(table(rows("lazy", seeds=range(2)), mixed))


@pytest.mark.parametrize(("name", "there"), [("rivals-backcopy", False), ("table2-backcopy", True)])
def test_a_column_that_the_baseline_has_no_value_in_is_not_compared(name: str, there: bool) -> None:
    """Softmax has no sparsity, Lazy Attention does."""
    kept = Path(__file__).parents[2] / "docs" / "results" / name / "table.json"
    compared = read_table(kept).compared
    assert ("sparsity/zero" in compared) == there
    assert "loss/excess" in compared


EXCESS = Column("loss/excess", "excess loss", "lower", 4, "nats", plotted=True)
SINK = Column("sink", "sink", "lower", plotted=True)


def test_rows_that_are_one_training_are_named_as_such():
    """Whatever the reason, such as a setting that has no effect: a tie alone could be chance."""
    losses = {"lazy": (0.5, 0.25), "twin": (0.5, 0.25), "near": (0.5, 0.25 + 2**-54), "third": (None, 0.25)}
    seen = [
        Observation(name, seed, "complete", {"loss/excess": value, "sink": 0.1})
        for name, values in losses.items()
        for seed, value in enumerate(values)
        if value is not None
    ]
    sink = Column("sink", "sink", None)
    result = table(rows(*losses, "absent", seeds=(0, 1)), seen, (EXCESS, sink))
    assert result.find_twins() == [["lazy", "twin", "third"]]
    said = (
        "The same losses, to the last bit, in every seed: lazy, twin, third. What differs between them has no effect."
    )
    assert said in " ".join(render_text(result, Path("table.md")).split())
    assert said in render_markdown(result)
    assert not table(rows("lazy", "b"), cells("lazy", 1.0) + cells("b", 1.0), (sink, LOSS)).find_twins()


def weighed(yardstick=Yardstick("loss/excess", 0.349, {"optimum": 0.0, "chance": 0.698})):  # noqa: B008
    """Of a baseline, a row that learned, and one that did not in 4 of 5 cells and has no sink."""
    losses = {"lazy": [0.01] * 5, "good": [0.02] * 5, "dead": [0.6, 0.7, 0.65, 0.3, 0.69]}
    sinks, noise = {"lazy": 0.4, "good": 0.2, "dead": 0.1}, np.random.default_rng(0).normal
    seen = [
        Observation(
            name, seed, "complete", {"loss/excess": loss + 1e-4 * noise(), "sink": sinks[name] + 1e-3 * noise()}
        )
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    return table(rows(*losses, seeds=range(5)), seen, (EXCESS, SINK), yardstick=yardstick)


def test_a_row_that_did_not_learn_says_so_first_and_wins_nothing():
    result = weighed()
    assert result.unlearned == {"dead": "4 of 5"}
    dead, loss, sink = describe_findings(result)
    assert dead == "Did not learn the task (in so many cells): dead (4 of 5). Only their loss says anything."
    assert "worse: good, dead" in loss
    assert "better: good." in sink, "its missing sink is no merit"
    assert "dead" not in sink
    header, *_, last = markdown_grids(render_markdown(result))[0]
    assert (header[:2], last[:2]) == (["Variant", "State"], ["dead", "did not learn (4 of 5)"])
    assert [cell[-1] == "*" for cell in last[4:]] == [True, False]
    for text in (render_markdown(result), render_latex(result), render_html(result), *render_html_parts(result)[1:]):
        assert "did not learn (4 of 5)" in text
        assert (
            "xcess loss: optimum 0.000, chance 0.698 nats (the best predictor without attention); learned below 0.349."
            in text
        )
    lines = list(csv.DictReader(io.StringIO(result.to_csv())))
    assert {line["variant"]: line["state"] for line in lines} == {
        "lazy": "",
        "good": "",
        "dead": "did not learn (4 of 5)",
    }
    assert "sink: separates 2 of 2 rows from lazy (Holm p < 0.05); better: good; did not learn the task: dead" in (
        render_markdown(result)
    )


def test_many_rows_that_did_not_learn_are_counted_and_marked_in_the_table():
    names = [f"dead {index}" for index in range(20)]
    losses = {"lazy": 0.1} | dict.fromkeys(names, 0.5)
    seen = [
        Observation(name, seed, "complete", {"loss/excess": loss}) for name, loss in losses.items() for seed in (0, 1)
    ]
    result = table(rows("lazy", *names, seeds=range(2)), seen, (EXCESS,), yardstick=weighed().yardstick)
    (said,) = describe_unlearned(result)
    assert said.count(" (2 of 2)") == 12
    assert "dead 11 (2 of 2) and 8 others. Only" in said
    assert render_markdown(result).count("did not learn (2 of 2)") == 20


def test_a_command_prints_the_first_rows_and_where_the_others_are(tmp_path):
    names = [f"row {index}" for index in range(2000)]
    seen = [Observation(name, 0, "complete", {"loss/excess": 0.5}) for name in ("lazy", *names)]
    result = table(rows("lazy", *names, seeds=range(2)), seen, (EXCESS,))
    whole = tmp_path / "table.md"
    text = render_text(result, whole)
    assert f"1,941 more rows are in {whole}." in text
    assert f"1,941 more lines are in {whole}." in text, "cells without a result"
    assert "\nrow 58 " in text
    assert "\nrow 60 " not in text
    assert text.count("\n") < 250
    assert len(markdown_grids(render_markdown(result))[0]) == 2003
    assert "more rows" in render_summary(result, whole)
    assert "more rows" not in render_text(weighed(), whole)


def test_which_rows_did_not_learn_is_determined_once_per_table(monkeypatch):
    """Each value of a row asks: determined each time, 2,500 rows took minutes."""
    asked, find_failures = [], Table.find_failures
    monkeypatch.setattr(Table, "find_failures", lambda self: asked.append(self) or find_failures(self))
    result = weighed()
    for render in (render_markdown, render_latex, render_html, Table.to_csv):
        render(result)
    assert len(asked) == 1


def test_a_table_without_a_yardstick_knows_nothing_of_learning():
    result = weighed(yardstick=None)
    assert "better: good, dead" in describe_findings(result)[1]
    for text in (render_markdown(result), render_latex(result), render_html(result), result.to_csv()):
        assert "learn" not in text
        assert "tate" not in text.replace("restated", "")


def test_a_baseline_that_did_not_learn_is_named_too():
    assert "dead (4 of 5)" in describe_findings(replace(weighed(), baseline="dead"))[0]


def test_one_sentence_says_that_no_row_learned():
    result = weighed(Yardstick("loss/excess", 0.001, {"optimum": 0.0}))
    assert list(result.unlearned) == ["lazy", "good", "dead"]
    none, *rest = describe_findings(result)
    assert none == "No row learned the task. Only the losses say anything."
    assert [sentence.partition(" ")[0] for sentence in rest] == ["Excess"], "nothing is left to say of the sink"


def test_an_interval_ends_at_the_bounds_of_its_metric():
    share = Column("share", "share", digits=1, unit="%", scale=100, bounds=(0.0, 1.0))
    values = {"lazy": [0.4, 0.5, 0.6], "top": [1.0, 0.99, 1.0], "low": [0.0, 0.001, 0.01]}
    seen = [
        Observation(name, seed, "complete", {"share": v}) for name, row in values.items() for seed, v in enumerate(row)
    ]
    text = render_text(table(rows(*values), seen, (share,)), Path("table.md"))
    assert re.search(r"^lazy .* 50\.0 ±24\.8$", text, re.M)
    assert re.search(r"^top .* 99\.7 \[98\.2, 100\.0\]\*$", text, re.M)
    assert re.search(r"^low .* 0\.4 \[0\.0, 1\.7\]\*$", text, re.M)


def test_a_bound_that_a_value_exceeds_cuts_no_interval() -> None:
    mass = Column("mass", "mass", bounds=(0.0, 1.0))
    values = {
        "lazy": [0.9, 0.99, 1.0 + 1e-7],  # the rounding of a float32 sum is within the bound
        "tau below 0": [1.1, 1.2, 1.25],
        "own rule": [0.8, 0.9, 1.0115],
        "signed": [-0.02, 0.1, 0.05],
    }
    seen = [
        Observation(name, seed, "complete", {"mass": v}) for name, row in values.items() for seed, v in enumerate(row)
    ]
    text = render_text(table(rows(*values), seen, (mass,)), Path("table.md"))
    assert re.search(r"^lazy .* 0\.963 \[0\.827, 1\.000\]$", text, re.M)
    assert re.search(r"^tau below 0 .* 1\.183 ±0\.190\*$", text, re.M)
    assert re.search(r"^own rule .* 0\.904 ±0\.263$", text, re.M)
    assert re.search(r"^signed .* 0\.043 ±0\.150\*$", text, re.M)


def test_a_terminal_gets_text_without_markup():
    text = render_text(hostile(), Path("table.md"), width=100)
    assert "\\|" not in text
    assert "\\_" not in text
    assert not re.search(r"^(#|\||>)", text, re.M)
    assert max(map(len, text.splitlines())) <= 100


LEGEND = "p is adjusted for the number of comparisons (Holm), the 95 % interval after ± is not. * p < 0.05."


def test_a_summary_has_the_finding_and_the_primary_column():
    text = render_summary(weighed(), Path("table.md"))
    finding, grid = text.split("\n\nVariant")
    assert finding.startswith("Did not learn the task (in so many cells): dead (4 of 5).")
    header, *lines, space, legend = f"Variant{grid}".splitlines()
    assert (space, legend) == ("", LEGEND)
    assert re.split(r"  +", header) == ["Variant", "State", "n", "excess loss (nats) ↓", "Δ to lazy"]
    assert [line.split()[0] for line in lines] == ["lazy", "good", "dead"]
    assert re.split(r"  +", lines[0])[-1] == "baseline"
    assert re.search(r"\+0\.0099 ±0\.000\d, p<0\.001\*$", lines[1])


@pytest.mark.parametrize("seeds", [1, 5])
def test_a_summary_explains_p_where_it_shows_one(seeds: int) -> None:
    noise = np.random.default_rng(0).normal
    observations = [cell(name, s, 1 + 0.1 * noise()) for name in ("lazy", "b") for s in range(seeds)]
    text = render_summary(
        table(rows("lazy", "b", seeds=range(seeds)), observations, primary=("loss",)), Path("table.md")
    )
    assert ("p=" in text, "*" in text.replace(LEGEND, ""), LEGEND in text) == (seeds > 1, False, seeds > 1)


def test_a_summary_has_the_primary_outcome_s_contrasts_and_names_the_rest_exploratory():
    noise = np.random.default_rng(0).normal
    values = {"lazy": 1.0, "b": 2.0}
    observations = [
        cell(name, s, at + 0.1 * noise(), sparsity=0.1 * at + 0.01 * noise())
        for name, at in values.items()
        for s in range(5)
    ]
    columns = (replace(LOSS, plotted=True), replace(SPARSITY, plotted=True))
    contrasts = [Contrast("main effect", {"b": 1, "lazy": -1})]
    result = table(rows(*values, seeds=range(5)), observations, columns, primary=("loss",), contrasts=contrasts)
    text = render_summary(result, Path("table.md"))
    assert re.search(r"^Contrast +Δ loss", text, re.M)
    assert re.search(r"^main effect +\+[01]\.\d+ ±", text, re.M)
    loss, sparsity = describe_findings(result)
    assert loss.startswith("Loss against lazy (n = 5): ")
    assert sparsity.startswith("Sparsity (exploratory) against lazy (n = 5): ")


@pytest.mark.parametrize("ending", ["md", "csv", "tex", "json", "html"])
def test_a_damaged_or_lost_file_is_not_saved(ending: str, tmp_path: Path) -> None:
    save(weighed(), stem := tmp_path / "table")
    assert is_saved(weighed(), stem)
    file = stem.with_suffix(f".{ending}")
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert not is_saved(weighed(), stem)
    file.unlink()
    assert not is_saved(weighed(), stem)
    file.mkdir()
    assert not is_saved(weighed(), stem)


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
    table = parse_table(json.dumps(whole), "it")
    shown = [render_text(table, Path("all")), render_markdown(table), render_latex(table), render_html(table)]
    shown += [table.to_csv(), format_comparison(compare_tables(("a", "b"), (table, table), [], (None, None)))]
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
            table = parse_table(json.dumps(changed), "it")
            found = compare_tables(("a", "b"), (table, table), [], (None, None))
        except (ValueError, NewerFormatError):
            continue
        assert "\x1b" not in format_comparison(found), path
