"""What a figure shows, in lines of text: words, limits, and the numbers and colours of everything drawn."""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation


def describe(figure: Figure) -> list[str]:
    """The figure's title, legends and panels; numbers have four digits."""
    lines = [figure.get_suptitle(), *(line for axes in figure.axes if axes.axison for line in _describe_panel(axes))]
    for legend in figure.legends:
        named = zip(legend.get_texts(), legend.legend_handles, strict=True)
        lines += [f"legend {text.get_text()}: {_mark(handle)}" for text, handle in named]
    return [line.replace("\n", "/").rstrip() for line in lines]


def _describe_panel(axes: Axes) -> Iterator[str]:
    yield f"panel {axes.get_title()}"
    for axis in (axes.xaxis, axes.yaxis):
        ticks = [label.get_text() + _colour(label.get_color(), "#000000") for label in axis.get_ticklabels()]
        place = f"{axis.get_scale()} {_numbers(axis.get_view_interval())}"
        yield f"{axis.axis_name} {axis.get_label_text()}: {place}: {', '.join(ticks)}"
    for line in axes.lines:
        yield f"line {_mark(line)}: {_numbers(line.get_xdata())}; {_numbers(line.get_ydata())}"
    for text in axes.texts:
        place = text.xy if isinstance(text, Annotation) else text.get_position()
        yield f"text {text.get_text()}: {_numbers(place)}"
    for patch in axes.patches:
        yield f"patch {_mark(patch)}: {_numbers(patch.get_window_extent().transformed(axes.transData.inverted()))}"
    for band in (shape.get_paths()[0].vertices for shape in axes.collections if len(shape.get_paths()) == 1):
        yield f"band {_numbers(band[:, 0])}; {_numbers(band[:, 1])}"
    for image in axes.images:
        pixels = np.ma.filled(np.ma.asarray(image.get_array(), np.float64), np.nan)
        yield f"image {pixels.shape} {sha256(pixels.round(4).tobytes()).hexdigest()[:16]}"


def _mark(artist: Any) -> str:
    """An artist's colour, line and marker, and its label if it has one."""
    words = [_colour(artist.get_facecolor() if hasattr(artist, "get_facecolor") else artist.get_color())]
    if hasattr(artist, "get_marker"):
        words += [artist.get_marker(), artist.get_linestyle(), f"{artist.get_linewidth():g}"]
        words.append(_colour(artist.get_markerfacecolor(), words[0]))
    return " ".join(str(word) for word in words if word not in ("", "None")) + (
        "" if artist.get_label().startswith("_") else f" {artist.get_label()}"
    )


def _colour(colour: Any, usual: str = "") -> str:
    return "" if to_hex(colour) == usual else to_hex(colour)


def _numbers(values: Any) -> str:
    """Few numbers, or of many their count, first, last, mean and extremes."""
    x = np.asarray(values, np.float64).ravel()
    if len(x) > 8:
        x = np.array([len(x), x[0], x[-1], np.nanmean(x), np.nanmin(x), np.nanmax(x)])
    return " ".join(f"{number:.4g}" for number in x)
