from collections.abc import Iterator
from pathlib import Path

import instant
import pytest

FIGURES_READ_BY = {"test_question"}


@pytest.fixture(scope="module", autouse=True)
def _few_pictures(request: pytest.FixtureRequest) -> None:
    """Figures are drawn only where a test reads them: that takes longer than a tiny grid."""
    if request.module.__name__ not in FIGURES_READ_BY:
        request.getfixturevalue("no_pictures")


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> instant.Training:
    """Trainings of an instant."""
    return instant.prepare(tmp_path, monkeypatch)


@pytest.fixture
def lab(tmp_path: Path, training: instant.Training) -> Iterator[instant.Lab]:
    """A grid of four cells whose trainings take an instant."""
    made = instant.make_lab(tmp_path, training)
    yield made
    for command in made.commands:
        command.process.kill()


@pytest.fixture
def search_lab(tmp_path: Path, training: instant.Training) -> Iterator[instant.Lab]:
    """A search of six points whose trainings take an instant."""
    made = instant.make_search_lab(tmp_path, training)
    yield made
    for command in made.commands:
        command.process.kill()
