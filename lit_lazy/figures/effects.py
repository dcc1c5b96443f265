"""Forest plots: of a table's differences to the baseline, and of the contrasts that a verdict rests on."""

import math
from collections.abc import Sequence
from statistics import median
from textwrap import wrap
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lit_lazy.figures.canvas import BETTER, NEUTRAL, WIDTH, WORSE, choose_rows, draw_legend_below, new_figure, use_style
from lit_lazy.table.columns import Column
from lit_lazy.table.declaration import BY_STATEMENT, Declaration, Finding
from lit_lazy.table.records import TableRow
from lit_lazy.table.results_table import Table
from lit_lazy.table.sequential_looks import Region, compute_support_interval, list_regions
from lit_lazy.table.statistics import Effect

UNLEARNED = "#8C8C8C"
"""Colour of rows that did not learn the task."""
FAR, ROUNDING = 10, 1e6
"""A point FAR times as far out as all others is drawn at the edge, unless the others are below 1 / ROUNDING of it:
those are rounding errors."""


@use_style()
def effects_figure(table: Table, columns: Sequence[str]) -> Figure:
    """Draw one panel per column key with every row's difference to the baseline and its 95 % interval.

    The baseline (the line at 0) comes first, then the rows in table order. Filled markers differ at p < 0.05 after
    Holm; squares are worse; hollow markers are not significant or not tested. Without a measured spread a dotted line
    spans the differences of the seeds. A row without a difference has its reason in words. Intervals much longer than
    most, and than the range of the points, are cut at the panel's edge and end in an arrow; outliers are drawn there
    with their value. Rows that did not learn the task are grey crosses and set no limits, unless none did. Of many rows
    only the best are shown.
    """
    by_name = {row.variant: row for row in table.rows}
    shown, which = choose_rows(table, by_name)
    rows = [by_name[variant] for variant in shown]
    width = 2.2 + 3.0 * len(columns)
    aside = "" if table.declaration is None else ", exploratory"
    title = [
        f"{table.ablation}: difference to {table.baseline}{aside}{which}",
        *(f"Warning: {w}" for w in table.warnings),
    ]
    figure = new_figure(width, 1.7 + 0.3 * len(rows), "\n".join(title))
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, key in zip(panels, columns, strict=True):
        _draw_panel(axes, table, rows, table.columns_by_key[key])
    panels[0].set_yticks(range(len(rows)), [row.variant for row in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    for label, row in zip(panels[0].get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.variant == table.baseline else "normal")
        if row.variant in table.unlearned:
            label.set_color(UNLEARNED)
    handles = [
        make_marker_handle("better, p < 0.05 (Holm)", BETTER, BETTER),
        make_marker_handle("worse, p < 0.05 (Holm)", WORSE, WORSE, "s"),
        make_marker_handle("differs, p < 0.05 (Holm)", NEUTRAL, NEUTRAL),
        make_marker_handle("not separated or not tested", NEUTRAL, "white"),
        Line2D([], [], color=NEUTRAL, linewidth=1.6, label="95 % interval, not adjusted"),
        Line2D([], [], color=NEUTRAL, linewidth=1.2, linestyle=":", label="range over seeds, not tested"),
    ]
    if table.unlearned:
        handles.append(make_marker_handle("did not learn the task", UNLEARNED, UNLEARNED, "X"))
    draw_legend_below(figure, handles, 3 if len(columns) > 2 else 2)
    return figure


def _draw_panel(axes: Axes, table: Table, rows: Sequence[TableRow], column: Column) -> None:
    measures = table.measures[column.key]
    shown = [(y, row, measures[row.variant].difference) for y, row in enumerate(rows)]
    unlearned = table.unlearned
    points = {
        row.variant: (effect.mean * column.scale, *_find_interval_ends(effect, column))
        for _, row, effect in shown
        if effect.mean is not None
    }
    low, high = compute_limits([points[name] for name in points if name not in unlearned] or [*points.values()])
    axes.set_xlim(low, high)
    axes.axvline(0, color=NEUTRAL, linewidth=1, zorder=1)
    for y, row, effect in shown:
        if effect.mean is None:
            # Next to the line at 0, on the side with more room.
            side = 1 if high > -low else -1
            place = {"xytext": (8 * side, 0), "textcoords": "offset points", "ha": "left" if side > 0 else "right"}
            why = "not defined" if measures[row.variant].mean is None else "no baseline"
            why = "baseline" if row.variant == table.baseline else why if row.n else row.status
            axes.annotate(why, (0, y), va="center", color=NEUTRAL, **place)
            if row.variant == table.baseline:
                axes.plot(0, y, "D", color="black", markersize=5, zorder=4)
            continue
        x = effect.mean * column.scale
        dead = row.variant in unlearned
        colour = UNLEARNED if dead else NEUTRAL
        if effect.separated and column.better and not dead:
            colour = BETTER if (x < 0) == (column.better == "lower") else WORSE
        left, right = _find_interval_ends(effect, column)
        if left < right:
            width, style = (1.2, ":") if effect.test == "saturated" else (1.6, "-")
            draw_interval(axes, y, left, right, colour, width, style)
        face = colour if effect.separated or dead else "white"
        if not low <= x <= high:
            # An arrow at the panel's edge, with the value inside.
            edge, arrow, offset, align = (high, ">", -8, "right") if x > high else (low, "<", 8, "left")
            axes.plot(edge, y, arrow, color=colour, markerfacecolor=face, markersize=7, clip_on=False, zorder=4)
            place = {"xytext": (offset, 0), "textcoords": "offset points", "ha": align, "va": "center"}
            axes.annotate(column.format(effect.mean, sign="+"), (edge, y), color=colour, **place)
            continue
        shape = "X" if dead else "s" if colour == WORSE else "o"
        axes.plot(x, y, shape, color=colour, markerfacecolor=face, markersize=6, markeredgewidth=1.4, zorder=4)
    seeds = " or ".join(map(str, table.summaries[column.key].seeds))
    axes.set(title=f"{column.title} (n = {seeds})" if seeds else column.title, xlabel=format_axis_label(column))
    style_forest_panel(axes, ticks=5)


def style_forest_panel(axes: Axes, ticks: int) -> None:
    """Draw a line per row instead of the y axis, and at most `ticks` + 1 ticks on the x axis."""
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=ticks)
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)


def _find_interval_ends(effect: Effect, column: Column) -> tuple[float, float]:
    """Ends of a difference's interval, or of its range if no spread was measured, in the column's unit."""
    assert effect.mean is not None
    if effect.test == "saturated" and effect.low is not None and effect.high is not None:
        return effect.low * column.scale, effect.high * column.scale
    middle, half = effect.mean * column.scale, (effect.ci95 or 0.0) * column.scale
    return middle - half, middle + half


def draw_interval(
    axes: Axes, y: float, left: float, right: float, colour: str, width: float = 1.6, style: str = "-"
) -> None:
    """Draw a line between two ends; ends beyond the panel become arrows at its edge."""
    low, high = axes.get_xlim()
    visible = [max(left, low), min(right, high)]
    axes.plot(visible, [y, y], color=colour, linewidth=width, linestyle=style, zorder=2)
    for edge, cut, marker in ((low, left < low, "<"), (high, right > high, ">")):
        if cut:
            axes.plot(edge, y, marker, color=colour, markersize=5, clip_on=False, zorder=3)


def compute_limits(shown: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Axis limits for the points that are not outliers; `shown` holds (point, left, right) of each.

    Outliers are at most a fifth of the points (or one), and more than FAR times as far out as all others. If the others
    are below 1 / ROUNDING of them, they are rounding errors and set no scale.
    """
    points = near = sorted((point for point, _, _ in shown), key=abs)
    for count in range(max(1, len(near) // 5), 0, -1):
        kept, far = near[:-count], near[-count:]
        if len(kept) > 1 and FAR * abs(kept[-1]) < abs(far[0]) < ROUNDING * abs(kept[-1]):
            points = kept
            break
    return fit_limits(points, [(left, right) for point, left, right in shown if point in points])


def fit_limits(points: Sequence[float], ends: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Axis limits that contain 0, every point, and intervals up to `widest` beyond the points.

    That is the span of the points, or the intervals' median length if that is more: most intervals are then whole, and
    of one or two all.
    """
    low, high = min([0.0, *points]), max([0.0, *points])
    lengths = [right - left for left, right in ends if left < right]
    widest = max(high - low, median(lengths) if lengths else 0.0) or 1.0
    left = min([low, *(max(left, low - widest) for left, _ in ends)])
    right = max([high, *(min(right, high + widest) for _, right in ends)])
    margin = 0.06 * (right - left or widest)
    return left - margin, right + margin


def format_axis_label(column: Column) -> str:
    """Axis label of differences, with the direction that is better."""
    unit = f" ({column.difference_unit})" if column.unit else ""
    return f"Δ{unit}" + {"lower": "   ← better", "higher": "   better →", None: ""}[column.better]


def make_marker_handle(label: str, colour: str, face: str, shape: str = "o", line: Literal["", "-"] = "-") -> Line2D:
    """Legend entry of a point with its interval; line "" is a point without interval."""
    look = {"marker": shape, "markerfacecolor": face, "markeredgewidth": 1.4}
    return Line2D([], [], color=colour, linestyle=line, label=label, **look)


TINT = 0.13
"""Opacity of the regions."""
AROUND, LEAST = 0.9, 1.15
"""Inches of the axes' title, ticks, label and a short legend; the least room of the panel and a longer legend."""


class _Look(NamedTuple):
    colour: str
    marker: str
    face: str


GOOD, BAD, OPEN = _Look(BETTER, "o", BETTER), _Look(WORSE, "s", WORSE), _Look(NEUTRAL, "o", "white")
STATUS = {"supported": GOOD, "refuted": BAD, "undecided": OPEN}


@use_style()
def verdict_figure(table: Table) -> Figure | None:
    """Draw the evidence for a verdict below its sentence; None without a verdict.

    Each contrast is shown at every look up to the one that decided it, the earlier ones fainter, over the regions that
    decide: support needs the thick part of the interval inside, refutation all of it.
    """
    declared, verdict = table.declaration, table.verdict
    if declared is None or verdict is None:
        return None
    column = table.columns_by_key[declared.primary]
    share = declared.rule in BY_STATEMENT
    scale = 1.0 if share else column.scale
    names = [wrap(f"{part.name}: {part.why}", 40) for part in verdict.parts]
    # The findings on each contrast, look by look, up to the one that decided it.
    shown = [[look.parts[i] for look in verdict.looks if look.parts[i].n == look.n] for i in range(len(verdict.parts))]
    heights = [max(len(name), len(found)) for name, found in zip(names, shown, strict=True)]
    height = 0.2 + 0.17 * sum(heights) + 0.12 * len(heights)
    title = f"{table.ablation} on {table.base}. {verdict.sentence}"
    figure = new_figure(WIDTH, AROUND + max(height, LEAST), title)
    axes = figure.subplots()
    regions = list_regions(declared)
    edges = {edge * scale for region in (*regions[0], *regions[1]) for edge in region if math.isfinite(edge)}
    drawn = [found for line in shown for found in line]
    ends = [(found.low * scale, found.high * scale) for found in drawn]
    low, high = (-0.02, 1.02) if share else fit_limits([*edges, *(found.mean * scale for found in drawn)], ends)
    axes.set_xlim(low, high)
    for parts, colour in zip(regions, (BETTER, WORSE), strict=True):
        for left, right in parts:
            axes.axvspan(
                max(left * scale, low), min(right * scale, high), color=colour, alpha=TINT, linewidth=0, zorder=0
            )
    for edge in edges - {0.0, 1.0} if share else edges:
        axes.axvline(edge, color=NEUTRAL, linewidth=1, linestyle="--" if edge else "-", zorder=1)
    y, places = 0.0, []
    for found, height in zip(shown, heights, strict=True):
        middle = y + (height - 1) / 2
        places.append(middle)
        for i, part in enumerate(found):
            _draw_look(axes, declared, part, middle + i - (len(found) - 1) / 2, scale, (i + 1) / len(found))
        y += height + 0.7
    axes.set_yticks(places, ["\n".join(name) for name in names])
    axes.set_ylim(y - 0.9, -0.8)
    axes.set_title(column.title)
    axes.set_xlabel("share of seeds in which it holds" if share else format_axis_label(column))
    style_forest_panel(axes, ticks=7)
    draw_legend_below(figure, _make_look_handles(*regions), 3)
    return figure


def _draw_look(axes: Axes, declared: Declaration, found: Finding, y: float, scale: float, strength: float) -> None:
    """Draw a finding with its intervals and number of seeds. strength: 1 for the last look, less for earlier ones."""
    look = STATUS[found.status]
    colour, face = _fade(look.colour, strength), _fade(look.face, strength)
    left, right = compute_support_interval(declared, found)
    draw_interval(axes, y, found.low * scale, found.high * scale, colour, 1.2)
    draw_interval(axes, y, left * scale, right * scale, colour, 3)
    style = {"markersize": 6, "markeredgewidth": 1.4, "zorder": 4}
    axes.plot(found.mean * scale, y, look.marker, color=colour, markerfacecolor=face, **style)
    beside = axes.get_yaxis_transform()
    axes.text(1.01, y, f"n = {found.n}", transform=beside, va="center", color=_fade(NEUTRAL, max(strength, 0.7)))


def _fade(colour: str, strength: float) -> str:
    """A colour mixed with white."""
    return _mix("white", colour, 0.25 + 0.75 * strength)


def _mix(below: str, above: str, share: float) -> str:
    """The colour that a colour of this opacity has above another."""
    red, green, blue = ((1 - share) * b + share * a for b, a in zip(to_rgb(below), to_rgb(above), strict=True))
    return to_hex((red, green, blue))


def _make_look_handles(supporting: Sequence[Region], refuting: Sequence[Region]) -> list[Line2D | Patch]:
    colours: dict[str, str] = {}
    if supporting:
        green = _mix("white", BETTER, TINT)
        colours = {
            "supported: the thick part inside": green,
            "refuted: the whole interval inside": _mix("white", WORSE, TINT),
        }
        if any(max(a[0], b[0]) < min(a[1], b[1]) for a in supporting for b in refuting):
            colours["where both overlap neither is wrong"] = _mix(green, WORSE, TINT)
    return [
        *(make_marker_handle(status, look.colour, look.face, look.marker, line="") for status, look in STATUS.items()),
        Line2D([], [], color=NEUTRAL, linewidth=1.2, label="simultaneous interval"),
        *(Patch(facecolor=colour, linewidth=0, label=name) for name, colour in colours.items()),
    ]
