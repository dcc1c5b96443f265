"""Figures over the variants of an ablation: loss against sparsity, and metrics over training."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from lit_lazy.figures.canvas import (
    NEUTRAL,
    WIDTH,
    Colours,
    choose_rows,
    draw_legend_below,
    new_figure,
    set_log_axis,
    use_style,
)
from lit_lazy.figures.label_placement import Label, place_labels
from lit_lazy.support.scale_limit import compute_far_limit
from lit_lazy.table.column_statistics import Measure
from lit_lazy.table.columns import Column, shorten_learned
from lit_lazy.table.results_table import Table

Metrics = Mapping[str, Sequence[tuple[int, float]]]
"""(step, value) pairs of one seed, by metric."""
Histories = Mapping[str, Sequence[Metrics]]
"""Metrics of each seed, by variant."""

LEARNED = re.compile(r"watch/(tau|(bias/learned\.|learned/)[\w.]+)_layer_\d+")
"""Mean of a learned parameter in a layer during training."""
LOSSES = ("loss/excess", "loss/bits_per_byte", "loss/val")
MOST_NAMED, NAMED_OF_MORE = 24, 10
"""With more points than MOST_NAMED, only the NAMED_OF_MORE lowest and the baseline are labelled."""
Look = Mapping[str, Any]
"""Keyword arguments of a line."""
LOOKS: tuple[Look, ...] = ({"linestyle": "-"}, {"linestyle": "--"})
"""Looks of the first and second metric of a panel; the colour is that of the variant."""


@use_style()
def loss_against_sparsity(table: Table) -> Figure | None:
    """Draw the loss of every variant against its sparsity, both with 95 % intervals over seeds.

    The loss is the table's first of excess loss, bits per byte and validation loss. Variants without a sparsity are at
    the left, before the axis begins. Outliers are at the upper edge, with an arrow and their value. With many variants
    only some are labelled, and the title counts the outliers and gives the highest. None without both columns, or if no
    variant has both values.
    """
    columns = table.columns_by_key
    loss = next((columns[key] for key in LOSSES if key in columns), None)
    sparsity = columns.get("sparsity/zero")
    if loss is None or sparsity is None:
        return None
    points = []
    for row in table.rows:
        x, y = (table.measures[column.key][row.variant] for column in (sparsity, loss))
        if y.mean is not None:
            place = math.nan if x.mean is None else x.mean * sparsity.scale, _find_interval_ends(x, sparsity)
            height = y.mean * loss.scale, _find_interval_ends(y, loss)
            points.append(_Point(row.variant, row.variant == table.baseline, *place, *height))
    if all(math.isnan(point.x) for point in points):
        return None
    counts = {measure.n for measure in table.measures[loss.key].values()} - {0}
    spread = "" if counts == {1} else " with 95 % CI"
    highest = compute_far_limit(point.y for point in points)
    far = {point.name for point in points if point.y > highest}
    named, which = {point.name for point in points}, ""
    if len(points) > MOST_NAMED:
        lowest = sorted(points, key=lambda point: (not point.baseline, point.y))
        named = {point.name for point in lowest[: NAMED_OF_MORE + 1]}
        which = f"; labelled: the baseline and the {NAMED_OF_MORE} lowest"
        if far:
            which += f"; far above: {len(far)}, up to {loss.format(max(point.y for point in points) / loss.scale)}"
    title = f"{table.ablation}: loss against sparsity, mean over {_format_seeds(counts)}{spread}{which}"
    figure = new_figure(WIDTH, 4.2 + 0.06 * min(len(points), MOST_NAMED), title)
    axes = figure.subplots()
    axes.set(xlabel=sparsity.heading, ylabel=loss.heading)
    axes.grid(True)
    apart, least = _set_x_axis(axes, points)
    axes.set_ylim(*_fit_limits([(point.y, point.y_ends) for point in points if point.name not in far]))
    top = axes.get_ylim()[1]
    labels, bars = [], []
    colours = Colours(table, (point.name for point in points))
    if handles := colours.make_legend_handles():
        draw_legend_below(figure, handles, 6)
    for point in points:
        x = apart if math.isnan(point.x) else point.x
        colour = colours[point.name]
        label, y = point.name, point.y
        if point.name in far:
            y = top
            axes.plot(x, y, "^", color=colour, markerfacecolor="white", markersize=7, clip_on=False, zorder=4)
            label += f": {loss.format(point.y / loss.scale)}"
        else:
            axes.plot(x, y, "D" if point.baseline else "o", color=colour, zorder=4)
            bars += _draw_intervals(axes, x, point, colour, least)
        if point.name in named:
            labels.append(Label("\n".join(wrap(label, 30)), x, y, point.baseline))
    place_labels(figure, axes, labels, bars)
    return figure


@use_style()
def loss_over_training(table: Table, histories: Histories) -> Figure | None:
    """Draw the validation loss of every variant: above the optimum on a log scale, if the data know the optimum."""
    excess = any("val/excess" in seed for seeds in histories.values() for seed in seeds)
    label, name = ("validation loss above the optimum", "val/excess") if excess else ("validation loss", "val/loss")
    title = f"{label} over training, in nats, mean over all sequences"
    return _draw_over_training(title, {label: name}, histories, table)


@use_style()
def parameter_over_training(table: Table, histories: Histories, learned: str = "tau") -> Figure | None:
    """Draw a learned parameter of every variant that has it, mean over layers and heads, from step 0 on."""
    name = "τ" if learned == "tau" else shorten_learned(learned)
    label, title = "offset parameter τ" if learned == "tau" else name, f"{name} over training, mean over layers, heads"
    return _draw_over_training(title, {label: f"watch/{learned}"}, histories, table)


def list_learned(histories: Histories) -> list[str]:
    """Names of the learned parameters in the histories of trainings; tau first."""
    metrics = {name for seeds in histories.values() for seed in seeds for name in seed}
    found = {match[1] for name in metrics if (match := LEARNED.fullmatch(name))}
    return sorted(found, key=lambda name: (name != "tau", name))


@use_style()
def sink_over_training(table: Table, histories: Histories) -> Figure | None:
    """Draw the first key's mean weight and its share of the surviving mass, for every variant, from step 0 on."""
    lines = {
        "weight on the first key": "watch/first_key_weight",
        "share of the mass on the first key": "watch/first_key_share",
    }
    title = "the first key over training, mean over all rows from position 8, layers, heads"
    return _draw_over_training(title, lines, histories, table)


class _Point(NamedTuple):
    """A variant in displayed units; x is NaN without a sparsity. Intervals are clipped to the bounds of the metric."""

    name: str
    baseline: bool
    x: float
    x_ends: tuple[float, float]
    y: float
    y_ends: tuple[float, float]


def _find_interval_ends(measure: Measure, column: Column) -> tuple[float, float]:
    if measure.mean is None:
        return math.nan, math.nan
    low, high = column.clip_interval(measure.mean, measure.ci95 or 0.0, measure.values.values())
    return low * column.scale, high * column.scale


def _fit_limits(values: Sequence[tuple[float, tuple[float, float]]]) -> tuple[float, float]:
    """Axis limits that contain every value, and its interval up to one span of the values beyond them."""
    low, high = min(value for value, _ in values), max(value for value, _ in values)
    span = (high - low) or max(upper - lower for _, (lower, upper) in values) / 2 or 1.0
    low = min(max(lower, low - span) for _, (lower, _) in values)
    high = max(min(upper, high + span) for _, (_, upper) in values)
    margin = 0.06 * (high - low or span)
    return low - margin, high + margin


def _set_x_axis(axes: Axes, points: Sequence[_Point]) -> tuple[float, float]:
    """Set limits and ticks; returns the x of variants without a sparsity, and the start of the axis of the others."""
    low, high = _fit_limits([(point.x, point.x_ends) for point in points if not math.isnan(point.x)])
    span = high - low
    apart = low - 0.1 * span
    ticks = [tick for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high]
    labels = [f"{tick:g}" for tick in ticks]
    if any(math.isnan(point.x) for point in points):
        axes.spines["bottom"].set_bounds(low, high)
        axes.set_xlim(apart - 0.1 * span, high)
        ticks, labels = [apart, *ticks], ["no\nsparsity", *labels]
    else:
        axes.set_xlim(low, high)
    axes.set_xticks(ticks, labels)
    return apart, low


def _draw_intervals(axes: Axes, x: float, point: _Point, colour: str, least: float) -> list[Bbox]:
    """Draw both intervals of a point at `x`; ends beyond the panel become arrows at its edge.

    least: start of the sparsity axis; only variants without a sparsity lie to its left.
    """
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    left = left if math.isnan(point.x) else least
    drawn = []
    level, upright = ((end, point.y) for end in point.x_ends), ((x, end) for end in point.y_ends)
    for (low, high), ends in ((level, "<>"), (upright, "v^")):
        if low == high or math.isnan(low[0]):
            continue
        cut = Bbox([(max(low[0], left), max(low[1], bottom)), (min(high[0], right), min(high[1], top))])
        axes.plot(cut.intervalx, cut.intervaly, color=colour, linewidth=1.0, alpha=0.6, zorder=2)
        for end, edge, arrow in zip((low, high), cut.get_points(), ends, strict=True):
            if end != tuple(edge):
                axes.plot(*edge, arrow, color=colour, markersize=4, clip_on=False, zorder=3)
        drawn.append(cut)
    return drawn


Curve = Mapping[int, float]
"""Value by step."""


def _read_curve(seed: Metrics, name: str) -> Curve:
    """The finite values of a metric, mean over layers of one that each layer has."""
    by_step: dict[int, list[float]] = {}
    for key, history in seed.items():
        if re.fullmatch(rf"{re.escape(name)}(_layer_\d+)?", key):
            for step, value in history:
                by_step.setdefault(step, []).append(value)
    means = {step: fmean(values) for step, values in by_step.items()}
    return {step: mean for step, mean in means.items() if math.isfinite(mean)}


def _draw_over_training(title: str, metrics: Mapping[str, str], histories: Histories, table: Table) -> Figure | None:
    """Draw a panel per variant with a line per metric, over the steps that all its seeds have, and a band of the range.

    metrics: names by label. The baseline comes first, and is also drawn thin and grey behind the other variants. Only
    the best of many variants are shown.
    """
    baseline = table.baseline
    curves = {
        variant: {label: [c for s in seeds if (c := _read_curve(s, name))] for label, name in metrics.items()}
        for variant, seeds in histories.items()
    }
    variants, which = choose_rows(table, [variant for variant, lines in curves.items() if any(lines.values())])
    if not variants:
        return None
    counts = {len(seeds) for variant in variants for seeds in curves[variant].values()} - {0}
    columns = min(4, len(variants))
    rows = math.ceil(len(variants) / columns)
    band = "" if counts == {1} else " (band: range)"
    heading = f"{table.ablation}: {title} and {_format_seeds(counts)}{band}{which}"
    figure = new_figure(WIDTH, 0.9 + rows * (1.35 if rows > 1 else 2.2), heading)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    looks = dict(zip(metrics, LOOKS, strict=False))
    colours = Colours(table, variants)
    values = (value for lines in curves.values() for seeds in lines.values() for c in seeds for value in c.values())
    on_log_scale = "val/excess" in metrics.values() and min(values) > 0  # a measured excess may be below 0
    panels[0].set_yscale("log" if on_log_scale else "linear")
    for axes in panels:
        axes.autoscale(False)  # each band would fit all panels anew
    last = 1
    for axes, variant in zip(panels, variants, strict=False):
        for label, look in looks.items():
            if variant != baseline and baseline in curves:
                _draw_line(axes, curves[baseline][label], {**look, "color": NEUTRAL, "linewidth": 0.7, "alpha": 0.7})
            style = {**look, "color": colours[variant], "label": label}
            last = max(last, _draw_line(axes, curves[variant][label], style, band=True))
        axes.set_title("\n".join(wrap(variant, 26)), fontsize=8.5, fontweight="bold" if variant == baseline else None)
        axes.grid(axis="y")
    panels[0].autoscale()
    if on_log_scale:
        low, high = panels[0].get_ylim()
        panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panels[0].yaxis.set_minor_locator(NullLocator())
    if all(name.startswith("watch/") for name in metrics.values()):  # measured at powers of two too
        set_log_axis(panels[0], last, zero=True)
    for axes in panels[max(len(variants) - columns, 0) : len(variants)]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("step")
    for axes in panels[len(variants) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], **look, color="black", label=label) for label, look in looks.items()]
    if len(variants) > 1 and variants[0] == baseline:
        handles.append(Line2D([], [], color=NEUTRAL, linewidth=0.7, label=f"{baseline}, the baseline"))
    named = colours.make_legend_handles()
    draw_legend_below(figure, [*handles, *named], 6 if named else len(handles))
    return figure


def _draw_line(axes: Axes, seeds: Sequence[Curve], look: Look, band: bool = False) -> int:
    """Draw the mean over seeds and their range; returns the last step."""
    steps = sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []
    if not steps:
        return 1
    values = np.array([[seed[step] for step in steps] for seed in seeds])
    axes.plot(steps, values.mean(axis=0), **look)
    if band:
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=look["color"], alpha=0.15, lw=0)
    return steps[-1]


def _format_seeds(counts: Iterable[int]) -> str:
    found = sorted(counts)
    return f"{' or '.join(map(str, found))} seed{'' if found == [1] else 's'}"
