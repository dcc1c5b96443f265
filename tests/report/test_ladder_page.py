"""The page of the ladder is made of its packed cells."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "results" / "frontier-frontier_100k"
page = SimpleNamespace(**runpy.run_path(str(FOLDER / "page.py")))


@pytest.fixture(scope="module")
def ladder():
    return page.Ladder.read(page.CELLS)


def test_it_is_made_of_its_cells(ladder) -> None:
    assert (FOLDER / "README.md").read_text() == page.format_page(ladder)


def test_another_loss_is_another_difference(ladder) -> None:
    place = ladder.usual[0]
    rules = {rule: dict(seeds) for rule, seeds in ladder.cells[place].items()}
    before = ladder.compare(place, "lazy", "softmax", "loss/val")
    for seed, result in rules["lazy"].items():
        rules["lazy"][seed] = replace(result, metrics=result.metrics | {"loss/val": result.metrics["loss/val"] + 0.5})
    changed = page.Ladder({**ladder.cells, place: rules})
    assert changed.compare(place, "lazy", "softmax", "loss/val").mean == pytest.approx(before.mean + 0.5)
    assert page.describe(changed)[0] != page.describe(ladder)[0]
    assert page.describe(changed)[1:4] == page.describe(ladder)[1:4]
