"""The forest plot shows the table's numbers, is legible with 17 rows, and has deterministic bytes."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from legible import assert_legible
from matplotlib.axes import Axes

from lit_lazy.figures import effects_figure, save_figure, selection, tau_over_training
from lit_lazy.figures.effects import UNLEARNED, compute_limits
from lit_lazy.figures.images import DPI
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.records import Column, Observation, RowInfo, Yardstick

WEBP_LIMIT = 16383
"""Pixels of a side."""
NAMES = ["lazy", *(f"a-rather-long-variant-{i:02d}" for i in range(1, 17))]
COLUMNS = (
    Column("loss", "validation loss", "lower", unit="nats"),
    Column("recall", "recall", "higher", digits=1, unit="%", scale=100),
    Column("sparsity", "sparsity"),
)


def make(n_seeds=5, warnings=()):
    rng = np.random.default_rng(0)
    common = rng.normal(size=(n_seeds, 3))
    observations = []
    for i, name in enumerate(NAMES):
        for seed in range(n_seeds):
            loss, recall, sparsity = (common[seed] + 0.5 * (i % 3 - 1) * (i > 0) + 0.1 * rng.normal(size=3)).tolist()
            metrics = {"loss": loss, "recall": recall, "sparsity": None if i == 2 else sparsity}
            status = "failed" if i == 4 else "complete"
            observations.append(Observation(name, seed, status, metrics))
    rows = [RowInfo(name, "ours", tuple(range(n_seeds)), "tiny") for name in NAMES]
    return build_table(TableSpec("study", "tiny", "lazy", rows, COLUMNS, (), "make", warnings=warnings), observations)


def points(axes):
    """(y, x, filled) of every plotted row."""
    drawn = [line for line in axes.lines if line.get_marker() in ("o", "s")]
    return {int(line.get_ydata()[0]): (line.get_xdata()[0], line.get_markerfacecolor() != "white") for line in drawn}


def test_points_intervals_and_fill_are_the_tables():
    table = make()
    figure = effects_figure(table, ["recall", "loss"])
    assert [axes.get_title() for axes in figure.axes] == ["recall (n = 5)", "validation loss (n = 5)"]
    for axes, column in zip(figure.axes, (COLUMNS[1], COLUMNS[0]), strict=True):
        effects = [row.metrics[column.key].difference for row in table.rows]
        expected = {y: (e.mean * column.scale, e.separated) for y, e in enumerate(effects) if e.mean is not None}
        assert points(axes) == expected
        assert {filled for _, filled in expected.values()} == {True, False}
        bars = {int(line.get_ydata()[0]): line.get_xdata() for line in axes.lines if line.get_linewidth() == 1.6}
        low, high = axes.get_xlim()
        for y, (x, _) in expected.items():
            half = effects[y].ci95 * column.scale
            assert tuple(bars[y]) == (max(x - half, low), min(x + half, high))
    worse = {int(line.get_ydata()[0]) for line in figure.axes[1].lines if line.get_marker() == "s"}
    losses = [row.metrics["loss"].difference for row in table.rows]
    assert worse == {y for y, e in enumerate(losses) if e.separated and e.mean > 0}, "told apart in grey too"
    assert "(nats)" in figure.axes[1].get_xlabel()
    assert "← better" in figure.axes[1].get_xlabel()
    assert "better →" in figure.axes[0].get_xlabel()


def test_rows_without_a_difference_say_why():
    axes = effects_figure(make(), ["sparsity"]).axes[0]
    assert {int(text.xy[1]): text.get_text() for text in axes.texts} == {0: "baseline", 2: "not defined", 4: "failed"}
    assert not {0, 2, 4} & set(points(axes))


def test_a_row_that_did_not_learn_is_a_grey_cross_and_sets_no_limits():
    table = make()
    dead = NAMES[3]
    measures = table.collect_measures("loss")
    others = {name: max(m.values.values()) for name, m in measures.items() if m.n and name != dead}
    bound = max(others.values()) + 1
    rows = [
        replace(row, metrics=row.metrics | {"loss": replace(measures[dead], values=dict.fromkeys("01234", bound))})
        if row.variant == dead
        else row
        for row in table.rows
    ]
    weighed = replace(table, rows=tuple(rows), yardstick=Yardstick("loss", bound, {"chance": 2 * bound}))
    assert weighed.unlearned == {dead: "5 of 5"}
    figure = effects_figure(weighed, ["loss", "recall"])
    assert_legible(figure)
    for axes in figure.axes:
        (cross,) = (line for line in axes.lines if line.get_color() == UNLEARNED and line.get_marker() != "None")
        assert cross.get_ydata()[0] == 3
        assert 3 not in points(axes)
    label = figure.axes[0].get_yticklabels()[3]
    assert (label.get_text(), label.get_color()) == (dead, UNLEARNED)
    (legend,) = figure.legends
    assert legend.get_texts()[-1].get_text() == "did not learn the task"


def test_where_no_row_learned_the_limits_are_those_of_all():
    table = make()
    dead = replace(table, yardstick=Yardstick("loss", -1e9, {"chance": 0.0}))
    assert {*dead.unlearned} == {row.variant for row in table.rows if row.metrics["loss"].n}
    for axes, before in zip(*(effects_figure(of, ["loss", "recall"]).axes for of in (dead, table)), strict=True):
        assert axes.get_xlim() == before.get_xlim()
        assert {line.get_marker() for line in axes.lines} & {"X"}


def test_the_baseline_is_on_top_and_what_has_no_spread_has_a_range():
    values = {"a": (1.0, 1.0, 1.0), "b": (2.0, 2.5, 3.0), "base": (0.5, 0.7, 1.0)}
    seen = [Observation(name, seed, "complete", {"loss": x}) for name in values for seed, x in enumerate(values[name])]
    rows = [RowInfo(name, "ours", (0, 1, 2), "tiny") for name in values]
    spec = TableSpec("study", "tiny", "base", rows, COLUMNS[:1], (), "make")
    axes = effects_figure(build_table(spec, seen), ["loss"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["base", "a", "b"]
    (ranged,) = (line for line in axes.lines if line.get_linestyle() == ":")
    assert list(ranged.get_ydata()) == [1, 1]
    assert list(ranged.get_xdata()) == pytest.approx([0.0, 0.5])


def test_wide_intervals_are_cut_with_an_arrow():
    axes = effects_figure(make(n_seeds=2), ["loss"]).axes[0]
    table = make(n_seeds=2)
    low, high = axes.get_xlim()
    beyond = {
        (y, marker, edge)
        for y, e in enumerate(row.metrics["loss"].difference for row in table.rows)
        if e.mean is not None
        for marker, edge, cut in (("<", low, e.mean - e.ci95 < low), (">", high, e.mean + e.ci95 > high))
        if cut
    }
    arrows = [line for line in axes.lines if line.get_marker() in ("<", ">")]
    assert {(int(a.get_ydata()[0]), a.get_marker(), a.get_xdata()[0]) for a in arrows} == beyond
    assert beyond


def test_a_wide_range_is_cut_with_an_arrow_too():
    values = {"base": (0.0, 0.0, 0.0), "a": (1.0, 1.1, 1.2), "b": (0.2, 0.3, 9.0)}
    seen = [Observation(name, seed, "complete", {"loss": x}) for name in values for seed, x in enumerate(values[name])]
    rows = [RowInfo(name, "ours", (0, 1, 2), "tiny") for name in values]
    spec = TableSpec("study", "tiny", "base", rows, COLUMNS[:1], (), "make")
    axes = effects_figure(build_table(spec, seen), ["loss"]).axes[0]
    low, high = axes.get_xlim()
    assert high < 9
    assert low > -0.5, "nothing reaches to the left of 0"
    (arrow,) = (line for line in axes.lines if line.get_marker() in ("<", ">"))
    assert (arrow.get_marker(), arrow.get_xdata()[0], arrow.get_ydata()[0]) == (">", high, 2)


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
    assert_legible(effects_figure(make(warnings=("Undertrained: the loss still falls. " * 4,)), keys))


def many(better, count):
    """A table of rows that have their number as loss, the baseline "lazy" and one without a cell; histories of all."""
    names = ["lazy", *map(str, range(1, count))]
    observations = [Observation(name, 0, "complete", {"loss": float(i)}) for i, name in enumerate(names)]
    rows = [RowInfo(name, "ours", (0,), "tiny") for name in ["unfinished", *names]]
    spec = TableSpec("study", "tiny", "lazy", rows, [Column("loss", "loss", better)], (), "make")
    histories = {name: [{"watch/tau_layer_0": [(0, 0.0), (1, 1.0)]}] for name in names}
    return build_table(spec, observations), histories


@pytest.mark.parametrize(("better", "kept", "which"), [("lower", "1234", "lowest"), ("higher", "6789", "highest")])
def test_of_many_rows_the_baseline_and_the_best_are_shown(better, kept, which, monkeypatch):
    monkeypatch.setattr(selection, "MOST_ROWS", 5)
    table, histories = many(better, 10)
    effects, tau = effects_figure(table, ["loss"]), tau_over_training(table, histories)
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
    tau_over_training(*many("lower", 10))
    assert len(fitted) <= 2


def test_files_are_written_alike(tmp_path):
    table = make()
    for name in ("a", "b"):
        save_figure(effects_figure(table, ["loss"]), tmp_path / name)
    png, svg = save_figure(effects_figure(table, ["loss"]), str(tmp_path / "v1.5"))
    assert (png.name, svg.name) == ("v1.5.png", "v1.5.svg")
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        content = (tmp_path / f"a{suffix}").read_bytes()
        assert content.startswith(start)
        assert content == (tmp_path / f"b{suffix}").read_bytes()
    assert b"<dc:date>" not in svg.read_bytes()


def test_unknown_columns_are_named():
    with pytest.raises(ValueError, match="columns: 'los' is not in the table; choose from loss, recall, sparsity"):
        effects_figure(make(), ["los"])
    with pytest.raises(ValueError, match="columns: none given"):
        effects_figure(make(), [])


def test_no_global_figure_state_and_no_heavy_import():
    code = "import sys, lit_lazy.figures; print({'matplotlib.pyplot', 'torch', 'mlflow', 'optuna'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
