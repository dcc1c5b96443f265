"""What is left out of figures, limits, rows, labels, bins, extremes, colours, files and imports."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import matplotlib as mpl
import numpy as np
import pytest
import torch
from legible import assert_legible
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from samples import VARIANTS, Arrays, make_arrays, make_study, make_trainings, tabulate
from test_drawn import RESULTS, RUN_FIGURES, draw_run, of_parts, read

from flash_lazy import Rows
from lit_lazy.attention import Elastic, LayerShape, Mixer, Normaliser, Position
from lit_lazy.attention.mixer import Drawn
from lit_lazy.config.serialisation import find_leaf_classes, replace_at
from lit_lazy.config.user_files import experiment, load_attribute, load_module
from lit_lazy.figures import ablation, canvas, diagnostics, effects
from lit_lazy.figures.ablation import Histories
from lit_lazy.figures.effects import compute_limits
from lit_lazy.grid.search.definition import define
from lit_lazy.measure import head_metrics, row_statistics
from lit_lazy.measure.collapse_and_sink_kinds import BROADCAST_RANK, BROADCAST_RATIO, NO_OPERATION_RATIO
from lit_lazy.report import ablation_page
from lit_lazy.report.ablation_page import draw_table_figures
from lit_lazy.report.index_and_search_pages import SearchReport
from lit_lazy.support.names_to_paths import find
from lit_lazy.table.build import read_table
from lit_lazy.table.records import Column, Point
from lit_lazy.table.results_table import Table

ROOT = Path(__file__).parents[2]
WEBP_LIMIT = 16383
"""Pixels of a side."""


def test_every_figure_of_a_run_is_there_and_small_enough_for_a_page() -> None:
    assert list(draw_run()) == RUN_FIGURES
    assert all(figure.get_figwidth() <= canvas.WIDTH for figure in draw_run().values())


def test_nothing_is_drawn_of_nothing() -> None:
    arrays = make_arrays()
    undefined = {k: np.full(v.shape, np.nan) if v.dtype.kind == "f" else v for k, v in arrays.items()}
    for name in RUN_FIGURES:
        assert getattr(diagnostics, name)({}) is None
        assert getattr(diagnostics, name)(undefined) is None
    softmax = {key: value for key, value in arrays.items() if not key.endswith("tau")}
    assert {*RUN_FIGURES} - diagnostics.draw_run_figures(softmax, "x").keys() == {"tau_by_layer", "parameters_by_head"}
    for metrics in ({"loss/val": 1.0}, {"sparsity/zero": 0.5}):
        table = tabulate({"lazy": [metrics]}, [Column(key, key) for key in ("loss/val", "sparsity/zero")])
        assert ablation.loss_against_sparsity(table) is None
    assert ablation.parameter_over_training(make_study(), {"softmax": [{"watch/first_key_weight": [(0, 0.1)]}]}) is None
    for draw in (ablation.parameter_over_training, ablation.sink_over_training, ablation.loss_over_training):
        assert draw(make_study(), {"softmax": [{}], "lazy": []}) is None
    assert effects.verdict_figure(read("table2-backcopy")) is None


def test_a_parameter_that_is_named_as_a_figure_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "watch/learned/sink_layer_0", "watch/first_key_weight", "val/loss", "watch/learned/loss_layer_0"
    histories = {"softmax": [{name: [(0, 0.1), (1, 0.2)] for name in names}]}
    monkeypatch.setattr(ablation_page, "_read_histories", lambda _: histories)
    drawn = ablation_page._draw_training_figures(SimpleNamespace(table=make_study()))  # type: ignore[arg-type]
    kinds = "loss", "learned.loss", "learned.sink", "sink"
    assert [*drawn] == [f"{kind}_over_training" for kind in kinds]


@pytest.mark.parametrize(("last", "scale"), [(0.01, "log"), (-0.002, "linear")])
def test_an_excess_below_0_is_on_the_axis(last: float, scale: str) -> None:
    histories = {"softmax": [{"val/excess": [(0, 2.0), (4, last)], "val/loss": [(0, 3.0), (4, 1.0)]}]}
    figure = ablation.loss_over_training(make_study(), histories)
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_yscale() == scale
    low, high = axes.get_ylim()
    assert low <= last < 2.0 <= high


def test_what_counts_as_small_and_as_a_sink_is_what_the_metrics_say() -> None:
    own = diagnostics.SMALL_WEIGHT, diagnostics.SINK_WEIGHT, diagnostics.FIRST_KEYS
    assert own == (row_statistics.SMALL_WEIGHT, head_metrics.SINK_WEIGHT, row_statistics.FIRST_KEYS)
    bounds = diagnostics.NO_OPERATION_RATIO, diagnostics.BROADCAST_RATIO, diagnostics.BROADCAST_RANK
    assert bounds == (NO_OPERATION_RATIO, BROADCAST_RATIO, BROADCAST_RANK)


def test_long_lines_are_means_over_bins() -> None:
    x = np.arange(1, 1001)
    values = np.random.default_rng(0).random((2, 1000))
    centres, means = canvas.average_log_bins(x, np.stack([x, *values]), most=50)
    np.testing.assert_allclose(means[0], centres)
    assert len(centres) <= 50
    assert list(centres[:3]) == [1, 2, 3]
    # A bin is symmetric around its centre, which gives the number of its points.
    ends = [0.0]
    for centre in centres:
        ends.append(2 * centre - 1 - ends[-1])
    assert ends[-1] == 1000
    np.testing.assert_allclose((means[1:] * np.diff(ends)).sum(axis=1), values.sum(axis=1))
    gaps = np.where(x % 2, np.nan, values)  # as of targets at every second position
    assert np.isfinite(canvas.average_log_bins(x, gaps, most=50)[1][:, 9:]).all()
    assert np.isnan(canvas.average_log_bins(x, np.full(1000, np.nan), most=50)[1]).all()
    short = canvas.average_log_bins(x[:50], values[:, :50], most=50)
    np.testing.assert_array_equal(short[1], values[:, :50])


@pytest.mark.parametrize("n_seeds", [1, 5])
def test_no_label_covers_a_marker_or_leaves_the_panel(n_seeds: int) -> None:
    figure = ablation.loss_against_sparsity(make_study(n_seeds))
    assert figure is not None
    assert_legible(figure)
    axes = figure.axes[0]
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == len(VARIANTS)
    for line in axes.lines:
        if line.get_marker() in ("o", "D"):
            assert not any(box.contains(*axes.transData.transform(line.get_xydata()[0])) for box in boxes)
    assert all(axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) for box in boxes)


# Limits and rows


def test_intervals_are_whole_where_most_would_be_cut() -> None:
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
def test_few_rows_that_are_far_off_do_not_flatten_the_others(others: tuple[float, ...], far: tuple[float, ...]) -> None:
    low, high = compute_limits([(point, point - 0.1, point + 0.1) for point in (*others, *far)])
    assert all(low < point < high for point in others)
    assert not any(low < point < high for point in far)


def many(better: str, count: int) -> tuple[Table, Histories]:
    """A table of rows that have their number as loss, the baseline "lazy" and one without a cell; histories of all."""
    names = ["lazy", *map(str, range(1, count))]
    losses = {"unfinished": [{"status": "waiting"}]} | {name: [{"loss": float(i)}] for i, name in enumerate(names)}
    histories = {name: [{"watch/tau_layer_0": [(0, 0.0), (1, 1.0)]}] for name in names}
    return tabulate(losses, [Column("loss", "loss", better)], "lazy"), histories


@pytest.mark.parametrize(("better", "kept", "which"), [("lower", "1234", "lowest"), ("higher", "6789", "highest")])
def test_of_many_rows_the_baseline_and_the_best_are_shown(better, kept, which, monkeypatch) -> None:
    monkeypatch.setattr(canvas, "MOST_ROWS", 5)
    table, histories = many(better, 10)
    drawn, tau = effects.effects_figure(table, ["loss"]), ablation.parameter_over_training(table, histories)
    assert tau is not None
    assert [label.get_text() for label in drawn.axes[0].get_yticklabels()] == ["lazy", *kept]
    assert [axes.get_title() for axes in tau.axes if axes.axison] == ["lazy", *kept]
    for figure, count in ((drawn, 11), (tau, 10)):
        said = f"; shown of {count}: the 5 with the {which} loss, baseline included"
        assert said in figure.get_suptitle().replace("\n", " ")
        assert_legible(figure)
    assert effects.effects_figure(many("lower", 1000)[0], ["loss"]).bbox.height < WEBP_LIMIT


# Extremes


def undefine_first_layer(arrays: Arrays) -> Arrays:
    for value in arrays.values():
        if value.dtype.kind == "f":
            value[0] = np.nan
    return arrays


def draw_over_training(names: list[str], n_seeds: int) -> list[Figure | None]:
    table, trained = make_study(1, names, baseline=names[0]), make_trainings(names, n_seeds)
    return [ablation.parameter_over_training(table, trained), ablation.sink_over_training(table, trained)]


def draw_search() -> list[Figure]:
    asked = load_attribute(find("ablations", "lazy_search"), "search")
    definition = define(asked, replace_at(experiment("backcopy_tiny"), asked.common))
    rng = np.random.default_rng(0)
    points = []
    for i in range(20):
        params = {path: axis.low + (axis.high - axis.low) * rng.random() for path, axis in definition.axes.items()}
        points.append(Point(i, str(i), params, "complete", float(rng.random()), {}, ""))
    importances = {path: 1 / len(definition.axes) for path in definition.axes}
    drawn = SearchReport("lazy_search-backcopy", definition, points, importances, [], "").draw_figures()
    assert len(drawn) == 3
    return [*drawn.values()]


def draw_arrays(arrays: Arrays) -> list[Figure]:
    return [*diagnostics.draw_run_figures(arrays, "a variant with a rather long name " * 4).values()]


EXTREMES = {
    "one head, eight tokens": lambda: draw_arrays(make_arrays(layers=1, heads=1, maps=1, length=8, init=False)),
    "partly undefined": lambda: draw_arrays(undefine_first_layer(make_arrays(layers=3))),
    "deep": lambda: draw_arrays(make_arrays(layers=24, heads=16, length=300, maps=6, lengths=(600,))),
    "one variant": lambda: [*draw_over_training(["lazy"], 1), ablation.loss_against_sparsity(make_study(1, ["lazy"]))],
    "long names": lambda: draw_over_training([f"a variant with a rather long name {i}" for i in range(17)], 5),
    "a search": draw_search,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "deep" else ()) for name in EXTREMES]
)
def test_all_text_is_inside_and_nothing_warns(name: str) -> None:
    for figure in EXTREMES[name]():
        assert figure is not None
        assert_legible(figure)


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/table.json")), ids=lambda path: path.parent.name)
def test_every_figure_of_a_committed_table_is_legible(path: Path) -> None:
    for figure in draw_table_figures(read_table(path)).values():
        assert_legible(figure)


# Colours


def list_own_colours(*bases: type) -> list[str]:
    """The colours that the project's classes under these bases have."""
    leaves = [cls for base in bases for cls in find_leaf_classes(base).values()]
    found = [cls for cls in leaves if cls.__module__.startswith("lit_lazy.") and not getattr(cls, "attends", False)]
    return [vars(cls).get("colour", f"{cls.__name__} has none") for cls in found]


def test_each_normaliser_and_each_position_has_a_colour_of_its_own() -> None:
    rules, positions = list_own_colours(Normaliser, Mixer), list_own_colours(Position)
    for chosen in (rules, positions):
        for a, b in combinations([*chosen, *canvas.SPARE, canvas.NEUTRAL], 2):
            assert np.abs(np.subtract(to_rgb(a), to_rgb(b))).sum() > 0.2, (a, b)
    assert not {*rules} & {*positions}
    assert canvas.choose_colours(["Elastic", "Softmax"]) == {"Elastic": canvas.FIRST, "Softmax": canvas.SECOND}
    assert not {canvas.BETTER, canvas.WORSE} & {canvas.FIRST, canvas.SECOND}


def test_a_row_s_colour_says_its_normaliser_or_where_all_have_one_its_position(tmp_path: Path) -> None:
    """Custom classes have their own colours, or some that no figure of some rows changes; no class is grey."""
    rows = {"a": ("Softmax", "Rope"), "b": ("Elastic", "Rope"), "c": ("Elastic", "NoPosition")}
    custom = {"x": ("", ""), "m": ("MyRule", "Rope"), "n": ("MyOther", "Rope"), "o": ("MyRule", "Rope")}
    table, _ = of_parts(**rows, **custom)
    by_normaliser, by_position = canvas.Colours(table, "abcxmno"), canvas.Colours(table, "bc")
    expected = [
        canvas.SECOND,
        canvas.FIRST,
        canvas.FIRST,
        canvas.NEUTRAL,
        canvas.SPARE[0],
        canvas.SPARE[1],
        canvas.SPARE[0],
    ]
    assert [by_normaliser[row] for row in "abcxmno"] == expected
    labels = [handle.get_label() for handle in by_normaliser.make_legend_handles()]
    assert labels == ["Softmax", "Elastic", "MyRule", "MyOther"]
    assert canvas.Colours(table, "bn")["n"] == canvas.SPARE[1]
    assert [by_position[row] for row in "bc"] == [*canvas.choose_colours(["Rope", "NoPosition"]).values()]
    assert by_position["a"] == canvas.NEUTRAL, "is not in the figure"
    assert canvas.Colours(table, "x").make_legend_handles() == []
    (file := tmp_path / "own.py").write_text('class Shown:\n    colour, spoken = "#123456", "shown"\n')
    load_attribute(file, "Shown")
    table, _ = of_parts(a=("Shown", ""), b=("Softmax", ""))
    assert canvas.Colours(table, "ab")["a"] == "#123456"
    assert [handle.get_label() for handle in canvas.Colours(table, "ab").make_legend_handles()] == ["shown", "Softmax"]


# Files, images and imports


def test_files_are_alike_whatever_the_users_own_style(tmp_path: Path) -> None:
    """Their background is opaque white, so that they are readable on a dark page."""
    arrays, table = make_arrays(init=False), make_study(variants=VARIANTS[:4])
    for folder, own in (("a", {}), ("b", {"font.size": 20.0, "axes.labelcolor": "red", "svg.hashsalt": "other"})):
        (tmp_path / folder).mkdir()
        with mpl.rc_context(own):
            canvas.save_figure(diagnostics.sink_heatmap(arrays), tmp_path / folder / "v1.5")
            canvas.save_figure(ablation.loss_against_sparsity(table), tmp_path / folder / "scatter")
    written = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert written == ["scatter.png", "scatter.svg", "v1.5.png", "v1.5.svg"]
    for name in written:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes()
        assert b"<dc:date>" not in content
        assert name.endswith("png") or b'style="fill: #ffffff"' in content
    pixels = imread(tmp_path / "a" / "scatter.png")
    assert pixels.shape[-1] == 3 or (pixels[..., 3] == 1).all()
    assert (pixels[0, 0, :3] == 1).all()


def test_the_mechanism_is_drawn_as_its_rule_computes_it(tmp_path: Path) -> None:
    """The committed figure in docs/ is up to date, too."""
    mechanism = load_module(ROOT / "docs" / "mechanism.py")
    scores = np.random.default_rng(1).normal(size=9)
    module = Elastic(tau_init=0.7).build(LayerShape(1, 1, 8, 8, 9))
    rows = Rows(torch.ones(1, 1, 1, 9, dtype=torch.bool), torch.full((1, 1, 1, 1), 9.0), torch.full((1, 1, 1, 1), 9))
    expected = module.weights(torch.tensor(scores, dtype=torch.float32).view(1, 1, 1, -1), rows)
    np.testing.assert_allclose(mechanism.weights(scores, 0.7), expected.detach().flatten(), atol=1e-7)
    figure = mechanism.mechanism_figure()
    assert_legible(figure)
    _, svg = canvas.save_figure(figure, tmp_path / "mechanism")
    assert svg.read_text() == (ROOT / "docs" / "mechanism.svg").read_text()


def test_a_figure_is_laid_out_and_drawn_as_rarely_as_can_be(tmp_path: Path) -> None:
    """Fitted for each line, each time with all panels, 150 panels over training took half a minute."""
    drawn = diagnostics.tau_by_layer({"tau": np.full((2, 2), 0.125), "sample": np.array([4, 16])})
    assert drawn is not None
    with count(Figure, "draw") as draws, count(ConstrainedLayoutEngine, "execute") as layouts:
        canvas.save_figure(drawn, tmp_path / "tau")
        canvas.render_image(drawn)
    assert (draws.call_count, layouts.call_count) == (2, 1)
    with count(Axes, "set_ybound") as fits:
        ablation.parameter_over_training(*many("lower", 10))
    assert fits.call_count <= 2


def count(owner: type, name: str) -> Any:
    return patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def test_no_global_figure_state_and_no_heavy_import() -> None:
    """Colours are read from the files of their classes."""
    code = (
        "import sys, json; from lit_lazy.figures.canvas import choose_colours; import lit_lazy.figures;"
        "said = choose_colours(sys.argv[1:]);"
        "print(json.dumps([*{'matplotlib.pyplot', 'torch', 'mlflow', 'optuna'} & set(sys.modules), said]))"
    )
    leaves = {
        name: vars(cls) for name, cls in find_leaf_classes(Drawn).items() if cls.__module__.startswith("lit_lazy.")
    }
    own = {name: attributes["colour"] for name, attributes in leaves.items() if "colour" in attributes}
    said = json.loads(subprocess.check_output([sys.executable, "-c", code, *own, "MyRule"], text=True))
    assert said == [own | {"MyRule": canvas.SPARE[0]}]
