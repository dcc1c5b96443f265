"""Figures of one run's diagnostics, by layer, head and position.

Each function takes the arrays of `lit_lazy.measure.diagnostics.Diagnostics` by name and returns None if they hold
nothing to draw. Layers and heads are counted from 0, positions from 1.
"""

import math
import re
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap, LogNorm, Normalize, to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lit_lazy.figures.canvas import (
    FIRST,
    NEUTRAL,
    POINTS,
    SECOND,
    WIDTH,
    average_log_bins,
    draw_legend_below,
    finite_mean,
    new_figure,
    prepend_title,
    set_log_axis,
    use_style,
)
from lit_lazy.table.columns import shorten_learned

Arrays = Mapping[str, np.ndarray]

# The same values as in lit_lazy.measure, which would import torch.
SMALL_WEIGHT, SINK_WEIGHT, FIRST_KEYS = 1e-5, 0.3, 8
NO_OPERATION_RATIO, BROADCAST_RATIO, BROADCAST_RANK = 0.2, 0.5, 1.5
ZERO, HIDDEN = "#d4d4d4", "#ffffff"
"""Colours of weights that are exactly 0 or undefined, and of keys that are hidden from a query."""
MOST_NAMED = 6
"""Up to this number of layers or heads are in a legend; more get a colour bar."""
MOST_LABELLED = 40
"""At most so many positions of a map have their texts at its edges."""


class _State(NamedTuple):
    """The measured model, or it before its training or before a change: prefix of its arrays, look of its lines."""

    prefix: str
    label: str
    line: Literal["-", "--"]
    face: str | None


TRAINED, INIT = _State("", "trained", "-", None), _State("init/", "at the start", "--", "white")
CHANGED, BEFORE = _State("", "changed", "-", None), _State("before/", "before the change", "--", "white")


@use_style()
def attention_maps(arrays: Arrays, labels: Sequence[str] = ()) -> Figure | None:
    """Draw the weights of the chosen heads in one sequence on a log scale, and below each map its first keys enlarged.

    Weights of exactly 0, and keys that are hidden (later than the query, or NaN), have colours outside the colour map.
    labels: texts of the positions, shown if there are at most MOST_LABELLED.
    """
    weights = _read_finite(arrays, "maps/weights")
    if weights is None:
        return None
    count, n = len(weights), weights.shape[-1]
    columns = min(count, 4)
    bands = math.ceil(count / columns)
    heights = [1.0, 0.8] if n > FIRST_KEYS else [1.0]
    side = min(2.6, (WIDTH - 1.4) / columns)
    title = f"Attention weights of {_pluralise(count, 'head')} in one sequence, first {n} positions"
    height = 0.5 + bands * sum(side * height + 0.45 for height in heights)
    figure = new_figure(max(4.8, side * columns + 1.4), height, title)
    grid = figure.subplots(bands * len(heights), columns, squeeze=False, height_ratios=heights * bands)
    # The panels of a head are stacked.
    stacks = grid.reshape(bands, len(heights), columns).transpose(0, 2, 1).reshape(-1, len(heights))
    colours, norm = mpl.colormaps["viridis"], LogNorm(SMALL_WEIGHT, 1)
    for i, (stack, head, matrix) in enumerate(zip(stacks, arrays["maps/heads"], weights, strict=False)):
        _draw_maps(stack, _colour_weights(matrix, colours, norm), labels)
        stack[0].set_title(f"layer {head[0]}, head {head[1]}" if head[0] >= 0 else f"map {head[1] + 1}")
        if i % columns == 0:
            for axes in stack:
                axes.set_ylabel("query (position)")
    for axes in stacks[count:].flat:
        axes.set_axis_off()
    beyond = "both" if (weights > 1).any() else "min"
    figure.colorbar(ScalarMappable(norm, colours), ax=grid, extend=beyond, label="weight", aspect=10 * height)
    handles = [_make_legend_patch(ZERO, "exactly 0"), _make_legend_patch(HIDDEN, "hidden from the query")]
    if (weights < 0).any():
        handles.append(_make_legend_patch(to_hex(mpl.colormaps["Reds"](0.7)), "below 0, by size"))
    if len(heights) > 1:
        handles.append(Patch(facecolor="none", edgecolor=SECOND, label=f"first {FIRST_KEYS} keys, enlarged"))
    draw_legend_below(figure, handles, 3)
    return figure


@use_style()
def sink_heatmap(arrays: Arrays) -> Figure | None:
    """Draw the mean weight on the first key by layer and head, and its share of the mass; below, at the start."""
    kinds = {"sink/weight": "weight", "sink/share": "share of the mass"}
    states = _find_states(arrays, *kinds)
    if not states:
        return None
    layers, heads = _find_shape(arrays, *kinds)[:2]
    title = f"Weight on the first key by layer and head, mean over {_describe_sample(arrays)}"
    figure = new_figure(WIDTH, max(2.4, 0.6 + len(states) * (0.7 + min(3.2, 0.28 * max(layers, 2)))), title)
    panels = figure.subplots(len(states), len(kinds), squeeze=False, sharex=True, sharey=True)
    colours, norm = mpl.colormaps["viridis"].with_extremes(bad=ZERO), Normalize(0, 1)
    absent = False
    for row, state in zip(panels, states, strict=True):
        for axes, (key, name) in zip(row, kinds.items(), strict=True):
            array = _read_finite(arrays, state.prefix + key)
            values = np.full((layers, heads), np.nan) if array is None else array[..., 0]
            absent |= bool(np.isnan(values).any())
            extent = (-0.5, heads - 0.5, -0.5, layers - 0.5)
            axes.imshow(values, colours, norm, aspect="auto", origin="lower", extent=extent)
            axes.set_title(f"{name}, {state.label}")
            for (layer, head), value in np.ndenumerate(values) if values.size <= 48 else ():
                text = "–" if np.isnan(value) else "<.01" if 0 < value < 0.005 else f"{value:.2f}"
                colour = "white" if value < 0.6 else "black"  # the colour map is dark for low values
                axes.text(head, layer, text, ha="center", va="center", fontsize=7.5, color=colour)
            _set_count_ticks(axes.xaxis, heads)
            _set_count_ticks(axes.yaxis, layers)
            axes.spines[:].set_visible(False)
        row[0].set_ylabel("layer")
    for axes in panels[-1]:
        axes.set_xlabel("head")
    label = f"weight or share (line: sink, {SINK_WEIGHT})"
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=panels, label=label)
    bar.ax.axhline(SINK_WEIGHT, color="white", linewidth=1.5)
    if absent:
        draw_legend_below(figure, [_make_legend_patch(ZERO, "not defined: no mass to share, or signed weights")], 1)
    return figure


@use_style()
def mass_by_position(arrays: Arrays) -> Figure | None:
    """Draw the surviving mass of a row and its part on the first key by position, mean over heads, a line per layer."""
    kinds = {"mass/row": "on all keys", "mass/first_key": "on the first key"}
    states = _find_states(arrays, *kinds)
    if not states:
        return None
    layers, _, length = _find_shape(arrays, *kinds)
    figure = new_figure(WIDTH, 3.1, f"Surviving mass by position, mean over heads and {_describe_sample(arrays)}")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (key, name) in zip(panels, kinds.items(), strict=True):
        for state, values in _read_states(arrays, key):
            positions, by_layer = average_log_bins(np.arange(1, length + 1), finite_mean(values, axis=1))
            _draw_ordered_lines(axes, positions, by_layer, state)
        _set_position_axis(axes, length)
        axes.set_title(name)
    panels[0].set_ylabel("mass (sum of weights)")
    _begin_at_zero(panels[0])
    _draw_colour_key(figure, panels, layers, "layer", _state_handles(states))
    return figure


@use_style()
def sparsity_by_layer(arrays: Arrays) -> Figure | None:
    """Draw exact zeros with the Gaussian null model, and small weights with empty tiles, by layer."""
    lines = {
        "sparsity/zero": ("exactly 0", FIRST, "o"),
        "sparsity/null": ("Gaussian null model", "#000000", "D"),
        "sparsity/small": ("w ≤ 1e-5", SECOND, "s"),
        "sparsity/block_64": ("64×64 tiles without a weight", "#009E73", "^"),
    }
    states = _find_states(arrays, *lines)
    if not states:
        return None
    layers, heads = _find_shape(arrays, *lines)
    figure = new_figure(WIDTH, 3.4, f"Sparsity by layer, mean over heads and {_describe_sample(arrays)}")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, keys in zip(panels, (list(lines)[:2], list(lines)[2:]), strict=True):
        for key in keys:
            _, colour, marker = lines[key]
            for state, values in _read_states(arrays, key):
                _draw_by_layer(axes, 100 * values, colour, state, marker, points=key == "sparsity/zero")
        _set_layer_axis(axes, layers)
    panels[0].set(title="exact zeros", ylabel="share of visible keys or tiles (%)", ylim=(-4, 104))
    panels[1].set_title("small weights, and empty tiles")
    if not _find_states(arrays, "sparsity/zero"):
        _write_remark(panels[0], "no sparsity: no weight can be exactly 0, or weights are signed")
    elif not _find_states(arrays, "sparsity/null"):
        _write_remark(panels[0], "no null model: no threshold, or no row sees eight keys")
    if not _find_states(arrays, "sparsity/block_64"):
        _write_remark(panels[1], "no tiles: the sequences are shorter than 64")
    handles = [
        Line2D([], [], color=colour, marker=marker, label=label)
        for key, (label, colour, marker) in lines.items()
        if _find_states(arrays, key)
    ]
    draw_legend_below(figure, [*handles, *_layer_handles(states, heads)], 4)
    return figure


@use_style()
def tau_by_layer(arrays: Arrays) -> Figure | None:
    """Draw the offset parameter by layer, mean over heads (and over positions if per token), with a point per head."""
    states = _find_states(arrays, "tau")
    if not states:
        return None
    layers, heads, *positions = _find_shape(arrays, "tau")
    title = f"τ by layer, mean over {_pluralise(heads, 'head')}" + (" and positions" if positions else "")
    figure = new_figure(5.6, 3.0, title)
    axes = figure.subplots()
    for state, values in _read_states(arrays, "tau"):
        _draw_by_layer(axes, finite_mean(values.reshape(layers, heads, -1), axis=2), FIRST, state, points=True)
    _set_layer_axis(axes, layers)
    axes.set_ylabel("offset parameter τ")
    draw_legend_below(figure, _layer_handles(states, heads), 3)
    return figure


@use_style()
def parameters_by_head(arrays: Arrays) -> Figure | None:
    """Draw each learned parameter over training, a line per head in the colour of its layer."""
    own = sorted(name for name in arrays if name.startswith(("watch/learned/", "watch/bias/learned.")))
    drawn = {name: values for name in ("watch/tau", *own) if (values := _read_finite(arrays, name)) is not None}
    if not drawn:
        return None
    steps = arrays["watch/step"]
    layers, heads = (max(values.shape[axis] for values in drawn.values()) for axis in (1, 2))
    symbol = "τ" if list(drawn) == ["watch/tau"] else "learned parameters"
    figure = new_figure(
        5.6, 1.2 + 1.8 * len(drawn), f"{symbol} over training, {_pluralise(heads, 'head')} in each layer"
    )
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False).ravel()
    for axes, (name, values) in zip(panels, drawn.items(), strict=True):
        for layer, colour in enumerate(_make_sequential_colours(layers)):
            axes.plot(steps, values[:, layer], color=colour, linewidth=1.0)
        axes.set_ylabel("offset parameter τ" if name == "watch/tau" else shorten_learned(name.removeprefix("watch/")))
        axes.grid(axis="y")
    set_log_axis(panels[-1], max(1, steps[-1]), zero=True)
    panels[-1].set_xlabel("step")
    _draw_colour_key(figure, panels, layers, "layer", [])
    return figure


@use_style()
def bias_curves(arrays: Arrays) -> Figure | None:
    """Draw the bias of every head by distance, a panel per layer; with few heads also the best ALiBi line of each."""
    curves = _read_finite(arrays, "bias/curve")
    if curves is None:
        return None
    layers, heads, length = curves.shape
    columns = min(layers, 4)
    rows = math.ceil(layers / columns)
    figure = new_figure(
        WIDTH if columns > 1 else 5.6,
        1.0 + rows * (2.2 if rows < 3 else 1.4),
        f"Bias added to the scores by distance, {_pluralise(heads, 'head')} in each layer",
    )
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    slopes = _read_finite(arrays, "bias/alibi_slope") if heads <= 4 else None  # a line more for each
    distances = np.arange(length)
    fit = _State("", "best ALiBi line (c − m · distance)", "--", None)
    for layer, axes in enumerate(panels.flat[:layers]):
        positions, drawn = average_log_bins(distances + 1, curves[layer])
        _draw_ordered_lines(axes, positions - 1, drawn, TRAINED)
        if slopes is not None:
            # The least-squares line passes through the mean of the curve.
            line = curves[layer].mean(axis=1, keepdims=True) - slopes[layer, :, None] * (distances - distances.mean())
            positions, drawn = average_log_bins(distances + 1, line)
            _draw_ordered_lines(axes, positions - 1, drawn, fit)
        axes.set_title(f"layer {layer}")
        set_log_axis(axes, length - 1, zero=True)
        axes.grid(axis="y")
    for axes in panels.flat[layers:]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("bias (nats)")
    for axes in panels.flat[max(layers - columns, 0) : layers]:
        axes.set_xlabel("distance (tokens)")
        axes.tick_params(labelbottom=True)
    more = [Line2D([], [], color=NEUTRAL, linestyle=fit.line, label=fit.label)] if slopes is not None else []
    _draw_colour_key(figure, panels, heads, "head", more)
    return figure


@use_style()
def value_norms(arrays: Arrays) -> Figure | None:
    """Draw the norm of the first keys' values relative to the mean: by key with a line per layer, and by layer."""
    states = _find_states(arrays, "sink/value_norm")
    if not states:
        return None
    layers, heads, keys = _find_shape(arrays, "sink/value_norm")
    figure = new_figure(WIDTH, 3.3, f"Value norms of the first keys, mean over {_describe_sample(arrays)}")
    panels = figure.subplots(1, 2, sharey=True)
    for state, values in _read_states(arrays, "sink/value_norm"):
        _draw_ordered_lines(panels[0], np.arange(1, keys + 1), finite_mean(values, axis=1), state, marker="o")
        _draw_by_layer(panels[1], values[..., 0], FIRST, state, points=True)
    for axes in panels:
        axes.axhline(1, color=NEUTRAL, linewidth=0.8, zorder=1)
    panels[0].set(title="by key, mean over heads", xlabel="key (position)", ylabel="value norm / mean value norm")
    _begin_at_zero(panels[0])
    panels[0].grid(axis="y")
    _set_count_ticks(panels[0].xaxis, keys, first=1)
    panels[1].set_title("first key by layer")
    _set_layer_axis(panels[1], layers)
    _draw_colour_key(figure, panels, layers, "layer", _layer_handles(states, heads))
    return figure


@use_style()
def sink_kinds(arrays: Arrays) -> Figure | None:
    """Draw ratio and stable rank of each head with a sink, with the bounds of the two kinds; and massive activations.

    The point of a head is its mean over the sequences with a sink, whose kinds may differ.
    """
    states = _find_states(arrays, "hidden/max_over_median")
    if not states or "sink/value_ratio" not in arrays:
        return None
    layers, heads = arrays["sink/value_ratio"].shape
    rate = np.sum([arrays[f"sink/{kind}"] for kind in ("no_operation", "broadcast", "neither")], axis=0)
    with_sink = np.count_nonzero(rate > 0)
    title = f"Sinks of {with_sink} of {_pluralise(layers * heads, 'head')}, and outliers, in {_describe_sample(arrays)}"
    figure = new_figure(WIDTH, 3.4, title)
    panels = figure.subplots(1, 2)
    for layer, colour in enumerate(_make_sequential_colours(layers)):
        rank, ratio = arrays["sink/stable_rank"][layer], arrays["sink/value_ratio"][layer]
        panels[0].plot(rank, ratio, ".", color=colour, alpha=0.8)
    bounds = {"color": NEUTRAL, "linewidth": 0.8, "zorder": 1}
    panels[0].axhline(NO_OPERATION_RATIO, linestyle="--", **bounds)
    most = max(4.0, 1.1 * np.nan_to_num(arrays["sink/stable_rank"]).max())
    top = max(1.5, 1.1 * np.nan_to_num(arrays["sink/value_ratio"]).max())
    panels[0].plot([1, BROADCAST_RANK, BROADCAST_RANK], [BROADCAST_RATIO, BROADCAST_RATIO, top], ":", **bounds)
    panels[0].set(title="sinks, a point per head", xlabel="stable rank of the head's update", xlim=(0.9, most))
    panels[0].set(ylabel="value norm of the sink / others'", ylim=(0, top))
    for state, values in _read_states(arrays, "hidden/max_over_median"):
        _draw_profile(panels[1], values, FIRST, state)
    panels[1].set(title="largest entry of the residual stream", ylabel="times the median entry", yscale="log")
    _set_layer_axis(panels[1], layers + 1)
    panels[1].set_xlabel("blocks passed (0: embedding)")
    handles = [
        Line2D([], [], linestyle="--", color=NEUTRAL, label="below: no operation"),
        Line2D([], [], linestyle=":", color=NEUTRAL, label="above, left: broadcast"),
    ]
    _draw_colour_key(figure, panels, layers, "layer", [*handles, *_state_handles(states, marker="o")])
    return figure


@use_style()
def rank_profile(arrays: Arrays) -> Figure | None:
    """Draw effective rank and token cosine of the residual stream after each layer, trained and at the start."""
    kinds = {"hidden/effective_rank": "effective rank (directions)", "hidden/cosine": "mean cosine of two tokens"}
    states = _find_states(arrays, *kinds)
    if not states:
        return None
    layers = _find_shape(arrays, *kinds)[0] - 1
    figure = new_figure(WIDTH, 3.0, f"Residual stream after each layer, over {_describe_sample(arrays)}")
    panels = figure.subplots(1, 2)
    for axes, (key, label) in zip(panels, kinds.items(), strict=True):
        for state, values in _read_states(arrays, key):
            _draw_profile(axes, values, FIRST, state)
        _set_layer_axis(axes, layers + 1)
        axes.set(xlabel="blocks passed (0: embedding)", ylabel=label)
    _begin_at_zero(panels[0])
    draw_legend_below(figure, _state_handles(states, marker="o"), 2)
    return figure


@use_style()
def loss_by_length(arrays: Arrays) -> Figure | None:
    """Draw loss by position at the training length and at every other measured length, and below it the thresholds.

    Dashed lines are measured with an evicting cache.
    """
    prefixes = sorted((key.removesuffix("sample") for key in arrays if re.fullmatch(r"(L\d+/)?sample", key)), key=len)
    found = {prefix: _read_finite(arrays, f"{prefix}loss/by_position") for prefix in prefixes}
    # If the training length is also requested, it is measured twice; the first measurement counts.
    by_length = {len(curve): (prefix, curve) for prefix, curve in reversed(found.items()) if curve is not None}
    if not by_length:
        return None
    curves = [(length, *by_length[length]) for length in sorted(by_length)]
    several, longest = len(curves) > 1, curves[-1][0]
    of_all = _describe_sample(arrays, curves[0][1])
    which = f"in sequences of {len(curves)} lengths" if several else f"mean over {of_all}"
    thetas = {length: _read_finite(arrays, f"{prefix}length/theta") for length, prefix, _ in curves}
    panels = 2 if several and any(theta is not None for theta in thetas.values()) else 1
    figure = new_figure(5.6, 1.2 + 2.0 * panels, f"Loss by position, {which}")
    axes, *below = figure.subplots(panels, squeeze=False, sharex=True)[:, 0]
    for (length, prefix, curve), colour in zip(curves, _make_sequential_colours(len(curves)), strict=True):
        positions, values = average_log_bins(np.arange(1, length + 1), curve, most=64)
        known = np.isfinite(values)  # not where nothing is predicted, as at every second position of MQAR
        axes.plot(positions[known], values[known], color=colour, label=_describe_sample(arrays, prefix))
        if (streamed := _read_finite(arrays, f"{prefix}streamed/loss")) is not None:
            axes.plot(*average_log_bins(np.arange(1, length + 1), streamed, most=64), color=colour, linestyle="--")
        for key, dash in (("length/theta", "-"), ("streamed/theta", "--")) if below else ():
            if (theta := _read_finite(arrays, prefix + key)) is not None:
                mean_theta = average_log_bins(np.arange(1, length + 1), theta.mean((0, 1)), most=64)
                below[0].plot(*mean_theta, color=colour, linestyle=dash)
    if kept := [arrays[key] for _, prefix, _ in curves if (key := f"{prefix}streamed/kept") in arrays]:
        label = f"with a cache of the first {kept[0][0]} and {kept[0][1]} newest tokens"
        axes.plot([], [], color=NEUTRAL, linestyle="--", label=label)
    context = int(arrays["context"]) if "context" in arrays else longest
    if longest > context:
        axes.axvline(context, color=NEUTRAL, linestyle=":", linewidth=1.0, label="end of the trained context")
    axes.set_ylabel("loss (nats)")
    for panel in below:
        axes.grid(axis="y")
        if all(theta is None or np.nanmin(theta) > 0 for theta in thetas.values()):
            panel.set_yscale("log")
        panel.set_ylabel("threshold, mean over heads")
    _set_position_axis((below or [axes])[-1], longest, most=64)
    if len(axes.lines) > 1:
        draw_legend_below(figure, axes.get_legend_handles_labels()[0], 2)
    return figure


RUN_FIGURES = (
    attention_maps,
    sink_heatmap,
    mass_by_position,
    sparsity_by_layer,
    tau_by_layer,
    parameters_by_head,
    bias_curves,
    value_norms,
    sink_kinds,
    rank_profile,
    loss_by_length,
)
"""All figures, in reading order."""


def draw_run_figures(arrays: Arrays, run: str) -> dict[str, Figure]:
    """All non-empty figures by name, in reading order, with the run's name in each title."""
    figures = {draw.__name__: draw(arrays) for draw in RUN_FIGURES}
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    for figure in drawn.values():
        prepend_title(figure, run)
    return drawn


def _read_finite(arrays: Arrays, key: str) -> np.ndarray | None:
    """The array in fp64 with NaN for non-finite numbers; None if it is absent or has no finite number."""
    if key not in arrays:
        return None
    values = np.asarray(arrays[key], dtype=np.float64)
    values = np.where(np.isfinite(values), values, np.nan)
    return None if np.isnan(values).all() else values


def _list_states(arrays: Arrays) -> tuple[_State, _State]:
    """The measured model, then what it is compared with."""
    return (CHANGED, BEFORE) if any(name.startswith(BEFORE.prefix) for name in arrays) else (TRAINED, INIT)


def _read_states(arrays: Arrays, key: str) -> list[tuple[_State, np.ndarray]]:
    """The array of each state that has something to draw under the key."""
    found = ((state, _read_finite(arrays, state.prefix + key)) for state in _list_states(arrays))
    return [(state, values) for state, values in found if values is not None]


def _find_states(arrays: Arrays, *keys: str) -> list[_State]:
    """The states that have something to draw under any of the keys."""
    found = {state for key in keys for state, _ in _read_states(arrays, key)}
    return [state for state in _list_states(arrays) if state in found]


def _find_shape(arrays: Arrays, *keys: str) -> tuple[int, ...]:
    return next(arrays[s.prefix + key].shape for s in _list_states(arrays) for key in keys if s.prefix + key in arrays)


def _pluralise(count: int, thing: str) -> str:
    return f"{count} {thing}" + ("s" if count > 1 else "")


def _describe_sample(arrays: Arrays, prefix: str = "") -> str:
    sequences, tokens = map(int, arrays[f"{prefix}sample"][:2])
    return f"{_pluralise(sequences, 'sequence')} of {_pluralise(tokens, 'token')}"


def _colour_weights(matrix: np.ndarray, colours: Colormap, norm: LogNorm) -> np.ndarray:
    """RGBA `[n, n, 4]` of a causal weight matrix; negative weights are reds by size, NaN counts as hidden."""
    image = colours(norm(np.clip(matrix, norm.vmin, norm.vmax)))
    below = mpl.colormaps["Reds"](norm(np.clip(-matrix, norm.vmin, norm.vmax)))
    image[matrix < 0] = below[matrix < 0]
    image[matrix == 0] = to_rgba(ZERO)
    image[np.isnan(matrix) | np.triu(np.ones(matrix.shape, dtype=bool), 1)] = to_rgba(HIDDEN)
    return image


def _draw_maps(stack: np.ndarray, image: np.ndarray, labels: Sequence[str]) -> None:
    """Draw the full map and, if it has more keys, the first keys below it."""
    n = len(image)
    for axes, keys in zip(stack, (n, FIRST_KEYS), strict=False):
        extent = (0.5, keys + 0.5, n + 0.5, 0.5)
        axes.imshow(image[:, :keys], aspect="auto", interpolation="nearest", extent=extent)
        axes.spines[:].set(visible=True, color=NEUTRAL, linewidth=0.6)
        for axis, count in ((axes.xaxis, keys), (axes.yaxis, n)):
            _set_count_ticks(axis, count, first=1)
            if labels and count <= MOST_LABELLED:
                shown = [repr(label)[1:-1].replace("$", r"\$") for label in labels[:count]]
                axis.set_ticks(range(1, count + 1), shown, fontsize=6.5)
        axes.tick_params("x", rotation=90 if labels else 0)
    stack[-1].set_xlabel("key (position)")
    if len(stack) > 1:
        stack[0].axvline(FIRST_KEYS + 0.5, color=SECOND, linewidth=0.9)
        stack[1].spines[:].set(color=SECOND, linewidth=1.2)


def _make_sequential_colours(count: int) -> np.ndarray:
    """RGBA `[count, 4]` from dark to light, without the end that is invisible on white."""
    return mpl.colormaps["viridis"](np.linspace(0, 0.88, count))


def _draw_ordered_lines(axes: Axes, x: np.ndarray, values: np.ndarray, state: _State, marker: str = "") -> None:
    """Draw a line per row of `values` `[lines, len(x)]`, coloured by index."""
    thickness = 1.4 if not state.prefix else 1.0
    for colour, line in zip(_make_sequential_colours(len(values)), values, strict=True):
        look = {"marker": marker, "markersize": 3, "markerfacecolor": state.face or colour}
        axes.plot(x, line, color=colour, linestyle=state.line, linewidth=thickness, **look)


def _draw_colour_key(figure: Figure, panels: np.ndarray, count: int, thing: str, more: Sequence[Artist]) -> None:
    """Draw a legend of layers or heads, or a colour bar if there are many; `more` handles go below."""
    colours = _make_sequential_colours(count)
    if count <= MOST_NAMED:
        named = [Line2D([], [], color=colour, label=f"{thing} {i}") for i, colour in enumerate(colours)]
        draw_legend_below(figure, [*named, *more], 6 if len(named) + len(more) > 4 else 4)
        return
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    mappable = ScalarMappable(norm, ListedColormap(colours))
    bar = figure.colorbar(mappable, ax=panels, label=thing, aspect=10 * figure.get_figheight())
    _set_count_ticks(bar.ax.yaxis, count)
    bar.ax.minorticks_off()
    if more:
        draw_legend_below(figure, more, 4)


def _draw_by_layer(
    axes: Axes, values: np.ndarray, colour: str, state: _State, marker: str = "o", points: bool = False
) -> None:
    """Draw the mean over heads of `values` `[layers, heads]`; with `points`, also each head of the trained model."""
    layers, heads = values.shape
    if points and not state.prefix and heads > 1:
        x = np.arange(layers)[:, None] + np.linspace(-0.18, 0.18, heads)
        axes.plot(x.ravel(), values.ravel(), ".", color=colour, alpha=0.45, markersize=4)
    _draw_profile(axes, finite_mean(values, axis=1), colour, state, marker)


def _draw_profile(axes: Axes, values: np.ndarray, colour: str, state: _State, marker: str = "o") -> None:
    """Draw a line over layers, with markers if there are few layers."""
    look = {"marker": marker if len(values) <= 12 else "", "markerfacecolor": state.face or colour}
    axes.plot(np.arange(len(values)), values, linestyle=state.line, color=colour, **look)


def _begin_at_zero(axes: Axes) -> None:
    """Start the y axis at 0, or end it there if all values are negative."""
    low, high = (1.06 * y for y in axes.dataLim.intervaly)
    axes.set_ylim(min(0, low), max(0, high) if low < 0 else high or 1)


def _set_layer_axis(axes: Axes, layers: int) -> None:
    axes.set_xlim(-0.5, layers - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("layer")
    axes.grid(axis="y")


def _set_position_axis(axes: Axes, length: int, most: int = POINTS) -> None:
    set_log_axis(axes, length)
    axes.set_xlabel("position (tokens" + ("; means over bins)" if length > most else ")"))
    axes.grid(axis="y")


def _set_count_ticks(axis: Axis, count: int, first: int = 0) -> None:
    """Set ticks at `count` integers from `first` on: all of up to 8, otherwise the first and the quarters."""
    last = first + count - 1
    axis.set_ticks(range(first, last + 1) if count <= 8 else [first, *(round(last * part / 4) for part in range(1, 5))])


def _write_remark(axes: Axes, text: str) -> None:
    """Write what a panel does not show: in the middle if it is empty, otherwise below its axis."""
    if axes.lines:
        axes.set_xlabel(f"{axes.get_xlabel()}\n({text})")
    else:
        text = "\n".join(wrap(text, 40))
        axes.text(0.5, 0.5, text, ha="center", va="center", color=NEUTRAL, transform=axes.transAxes)


def _state_handles(states: Sequence[_State], marker: str = "") -> list[Line2D]:
    """Legend entries of the states; empty if there is only the trained model."""
    if len(states) == 1 and not states[0].prefix:
        return []
    look = {"color": NEUTRAL, "marker": marker}
    return [Line2D([], [], linestyle=s.line, markerfacecolor=s.face or NEUTRAL, label=s.label, **look) for s in states]


def _layer_handles(states: Sequence[_State], heads: int) -> list[Line2D]:
    """Legend entries of `_draw_by_layer`."""
    named = [state.label for state in states if not state.prefix and heads > 1]
    points = [
        Line2D([], [], color=NEUTRAL, linestyle="", marker=".", alpha=0.6, label=f"one head ({x})") for x in named
    ]
    return _state_handles(states, marker="o") + points


def _make_legend_patch(colour: str, label: str) -> Patch:
    return Patch(facecolor=colour, edgecolor=NEUTRAL, linewidth=0.6, label=label)
