"""The losses of known predictors that every source states: where they lie, and that no key depends on them."""

import math

import pytest

from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.base import DataConfig
from lit_lazy.data.distractors import Distractors
from lit_lazy.data.facts import compute_learned_nats
from lit_lazy.data.mqar import Mqar
from lit_lazy.data.recall import Recall
from lit_lazy.data.stdlib import Stdlib

SOURCES = {
    Backcopy(train_sequences=50): ("8588600efacc6cd7", "7d3ef0d6f265"),
    Recall(train_sequences=50): ("b0c0b54f2e7a8ff6", "8c1e60beabec"),
    Distractors(train_sequences=50): ("9b218f0a66ad5c7d", "bdfab0463b1a"),
    Mqar(train_sequences=5, validation_sequences=5): ("0e299b3248f32592", "bf7981c03027"),
}
"""Fingerprint and key of each source, from before it stated marks."""


@pytest.mark.parametrize("data", SOURCES, ids=lambda data: type(data).__name__)
def test_marks_change_neither_fingerprint_nor_key(data: DataConfig) -> None:
    source = data.load()
    assert (source.fingerprint, cell_key(RunConfig(data=data), source.fingerprint)) == SOURCES[data]
    assert 0 <= source.info["optimum_nats"] < compute_learned_nats(source.info) < source.info["chance_nats"]


@pytest.mark.parametrize("data", [data for data in SOURCES if not isinstance(data, Backcopy)], ids=str)
def test_where_answers_are_certain_chance_is_the_marginal_of_the_targets(data: DataConfig) -> None:
    """Drawn values are uniform, so the marginal of many targets comes close to the law; here from the options alone."""
    expected = {"Recall": math.log(4), "Distractors": math.log(8), "Mqar": math.log(4096)}[type(data).__name__]
    info = data.load().info
    assert (info["optimum_nats"], info["chance_nats"]) == (0, pytest.approx(expected))
    assert compute_learned_nats(info) == pytest.approx(expected / 2)


def test_text_is_learned_halfway_between_unigram_and_trigram() -> None:
    info = Stdlib(validation_windows=16).load().info
    bits = (info["unigram_bits_per_byte"] + info["trigram_bits_per_byte"]) / 2
    assert compute_learned_nats(info) == pytest.approx(bits * math.log(2))
    assert compute_learned_nats(info | {"bytes_per_token": 3.0}) == pytest.approx(3 * bits * math.log(2))


def test_a_source_without_marks_does_not_say_what_learning_is() -> None:
    assert compute_learned_nats({"optimum_nats": 1.0}) is None
