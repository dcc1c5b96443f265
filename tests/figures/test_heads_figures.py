"""Figures of diagnostics and trainings show their input numbers in one style, with all text inside the canvas."""

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

from flash_lazy import Rows
from lit_lazy.attention import Elastic, LayerShape
from lit_lazy.figures import (
    draw_run_figures,
    learned_over_training,
    loss_against_sparsity,
    save_figure,
    sink_over_training,
)
from lit_lazy.figures import heads as figures
from lit_lazy.figures.canvas import WIDTH, average_log_bins, use_style
from lit_lazy.figures.mechanism import mechanism_figure, weights
from lit_lazy.measure import head_metrics, row_statistics, sink_kinds
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.records import Column, Observation, RowInfo, Table
from lit_lazy.table.stored import read_table

RESULTS = Path(__file__).parents[2] / "docs" / "results"

NAMES = [
    "attention_maps",
    "sink_heatmap",
    "mass_by_position",
    "sparsity_by_layer",
    "tau_by_layer",
    "learned_by_head",
    "bias_curves",
    "value_norms",
    "sink_kinds",
    "rank_profile",
    "loss_by_length",
]


KINDS = ("no_operation", "broadcast", "neither")


def make(layers=2, heads=4, length=64, maps=2, init=True, lengths=()):
    rng = np.random.default_rng(0)
    made = {}
    for prefix, n in [("", length), *([("init/", length)] if init else []), *((f"L{n}/", n) for n in lengths)]:
        keys = min(8, n)
        made |= {
            f"{prefix}sink/weight": rng.random((layers, heads, keys)) / 2,
            f"{prefix}sink/share": rng.random((layers, heads, keys)),
            f"{prefix}sink/value_norm": rng.random((layers, heads, keys)),
            **{f"{prefix}sink/{kind}": rng.random((layers, heads)) / 3 for kind in KINDS},
            f"{prefix}sink/value_ratio": 1.3 * rng.random((layers, heads)),
            f"{prefix}sink/stable_rank": 1 + 3 * rng.random((layers, heads)),
            f"{prefix}mass/row": rng.random((layers, heads, n)),
            f"{prefix}mass/first_key": rng.random((layers, heads, n)) / 2,
            f"{prefix}sparsity/zero": rng.random((layers, heads)),
            f"{prefix}sparsity/small": rng.random((layers, heads)),
            f"{prefix}sparsity/block_64": rng.random((layers, heads)),
            f"{prefix}sparsity/null": rng.random((layers, heads)),
            f"{prefix}tau": 1 + rng.normal(size=(layers, heads)),
            f"{prefix}hidden/effective_rank": 30 * rng.random(layers + 1),
            f"{prefix}hidden/max_over_median": 10 + 300 * rng.random(layers + 1),
            f"{prefix}hidden/cosine": rng.random(layers + 1),
            f"{prefix}loss/by_position": 2 + rng.random(n),
            f"{prefix}sample": np.array([16, n, layers]),
        }
    made["watch/step"] = np.array([0, 1, 2, 4, 7])
    made["watch/tau"] = 1 + rng.random((5, layers, heads))
    made["bias/curve"] = rng.normal(size=(layers, heads, length))
    made["bias/alibi_slope"] = rng.random((layers, heads)) / length
    n = min(length, 128)
    weights = np.tril(np.maximum(rng.random((maps, n, n)) - 0.5, 0)) / n
    made["maps/weights"] = weights.astype(np.float16)
    made["maps/heads"] = np.array([(i % layers, i % heads) for i in range(maps)])
    return {key: value if value.dtype.kind == "i" else np.asarray(value, np.float32) for key, value in made.items()}


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def lines(axes, dash="-"):
    """The y values of every line of a dash style, without points and reference lines."""
    found = [line for line in axes.lines if line.get_linestyle() == dash and line.get_transform() == axes.transData]
    return [np.asarray(line.get_ydata()) for line in found]


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_every_figure_is_there_in_reading_order_and_small_enough_for_a_page():
    made = draw_run_figures(make(), "lazy, seed 3")
    assert list(made) == NAMES
    for figure in made.values():
        assert figure.get_figwidth() <= WIDTH
        assert figure.get_suptitle().startswith("lazy, seed 3\n")


def test_nothing_is_drawn_of_nothing():
    arrays = make()
    for name in NAMES:
        draw = getattr(figures, name)
        assert draw({}) is None
        undefined = {k: np.full(v.shape, np.nan) if v.dtype.kind == "f" else v for k, v in arrays.items()}
        assert draw(undefined) is None
    softmax = {key: value for key, value in arrays.items() if not key.endswith("tau")}
    assert list(draw_run_figures(softmax, "x")) == [
        name for name in NAMES if name not in ("tau_by_layer", "learned_by_head")
    ]


def test_a_zero_weight_is_told_from_a_small_one_and_from_a_hidden_key():
    n = 10
    weights = np.tril(np.full((n, n), 0.1)).astype(np.float16)
    weights[5, 2], weights[6, 2], weights[7, 2] = 0, 1e-7, 1e-4
    figure = drawn(figures.attention_maps({"maps/weights": weights[None], "maps/heads": np.array([[0, 2]])}))
    whole, first = figure.axes[:2]
    assert whole.get_title() == "layer 0, head 2"
    image = np.asarray(whole.images[0].get_array())
    np.testing.assert_array_equal(np.asarray(first.images[0].get_array()), image[:, :8])
    zero, hidden = to_rgba(figures.ZERO), to_rgba(figures.HIDDEN)
    assert tuple(image[5, 2]) == zero
    assert {tuple(image[i, j]) for i, j in combinations(range(n), 2)} == {hidden}
    tiny, small, larger = (tuple(image[i, 2]) for i in (6, 7, 8))
    assert len({zero, hidden, tiny, small, larger}) == 5
    # Neither is in the colour map, nor close to it.
    colours = mpl.colormaps["viridis"](np.linspace(0, 1, 256))
    for outside in (zero, hidden):
        assert np.abs(colours - outside).max(axis=1).min() > 0.25
    labels = {patch.get_label(): patch.get_facecolor() for patch in figure.legends[0].get_patches()}
    assert labels["exactly 0"] == zero
    assert labels["hidden from the query"] == hidden


@pytest.mark.parametrize(
    ("mass", "limits"), [([0.5, 1.0], (0, 1.06)), ([-0.5, -1.0], (-1.06, 0)), ([0.0, 0.0], (0, 1))]
)
def test_mass_is_drawn_from_zero_upwards_or_down_from_it(mass, limits):
    rows = np.array(mass, np.float32).reshape(1, 1, 2)
    arrays = {"mass/row": rows, "mass/first_key": rows, "sample": np.array([1, 2, 1])}
    axes = drawn(figures.mass_by_position(arrays)).axes[0]
    assert axes.get_ylim() == pytest.approx(limits)


def test_a_weight_below_zero_is_red_and_in_the_legend():
    weights = np.tril(np.full((4, 4), 0.25))
    weights[3, 0], weights[2, 0] = -0.25, -0.01
    figure = drawn(figures.attention_maps({"maps/weights": weights[None], "maps/heads": np.array([[0, 0]])}))
    image = np.asarray(figure.axes[0].images[0].get_array())
    large, small = image[3, 0], image[2, 0]
    assert large[0] > 2 * large[2]
    assert small[0] > small[2]
    assert tuple(large) != tuple(small)
    assert "below 0, by size" in {patch.get_label() for patch in figure.legends[0].get_patches()}
    weights[weights < 0] = 0.1
    plain = drawn(figures.attention_maps({"maps/weights": weights[None], "maps/heads": np.array([[0, 0]])}))
    assert "below 0, by size" not in {patch.get_label() for patch in plain.legends[0].get_patches()}


def test_a_weight_that_is_not_known_counts_as_hidden():
    weights = np.tril(np.full((4, 4), 0.25))
    weights[3, 0] = np.nan
    figure = drawn(figures.attention_maps({"maps/weights": weights[None], "maps/heads": np.array([[0, 0]])}))
    assert len(figure.axes) == 2, "four keys need no enlargement: a map and its colour bar"
    assert tuple(np.asarray(figure.axes[0].images[0].get_array())[3, 0]) == to_rgba(figures.HIDDEN)


def test_sink_heatmap_shows_the_first_key_raw_and_as_share_trained_and_not():
    arrays = make(layers=3)
    arrays["sink/share"][1, 2, 0] = np.nan
    figure = drawn(figures.sink_heatmap(arrays))
    keys = ["sink/weight", "sink/share", "init/sink/weight", "init/sink/share"]
    for axes, key in zip(figure.axes, keys, strict=False):
        shown = np.ma.filled(axes.images[0].get_array(), np.nan)
        np.testing.assert_allclose(shown, arrays[key][..., 0], rtol=1e-6)
        # Layer 0 is the lowest row of cells.
        written = {text.get_position(): text.get_text() for text in axes.texts}
        for layer, head in ((0, 0), (2, 3)):
            assert written[head, layer] == f"{arrays[key][layer, head, 0]:.2f}"
    titles = [
        "weight, trained",
        "share of the mass, trained",
        "weight, at the start",
        "share of the mass, at the start",
    ]
    assert [axes.get_title() for axes in figure.axes[:4]] == titles
    assert {text.get_position(): text.get_text() for text in figure.axes[1].texts}[2, 1] == "–"
    assert "no mass" in figure.legends[0].get_texts()[0].get_text()


def test_lines_are_means_over_heads_and_the_untrained_ones_dashed():
    arrays = make()
    mass = drawn(figures.mass_by_position(arrays))
    for axes, key in zip(mass.axes, ("mass/row", "mass/first_key"), strict=True):
        same(lines(axes), arrays[key].mean(axis=1))
        same(lines(axes, "--"), arrays[f"init/{key}"].mean(axis=1))
        assert axes.get_xscale() == "log"
    by_key, by_layer = drawn(figures.value_norms(arrays)).axes
    same(lines(by_key), arrays["sink/value_norm"].mean(axis=1))
    same(lines(by_layer), [arrays["sink/value_norm"][..., 0].mean(axis=1)])
    rank, cosine = drawn(figures.rank_profile(arrays)).axes
    for axes, key in ((rank, "hidden/effective_rank"), (cosine, "hidden/cosine")):
        same(lines(axes), [arrays[key]])
        same(lines(axes, "--"), [arrays[f"init/{key}"]])
        assert list(axes.lines[0].get_xdata()) == [0, 1, 2], "0 is the embedding"


def test_sparsity_stands_beside_its_null_and_its_init_in_per_cent():
    arrays = make()
    zeros, others = drawn(figures.sparsity_by_layer(arrays)).axes
    for axes, keys in ((zeros, ("zero", "null")), (others, ("small", "block_64"))):
        same(lines(axes), [100 * arrays[f"sparsity/{key}"].mean(axis=1) for key in keys])
        same(lines(axes, "--"), [100 * arrays[f"init/sparsity/{key}"].mean(axis=1) for key in keys])
    heads = next(line for line in zeros.lines if line.get_marker() == ".")
    np.testing.assert_allclose(heads.get_ydata(), 100 * arrays["sparsity/zero"].ravel(), rtol=1e-6)
    assert "%" in zeros.get_ylabel()


@pytest.mark.parametrize(
    ("absent", "panel", "remark"),
    [
        (("zero", "null"), 0, "no sparsity: no weight can be exactly 0, or weights are signed"),
        (("null",), 0, "no null model: no threshold, or no row sees eight keys"),
        (("block_64",), 1, "no tiles: the sequences are shorter than 64"),
    ],
)
def test_sparsity_says_what_there_is_none_of(absent, panel, remark):
    arrays = make()
    for key in absent:
        for prefix in ("", "init/"):
            arrays[f"{prefix}sparsity/{key}"][:] = np.nan
    axes = drawn(figures.sparsity_by_layer(arrays)).axes[panel]
    assert remark in (axes.get_xlabel() + "".join(text.get_text() for text in axes.texts)).replace("\n", " ")
    frame = axes.get_window_extent()
    for text in axes.texts:
        assert frame.x0 < text.get_window_extent().x0 < text.get_window_extent().x1 < frame.x1


def test_tau_shows_every_head_and_positions_as_their_mean():
    arrays = make()
    axes = drawn(figures.tau_by_layer(arrays)).axes[0]
    same(lines(axes), [arrays["tau"].mean(axis=1)])
    assert sorted(line.get_marker() for line in axes.lines) == [".", "o", "o"]
    per_token = arrays["tau"][..., None] + np.array([-1.0, 0.0, 1.0])
    figure = drawn(figures.tau_by_layer({"tau": per_token}))
    same(lines(figure.axes[0]), [arrays["tau"].mean(axis=1)])
    assert "positions" in figure.get_suptitle()


def test_tau_over_training_has_a_line_per_head_in_the_colour_of_its_layer():
    arrays = make(layers=2, heads=4)
    figure = drawn(figures.learned_by_head(arrays))
    axes = figure.axes[0]
    same(lines(axes), arrays["watch/tau"].reshape(5, 8).T)
    assert all(line.get_xdata().tolist() == [0, 1, 2, 4, 7] for line in axes.lines)
    colours = [line.get_color() for line in axes.lines]
    named = {line.get_label(): line.get_color() for line in figure.legends[0].get_lines()}
    assert all(tuple(colours[i]) == tuple(named[f"layer {i // 4}"]) for i in range(8))
    assert tuple(named["layer 0"]) != tuple(named["layer 1"])


def test_the_dashed_line_of_an_alibi_curve_is_the_curve():
    slopes = np.array([[0.5, 0.125]])
    curve = 3 - slopes[..., None] * np.arange(20)
    axes = drawn(figures.bias_curves({"bias/curve": curve, "bias/alibi_slope": slopes})).axes[0]
    same(lines(axes), curve[0])
    same(lines(axes, "--"), curve[0])
    assert axes.lines[0].get_xdata()[0] == axes.get_xlim()[0] == 0
    assert axes.get_xscale() == "symlog"
    many = drawn(figures.bias_curves(make(heads=5)))
    assert not [line for axes in many.axes for line in axes.lines if line.get_linestyle() == "--"]


def test_loss_has_a_curve_per_length_and_the_end_of_the_trained_context():
    arrays = make(length=32, lengths=(16, 32, 64)) | {"context": np.array(24)}
    axes = drawn(figures.loss_by_length(arrays)).axes[0]
    curves = [arrays["L16/loss/by_position"], arrays["loss/by_position"], arrays["L64/loss/by_position"]]
    same(lines(axes), curves)
    (end,) = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert set(end.get_xdata()) == {24}  # measured at 32, trained at 24
    labels = [line.get_label() for line in axes.lines]
    assert labels[:3] == [f"16 sequences of {n} tokens" for n in (16, 32, 64)]
    alone = drawn(figures.loss_by_length(make(length=32)))
    assert "16 sequences of 32 tokens" in alone.get_suptitle()


def test_lengths_have_dashed_curves_with_a_cache_that_evicts_and_thresholds_below():
    arrays = make(length=32, lengths=(64,)) | {"context": np.array(32)}
    rng = np.random.default_rng(1)
    for prefix, n in (("", 32), ("L64/", 64)):
        arrays[f"{prefix}length/theta"] = rng.random((2, 4, n))
        arrays[f"{prefix}streamed/theta"] = rng.random((2, 4, n))
        arrays[f"{prefix}streamed/loss"] = 2 + rng.random(n)
        arrays[f"{prefix}streamed/kept"] = np.array([4, 28])
    above, below = drawn(figures.loss_by_length(arrays)).axes
    same(lines(above), [arrays["loss/by_position"], arrays["L64/loss/by_position"]])
    same(lines(above, "--")[:2], [arrays["streamed/loss"], arrays["L64/streamed/loss"]])
    same(lines(below), [arrays[f"{prefix}length/theta"].mean((0, 1)) for prefix in ("", "L64/")])
    same(lines(below, "--"), [arrays[f"{prefix}streamed/theta"].mean((0, 1)) for prefix in ("", "L64/")])
    assert "with a cache of the first 4 and 28 newest tokens" in [line.get_label() for line in above.lines]
    assert below.get_xlabel().startswith("position")
    del arrays["length/theta"], arrays["L64/length/theta"]
    assert len(drawn(figures.loss_by_length(arrays)).axes) == 1


def test_a_head_s_sink_is_a_point_and_outliers_a_line_by_depth():
    arrays = make(layers=3, heads=2)
    arrays["sink/value_ratio"][1, 0] = arrays["sink/stable_rank"][1, 0] = np.nan
    for kind in KINDS:
        arrays[f"sink/{kind}"][1, 0] = 0
    figure = drawn(figures.sink_kinds(arrays))
    kinds, outliers = figure.axes
    assert "Sinks of 5 of 6 heads" in figure.get_suptitle()
    points = [line for line in kinds.lines if line.get_marker() == "."]
    same([line.get_xdata() for line in points], arrays["sink/stable_rank"])
    same([line.get_ydata() for line in points], arrays["sink/value_ratio"])
    same(lines(outliers), [arrays["hidden/max_over_median"]])
    same(lines(outliers, "--"), [arrays["init/hidden/max_over_median"]])
    for name in ("value_ratio", "stable_rank"):
        arrays[f"sink/{name}"][:] = np.nan
    for kind in KINDS:
        arrays[f"sink/{kind}"][:] = 0
    without = drawn(figures.sink_kinds(arrays))
    assert "Sinks of 0 of 6 heads" in without.get_suptitle()
    assert_legible(without)


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


VARIANTS = [
    "lazy",
    "softmax",
    "softmax + learned bias",
    "diverged",
    *(f"lazy with another part {i:02d}" for i in range(13)),
]


def study(n_seeds=3, variants=VARIANTS, loss="loss/excess", baseline="lazy") -> Table:
    rng = np.random.default_rng(1)
    observations = []
    for name in variants:
        level, sparsity = 0.025 + 0.003 * rng.normal(), 0.58 + 0.04 * rng.normal()
        for seed in range(n_seeds):
            metrics = {
                loss: 2.5 if name == "diverged" else level + 0.001 * rng.normal(),
                "sparsity/zero": None if name.startswith("softmax") else sparsity + 0.01 * rng.normal(),
            }
            observations.append(Observation(name, seed, "complete", metrics))
    rows = [RowInfo(name, "ours", tuple(range(n_seeds)), "tiny") for name in variants]
    columns = (
        Column("loss/val", "validation loss", "lower", unit="nats"),
        Column(loss, "excess loss", "lower", unit="nats"),
        Column("sparsity/zero", "sparsity", digits=1, unit="%", scale=100),
    )
    return build_table(TableSpec("study", "tiny", baseline, rows, columns, (), "make"), observations)


def test_loss_against_sparsity_shows_the_tables_means_and_intervals():
    table = study()
    axes = drawn(loss_against_sparsity(table)).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("sparsity (%)", "excess loss (nats) ↓")
    spots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() in ("o", "D")}
    bars = [(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axes.lines if line.get_linewidth() == 1]
    shown = {text.get_text() for text in axes.texts}
    (left, _), (_, top) = axes.get_xlim(), axes.get_ylim()
    for row in table.rows:
        x, y = row.metrics["sparsity/zero"], row.metrics["loss/excess"]
        if row.variant == "diverged":
            assert "diverged: 2.500" in shown
            (arrow,) = [line for line in axes.lines if line.get_marker() == "^" and line.get_markersize() == 7]
            assert (arrow.get_xdata()[0], arrow.get_ydata()[0]) == (100 * x.mean, top)
            continue
        assert row.variant in shown
        if x.mean is None:
            (place,) = [spot[0] for spot in spots if spot[1] == y.mean]
            assert left < place < min(row.metrics["sparsity/zero"].mean or 1 for row in table.rows) * 100
        else:
            assert (100 * x.mean, y.mean) in spots
            assert (pytest.approx((100 * (x.mean - x.ci95), 100 * (x.mean + x.ci95))), (y.mean, y.mean)) in bars
            assert ((100 * x.mean, 100 * x.mean), pytest.approx((y.mean - y.ci95, y.mean + y.ci95))) in bars
    assert len(shown) == len(table.rows)
    assert axes.get_xticklabels()[0].get_text() == "no\nsparsity"


def test_an_interval_ends_at_what_its_metric_cannot_pass():
    columns = (
        Column("loss/excess", "excess loss", "lower", unit="nats"),
        Column("sparsity/zero", "sparsity", unit="%", scale=100, bounds=(0.0, 1.0)),
    )
    values = {"lazy": (0.2, 0.9, 0.99), "low": (0.01, 0.1, 0.7)}
    seen = [
        Observation(name, seed, "complete", {"loss/excess": 0.01 + 0.001 * seed, "sparsity/zero": value})
        for name, of in values.items()
        for seed, value in enumerate(of)
    ]
    rows = [RowInfo(name, "ours", (0, 1, 2), "tiny") for name in values]
    table = build_table(TableSpec("study", "tiny", "lazy", rows, columns, (), "make"), seen)
    assert all(row.metrics["sparsity/zero"].ci95 > 0.7 for row in table.rows)
    axes = drawn(loss_against_sparsity(table)).axes[0]
    level = [line for line in axes.lines if line.get_linewidth() == 1 and len(set(line.get_ydata())) == 1]
    assert [tuple(line.get_xdata()) for line in level] == [(0, 100), (0, 100)]
    assert not [line for line in axes.lines if line.get_marker() in ("<", ">")], "a bound is no edge of the panel"


def test_no_interval_reaches_in_among_the_variants_without_a_threshold():
    axes = drawn(loss_against_sparsity(study(2, (*VARIANTS[:3], VARIANTS[4])))).axes[0]
    border, _ = axes.spines["bottom"].get_bounds()  # the axis begins where a sparsity can be
    level = [line.get_xdata() for line in axes.lines if line.get_linewidth() == 1 and len(set(line.get_ydata())) == 1]
    assert min(left for left, _ in level) == border  # with two seeds, intervals are so wide that they are cut


@pytest.mark.parametrize("n_seeds", [1, 2, 5])
def test_no_label_covers_another_a_marker_or_leaves_the_panel(n_seeds):
    figure = drawn(loss_against_sparsity(study(n_seeds)))
    axes = figure.axes[0]
    with use_style():
        figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == len(VARIANTS)
    for a, b in combinations(boxes, 2):
        assert not a.overlaps(b)
    for line in axes.lines:
        if line.get_marker() in ("o", "D"):
            assert not any(box.contains(*axes.transData.transform(line.get_xydata()[0])) for box in boxes)
    for box in boxes:
        assert axes.bbox.x0 <= box.x0
        assert box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0
        assert box.y1 <= axes.bbox.y1


def test_of_many_variants_only_some_are_named_and_those_far_above_are_counted():
    """Labels of all points beyond the edge would overlap each other and the labels below."""
    table = read_table(RESULTS / "rivals_rates-backcopy" / "table.json")
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


def test_loss_against_sparsity_needs_both_and_takes_the_first_loss():
    assert loss_against_sparsity(study(variants=["lazy", "softmax"])) is not None
    bits = drawn(loss_against_sparsity(study(loss="loss/bits_per_byte")))
    assert bits.axes[0].get_ylabel().startswith("excess loss"), "the column's own title, here of the bits"
    rows = [RowInfo("lazy", "ours", (0,), "tiny")]
    columns = (Column("loss/val", "loss"), Column("sparsity/zero", "sparsity"))
    for metrics in ({"loss/val": 1.0}, {"sparsity/zero": 0.5}):
        seen = [Observation("lazy", 0, "complete", metrics)]
        spec = TableSpec("a", "tiny", "lazy", rows, columns, (), "make")
        assert loss_against_sparsity(build_table(spec, seen)) is None
    seen = [Observation("lazy", 0, "complete", {"loss/val": 1.0, "sparsity/zero": 0.5})]
    spec = TableSpec("a", "tiny", "lazy", rows, columns[:1], (), "make")
    assert loss_against_sparsity(build_table(spec, seen)) is None


BASELINE = VARIANTS[5]


def trainings(variants=VARIANTS, n_seeds=2):
    steps = [0, 1, 2, 4, 100]
    made = {}
    for i, name in enumerate(variants):
        seeds = []
        for seed in range(n_seeds):
            metrics = {"watch/first_key_weight": [(step, i + step + seed) for step in steps]}
            metrics["watch/first_key_share"] = [(step, 2 * i + seed) for step in steps]
            if not name.startswith("softmax"):
                metrics["watch/tau_layer_0"] = [(step, 1.0 + seed) for step in steps]
                metrics["watch/tau_layer_1"] = [(step, 2.0 + i + seed) for step in steps]
            seeds.append(metrics)
        made[name] = seeds
    return made


def lines_of(figure):
    """By title of the panel, the labelled lines and the lines behind them."""
    found = {}
    for axes in figure.axes:
        if axes.axison:
            own = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
            found[axes.get_title()] = own, [line for line in axes.lines if line.get_label().startswith("_")]
    return found


def test_trainings_are_means_over_layers_and_seeds_with_their_range():
    figure = drawn(learned_over_training(study(baseline=BASELINE), trainings()))
    panels = lines_of(figure)
    others = [name for name in VARIANTS if not name.startswith("softmax") and name != BASELINE]
    assert list(panels) == [BASELINE, *others]
    for name, (own, behind) in panels.items():
        (line,) = own.values()
        i = VARIANTS.index(name)
        assert list(line.get_xdata()) == [0, 1, 2, 4, 100]
        # Layers at 1 and 2 + i; seeds differ by 1.
        np.testing.assert_allclose(line.get_ydata(), 1.5 + i / 2 + 0.5)
        assert [list(other.get_ydata()) for other in behind] == (
            [] if name == BASELINE else [list(panels[BASELINE][0]["offset parameter τ"].get_ydata())]
        )
    i = VARIANTS.index(BASELINE)
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (1.5 + i / 2, 2.5 + i / 2)
    assert figure.axes[0].get_xlim() == (0, 100)
    title = " ".join(figure.get_suptitle().split())
    assert title == "study: τ over training, mean over layers, heads and 2 seeds (band: range)"


def test_each_panel_has_both_figures_of_the_first_key():
    figure = drawn(sink_over_training(study(baseline=BASELINE), trainings()))
    panels = lines_of(figure)
    assert list(panels) == [BASELINE, *(name for name in VARIANTS if name != BASELINE)]
    own, behind = panels[VARIANTS[3]]
    same([own["weight on the first key"].get_ydata()], [3.5 + np.array([0, 1, 2, 4, 100])])
    same([own["share of the mass on the first key"].get_ydata()], [np.full(5, 6.5)])
    assert len(behind) == (0 if VARIANTS[3] == BASELINE else 2)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [*own, f"{BASELINE}, the baseline"]


def test_a_training_that_ended_early_or_was_undefined_shortens_its_line():
    ended = {
        "lazy": [{"watch/tau_layer_0": [(0, 1.0), (1, 2.0), (2, 9.0)]}, {"watch/tau_layer_0": [(0, 1.0), (1, 4.0)]}]
    }
    ended["lazy"] += [{}]
    (line,) = drawn(learned_over_training(study(), ended)).axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 1], [1, 3])
    undefined = {"lazy": [{"watch/first_key_share": [(0, float("nan")), (1, 0.5)]}]}
    (line,) = drawn(sink_over_training(study(), undefined)).axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1], [0.5])
    assert learned_over_training(study(), {"softmax": [{"watch/first_key_weight": [(0, 0.1)]}]}) is None
    assert sink_over_training(study(), {"softmax": [{}], "lazy": []}) is None
    assert learned_over_training(study(), {}) is None


EXTREMES = {
    "one head": make(layers=1, heads=1, maps=1),
    "eight tokens": make(length=8, init=False, maps=5),
    "deep": make(layers=24, heads=16, length=300, maps=6, lengths=(600,)),
    "partly undefined": {
        key: np.where(np.arange(value.shape[0]).reshape(-1, *[1] * (value.ndim - 1)) == 0, np.nan, value)
        if value.dtype.kind == "f"
        else value
        for key, value in make(layers=3).items()
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "deep" else ()) for name in EXTREMES]
)
def test_all_text_is_inside_and_nothing_warns(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in draw_run_figures(EXTREMES[name], "a variant with a rather long name " * 4).values():
            assert_legible(figure)


def test_figures_over_variants_are_legible():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = [f"a variant with a rather long name {i}" for i in range(17)]
        for made in (trainings(named, 5), trainings(["lazy"], 1)):
            table = study(1, list(made), baseline=next(iter(made)))
            assert_legible(drawn(learned_over_training(table, made)))
            assert_legible(drawn(sink_over_training(table, made)))
        assert_legible(drawn(loss_against_sparsity(study(2))))
        assert_legible(drawn(loss_against_sparsity(study(1, ["lazy"]))))


def test_files_are_alike_whatever_the_users_own_style(tmp_path):
    arrays, table = make(init=False), study(variants=VARIANTS[:4])
    for folder, own in (("a", {}), ("b", {"font.size": 20.0, "axes.labelcolor": "red", "svg.hashsalt": "other"})):
        (tmp_path / folder).mkdir()
        with mpl.rc_context(own):
            save_figure(drawn(figures.sink_heatmap(arrays)), tmp_path / folder / "heat")
            save_figure(drawn(loss_against_sparsity(table)), tmp_path / folder / "scatter")
    written = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(written) == 4
    for name in written:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_style_file_goes_with_the_package():
    root = Path(__file__).parents[2]
    code = (
        "from setuptools import Distribution; d = Distribution(); d.parse_config_files(['pyproject.toml']);"
        "d.packages = ['lit_lazy.figures']; d.include_package_data = False;"
        "b = d.get_command_obj('build_py'); b.finalize_options();"
        "print([f for _, _, _, files in b.data_files for f in files])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=root, text=True, capture_output=True, check=True).stdout
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
    assert svg.read_text() == (Path(__file__).resolve().parents[2] / "docs" / "mechanism.svg").read_text()
