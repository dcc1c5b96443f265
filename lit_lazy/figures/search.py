"""Figures of a search: history, objective along each axis, importance of the axes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_lazy.figures.canvas import FIRST, NEUTRAL, SECOND, draw_legend_below, new_figure, use_style
from lit_lazy.table.records import Point

TITLES = {"loss/val": "validation loss (nats)", "loss/excess": "excess loss (nats)"}


class Axis(NamedTuple):
    """The range of a searched option, and its dotted path and short name."""

    path: str
    name: str
    low: float
    high: float
    log: bool
    """Whether values are sampled and displayed on a logarithmic scale."""


@use_style()
def history_figure(search_id: str, title: str, points: Sequence[Point]) -> Figure:
    """Draw the objective of every point in sampling order, and the best value so far."""
    figure = new_figure(6.4, 4.2, f"{search_id}: the search over time")
    axes = figure.subplots()
    complete = [(point.number, point.value) for point in points if point.value is not None]
    best = [min(value for _, value in complete[: i + 1]) for i in range(len(complete))]
    axes.step([number for number, _ in complete], best, where="post", color=FIRST, linewidth=1.6, zorder=2)
    _scatter(axes, points, lambda point: float(point.number))
    axes.set(xlabel="point, in sampling order", ylabel=title)
    axes.locator_params(axis="x", integer=True)
    _add_legend(figure, Line2D([], [], color=FIRST, linewidth=1.6, label="best so far"))
    return figure


@use_style()
def slices_figure(search_id: str, title: str, axes: Sequence[Axis], points: Sequence[Point]) -> Figure:
    """Draw one panel per axis with the objective against the points' values on it."""
    count = len(axes)
    figure = new_figure(max(6.0, 1.4 + 2.6 * count), 4.0, f"{search_id}: objective along each axis")
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        panel.set_xscale("log" if axis.log else "linear")
        _scatter(panel, points, lambda point, path=axis.path: point.params[path])
        panel.set(xlim=(axis.low, axis.high), xlabel=axis.name)
    panels[0].set_ylabel(title)
    _add_legend(figure)
    return figure


@use_style()
def importance_figure(search_id: str, importances: Mapping[str, float], complete: int) -> Figure:
    """Draw a bar for the importance of each axis, by name."""
    figure = new_figure(6.0, 1.4 + 0.35 * len(importances), f"{search_id}: importance of each axis")
    axes = figure.subplots()
    shares = [100 * share for share in importances.values()]
    axes.barh(range(len(shares)), shares, color=FIRST, height=0.6, zorder=2)
    for y, share in enumerate(shares):
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{share:.0f} %", (share, y), color=NEUTRAL, **place)
    axes.set_yticks(range(len(shares)), list(importances))
    axes.set(ylim=(len(shares) - 0.5, -0.5), xlim=(0, 108))
    axes.set_xlabel(f"importance (%), PED-ANOVA of {complete} complete points")
    axes.grid(axis="x")
    return figure


def _find_last_objective(point: Point) -> float:
    """The final objective, otherwise that of the last validation; NaN without either."""
    return point.value if point.value is not None else point.reports.get(point.last_step, math.nan)


def is_plotted(point: Point) -> bool:
    """Whether a point has ended with an objective."""
    return point.state in ("complete", "pruned", "diverged") and math.isfinite(_find_last_objective(point))


def _scatter(axes: Axes, points: Sequence[Point], x_of: Callable[[Point], float]) -> None:
    """Draw complete points filled, the best as a diamond, others hollow, and points beyond the top as triangles."""
    shown = sorted((point for point in points if is_plotted(point)), key=_find_last_objective)
    values = [_find_last_objective(point) for point in shown]
    quartile = values[3 * (len(values) - 1) // 4]
    # A single very bad point must not compress the scale of all others.
    top = quartile + 1.5 * (quartile - values[0]) if quartile > values[0] else values[-1]
    best = next((point for point in shown if point.state == "complete"), None)
    for point, value in zip(shown, values, strict=True):
        colour, face = (FIRST, FIRST) if point.state == "complete" else (SECOND, "white")
        marker, size = ("D", 8) if point is best else ("^" if value > top else "o", 5)
        style = {"color": colour, "markerfacecolor": face, "markersize": size, "markeredgewidth": 1.2}
        axes.plot(x_of(point), min(value, top), marker, clip_on=False, zorder=5 if point is best else 4, **style)
    axes.grid(axis="y")


def _add_legend(figure: Figure, *more: Line2D) -> None:
    def marker(label: str, shape: str, colour: str, face: str) -> Line2D:
        return Line2D([], [], linestyle="", color=colour, marker=shape, markerfacecolor=face, label=label)

    handles = [
        marker("complete", "o", FIRST, FIRST),
        marker("the best", "D", FIRST, FIRST),
        marker("pruned or diverged, at its last validation", "o", SECOND, "white"),
        marker("above the plot", "^", NEUTRAL, "white"),
        *more,
    ]
    draw_legend_below(figure, handles, 2)
