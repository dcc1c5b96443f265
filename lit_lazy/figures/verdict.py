"""Figure of a question's verdict: the declared contrasts with the intervals that its rule uses."""

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lit_lazy.figures.canvas import BETTER, NEUTRAL, WIDTH, WORSE, draw_legend_below, new_figure, use_style
from lit_lazy.figures.effects import (
    draw_interval,
    fit_limits,
    format_axis_label,
    make_marker_handle,
    set_row_labels,
    style_forest_panel,
)
from lit_lazy.table.declaration import BY_STATEMENT, Declaration, Finding, Verdict
from lit_lazy.table.looks import Region, compute_support_interval, list_regions
from lit_lazy.table.records import Column, Table
from lit_lazy.table.verdicts import Level, compute_levels, describe_bounds

NAME_WIDTH = 40
"""Characters per line of a contrast's name."""
TINT = 0.13
"""Opacity of the regions."""
INTERVAL = "simultaneous 95 % interval"
AROUND, LEAST = 0.9, 1.15
"""Inches of the axes' title, ticks, label and a short legend; the least room of the panel and a longer legend."""


class _Look(NamedTuple):
    colour: str
    marker: str
    face: str


class _Line(NamedTuple):
    """A contrast, or a row of a contrast, in the column's unit; without a look it is a heading."""

    name: str
    look: _Look | None = None
    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0
    bold: bool = False


GOOD, BAD, OPEN = _Look(BETTER, "o", BETTER), _Look(WORSE, "s", WORSE), _Look(NEUTRAL, "o", "white")
STATUS = {"supported": GOOD, "refuted": BAD, "undecided": OPEN}


@use_style()
def verdict_figure(table: Table) -> Figure | None:
    """Draw the evidence for a verdict below its sentence; None without a verdict.

    A question with looks shows each contrast at every look up to the one that decided it, the earlier ones fainter,
    over the regions that decide: support needs the thick part of the interval inside, refutation all of it. Otherwise:
    A rule on differences shows each contrast with the declared margin. A rule on single rows shows each row of each
    contrast with the bounds "removed" and "there"; rows that are claimed to lie below "removed" are bold.
    """
    declared, verdict = table.declaration, table.verdict
    if declared is None or verdict is None:
        return None
    column = table.columns_by_key[declared.primary]
    if verdict.looks:
        return _draw_looks(table, declared, verdict, column)
    rows = compute_levels(declared, table)
    shown = _make_level_lines(declared, verdict, rows, column) if rows else _make_difference_lines(verdict, column)
    shown = [line._replace(name="\n".join(wrap(line.name, NAME_WIDTH))) for line in shown]
    height = sum(0.12 + 0.16 * (1 + line.name.count("\n")) for line in shown)
    figure = new_figure(WIDTH, AROUND + max(height, LEAST), _format_title(table, verdict))
    axes = figure.subplots()
    marks = [bound * column.scale for bound in (declared.removed, declared.kept)] if rows else [0.0]
    drawn = [line for line in shown if line.look]
    low, high = fit_limits([*marks, *(x.mean for x in drawn)], [(x.low, x.high) for x in drawn])
    axes.set_xlim(low, high)
    handles = _make_bound_handles(declared, column) if rows else _make_margin_handles(declared, column)
    if rows:
        for mark, style in zip(marks, ("--", ":"), strict=True):
            axes.axvline(mark, color=NEUTRAL, linewidth=1, linestyle=style, zorder=1)
    else:
        margin = declared.margin * column.scale
        axes.axvspan(max(-margin, low), min(margin, high), color=NEUTRAL, alpha=0.15, linewidth=0, zorder=0)
        axes.axvline(0, color=NEUTRAL, linewidth=1, zorder=1)
    for y, line in enumerate(shown):
        if line.look:
            draw_interval(axes, y, line.low, line.high, line.look.colour)
            face, style = line.look.face, {"markersize": 6, "markeredgewidth": 1.4, "zorder": 4}
            axes.plot(line.mean, y, line.look.marker, color=line.look.colour, markerfacecolor=face, **style)
    set_row_labels(axes, [(line.name, line.bold) for line in shown])
    for label, line in zip(axes.get_yticklabels(), shown, strict=True):
        if line.look is None:
            label.set_color(NEUTRAL)
    axes.set_title(f"{column.title} (n = {verdict.n})")
    axes.set_xlabel(column.heading if rows else format_axis_label(column))
    style_forest_panel(axes, ticks=7)
    draw_legend_below(figure, handles, 3)
    return figure


def _draw_looks(table: Table, declared: Declaration, verdict: Verdict, column: Column) -> Figure:
    share = declared.rule in BY_STATEMENT
    scale = 1.0 if share else column.scale
    names = [wrap(f"{part.name}: {part.why}", NAME_WIDTH) for part in verdict.parts]
    shown = [_list_findings(verdict, i) for i in range(len(verdict.parts))]
    heights = [max(len(name), len(found)) for name, found in zip(names, shown, strict=True)]
    height = 0.2 + 0.17 * sum(heights) + 0.12 * len(heights)
    figure = new_figure(WIDTH, AROUND + max(height, LEAST), _format_title(table, verdict))
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


def _list_findings(verdict: Verdict, contrast: int) -> list[Finding]:
    """The findings on a contrast, look by look, up to the one that decided it."""
    found = [look.parts[contrast] for look in verdict.looks]
    return [part for look, part in zip(verdict.looks, found, strict=True) if part.n == look.n]


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
        *(_make_marker_handle(look, status) for status, look in STATUS.items()),
        Line2D([], [], color=NEUTRAL, linewidth=1.2, label="simultaneous interval"),
        *(Patch(facecolor=colour, linewidth=0, label=name) for name, colour in colours.items()),
    ]


def _format_title(table: Table, verdict: Verdict) -> str:
    return f"{table.ablation} on {table.base}. {verdict.sentence}"


def _make_difference_lines(verdict: Verdict, column: Column) -> list[_Line]:
    return [
        _Line(p.name, STATUS[p.status], p.mean * column.scale, p.low * column.scale, p.high * column.scale)
        for p in verdict.parts
    ]


def _make_level_lines(
    declared: Declaration, verdict: Verdict, rows: Mapping[str, Sequence[Level]], column: Column
) -> list[_Line]:
    """A heading per contrast, followed by its rows."""
    shown = []
    for part in verdict.parts:
        shown.append(_Line(f"{part.name}: {part.status}"))
        for row in rows[part.name]:
            look = GOOD if row.interval.high < declared.removed else BAD if row.interval.low > declared.kept else OPEN
            ends = (end * column.scale for end in row.interval)
            shown.append(_Line(row.row, look, row.mean * column.scale, *ends, bold=row.claimed))
    return shown


def _make_margin_handles(declared: Declaration, column: Column) -> list[Line2D | Patch]:
    (margin,) = describe_bounds(declared, column)
    band = Patch(color=NEUTRAL, alpha=0.15, linewidth=0, label=margin)
    return [*(_make_marker_handle(look, status) for status, look in STATUS.items()), _make_interval_handle(), band]


def _make_bound_handles(declared: Declaration, column: Column) -> list[Line2D | Patch]:
    removed, there = describe_bounds(declared, column)
    return [
        _make_marker_handle(GOOD, "shown to be removed"),
        _make_marker_handle(BAD, "shown to be there"),
        _make_marker_handle(OPEN, "neither"),
        Line2D([], [], color=NEUTRAL, linewidth=1, linestyle="--", label=removed),
        Line2D([], [], color=NEUTRAL, linewidth=1, linestyle=":", label=there),
        _make_interval_handle(),
    ]


def _make_interval_handle() -> Line2D:
    return Line2D([], [], color=NEUTRAL, linewidth=1.6, label=INTERVAL)


def _make_marker_handle(look: _Look, label: str) -> Line2D:
    return make_marker_handle(label, look.colour, look.face, look.marker, line="")
