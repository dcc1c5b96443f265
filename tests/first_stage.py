"""Stand-ins for the learning rates of first stages, for tests of what uses them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from lit_lazy.grid import stages

NAME = "q_text_rates-stdlib_small"
BEST = {"softmax": 0.005, "softmax + bias": 0.002, "elastic": 0.01, "lazy": 0.005}
FRONTIER = "frontier_rates-frontier_100k", "frontier_rates-frontier_300k"
FRONTIER_BEST = {
    "softmax + bias": 0.008,
    "elastic": 0.004,
    "softmax": 0.008,
    "lazy": 0.016,
    "softmax + output gate": 0.004,
}
STAGES = {NAME: BEST} | dict.fromkeys(FRONTIER, FRONTIER_BEST)
"""Of the first stages of all questions: the best rate of each row."""


def use_stand_in(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rates: Mapping[str, Mapping[str, float]] = STAGES
) -> None:
    """Let second stages read these rates instead of the committed ones."""
    folder.mkdir(exist_ok=True)
    path = folder / "rates.json"
    path.write_text(json.dumps(rates))
    monkeypatch.setattr(stages, "RATES", str(path))
