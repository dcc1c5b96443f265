"""Learning-rate schedules against their closed forms."""

from itertools import pairwise

import pytest

from lit_lazy.config.schema import TrainConfig
from lit_lazy.optim import WSD, Constant, Cosine
from lit_lazy.training.trained_parameters import lr_factor


@pytest.mark.parametrize(
    ("schedule", "at", "last", "expected"),
    [
        (WSD(decay_share=0.25, decay="linear"), (0.0, 0.5, 0.75, 0.875, 1.0), 0.2, [1, 1, 1, 0.6, 0.2]),
        (WSD(decay_share=0.2), (0.0, 0.8, 0.85, 0.95, 1.0), 0.0, [1, 1, 0.5, 1 - 0.75**0.5, 0]),
        (WSD(decay_share=1.0, decay="linear"), (0.3,), 0.1, [1 - 0.9 * 0.3]),
        (Cosine(), (0.0, 1 / 3, 0.5, 1.0), 0.1, [1, 0.1 + 0.9 * 0.75, 0.55, 0.1]),  # (1 + cos 60°) / 2
        (Constant(), (0.0, 0.5, 1.0), 0.1, [1, 1, 1]),
    ],
    ids=repr,
)
def test_closed_forms(schedule, at, last, expected):
    assert [schedule.factor(u, last) for u in at] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", [Cosine(), WSD(), WSD(0.5, "linear")], ids=repr)
def test_behind_the_warm_up_it_never_rises_and_ends_at_the_fraction(schedule):
    cfg = TrainConfig(steps=100, warmup_steps=10, final_lr_fraction=0.1, schedule=schedule)
    factors = [lr_factor(step, cfg) for step in range(10, 120)]
    assert factors[0] == 1
    assert all(a >= b for a, b in pairwise(factors))
    assert factors[90:] == pytest.approx([0.1] * 20)
    assert [lr_factor(step, cfg) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1])
