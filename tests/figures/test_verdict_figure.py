"""The figure of a verdict shows exactly the declared contrasts, with the intervals that decided them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from legible import assert_legible
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from samples import around, make_question
from scipy.stats import beta, t
from test_drawn import LOOKS, OF_VERDICTS, far_apart

from lit_lazy.figures import verdict_figure
from lit_lazy.table.declaration import MOST_CONTRASTS
from lit_lazy.table.records import Table
from lit_lazy.table.stored import read_table

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def table_of(name: str) -> Table:
    return read_table(RESULTS / name / "table.json")


def first_contrast(name: str) -> Table:
    table = table_of(name)
    assert table.verdict is not None
    looks = tuple(replace(look, parts=look.parts[:1]) for look in table.verdict.looks)
    return replace(table, verdict=replace(table.verdict, parts=table.verdict.parts[:1], looks=looks))


def most_contrasts() -> Table:
    names = [f"new, {i} times as far{' and so on' * 9}" for i in range(MOST_CONTRASTS)]
    return make_question("lower", {"old": [1.0] * 80} | {name: around(0.9, 0.5, 80) for name in names})


def axes_of(table: Table) -> Axes:
    figure = verdict_figure(table)
    assert figure is not None
    return figure.axes[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make",
    [
        *OF_VERDICTS.values(),
        most_contrasts,
        *(
            lambda name=name: first_contrast(name)
            for name in ("q_cost_2-stdlib_long", "q_mask_2-backcopy", "q_text_2-stdlib_small", "q_sink_2-backcopy")
        ),
    ],
)
def test_every_contrast_has_a_row_inside_the_panel_and_is_legible(make) -> None:
    table = make()
    axes = axes_of(table)
    assert_legible(axes.figure)
    assert len(axes.get_yticklabels()) == len(table.verdict.parts)


def test_a_contrast_far_from_the_others_is_inside_the_panel() -> None:
    low, high = axes_of(far_apart()).get_xlim()
    assert low < 0.9
    assert high > 60


def test_there_is_none_without_a_verdict() -> None:
    assert verdict_figure(table_of("table2-backcopy")) is None
    assert verdict_figure(replace(table_of("q_mask_2-backcopy"), verdict=None)) is None


def test_every_look_is_drawn_up_to_the_one_that_decides_over_the_regions_of_the_rule() -> None:
    """Thin lines are the intervals of refutation, t(n - 1) at 0.025 w / K, thick ones of support, at 0.025 w."""
    axes = axes_of(make_question("lower", LOOKS))
    lines = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_ydata()[0] == line.get_ydata()[1]]
    thin, thick = ([line for line in lines if (line.get_linewidth() > 2) == wide] for wide in (False, True))
    expected = [("new a", 10), ("new b", 10), ("new b", 20), ("new b", 40)]
    for drawn, parts in ((thin, 2), (thick, 1)):
        for line, (name, n) in zip(drawn, expected, strict=True):
            sample = np.array(LOOKS[name][:n]) - 1
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


def test_a_statement_shows_the_share_of_its_seeds_with_its_lower_bounds() -> None:
    axes = axes_of(OF_VERDICTS["a statement"]())
    lows = [line.get_xdata()[0] for line in axes.lines if line.get_linewidth() == 1.2]
    met = {10: 9, 20: 19}
    np.testing.assert_allclose(lows, [beta.ppf(0.025 / 8, met[n], n - met[n] + 1) for n in met], rtol=1e-6)
