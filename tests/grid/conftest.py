from collections.abc import Iterator
from pathlib import Path

import instant
import pytest
from two_rows import WILD, two_rows


@pytest.fixture(scope="module", autouse=True)
def _few_pictures(no_pictures: None) -> None:
    """No test here reads figures, which take longer to draw than a tiny grid to train."""


@pytest.fixture
def pair(tmp_path: Path) -> str:
    """The file of two rows with two seeds, and one that diverges."""
    path = tmp_path / "pair.py"
    path.write_text(two_rows("pair", more=WILD))
    return str(path)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> instant.Training:
    return instant.prepare(tmp_path, monkeypatch)


@pytest.fixture
def lab(tmp_path: Path, training: instant.Training) -> Iterator[instant.Lab]:
    """A grid of four cells whose trainings take an instant."""
    yield (made := instant.make_lab(tmp_path, training))
    made.end()


@pytest.fixture
def search_lab(tmp_path: Path, training: instant.Training) -> Iterator[instant.Lab]:
    yield (made := instant.make_search_lab(tmp_path, training))
    made.end()
