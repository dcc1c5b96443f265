"""Figures as images for a page, and those of several runs drawn in several processes."""

import io
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import NamedTuple

from matplotlib.figure import Figure

from lit_lazy.figures.canvas import use_style
from lit_lazy.figures.heads import Arrays, draw_run_figures
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.machine import count_cores

DPI = 120
"""Finer than the 96 pixels per inch of a page, so that images stay sharp on high-density screens."""
WORTH_A_PROCESS = 6
"""Runs per process: the imports of a process take as long as the figures of one or two."""


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


Run = tuple[str, Arrays]
"""A run's name and the arrays of its diagnostics."""


def render_runs(runs: Sequence[Run]) -> list[dict[str, Image]]:
    """The images of `draw_run_figures` for each run, drawn in this process and, if there are many runs, in others.

    Raises UnfinishedError if another process dies.
    """
    count = max(1, min(count_cores(), math.ceil(len(runs) / WORTH_A_PROCESS)))
    helpers = [_start_helper(runs[first::count]) for first in range(1, count)]
    try:
        parts = [_render_here(runs[::count]), *(_read_images(helper) for helper in helpers)]
    finally:
        for helper in helpers:
            with helper:
                helper.kill()
    return [parts[index % count][index // count] for index in range(len(runs))]


def _render_here(runs: Sequence[Run]) -> list[dict[str, Image]]:
    return [
        {kind: render_image(figure) for kind, figure in draw_run_figures(arrays, name).items()} for name, arrays in runs
    ]


def _start_helper(runs: Sequence[Run]) -> "subprocess.Popen[bytes]":
    """A new process, as threads of this one may hold locks that a fork would wait for."""
    with TemporaryFile() as stdin:
        pickle.dump(runs, stdin)
        stdin.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", "from lit_lazy.figures.images import main; main()"],
            stdin=stdin,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the parent handles Ctrl-C
        )


def _read_images(helper: "subprocess.Popen[bytes]") -> list[dict[str, Image]]:
    images, _ = helper.communicate()
    if helper.returncode:
        raise UnfinishedError(f"a process that drew figures died (status {helper.returncode}); repeat the command")
    return pickle.loads(images)


def main() -> None:
    """Draw the runs on standard input, as a helper of another process."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up between the images
    pickle.dump(_render_here(pickle.load(sys.stdin.buffer)), answer)
    answer.flush()
