"""The figure of a verdict shows exactly the declared contrasts, with the intervals that decided them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from legible import assert_legible
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from scipy.stats import beta, t

from lit_lazy.figures import verdict_figure
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.declaration import MOST_CONTRASTS, Comparison, Declaration, Statement
from lit_lazy.table.records import Column, Observation, RowInfo, Table
from lit_lazy.table.stored import read_table
from lit_lazy.table.verdicts import add_verdict

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def table_of(name: str) -> Table:
    return read_table(RESULTS / name / "table.json")


def axes_of(table: Table) -> Axes:
    figure = verdict_figure(table)
    assert figure is not None
    assert_legible(figure)
    return figure.axes[0]


def test_every_contrast_is_in_the_panel_however_far_from_the_others() -> None:
    """A contrast beyond the edge would be an arrow without a value."""
    table = table_of("q_position_2-distractors")
    assert table.verdict is not None
    means = (0.009, 0.01, 0.6, 0.343)
    parts = tuple(
        replace(part, mean=mean, low=mean - 0.01, high=mean + 0.01, n=10)
        for part, mean in zip(table.verdict.parts, means, strict=True)
    )
    look = replace(table.verdict.looks[0], parts=parts)
    axes = axes_of(replace(table, verdict=replace(table.verdict, parts=parts, looks=(look,))))
    low, high = axes.get_xlim()
    assert sorted(x for x, _ in points_of(axes)) == pytest.approx(sorted(100 * m for m in means))
    assert low < 0.9
    assert high > 60


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name", ["q_cost_2-stdlib_long", "q_mask_2-backcopy", "q_text_2-stdlib_small", "q_sink_2-backcopy"]
)
def test_a_figure_of_one_contrast_is_legible(name: str) -> None:
    table = table_of(name)
    assert table.verdict is not None
    looks = tuple(replace(look, parts=look.parts[:1]) for look in table.verdict.looks)
    assert axes_of(replace(table, verdict=replace(table.verdict, parts=table.verdict.parts[:1], looks=looks)))


@pytest.mark.filterwarnings("error")
def test_a_figure_of_as_many_contrasts_as_a_question_may_have_is_legible() -> None:
    rows = {"old": [1.0] * 80} | {f"new, {i} times as far{' and so on' * 9}": around(0.9, 0.5, 80) for i in range(5)}
    table = sequential("lower", rows)
    assert table.declaration is not None
    assert len(table.declaration.contrasts) == MOST_CONTRASTS
    assert len(axes_of(table).get_yticklabels()) == MOST_CONTRASTS


def test_there_is_none_without_a_verdict() -> None:
    assert verdict_figure(table_of("table2-backcopy")) is None
    assert verdict_figure(replace(table_of("q_mask_2-backcopy"), verdict=None)) is None


def sequential(rule: str, rows: dict[str, list[float]], **changes: object) -> Table:
    """A question with looks at 10, 20, 40 and 80 seeds, on rows that may stop early; `new ...` against `old`."""
    contrasts = {name: {name: 1.0, "old": -1.0} for name in rows if name.startswith("new")}
    looks = {"looks": (10, 20, 40, 80), "commit": "abc"}
    declared = Declaration(
        "New is so.",
        "R5",
        "loss",
        rule=rule,
        margin=0.1,
        seeds=tuple(range(80)),
        **looks | {"contrasts": contrasts, **changes},
    )
    cells = [
        Observation(name, seed, "complete", {"loss": value}) for name in rows for seed, value in enumerate(rows[name])
    ]
    infos = [RowInfo(name, "ours", tuple(range(len(values))), "base") for name, values in rows.items()]
    loss = Column("loss", "loss", "lower", 3, "nats", scale=1)
    return add_verdict(build_table(TableSpec("q", "base", "old", infos, [loss], [], "make"), cells), declared)


def around(mean: float, sd: float, n: int) -> list[float]:
    x = np.tile([-1.0, 1.0], n // 2)
    return (mean + sd * x / x.std(ddof=1)).tolist()


def test_every_look_is_drawn_up_to_the_one_that_decides_over_the_regions_of_the_rule() -> None:
    """Thin lines are the intervals of refutation, t(n - 1) at 0.025 w / K, thick ones of support, at 0.025 w."""
    rows = {"old": [1.0] * 40, "new a": around(0.5, 0.1, 10), "new b": around(0.92, 0.2, 40)}
    axes = axes_of(sequential("lower", rows))
    assert [text.get_text() for text in axes.texts] == ["n = 10", "n = 10", "n = 20", "n = 40"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["new a: lower", "new b: neither shown"]
    lines = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_ydata()[0] == line.get_ydata()[1]]
    thin, thick = ([line for line in lines if (line.get_linewidth() > 2) == wide] for wide in (False, True))
    expected = [("new a", 10), ("new b", 10), ("new b", 20), ("new b", 40)]
    for drawn, parts in ((thin, 2), (thick, 1)):
        for line, (name, n) in zip(drawn, expected, strict=True):
            sample = np.array(rows[name][:n]) - 1
            weight = {10: 1 / 8, 20: 1 / 8, 40: 1 / 4}[n]
            half = t.isf(0.025 * weight / parts, n - 1) * sample.std(ddof=1) / n**0.5
            ends = np.clip(sample.mean() + half * np.array([-1, 1]), *axes.get_xlim())
            np.testing.assert_allclose(line.get_xdata(), ends, rtol=1e-6)
    depth = [np.mean(to_rgb(line.get_color())) for line in thin]
    assert depth[1] > depth[2] > depth[3], "earlier looks are fainter"
    support, refute = (patch.get_extents().transformed(axes.transData.inverted()).intervalx for patch in axes.patches)
    low, high = axes.get_xlim()
    np.testing.assert_allclose(support, [low, 0], atol=1e-9)
    np.testing.assert_allclose(refute, [-0.1, high], atol=1e-9)


@pytest.mark.parametrize(
    ("rule", "edges"),
    [("higher", {0.0, 0.1}), ("same", {-0.1, -0.05, 0.05, 0.1}), ("no_worse", {0.0, 0.1}), ("removed", set())],
)
def test_each_rule_has_its_regions(rule: str, edges: set[float]) -> None:
    axes = axes_of(sequential(rule, {"old": [1.0] * 20, "new a": around(0.93, 0.5, 20)}))
    drawn = {line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--" or line.get_linewidth() == 1}
    assert drawn == edges
    texts = [text.get_text() for legend in axes.figure.legends for text in legend.get_texts()]
    assert any(text.startswith("supported:") for text in texts) == bool(edges)
    assert ("where both overlap neither is wrong" in texts) == bool(edges)


def test_a_statement_shows_the_share_of_its_seeds_against_a_half_and_three_quarters() -> None:
    statement = Statement("sink", Comparison("new", "<", 0.25, "old"), rivals=("kept",))
    rows = {"old": [0.4] * 20, "new": [0.01] * 9 + [0.3] + [0.01] * 10, "kept": [0.4] * 20}
    parts = {"statements": (statement,), "contrasts": {"sink": statement.weights}}
    table = sequential("alone", rows, **parts)
    assert table.verdict is not None
    assert [look.parts[0].mean for look in table.verdict.looks] == [0.9, 0.95]
    axes = axes_of(table)
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [0.5, 0.75]
    assert sorted({x for x, _ in points_of(axes)}) == [0.9, 0.95]
    lows = [line.get_xdata()[0] for line in axes.lines if line.get_linewidth() == 1.2]
    met = {10: 9, 20: 19}
    np.testing.assert_allclose(lows, [beta.ppf(0.025 / 8, met[n], n - met[n] + 1) for n in met], rtol=1e-6)
    (label,) = axes.get_yticklabels()
    assert label.get_text().replace("\n", " ") == "sink: met in 19 of 20 seeds, by its rivals in 0"
    texts = [text.get_text() for legend in axes.figure.legends for text in legend.get_texts()]
    assert "where both overlap neither is wrong" in texts


def points_of(axes: Axes) -> list[tuple[float, str]]:
    return [(line.get_xdata()[0], line.get_color()) for line in axes.lines if line.get_marker() in ("o", "s")]
