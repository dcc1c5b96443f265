"""Place labels next to points so that none covers a marker or another label, or leaves the panel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from lit_lazy.figures.canvas import NEUTRAL

MARKER = 7
"""Half the side, in pixels, of the box that a marker reserves."""


@dataclass(frozen=True)
class Label:
    text: str
    x: float
    y: float
    bold: bool = False


def place_labels(figure: Figure, axes: Axes, labels: Sequence[Label], bars: Sequence[Bbox]) -> None:
    """Write the labels of points on axes with final limits; `bars` are error bars in data coordinates.

    Labels are placed greedily from the bottom up, each at its cheapest position, so the layout is deterministic.
    """
    figure.draw_without_rendering()
    spots = axes.transData.transform([(label.x, label.y) for label in labels])
    markers = [Bbox([spot - MARKER, spot + MARKER]) for spot in spots]
    layout = _LabelLayout(axes.bbox, markers, [bar.transformed(axes.transData) for bar in bars])
    for i in sorted(range(len(labels)), key=lambda i: (spots[i][1], spots[i][0])):
        label, spot = labels[i], spots[i]
        text = axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            annotation_clip=False,
            fontweight="bold" if label.bold else "normal",
            path_effects=[withStroke(linewidth=2.5, foreground="white", alpha=0.8)],
            zorder=5,
        )
        place = layout.find_cheapest(spot, np.array(text.get_window_extent().size) + 4)
        layout.taken.append(place)
        offset = place.get_points().mean(axis=0) - spot
        text.set_position(offset * 72 / figure.dpi)
        if _distance(place, spot) > 18:  # pixels: a line joins them
            layout.lines.append(Path(np.stack([spot, _find_nearest_point(place, spot)])))
            start = axes.transData.inverted().transform(_find_nearest_point(place, spot))
            axes.plot([start[0], label.x], [start[1], label.y], color=NEUTRAL, linewidth=0.6, zorder=3)


@dataclass
class _LabelLayout:
    """The contents of a panel in pixels: edges, markers and labels, error bars, lines from labels to points."""

    edges: Bbox
    taken: list[Bbox]
    bars: list[Bbox]
    lines: list[Path] = field(default_factory=list)

    def find_cheapest(self, spot: np.ndarray, size: np.ndarray) -> Bbox:
        """The first place of least cost. Line intersections are slow, so only promising places are tested for them."""
        steps = (np.array([math.cos(angle * math.pi / 8), math.sin(angle * math.pi / 8)]) for angle in range(16))
        around = product((9, 14, 22, 34, 50, 75, 110, 150, 200, 260), steps)  # nearest first
        middles = (spot + direction * (radius + size / 2) for radius, direction in around)
        places = (Bbox([middle - size / 2, middle + size / 2]) for middle in middles)
        best = next(places)
        least = self._cost(best, spot) + self._cost_of_lines(best, spot)
        for place in places:
            cost = _distance(place, spot)
            if cost < least:
                cost = self._cost(place, spot)
            if cost < least:
                cost += self._cost_of_lines(place, spot)
            if cost < least:
                best, least = place, cost
        return best

    def _cost(self, place: Bbox, spot: np.ndarray) -> float:
        """Distance to the point in pixels, plus large penalties for overlaps and for leaving the panel."""
        outside = not all(self.edges.contains(*corner) for corner in place.get_points())
        cost = _distance(place, spot) + 3000 * (place.count_overlaps(self.taken) + outside)
        return cost + 30 * place.count_overlaps(self.bars)

    def _cost_of_lines(self, place: Bbox, spot: np.ndarray) -> float:
        """Penalty for each box and line that the label's line would cross, and each line that the label would cover."""
        line = Path(np.stack([spot, _find_nearest_point(place, spot)]))
        crossed = sum(line.intersects_bbox(other) for other in self.taken if not other.contains(*spot))
        crossed += sum(line.intersects_path(other) for other in self.lines)
        covered = sum(other.intersects_bbox(place) for other in self.lines)
        return 300.0 * (crossed + covered)


def _find_nearest_point(box: Bbox, spot: np.ndarray) -> np.ndarray:
    return np.clip(spot, *box.get_points())


def _distance(box: Bbox, spot: np.ndarray) -> float:
    return float(np.linalg.norm(_find_nearest_point(box, spot) - spot))
