"""Legibility of figures: no text overlaps another or leaves the canvas, and no legend covers a panel."""

from collections.abc import Iterator
from itertools import combinations

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from lit_lazy.figures.canvas import use_style

PIXEL = 1.0
"""Tolerated overlap: boxes of text include the empty space around glyphs."""


def assert_legible(figure: Figure) -> None:
    """Draw the figure and check the boxes of all texts in it, including tick labels."""
    with use_style():
        figure.draw_without_rendering()
    boxes = [(text.get_text(), _box(text)) for text in _texts(figure) if text.get_text().strip()]
    canvas = figure.bbox.padded(PIXEL)
    outside = [name for name, box in boxes if not (canvas.contains(*box.min) and canvas.contains(*box.max))]
    assert not outside, f"outside the canvas: {outside}"
    meeting = [(a, b) for (a, first), (b, second) in combinations(boxes, 2) if first.overlaps(second)]
    assert not meeting, f"texts that meet: {meeting}"
    for legend in figure.legends:
        over = [
            axes for axes in figure.axes if axes.axison and axes.get_tightbbox().overlaps(legend.get_window_extent())
        ]
        assert not over, "a legend over a panel"


def _texts(figure: Figure) -> Iterator[Text]:
    if figure._suptitle is not None:
        yield figure._suptitle
    for legend in figure.legends:
        yield from legend.get_texts()
    for axes in figure.axes:
        if axes.axison:
            yield from (axes.title, *axes.texts)
            for axis in (axes.xaxis, axes.yaxis):
                yield axis.label
                yield from _shown_ticks(axis)


def _shown_ticks(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label for label in labels if label.get_visible()]


def _box(text: Text) -> Bbox:
    """The box of a text without the arrow of an annotation."""
    box = Text.get_window_extent(text)
    return Bbox.from_extents(box.x0 + PIXEL, box.y0 + PIXEL, box.x1 - PIXEL, box.y1 - PIXEL)
