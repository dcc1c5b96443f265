"""The forest plot shows the table's numbers, and is legible with any number of rows."""

import subprocess
import sys

import pytest
from legible import assert_legible
from matplotlib.axes import Axes
from samples import EFFECT_COLUMNS, make_effects, tabulate
from test_drawn import unlearned

from lit_lazy.figures import effects_figure, palette, parameter_over_training
from lit_lazy.figures.canvas import DPI
from lit_lazy.figures.effects import compute_limits
from lit_lazy.table.records import Column

WEBP_LIMIT = 16383
"""Pixels of a side."""


def points(axes):
    """(y, x, filled) of every plotted row."""
    drawn = [line for line in axes.lines if line.get_marker() in ("o", "s")]
    return {int(line.get_ydata()[0]): (line.get_xdata()[0], line.get_markerfacecolor() != "white") for line in drawn}


def test_points_intervals_and_fill_are_the_tables():
    table = make_effects(n_seeds=2)
    figure = effects_figure(table, ["recall", "loss"])
    cut = set()
    for axes, column in zip(figure.axes, (EFFECT_COLUMNS[1], EFFECT_COLUMNS[0]), strict=True):
        effects = [row.metrics[column.key].difference for row in table.rows]
        expected = {y: (e.mean * column.scale, e.separated) for y, e in enumerate(effects) if e.mean is not None}
        assert points(axes) == expected
        bars = {int(line.get_ydata()[0]): line.get_xdata() for line in axes.lines if line.get_linewidth() == 1.6}
        low, high = axes.get_xlim()
        beyond = set()
        for y, (x, _) in expected.items():
            half = effects[y].ci95 * column.scale
            assert tuple(bars[y]) == (max(x - half, low), min(x + half, high))
            beyond |= {
                (y, m, edge) for m, edge, out in (("<", low, x - half < low), (">", high, x + half > high)) if out
            }
        arrows = [line for line in axes.lines if line.get_marker() in ("<", ">")]
        assert {(int(a.get_ydata()[0]), a.get_marker(), a.get_xdata()[0]) for a in arrows} == beyond
        cut |= beyond
    assert cut
    worse = {int(line.get_ydata()[0]) for line in figure.axes[1].lines if line.get_marker() == "s"}
    losses = [row.metrics["loss"].difference for row in table.rows]
    assert worse == {y for y, e in enumerate(losses) if e.separated and e.mean > 0}, "told apart in grey too"


def test_intervals_are_whole_where_most_would_be_cut():
    points, half = (-0.01, 0.02, 0.03), 0.08
    wide = [(x, x - half, x + half) for x in points]
    low, high = compute_limits([*wide, (0.0, -9.0, 9.0)])
    assert all(low < left < right < high for _, left, right in wide)
    assert -1 < low < high < 1, "one that is far longer than the others is cut"


@pytest.mark.parametrize(
    ("others", "far"),
    [
        ((0.1, 0.2, -0.3), (9.0,)),
        ((0.3, 0.2) * 6, (9.0, 80.0, 700.0)),  # a fifth, as for the rivals, each within ten times the next
        ((0.1, 0.2, 9.0, 12.0), ()),
        ((*(1e-16,) * 10, 0.5, 0.6), ()),  # rounding errors set no scale
        ((*(0.3, 0.2) * 4, 9.0, 80.0, 700.0), ()),  # too many to be outliers
        ((0.0, 0.0, 0.0, 9.0), ()),  # no scale to compare with
    ],
)
def test_few_rows_that_are_far_off_do_not_flatten_the_others(others, far):
    low, high = compute_limits([(point, point - 0.1, point + 0.1) for point in (*others, *far)])
    assert all(low < point < high for point in others)
    assert not any(low < point < high for point in far)


@pytest.mark.parametrize("keys", [["loss"], ["loss", "recall", "sparsity"]])
def test_no_text_overlaps_or_leaves_the_figure(keys):
    assert_legible(effects_figure(make_effects(warnings=("Undertrained: the loss still falls. " * 4,)), keys))
    assert_legible(effects_figure(unlearned(), keys))


def many(better, count):
    """A table of rows that have their number as loss, the baseline "lazy" and one without a cell; histories of all."""
    names = ["lazy", *map(str, range(1, count))]
    losses = {"unfinished": [{"status": "waiting"}]} | {name: [{"loss": float(i)}] for i, name in enumerate(names)}
    histories = {name: [{"watch/tau_layer_0": [(0, 0.0), (1, 1.0)]}] for name in names}
    return tabulate(losses, [Column("loss", "loss", better)], "lazy"), histories


@pytest.mark.parametrize(("better", "kept", "which"), [("lower", "1234", "lowest"), ("higher", "6789", "highest")])
def test_of_many_rows_the_baseline_and_the_best_are_shown(better, kept, which, monkeypatch):
    monkeypatch.setattr(palette, "MOST_ROWS", 5)
    table, histories = many(better, 10)
    effects, tau = effects_figure(table, ["loss"]), parameter_over_training(table, histories)
    assert tau is not None
    assert [label.get_text() for label in effects.axes[0].get_yticklabels()] == ["lazy", *kept]
    assert [axes.get_title() for axes in tau.axes if axes.axison] == ["lazy", *kept]
    for figure, count in ((effects, 11), (tau, 10)):
        said = f"; shown of {count}: the 5 with the {which} loss, baseline included"
        assert said in figure.get_suptitle().replace("\n", " ")
        assert_legible(figure)


def test_a_figure_of_any_number_of_rows_fits_into_an_image():
    table, _ = many("lower", 1000)
    assert effects_figure(table, ["loss"]).get_figheight() * DPI < WEBP_LIMIT


def test_the_panels_over_training_are_fitted_together(monkeypatch):
    """Fitted for each line, each time with all panels, 150 took half a minute."""
    fitted, set_bound = [], Axes.set_ybound
    monkeypatch.setattr(
        Axes, "set_ybound", lambda axes, *bound, **more: fitted.append(axes) or set_bound(axes, *bound, **more)
    )
    parameter_over_training(*many("lower", 10))
    assert len(fitted) <= 2


def test_unknown_columns_are_named():
    with pytest.raises(ValueError, match=r"columns: 'los' .* choose from loss, recall, sparsity"):
        effects_figure(make_effects(), ["los"])
    with pytest.raises(ValueError, match="columns: none given"):
        effects_figure(make_effects(), [])


def test_no_global_figure_state_and_no_heavy_import():
    code = "import sys, lit_lazy.figures; print({'matplotlib.pyplot', 'torch', 'mlflow', 'optuna'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
