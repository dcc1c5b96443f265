"""Figures of diagnostics and trainings: what is left out, colours, labels, bins, files, and text inside the canvas."""

import subprocess
import sys
import warnings
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from legible import assert_legible
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text
from samples import VARIANTS, make_arrays, make_study, make_trainings, tabulate
from test_drawn import RUN_FIGURES, draw_map, draw_run, make_map

from flash_lazy import Rows
from lit_lazy.attention import Elastic, LayerShape
from lit_lazy.figures import (
    draw_run_figures,
    loss_against_sparsity,
    parameter_over_training,
    save_figure,
    sink_over_training,
)
from lit_lazy.figures import heads as figures
from lit_lazy.figures.canvas import WIDTH, average_log_bins, use_style
from lit_lazy.figures.mechanism import mechanism_figure, weights
from lit_lazy.measure import head_metrics, row_statistics, sink_kinds
from lit_lazy.table.records import Column
from lit_lazy.table.stored import read_table

ROOT = Path(__file__).parents[2]


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def test_every_figure_of_a_run_is_there_and_small_enough_for_a_page():
    made = draw_run()
    assert list(made) == RUN_FIGURES
    assert all(figure.get_figwidth() <= WIDTH for figure in made.values())


def test_nothing_is_drawn_of_nothing():
    arrays = make_arrays()
    undefined = {k: np.full(v.shape, np.nan) if v.dtype.kind == "f" else v for k, v in arrays.items()}
    for name in RUN_FIGURES:
        assert getattr(figures, name)({}) is None
        assert getattr(figures, name)(undefined) is None
    softmax = {key: value for key, value in arrays.items() if not key.endswith("tau")}
    assert list(draw_run_figures(softmax, "x")) == [
        name for name in RUN_FIGURES if name not in ("tau_by_layer", "parameters_by_head")
    ]
    for columns, metrics in (
        ("loss/val sparsity/zero", {"loss/val": 1.0}),
        ("loss/val sparsity/zero", {"sparsity/zero": 0.5}),
        ("loss/val", {"loss/val": 1.0, "sparsity/zero": 0.5}),
    ):
        table = tabulate({"lazy": [metrics]}, [Column(key, key) for key in columns.split()])
        assert loss_against_sparsity(table) is None
    assert parameter_over_training(make_study(), {"softmax": [{"watch/first_key_weight": [(0, 0.1)]}]}) is None
    assert sink_over_training(make_study(), {"softmax": [{}], "lazy": []}) is None
    assert parameter_over_training(make_study(), {}) is None


def test_a_zero_weight_is_told_from_a_small_one_and_from_a_hidden_key():
    figure = drawn(draw_map(make_map(10, w52=0, w62=1e-7, w72=1e-4, w30=np.nan)))
    image = np.asarray(figure.axes[0].images[0].get_array())
    zero, hidden = to_rgba(figures.ZERO), to_rgba(figures.HIDDEN)
    assert tuple(image[5, 2]) == zero
    assert {tuple(image[3, 0]), *(tuple(image[i, j]) for i, j in combinations(range(10), 2))} == {hidden}
    assert len({zero, hidden, *(tuple(image[i, 2]) for i in (6, 7, 8))}) == 5
    # Neither is in the colour map, nor close to it.
    colours = mpl.colormaps["viridis"](np.linspace(0, 1, 256))
    for outside in (zero, hidden):
        assert np.abs(colours - outside).max(axis=1).min() > 0.25
    negative = np.asarray(drawn(draw_map(make_map(4, w30=-0.25, w20=-0.01))).axes[0].images[0].get_array())
    assert negative[3, 0, 0] > 2 * negative[3, 0, 2], "red"


def test_what_counts_as_small_and_as_a_sink_is_what_the_metrics_say():
    own = figures.SMALL_WEIGHT, figures.SINK_WEIGHT, figures.FIRST_KEYS
    assert own == (row_statistics.SMALL_WEIGHT, head_metrics.SINK_WEIGHT, row_statistics.FIRST_KEYS)
    bounds = figures.NO_OPERATION_RATIO, figures.BROADCAST_RATIO, figures.BROADCAST_RANK
    assert bounds == (sink_kinds.NO_OPERATION_RATIO, sink_kinds.BROADCAST_RATIO, sink_kinds.BROADCAST_RANK)


def test_long_lines_are_means_over_bins():
    x = np.arange(1, 1001)
    values = np.random.default_rng(0).random((2, 1000))
    centres, means = average_log_bins(x, np.stack([x, *values]), most=50)
    np.testing.assert_allclose(means[0], centres)
    assert len(centres) <= 50
    assert list(centres[:3]) == [1, 2, 3]
    # A bin is symmetric around its centre, which gives the number of its points.
    ends = [0.0]
    for centre in centres:
        ends.append(2 * centre - 1 - ends[-1])
    counts = np.diff(ends)
    assert ends[-1] == 1000
    np.testing.assert_allclose((means[1:] * counts).sum(axis=1), values.sum(axis=1))
    short = average_log_bins(x[:50], values[:, :50], most=50)
    np.testing.assert_array_equal(short[1], values[:, :50])


def test_loss_against_sparsity_shows_the_tables_means_and_intervals():
    table = make_study()
    axes = drawn(loss_against_sparsity(table)).axes[0]
    spots = {tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() in ("o", "D")}
    bars = [(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axes.lines if line.get_linewidth() == 1]
    for row in table.rows:
        x, y = row.metrics["sparsity/zero"], row.metrics["loss/excess"]
        if x.mean is not None and row.variant != "diverged":
            assert (100 * x.mean, y.mean) in spots
            assert (pytest.approx((100 * (x.mean - x.ci95), 100 * (x.mean + x.ci95))), (y.mean, y.mean)) in bars
            assert ((100 * x.mean, 100 * x.mean), pytest.approx((y.mean - y.ci95, y.mean + y.ci95))) in bars


@pytest.mark.parametrize("n_seeds", [1, 2, 5])
def test_no_label_covers_another_a_marker_or_leaves_the_panel(n_seeds):
    figure = drawn(loss_against_sparsity(make_study(n_seeds)))
    axes = figure.axes[0]
    with use_style():
        figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == len(VARIANTS)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    for line in axes.lines:
        if line.get_marker() in ("o", "D"):
            assert not any(box.contains(*axes.transData.transform(line.get_xydata()[0])) for box in boxes)
    assert all(axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) for box in boxes)


def test_of_many_variants_only_some_are_named_and_those_far_above_are_counted():
    """Labels of all points beyond the edge would overlap each other and the labels below."""
    table = read_table(ROOT / "docs" / "results" / "rivals_rates-backcopy" / "table.json")
    figure = drawn(loss_against_sparsity(table))
    axes = figure.axes[0]
    far = [line for line in axes.lines if line.get_marker() == "^" and line.get_markersize() == 7]
    losses = sorted(row.metrics["loss/excess"].mean for row in table.rows)
    assert len(far) >= sum(loss > axes.get_ylim()[1] for loss in losses) > 0
    within = [line.get_ydata()[0] for line in axes.lines if line.get_marker() in ("o", "D")]
    assert sorted(within) == pytest.approx(losses[: -len(far)])
    title = " ".join(figure.get_suptitle().split())
    assert title.endswith(f"the 10 lowest; far above: {len(far)}, up to {losses[-1]:.4f}")
    names = {" ".join(text.get_text().split()) for text in axes.texts}
    assert len(names) == 11
    assert table.baseline in names
    assert_legible(figure)


def undefine_first_layer(arrays):
    return {
        key: np.where(np.arange(value.shape[0]).reshape(-1, *[1] * (value.ndim - 1)) == 0, np.nan, value)
        if value.dtype.kind == "f"
        else value
        for key, value in arrays.items()
    }


EXTREMES = {
    "one head": lambda: make_arrays(layers=1, heads=1, maps=1),
    "eight tokens": lambda: make_arrays(length=8, init=False, maps=5),
    "deep": lambda: make_arrays(layers=24, heads=16, length=300, maps=6, lengths=(600,)),
    "partly undefined": lambda: undefine_first_layer(make_arrays(layers=3)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "deep" else ()) for name in EXTREMES]
)
def test_all_text_is_inside_and_nothing_warns(name):
    for figure in draw_run_figures(EXTREMES[name](), "a variant with a rather long name " * 4).values():
        assert_legible(figure)


def test_figures_over_variants_are_legible():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = [f"a variant with a rather long name {i}" for i in range(17)]
        for made in (make_trainings(named, 5), make_trainings(["lazy"], 1)):
            table = make_study(1, list(made), baseline=next(iter(made)))
            assert_legible(drawn(parameter_over_training(table, made)))
            assert_legible(drawn(sink_over_training(table, made)))
        assert_legible(drawn(loss_against_sparsity(make_study(2))))
        assert_legible(drawn(loss_against_sparsity(make_study(1, ["lazy"]))))


def test_files_are_alike_whatever_the_users_own_style(tmp_path):
    arrays, table = make_arrays(init=False), make_study(variants=VARIANTS[:4])
    for folder, own in (("a", {}), ("b", {"font.size": 20.0, "axes.labelcolor": "red", "svg.hashsalt": "other"})):
        (tmp_path / folder).mkdir()
        with mpl.rc_context(own):
            paths = save_figure(drawn(figures.sink_heatmap(arrays)), tmp_path / folder / "v1.5")
            save_figure(drawn(loss_against_sparsity(table)), tmp_path / folder / "scatter")
    assert [path.name for path in paths] == ["v1.5.png", "v1.5.svg"]
    written = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(written) == 4
    for name in written:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes()
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
        assert b"<dc:date>" not in content


def test_the_style_file_goes_with_the_package():
    code = (
        "from setuptools import Distribution; d = Distribution(); d.parse_config_files(['pyproject.toml']);"
        "d.packages = ['lit_lazy.figures']; d.include_package_data = False;"
        "b = d.get_command_obj('build_py'); b.finalize_options();"
        "print([f for _, _, _, files in b.data_files for f in files])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert "style.mplstyle" in said


def test_the_mechanism_is_drawn_as_its_rule_computes_it(tmp_path: Path) -> None:
    """The committed figure in docs/ is up to date, too."""
    scores = np.random.default_rng(1).normal(size=9)
    module = Elastic(tau_init=0.7).build(LayerShape(1, 1, 8, 8, 9))
    visible = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    rows = Rows(visible, torch.full((1, 1, 1, 1), 9.0), torch.full((1, 1, 1, 1), 9))
    expected = module.weights(torch.tensor(scores, dtype=torch.float32).view(1, 1, 1, -1), rows)
    np.testing.assert_allclose(weights(scores, 0.7), expected.detach().flatten(), atol=1e-7)
    figure = mechanism_figure()
    assert_legible(figure)
    _, svg = save_figure(figure, tmp_path / "mechanism")
    assert svg.read_text() == (ROOT / "docs" / "mechanism.svg").read_text()
