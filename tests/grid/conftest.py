import pytest

FIGURES_READ_BY = {"test_launch", "test_question"}


@pytest.fixture(scope="module", autouse=True)
def _few_pictures(request: pytest.FixtureRequest) -> None:
    """Figures are drawn only where a test reads them: that takes longer than a tiny grid."""
    if request.module.__name__ not in FIGURES_READ_BY:
        request.getfixturevalue("no_pictures")
