"""Figure of a question's verdict: the declared contrasts with the intervals that its rule uses."""

import math
from collections.abc import Sequence
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
    style_forest_panel,
)
from lit_lazy.table.declaration import BY_STATEMENT, Declaration, Finding
from lit_lazy.table.looks import Region, compute_support_interval, list_regions
from lit_lazy.table.records import Table

NAME_WIDTH = 40
"""Characters per line of a contrast's name."""
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
    names = [wrap(f"{part.name}: {part.why}", NAME_WIDTH) for part in verdict.parts]
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
