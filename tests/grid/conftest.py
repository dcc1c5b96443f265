from collections.abc import Iterator
from pathlib import Path

import instant
import pytest


@pytest.fixture(scope="module", autouse=True)
def _few_pictures(no_pictures: None) -> None:
    """No test here reads figures, which take longer to draw than a tiny grid to train."""


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> instant.Training:
    """Trainings of an instant."""
    return instant.prepare(tmp_path, monkeypatch)


@pytest.fixture
def lab(tmp_path: Path, training: instant.Training) -> Iterator[instant.Lab]:
    """A grid of four cells whose trainings take an instant."""
    yield (made := instant.make_lab(tmp_path, training))
    made.end()


@pytest.fixture
def search_lab(tmp_path: Path, training: instant.Training) -> Iterator[instant.Lab]:
    """A search of six points whose trainings take an instant."""
    yield (made := instant.make_search_lab(tmp_path, training))
    made.end()
