"""Shared parts of all figures: style, colours, sizes, files, and images for a page; the rows that a figure shows.

Each normaliser, mixer and position has one colour in every figure.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from lit_lazy.support.disk import write_atomically
from lit_lazy.support.imported_code import read_constants
from lit_lazy.table.results_table import Table

STYLE = Path(__file__).with_name("style.mplstyle")
FIRST, SECOND, NEUTRAL = "#0072B2", "#D55E00", "#595959"
"""Two of Okabe and Ito's colours, distinguishable with all common colour blindness, and a grey."""
BETTER, WORSE = "#009E73", "#CC79A7"
"""Two more, to be combined with different markers: they look the same in greyscale."""
WIDTH = 7.3
"""Inches; 1095 pixels at the 150 dpi of a PNG."""
TITLE_LINE = 0.18
"""Height of a line of a figure's title, in inches."""
POINTS = 128
"""Longer lines are drawn as means over this many bins: finer detail is invisible, and SVGs stay small."""
SPARE = ("#000000", "#BB00BB", "#00CED1", "#7F3C8D", "#F0E442")
"""Colours of classes without one of their own, as custom ones are."""
PARTS = Path(__file__).parents[1] / "attention"
"""Folder of the project's classes, each of which says its colour, and its name if people write it otherwise."""


@contextmanager
def use_style() -> Iterator[None]:
    """Apply the project's style, as a decorator or in a `with` block, regardless of the user's matplotlibrc.

    Ticks are created on first drawing, so both building and saving a figure need it.
    """
    with style.context(["default", STYLE]):
        yield


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure of a size in inches, plus room for its wrapped title."""
    lines = _wrap_title(title, width)
    figure = Figure(figsize=(width, height + TITLE_LINE * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(lines))
    return figure


def prepend_title(figure: Figure, text: str) -> None:
    """Add lines before the title, and room for them."""
    width, height = figure.get_size_inches()
    lines = _wrap_title(text, width)
    with use_style():
        figure.suptitle("\n".join([*lines, figure.get_suptitle()]))
    figure.set_size_inches(width, height + TITLE_LINE * len(lines))


def _wrap_title(title: str, width: float) -> list[str]:
    return [line for text in title.split("\n") for line in wrap(text, int(11.5 * width), break_on_hyphens=False)]


def draw_legend_below(figure: Figure, handles: Iterable[Artist], columns: int) -> None:
    """Draw a legend below all panels, in at most `columns` columns, or fewer if the figure is too narrow."""
    entries = list(handles)
    for ncols in range(min(columns, len(entries)), 0, -1):
        legend = figure.legend(handles=entries, loc="outside lower center", ncols=ncols)
        if ncols == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


@use_style()
def save_figure(figure: Figure, path_stem: str | Path) -> tuple[Path, Path]:
    """Write `<path_stem>.png` (150 dpi) and `<path_stem>.svg` of a finished figure, deterministic in the figure."""
    png, svg = Path(f"{path_stem}.png"), Path(f"{path_stem}.svg")
    _lay_out(figure)
    write_atomically(svg, lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
    write_atomically(png, lambda file: imsave(file, _draw_pixels(figure), format="png", dpi=figure.dpi))
    return png, svg


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """`save_figure` of each figure into a folder, by name; returns the paths."""
    return [path for name, figure in figures.items() for path in save_figure(figure, folder / name)]


def average_log_bins(x: np.ndarray, values: np.ndarray, most: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Average `values` `[..., n]` at x = 1..n over at most `most` bins even in log x; unchanged if n <= most.

    The x of a bin is the mean of its x; the first bins hold one point each. Values that are not finite are left out.
    """
    if len(x) <= most:
        return x, values
    starts = np.unique(np.geomspace(1, len(x), most).astype(int)) - 1
    counts = np.diff(np.append(starts, len(x)))
    known = np.isfinite(values)
    sums, n = (np.add.reduceat(each, starts, axis=-1, dtype=float) for each in (np.where(known, values, 0), known))
    return np.add.reduceat(x, starts) / counts, np.divide(sums, n, out=np.full_like(sums, np.nan), where=n > 0)


def finite_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of the finite numbers along an axis; NaN without finite numbers."""
    return np.ma.masked_invalid(values).mean(axis=axis).filled(np.nan)


def set_log_axis(axes: Axes, last: float, zero: bool = False) -> None:
    """Set a logarithmic x axis with plain tick labels, from 1 (with `zero`, from 0) to `last`."""
    ticks = [float(step * 10**power) for power in range(7) for step in ((1, 2, 5) if last < 100 else (1,))]
    if zero:
        axes.set_xscale("symlog", linthresh=1, linscale=0.4)
        ticks.insert(0, 0.0)
    else:
        axes.set_xscale("log")
    axes.set_xticks([tick for tick in ticks if tick <= last], minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(ticks[0], max(last, ticks[0] + 1))


@use_style()
def render_image(figure: Figure) -> bytes:
    """The image of a finished figure, deterministic in the figure.

    Lossless WebP is smaller than PNG, and than SVG with its text as outlines.
    """
    _lay_out(figure)
    imsave(image := io.BytesIO(), _draw_pixels(figure), format="webp", pil_kwargs={"lossless": True})
    return image.getvalue()


def _lay_out(figure: Figure) -> None:
    """Lay a finished figure out once, for files and pages: savefig would do it for each, and draw twice.

    Spines are within their panels; to measure them would take a third of the time.
    """
    if (engine := figure.get_layout_engine()) is not None:
        for spine in (spine for axes in figure.axes for spine in axes.spines.values()):
            spine.set_in_layout(False)
        engine.execute(figure)
        figure.set_layout_engine(None)


def _draw_pixels(figure: Figure) -> np.ndarray:
    """The pixels of a figure, which is drawn only if it changed since it was: file and page share them."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    if figure.stale:
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def choose_colours(names: Sequence[str]) -> dict[str, str]:
    """The colour of each class: its own, else the next spare one, and grey after those; grey for "", no class."""
    spare = iter(SPARE)
    own = {name: read_constants(name, PARTS).get("colour") for name in names}
    return {name: colour or (next(spare, NEUTRAL) if name else NEUTRAL) for name, colour in own.items()}


class Colours:
    """The colours of a table's variants: by normaliser, or by position if all have one normaliser."""

    def __init__(self, table: Table, variants: Iterable[str]) -> None:
        shown = set(variants)
        rows = [row for row in table.rows if row.variant in shown and row.normaliser]
        by_position = len({row.normaliser for row in rows}) == 1 < len({row.position for row in rows})
        names = {row.variant: row.position if by_position else row.normaliser for row in table.rows}
        colours = choose_colours([*names.values()])  # of all rows, so that a figure of some has the same
        self._names = {row.variant: names[row.variant] for row in rows}
        self._colours = {name: colours[name] for name in self._names.values()}

    def __getitem__(self, variant: str) -> str:
        return self._colours[self._names[variant]] if variant in self._names else NEUTRAL

    def make_legend_handles(self) -> list[Line2D]:
        """Legend entries of the colours; empty if all variants have the same."""
        if len(self._colours) < 2:
            return []
        return [
            Line2D([], [], color=colour, linestyle="", marker="o", label=spoken or name or "no attention")
            for name, colour in self._colours.items()
            for spoken in [read_constants(name, PARTS).get("spoken")]
        ]


MOST_ROWS = 150
"""A figure of 450 rows would be longer than a WebP image can be."""


def choose_rows(table: Table, variants: Iterable[str]) -> tuple[list[str], str]:
    """The variants to show, the baseline first, and an addition to the title.

    If there are more than MOST_ROWS, only those with the best means in the first main column are shown.
    """
    shown = sorted(variants, key=lambda variant: variant != table.baseline)
    if len(shown) <= MOST_ROWS:
        return shown, ""
    column = [*table.main_columns, *table.columns][0]
    sign = -1 if column.better == "higher" else 1
    measures = table.measures[column.key]

    def rank(variant: str) -> tuple[bool, bool, float]:
        mean = measures[variant].mean
        return variant != table.baseline, mean is None, sign * (mean or 0.0)

    best = set(sorted(shown, key=rank)[:MOST_ROWS])
    which = "highest" if sign < 0 else "lowest"
    return (
        [variant for variant in shown if variant in best],
        f"; shown of {len(shown)}: the {MOST_ROWS} with the {which} {column.title}, baseline included",
    )
