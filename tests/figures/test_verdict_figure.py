"""The figure of a verdict shows exactly the declared contrasts, with the intervals that decided them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from legible import assert_legible
from matplotlib.axes import Axes
from scipy.stats import t

from lit_lazy.figures import verdict_figure
from lit_lazy.figures.canvas import BETTER, NEUTRAL, WORSE
from lit_lazy.table.records import Table

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COLOURS = {"supported": BETTER, "refuted": WORSE, "undecided": NEUTRAL}


def table_of(name: str) -> Table:
    return Table.from_json(json.loads((RESULTS / name / "table.json").read_text()))


def axes_of(table: Table) -> Axes:
    figure = verdict_figure(table)
    assert figure is not None
    assert_legible(figure)
    return figure.axes[0]


def points(axes: Axes) -> dict[int, tuple[float, str]]:
    """Value and colour by index of the line."""
    found = (line for line in axes.lines if line.get_marker() in ("o", "s"))
    return {int(line.get_ydata()[0]): (line.get_xdata()[0], line.get_color()) for line in found}


def intervals(axes: Axes) -> dict[int, list[float]]:
    drawn = (line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_ydata()[0] == line.get_ydata()[1])
    return {int(line.get_ydata()[0]): list(line.get_xdata()) for line in drawn}


@pytest.mark.parametrize("name", ["q_text-stdlib_small", "q_position-distractors", "q_length-stdlib_small"])
def test_differences_are_the_declared_contrasts_with_the_verdict_s_intervals(name: str) -> None:
    table = table_of(name)
    assert table.verdict is not None
    assert table.declaration is not None
    (column,) = (column for column in table.columns if column.key == table.declaration.primary)
    axes = axes_of(table)
    parts = table.verdict.parts
    assert [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()] == [part.name for part in parts]
    low, high = axes.get_xlim()
    for y, part in enumerate(parts):
        assert points(axes)[y] == (part.mean * column.scale, COLOURS[part.status])
        assert intervals(axes)[y] == [max(part.low * column.scale, low), min(part.high * column.scale, high)]
    title = " ".join(axes.figure.get_suptitle().split())
    assert title == f"{table.ablation} on {table.base}. {table.verdict.sentence}"
    (band,) = axes.patches
    margin = table.declaration.margin * column.scale
    extent = band.get_extents().transformed(axes.transData.inverted())
    np.testing.assert_allclose(extent.intervalx, [max(-margin, low), min(margin, high)], rtol=1e-6)


def test_a_rule_on_what_is_left_shows_each_row_beside_its_bounds() -> None:
    table = table_of("q_mask-backcopy")
    assert table.declaration is not None
    axes = axes_of(table)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[:4] == ["BOS at 1: undecided", "elastic at 1", "softmax at 1", "BOS at 2: undecided"]
    assert labels[6:9] == ["BOS at 5: supported", "elastic at 5", "softmax at 5"]
    bold = [label.get_text() for label in axes.get_yticklabels() if label.get_fontweight() == "bold"]
    assert bold == [f"elastic at {k}" for k in (1, 2, 5, 9)]
    values = {row.variant: list(row.metrics[table.declaration.primary].values.values()) for row in table.rows}
    shown = intervals(axes)
    for name in ("softmax at 2", "softmax at 5"):
        y, seen = labels.index(name), values[name]
        half = t.isf(0.05 / 4 / 2, 4) * np.std(seen, ddof=1) / 5**0.5  # four simultaneous contrasts
        np.testing.assert_allclose(shown[y], np.mean(seen) + half * np.array([-1, 1]), rtol=1e-6)
    there = {labels[y]: colour for y, (_, colour) in points(axes).items()}
    assert (there["elastic at 5"], there["softmax at 5"], there["softmax at 1"]) == (BETTER, WORSE, NEUTRAL)
    bounds = {line.get_xdata()[0] for line in axes.lines if line.get_linestyle() in ("--", ":")}
    assert bounds == {0.1, 0.3}


def test_the_rivals_that_refute_a_claim_are_in_it() -> None:
    axes = axes_of(table_of("q_sink-backcopy"))
    labels = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
    start = labels.index("alone among its rivals, RoPE std 0.02: refuted")
    removed = {labels[y] for y, (_, colour) in points(axes).items() if y > start + 1 and colour == BETTER}
    rivals = ("sink logit", "softpick", "sigmoid", "clipped", "ReLU/n")
    assert removed == {f"{rival} RoPE std 0.02" for rival in rivals}


def test_every_contrast_is_in_the_panel_however_far_from_the_others() -> None:
    """A contrast beyond the edge would be an arrow without a value."""
    table = table_of("q_position-distractors")
    assert table.verdict is not None
    means = (0.009, 0.01, 0.6, 0.343)
    parts = [replace(p, mean=m, low=m - 0.01, high=m + 0.01) for p, m in zip(table.verdict.parts, means, strict=True)]
    axes = axes_of(replace(table, verdict=replace(table.verdict, parts=tuple(parts))))
    low, high = axes.get_xlim()
    assert sorted(x for x, _ in points(axes).values()) == pytest.approx(sorted(100 * m for m in means))
    assert low < 0.9
    assert high > 60


def test_there_is_none_without_a_verdict() -> None:
    assert verdict_figure(table_of("table2-backcopy")) is None
    assert verdict_figure(replace(table_of("q_mask-backcopy"), verdict=None)) is None
