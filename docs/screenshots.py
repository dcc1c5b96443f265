"""Takes the pictures of docs/dashboards.md from a served folder of runs in headless Chromium.

    .venv/bin/python docs/screenshots.py runs docs/results/dashboards table2-backcopy train-backcopy

Arguments: the runs folder, the folder for pictures, the MLflow experiment of a finished ablation and that of some
trainings. Needs `chromium`.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from chromium import Browser

WIDTH, TALL = 1500, 4000
COLOURS = 256
SETTLE_SECONDS = 1.0
"""Wait for the last traces of a chart, and for frames of artifacts, which do not signal that they are ready."""
CARDS = "[...document.querySelectorAll('[data-testid=experiment-view-compare-runs-card]')]"
DRAWN = f"{CARDS}.length && {CARDS}.every(card => card.querySelector('.trace, .js-line, .dimension'))"
"""Whether each chart on the page has drawn something."""
LISTED = "document.querySelectorAll('.ag-center-cols-container .ag-row').length"
FRAMED = "document.querySelectorAll('iframe').length"
HEIGHTS = {
    DRAWN: f"Math.max(...{CARDS}.map(card => card.getBoundingClientRect().bottom)) + 190",
    LISTED: "document.querySelector('.ag-center-cols-container').getBoundingClientRect().top + 90 + 32 * "
    "Math.min(22, document.querySelectorAll('.ag-center-cols-container .ag-row').length)",
    FRAMED: "1100",
}
"""The height of the relevant part of a page, once it is drawn."""
PICTURES = {
    "by variant": ("by-variant.png", LISTED),
    "all cells": ("all-cells.png", LISTED),
    "charts": ("charts.png", DRAWN),
    "parallel coordinates": ("parallel-coordinates.png", DRAWN),
    "its table": ("table.png", FRAMED),
    "its report": ("report.png", FRAMED),
    "a cell": ("cell.png", DRAWN),
}
TRAININGS = {"charts": ("trainings.png", DRAWN)}
"""The same for an experiment of `lit-lazy train`."""
CURVES = "^(val|watch)/"
"""The search in a cell's charts."""
FIRST_VISIT = {"mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true"}
"""Local storage that keeps MLflow from opening its assistant on the first visit."""
TIDY = """
document.querySelector("[data-component-id='mlflow.experiment_page.shared_view.dismiss']")?.click();
document.querySelectorAll('[data-assistant-ui]').forEach(element => element.remove());
// Hide artifact paths of this machine.
[...document.querySelectorAll('div, span')].filter(element => element.textContent.startsWith('Path: '))
  .forEach(element => { element.style.visibility = 'hidden'; });
"""


@contextmanager
def served_links(runs: Path, *name: str) -> Iterator[dict[str, str]]:
    """Links of the first experiment that `lit-lazy dashboard` prints, by label; it serves within the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "lit_lazy", "dashboard", *name, "--runs", str(runs), "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    printed = ""
    assert server.stdout is not None
    try:
        while "Ctrl-C stops the server" not in printed:
            line = server.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended: {printed}")
            printed += line
        first = printed.split("\n\n")[1]
        yield dict(re.findall(r"^  (\w[\w ]*\w) +(http\S+)$", first, re.M))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def take(links: Mapping[str, str], out: Path, pictures: Mapping[str, tuple[str, str]] = PICTURES) -> list[Path]:
    """Take the pictures of all given links; returns their files."""
    out.mkdir(parents=True, exist_ok=True)
    taken = []
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile), WIDTH, TALL, FIRST_VISIT) as browser:
        for label, (name, drawn) in pictures.items():
            if label in links:
                browser.resize(WIDTH, TALL)
                browser.open(links[label])
                browser.wait(drawn)
                browser.evaluate(TIDY)
                if label == "a cell":
                    browser.evaluate("document.querySelector('[placeholder=\"Search metric charts\"]').focus()")
                    browser.call("Input.insertText", text=CURVES)
                    browser.wait(f"!document.body.innerText.includes('init/') && {drawn}")
                browser.resize(WIDTH, min(TALL, int(browser.evaluate(HEIGHTS[drawn]))))
                browser.wait(drawn)
                time.sleep(SETTLE_SECONDS)
                browser.picture(out / name)
                shrink(out / name)
                taken.append(out / name)
                if label == "all cells":
                    links = {**links, "a cell": a_cell(browser)}
    return taken


def shrink(picture: Path) -> None:
    """Reduce a picture to colours that cover all of its own, rare ones too, which leaves a third of its size."""
    image = Image.open(picture).convert("RGB")
    covering = image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    covering.save(picture, optimize=True)


def a_cell(browser: Browser) -> str:
    """Link to one cell's charts, from the list of all cells."""
    cell = browser.evaluate(
        "[...document.querySelectorAll('.ag-row a')].map(a => a.href).find(a => a.includes('/runs/'))"
    )
    return f"{cell.partition('?')[0]}/model-metrics?workflowType=machine_learning"


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    for name, pictures in zip(sys.argv[3:], (PICTURES, TRAININGS), strict=True):
        with served_links(Path(sys.argv[1]), name) as found:
            print("\n".join(str(file) for file in take(found, Path(sys.argv[2]), pictures)))
