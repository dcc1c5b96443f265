"""Learning-rate schedules against their closed forms."""

from itertools import pairwise

import pytest

from lit_lazy.config.schema import TrainConfig
from lit_lazy.optim import WSD, Constant, Cosine, Schedule
from lit_lazy.training.optimiser import lr_factor


def test_wsd_is_the_peak_then_falls() -> None:
    linear = WSD(decay_share=0.25, decay="linear")
    assert [linear.factor(u, 0.2) for u in (0.0, 0.5, 0.75, 0.875, 1.0)] == pytest.approx([1, 1, 1, 0.6, 0.2])
    root = WSD(decay_share=0.2)
    assert [root.factor(u, 0.0) for u in (0.0, 0.8, 0.85, 0.95, 1.0)] == pytest.approx([1, 1, 0.5, 1 - 0.75**0.5, 0])


def test_a_whole_decay_begins_at_once() -> None:
    assert WSD(decay_share=1.0, decay="linear").factor(0.3, 0.1) == pytest.approx(1 - 0.9 * 0.3)


def test_constant_stays() -> None:
    assert {Constant().factor(u / 10, 0.1) for u in range(11)} == {1.0}


@pytest.mark.parametrize("schedule", [Cosine(), WSD(), WSD(0.5, "linear")], ids=repr)
def test_behind_the_warm_up_it_never_rises_and_ends_at_the_fraction(schedule: Schedule) -> None:
    cfg = TrainConfig(steps=100, warmup_steps=10, final_lr_fraction=0.1, schedule=schedule)
    factors = [lr_factor(step, cfg) for step in range(10, 120)]
    assert factors[0] == 1
    assert all(a >= b for a, b in pairwise(factors))
    assert factors[90:] == pytest.approx([0.1] * 20)
    assert [lr_factor(step, cfg) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1])
