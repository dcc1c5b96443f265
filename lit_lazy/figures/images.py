"""Figures as images for a page."""

import io
from typing import NamedTuple

from matplotlib.figure import Figure

from lit_lazy.figures.canvas import use_style

DPI = 120
"""Finer than the 96 pixels per inch of a page, so that images stay sharp on high-density screens."""


class Image(NamedTuple):
    """A figure in lossless WebP, which is smaller than PNG, and than SVG with its text as outlines."""

    data: bytes
    size: tuple[float, float]
    """Width and height in inches."""


@use_style()
def render_image(figure: Figure) -> Image:
    """The image of a finished figure, deterministic in the figure."""
    image, engine, dpi = io.BytesIO(), figure.get_layout_engine(), figure.dpi
    figure.set_dpi(DPI)
    if engine is not None:
        # With a layout engine, savefig would draw the figure twice, once without output.
        engine.execute(figure)
        figure.set_layout_engine(None)
    figure.savefig(image, format="webp", dpi=DPI, pil_kwargs={"lossless": True})
    # Text has other widths at other resolutions, so that files need layouts of their own.
    figure.set_layout_engine(engine)
    figure.set_dpi(dpi)
    width, height = figure.get_size_inches()
    return Image(image.getvalue(), (float(width), float(height)))
