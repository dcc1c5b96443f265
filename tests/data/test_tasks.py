"""What every data source promises: options alone determine its sequences, it states losses, errors are one line."""

import dataclasses
import math
import re

import pytest
import torch

from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.data import compute_learned_nats
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.distractors import Distractors
from lit_lazy.data.mqar import Mqar
from lit_lazy.data.packages import Packages
from lit_lazy.data.recall import Recall
from lit_lazy.data.source_interface import DataConfig
from lit_lazy.data.stdlib import Stdlib
from lit_lazy.data.text import Text
from lit_lazy.data.token_dataset import IGNORED, Batch, TokenDataset
from lit_lazy.data.trigger import Trigger

KNOWN = {
    Backcopy(train_sequences=50): ("8588600efacc6cd7", "7d3ef0d6f265"),
    Recall(train_sequences=50): ("b0c0b54f2e7a8ff6", "8c1e60beabec"),
    Distractors(train_sequences=50): ("9b218f0a66ad5c7d", "bdfab0463b1a"),
    Mqar(train_sequences=5, validation_sequences=5): ("0e299b3248f32592", "bf7981c03027"),
    Trigger(train_sequences=50, validation_sequences=50): ("66c50603b3f025c1", "3a54f0bd1cb4"),
}
"""Fingerprint and key of a small source of each synthetic task."""
SMALL = {"train_sequences": 60, "validation_sequences": 40}
TASKS = [
    *KNOWN,
    Backcopy(vocab_size=3, n_triggers=1, context_length=3, **SMALL),
    Backcopy(vocab_size=20, n_triggers=7, trigger_mass=0.9, concentration=0.05, **SMALL),
    Backcopy(vocab_size=100, n_triggers=1, trigger_mass=0.01, concentration=5, context_length=33, **SMALL),
    Backcopy(fixed_token_at=9, **SMALL),
    Recall(pairs=1, queries=2, keys=2, values=2, **SMALL),
    Recall(pairs=9, queries=4, keys=11, values=3, **SMALL),
    Distractors(queries=4, lags=2, keys=4, values=2, **SMALL),
    Distractors(queries=6, lags=5, keys=9, values=3, **SMALL),
    Mqar(vocab_size=20, context_length=16, pairs=3, random_fillers=True, power=1.0, **SMALL),
    Mqar(vocab_size=11, context_length=4, pairs=1, **SMALL),
    Trigger(symbols=2, context_length=3, trigger_share=0.9, **SMALL),
    Trigger(symbols=300, context_length=40, trigger_share=0.01, **SMALL),
]


def read(data: TokenDataset) -> Batch:
    """All sequences in one batch."""
    return data.__getitems__(list(range(len(data))))


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_batches_and_facts_are_as_stated(task: DataConfig) -> None:
    source, length = task.load(), task.context_length
    assert task.outline() == source.outline
    assert source.context_length == length
    for part in ("train", "validation"):
        batch, n = read(getattr(source, part)), getattr(task, f"{part}_sequences")
        assert batch.keys() == {"tokens", "targets", "oracle_nll", *source.row_groups}
        assert all(values.shape == (n, length) for values in batch.values())
        assert source.info[f"{part}_tokens"] == n * length
        tokens, targets, oracle = batch["tokens"], batch["targets"], batch["oracle_nll"]
        answered = targets != IGNORED
        for ids in (tokens, targets[answered]):
            assert ids.dtype == torch.int64
            assert 0 <= ids.min() <= ids.max() < source.vocab_size
        assert len(answered.sum(1).unique()) == 1, "micro-batches weigh alike"
        rows = torch.stack([batch[name] for name in source.row_groups])
        assert rows.dtype == torch.bool
        assert rows.flatten(1).any(1).all()
        assert (rows.sum(0) <= answered).all(), "no row without a target, and none in two groups"
        assert oracle.isfinite().all()
        assert (oracle >= 0).all()
    optimum, chance = source.info["optimum_nats"], source.info["chance_nats"]
    assert optimum == pytest.approx(oracle[answered].mean().item(), rel=1e-5)
    assert 0 <= optimum < chance
    assert compute_learned_nats(source.info) == pytest.approx((optimum + chance) / 2)


@pytest.mark.parametrize("task", KNOWN, ids=lambda task: type(task).__name__)
def test_options_alone_determine_the_sequences(task: DataConfig) -> None:
    source = task.load()
    assert task.load() is source
    assert (source.fingerprint, cell_key(RunConfig(data=task), source.fingerprint)) == KNOWN[task]
    other = dataclasses.replace(task, task_seed=1).load()
    assert not torch.equal(other.train.sequences, source.train.sequences)
    longer = dataclasses.replace(task, train_sequences=task.train_sequences + 10).load()
    assert len({source.fingerprint, other.fingerprint, longer.fingerprint}) == 3
    kept, again = read(source.validation), read(longer.validation)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize(("task", "nats"), [(Recall, math.log(4)), (Distractors, math.log(8)), (Mqar, math.log(4096))])
def test_where_answers_are_certain_chance_is_the_marginal_of_the_targets(task: type, nats: float) -> None:
    """Drawn values are uniform, so the marginal of many targets comes close to the law; here from the options alone."""
    info = task(train_sequences=5, validation_sequences=5).load().info
    assert (info["optimum_nats"], info["chance_nats"]) == (0, pytest.approx(nats))


def test_text_is_learned_halfway_between_unigram_and_trigram() -> None:
    info = Stdlib(validation_windows=16).load().info
    bits = (info["unigram_bits_per_byte"] + info["trigram_bits_per_byte"]) / 2
    assert compute_learned_nats(info) == pytest.approx(bits * math.log(2))
    assert compute_learned_nats(info | {"bytes_per_token": 3.0}) == pytest.approx(3 * bits * math.log(2))
    assert compute_learned_nats({"optimum_nats": 1.0}) is None, "a source without marks says nothing"


OUT_OF_RANGE = {
    Backcopy: {"vocab_size": (4,), "fixed_token_at": (65,)},
    Recall: {"queries": (3,), "pairs": (7,)},
    Distractors: {"queries": (7,), "keys": (7,)},
    Mqar: {"context_length": (254, 257), "vocab_size": (128,)},
    Text: {"max_tokens": (3,)},
}
"""Values that others exclude; bounds of single fields: tests/config/test_config.py."""
REFUSED = [
    *(
        (task, {field: value}, f"data.{field}={value}: must ")
        for task, fields in OUT_OF_RANGE.items()
        for field, values in fields.items()
        for value in values
    ),
    (Recall, {"pairs": 65}, "data.keys=72: must "),
    (Recall, {"train_sequences": 10**13}, "data.train_sequences=10000000000000, "),
    (Mqar, {"train_sequences": 10**12}, "data.train_sequences=1000000000000, "),
    (Distractors, {"lags": 10**9}, "data.train_sequences=38400, "),
    (Text, {"path": "a", "hub": "b"}, "data.hub='b': excludes data.path='a'"),
    (Text, {"path": "a", "stream": True}, "data.stream=True: needs data.hub"),
    (Text, {"hub": "b", "stream": True}, "data.stream=True: needs data.max_tokens"),
    (Text, {"path": "a", "end_of_text": "</s>"}, "data.end_of_text='</s>': needs a data.tokenizer"),
    (Text, {"path": "a", "bos": True, "document_mask": True}, "data.bos=True: excludes data.document_mask"),
    (Packages, {"path": "text.txt", "validated": "packages"}, "data.validated='packages': has no effect"),
    (Packages, {"validation": "a.txt"}, "data.validation='a.txt': needs data.path"),
]


@pytest.mark.parametrize(("task", "options", "message"), REFUSED)
def test_a_wrong_option_is_one_line(task: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)) as error:
        task(**options).load()
    assert "\n" not in str(error.value)
