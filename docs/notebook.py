"""Runs docs/tutorial.md and writes it with its output as docs/results/tutorial/tutorial.ipynb.

    .venv/bin/python docs/notebook.py

Runs every block in an empty folder, as a reader would: seven to fifteen minutes on two cores.
"""

import base64
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from PIL import Image

TUTORIAL = Path(__file__).resolve().with_name("tutorial.md")
NOTEBOOK = TUTORIAL.parent / "results" / "tutorial" / "tutorial.ipynb"
ABOUT = """\
*docs/notebook.py ran [docs/tutorial.md](../../tutorial.md) and wrote this notebook. To run it yourself, start Jupyter
in an empty folder with the project's `.venv/bin` first on the `PATH`.*
"""
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```\n?", re.M | re.S)
FILE = re.compile(r"# (my_\w+\.py)\n")
"""First line of a block that is saved as a file."""
MOST_LINES = 40
"""Lines of a cell's output; the rest is cut."""
WIDEST = 420
"""Pixels of a picture, which keep the notebook small."""


@dataclass
class Cell:
    """A text or a block of the tutorial; text has no output."""

    kind: Literal["text", "python", "sh"]
    source: str
    output: str = ""
    pictures: list[Path] = field(default_factory=list)


def cells_of(text: str) -> list[Cell]:
    """The blocks of a Markdown text and the texts between them, in order."""
    cells, end = [], 0
    for block in BLOCK.finditer(text):
        cells += [Cell("text", text[end : block.start()]), Cell("python" if block[1] == "python" else "sh", block[2])]
        end = block.end()
    return [cell for cell in (*cells, Cell("text", text[end:])) if cell.source.strip()]


def execute(cells: Sequence[Cell], folder: Path) -> dict[str, Any]:
    """Run the blocks in a folder, add their output and new pictures to the cells, and return their variables.

    Blocks that name a file are saved; all other Python blocks share their variables. Raises the errors of the blocks,
    and CalledProcessError if a command fails.
    """
    names: dict[str, Any] = {"__name__": "tutorial"}
    sys.path.insert(0, str(folder))
    with chdir(folder):
        for cell in cells:
            known = set(folder.glob("*.png"))
            if named := FILE.match(cell.source):
                Path(named[1]).write_text(cell.source, encoding="utf-8")
            elif cell.kind == "python":
                with redirect_stdout(io.StringIO()) as printed:
                    exec(compile(cell.source, "tutorial.md", "exec"), names)
                cell.output = printed.getvalue()
            elif cell.kind == "sh":
                cell.output = "".join(_run(line) for line in cell.source.splitlines())
            cell.output = cell.output.replace(f"{folder}/", "")
            cell.pictures = sorted(set(folder.glob("*.png")) - known)
    return names


def _run(line: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = {"shell": True, "text": True, "stdout": subprocess.PIPE, "check": True}
    return subprocess.run(line, env=os.environ | {"PATH": path}, **command).stdout


def notebook(cells: Sequence[Cell]) -> dict[str, Any]:
    """A notebook of the cells in nbformat 4.5, with numbered ids."""
    made = [_text(ABOUT)]
    for cell in cells:
        if cell.kind == "text":
            made.append(_text(re.sub(r"\]\((\w+\.md|results/)", r"](../../\1", cell.source)))
        else:
            number = sum(known["cell_type"] == "code" for known in made) + 1
            made.append(
                {
                    "cell_type": "code",
                    "execution_count": number,
                    "metadata": {},
                    "outputs": _outputs(cell),
                    "source": _lines(_as_cell(cell)),
                }
            )
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [{**cell, "id": f"cell-{i}"} for i, cell in enumerate(made)],
        "metadata": {"kernelspec": python, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(source)}


def _as_cell(cell: Cell) -> str:
    if named := FILE.match(cell.source):
        return f"%%writefile {named[1]}\n{cell.source}"
    return cell.source if cell.kind == "python" else re.sub(r"^(?=.)", "!", cell.source, flags=re.M)


def _lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


def _outputs(cell: Cell) -> list[dict[str, Any]]:
    lines = cell.output.strip("\n").splitlines(keepends=True)
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... ({len(lines) - MOST_LINES} more lines)"]
    printed = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return [*printed, *map(_picture, cell.pictures)]


def _picture(file: Path) -> dict[str, Any]:
    image = Image.open(file).convert("RGB")
    image.thumbnail((WIDEST, image.height))
    packed = io.BytesIO()
    image.quantize(64).save(packed, "PNG", optimize=True)
    data = {"image/png": base64.b64encode(packed.getvalue()).decode(), "text/plain": [file.name]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        followed = cells_of(TUTORIAL.read_text(encoding="utf-8"))
        execute(followed, Path(empty))
        NOTEBOOK.parent.mkdir(parents=True, exist_ok=True)
        NOTEBOOK.write_text(json.dumps(notebook(followed), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
