"""Labels beside points: none covers a marker, another label, or leaves the panel."""

import math
from collections.abc import Iterator, Sequence
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
"""Pixels from the middle of a marker to the edge of what it keeps free."""
NEAR = 18
"""A label more pixels away than this is joined to its point by a line."""


@dataclass(frozen=True)
class Label:
    text: str
    x: float
    y: float
    bold: bool = False


def place_labels(figure: Figure, axes: Axes, labels: Sequence[Label], bars: Sequence[Bbox]) -> None:
    """Writes the labels of points whose axes have their final limits; `bars` are error bars in data coordinates.

    One after the other, from below, takes the place of least cost, so the same points get the same places.
    """
    figure.draw_without_rendering()
    spots = axes.transData.transform([(label.x, label.y) for label in labels])
    markers = [Bbox([spot - MARKER, spot + MARKER]) for spot in spots]
    room = _LabelLayout(axes.bbox, markers, [bar.transformed(axes.transData) for bar in bars])
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
        place = room.place_label(spot, np.array(text.get_window_extent().size) + 4)
        offset = _find_centre(place) - spot
        text.set_position((offset[0] * 72 / figure.dpi, offset[1] * 72 / figure.dpi))
        if _distance(place, spot) > NEAR:
            start = axes.transData.inverted().transform(_find_nearest_point(place, spot))
            axes.plot([start[0], label.x], [start[1], label.y], color=NEUTRAL, linewidth=0.6, zorder=3)


@dataclass
class _LabelLayout:
    """What is in a panel, in pixels: its edges, markers and labels, error bars, and lines from labels to points."""

    edges: Bbox
    taken: list[Bbox]
    bars: list[Bbox]
    lines: list[Path] = field(default_factory=list)

    def place_label(self, spot: np.ndarray, size: np.ndarray) -> Bbox:
        place = self._find_cheapest(spot, size)
        self.taken.append(place)
        if _distance(place, spot) > NEAR:
            self.lines.append(Path(np.stack([spot, _find_nearest_point(place, spot)])))
        return place

    def _find_cheapest(self, spot: np.ndarray, size: np.ndarray) -> Bbox:
        """The first place of least cost. Lines are slow to intersect: only of a place that could be it."""
        places = _list_candidate_boxes(spot, size)
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
        """Pixels away from the point, and far more for what would be covered or left."""
        outside = not (self.edges.containsx(place.x0) and self.edges.containsx(place.x1))
        outside = outside or not (self.edges.containsy(place.y0) and self.edges.containsy(place.y1))
        cost = _distance(place, spot) + 1000 * (place.count_overlaps(self.taken) + outside)
        return cost + 30 * place.count_overlaps(self.bars)

    def _cost_of_lines(self, place: Bbox, spot: np.ndarray) -> float:
        """For each thing that the line to the point would cross, and each line that the label would cover."""
        line = Path(np.stack([spot, _find_nearest_point(place, spot)]))
        crossed = sum(line.intersects_bbox(other) for other in self.taken if not other.contains(*spot))
        crossed += sum(line.intersects_path(other) for other in self.lines)
        covered = sum(other.intersects_bbox(place) for other in self.lines)
        return 300.0 * (crossed + covered)


def _list_candidate_boxes(spot: np.ndarray, size: np.ndarray) -> Iterator[Bbox]:
    """Boxes of a size around a spot, nearest first."""
    for radius, angle in product((9, 14, 22, 34, 50, 75, 110, 150, 200, 260), range(16)):
        direction = np.array([math.cos(angle * math.pi / 8), math.sin(angle * math.pi / 8)])
        middle = spot + direction * (radius + size / 2)
        yield Bbox([middle - size / 2, middle + size / 2])


def _find_centre(box: Bbox) -> np.ndarray:
    return box.get_points().mean(axis=0)


def _find_nearest_point(box: Bbox, spot: np.ndarray) -> np.ndarray:
    """The point of a box nearest to a spot."""
    low, high = box.get_points()
    return np.clip(spot, low, high)


def _distance(box: Bbox, spot: np.ndarray) -> float:
    return float(np.linalg.norm(_find_nearest_point(box, spot) - spot))
