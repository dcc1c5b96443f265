"""Images of figures are laid out and drawn once."""

from collections import Counter

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lit_lazy import figures
from lit_lazy.figures import heads


def test_an_image_is_laid_out_once_and_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = heads.tau_by_layer({"tau": np.full((2, 2), 0.125), "sample": np.array([4, 16])})
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
