"""Runs docs/tutorial.md from its first block to its last on the tiny model, and checks the notebook made from it."""

import json
import re
from pathlib import Path

import pytest
from forked import run_in_fork
from torch_alone import ROOT

from lit_lazy.config.user_files import load_module

made = load_module(ROOT / "docs" / "notebook.py")
TINY = {'"backcopy"': '"backcopy_tiny"', "my_question-backcopy": "my_question-backcopy_tiny"}
MOST_BYTES = 200_000


@pytest.mark.long
def test_it_can_be_followed(tmp_path: Path) -> None:
    text = made.TUTORIAL.read_text()
    for known, tiny in TINY.items():
        assert known in text
        text = text.replace(known, tiny)
    # In a fork: its rule has the name of the README's, and a process can register only one.
    run_in_fork(lambda: follow(text, tmp_path))


def follow(text: str, folder: Path) -> None:
    cells = made.cells_of(text)
    names = made.execute(cells, folder)
    verdict = names["found"].table.verdict
    assert verdict.exploratory  # not committed before its run
    out = " ".join("".join(cell.output for cell in cells).split())  # one of them is wrapped
    assert out.count(verdict.sentence) >= 3  # from the grid, the results, and all verdicts
    assert [picture.name for cell in cells for picture in cell.pictures] == ["lazy.png", "softmax.png"]
    assert (folder / "runs" / "my_question-backcopy_tiny" / "report.html").exists()
    assert all(cell["outputs"] for cell in made.notebook(cells)["cells"] if prints_output(cell))


def prints_output(cell: dict) -> bool:
    source = "".join(cell["source"])
    return cell["cell_type"] == "code" and ("print(" in source or source.startswith("!"))


def test_the_notebook_is_the_tutorial_with_its_output() -> None:
    kept = json.loads(made.NOTEBOOK.read_text())
    assert made.NOTEBOOK.stat().st_size < MOST_BYTES
    todays = made.notebook(made.cells_of(made.TUTORIAL.read_text()))
    without = [{**cell, "outputs": []} if "outputs" in cell else cell for cell in kept["cells"]]
    assert {**kept, "cells": without} == todays, "`.venv/bin/python docs/notebook.py` makes it anew"
    assert all(cell["outputs"] for cell in kept["cells"] if prints_output(cell))
    assert not re.search(r"/(tmp|home|root|work)/|Traceback", made.NOTEBOOK.read_text())
    for link in re.findall(r"\]\((?!http)([^)#]+)", "".join("".join(cell["source"]) for cell in kept["cells"])):
        assert (made.NOTEBOOK.parent / link).exists(), link
