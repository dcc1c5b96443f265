"""Images of figures: the same from every process, and each laid out and drawn once."""

from collections import Counter

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lit_lazy import figures
from lit_lazy.figures import heads, images
from lit_lazy.support.errors import UnfinishedError

RUNS = [
    (f"run {number}", {"tau": np.full((2, 2), number / 8), "sample": np.array([4, 16])})
    for number in range(images.WORTH_A_PROCESS + 1)
]


def test_images_are_the_same_from_one_process_and_from_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "count_cores", lambda: 2)
    shared = figures.render_runs(RUNS)
    monkeypatch.setattr(images, "count_cores", lambda: 1)
    assert shared == figures.render_runs(RUNS)
    assert [list(drawn) for drawn in shared] == [["tau_by_layer"]] * len(RUNS)
    assert len({drawn["tau_by_layer"].data for drawn in shared}) == len(RUNS)


def test_a_dead_process_ends_the_drawing_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "count_cores", lambda: 2)
    damaged = ("damaged", {"tau": np.zeros(3)})
    with pytest.raises(UnfinishedError, match=r"a process that drew figures died \(status 1\); repeat the command"):
        figures.render_runs([RUNS[0], damaged, *RUNS[2:]])  # the other process draws every second run
    assert "Traceback" in capfd.readouterr().err


def test_an_image_is_laid_out_once_and_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = heads.tau_by_layer(RUNS[1][1])
    assert drawn is not None
    counts = Counter[str]()
    for owner, name in ((ConstrainedLayoutEngine, "execute"), (Figure, "draw")):
        method = getattr(owner, name)

        def counted(*words: object, name: str = name, method: object = method) -> object:
            counts[name] += 1
            return method(*words)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, counted)
    figures.render_image(drawn)
    assert counts == {"execute": 1, "draw": 1}
    assert isinstance(drawn.get_layout_engine(), ConstrainedLayoutEngine), "files need layouts of their own"
