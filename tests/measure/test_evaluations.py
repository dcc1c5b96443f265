"""Evaluations of final models: part of the key, checked before training, equal to plain sums."""

import dataclasses
import math
import re
import sys

import numpy as np
import pytest
import torch

from lit_lazy.attention import AttentionSpec, Elastic, Eviction, LearnedAbsolute, RetNet
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.config.key import cell_key, evaluation_key
from lit_lazy.config.user_files import experiment
from lit_lazy.data import TokenDataset
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.stdlib import Stdlib
from lit_lazy.measure.costs import Costs
from lit_lazy.measure.diagnostics import sample_validation
from lit_lazy.measure.evaluation import Varied, evaluate, measure_evaluation
from lit_lazy.measure.int8 import Int8
from lit_lazy.measure.lengths import Lengths, Streaming, loss_by_position
from lit_lazy.measure.lm_eval import LmEval
from lit_lazy.measure.retrieval import Needle, Passkey
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.training import checkpoints
from lit_lazy.training.check_before_run import prepare
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import RunResult

TINY = experiment("backcopy_tiny")
LENGTHS, STREAMING = Lengths((1, 2), sequences=8), Streaming((0, 2), window=5, sequences=4)
VARIED = Varied("validation_sequences", (16, 32))
RETRIEVAL = Passkey((24,), digits=2, sequences=2), Needle((24,), digits=1, sequences=2), Int8(sequences=8)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    cfg = dataclasses.replace(TINY, evaluations=(LENGTHS, STREAMING, VARIED, *RETRIEVAL))
    folder = tmp_path_factory.mktemp("run")
    return run(cfg, folder, keep_checkpoint=True), folder


@dataclasses.dataclass(frozen=True)
class Mine(Evaluation):
    """A custom evaluation."""

    name: str = "a"

    def measure(self, model, data):  # noqa: ARG002
        return {f"mine/{self.name}": 1.0, "mine/undefined": float("nan")}


@dataclasses.dataclass(frozen=True)
class Fixed(Backcopy):
    """Data of one length, whatever is asked for."""

    context_length: int = TINY.data.context_length

    def load(self):
        return TINY.data.load()


SMALL = Backcopy(vocab_size=8, context_length=16, n_triggers=2, train_sequences=4, validation_sequences=8)


def validation(length, sequences):
    (batch,) = sample_validation(dataclasses.replace(SMALL, context_length=length).load(), sequences)
    return batch


def test_lengths_are_means_of_the_losses_by_position(result):
    model = DecoderLM(TINY.model, 9, 16, seed=1).double()
    found = LENGTHS.measure(model, SMALL)
    for times in (1, 2):
        loss = loss_by_position(model, validation(16 * times, 8))
        assert found[f"length_{times}x/loss"] == pytest.approx(loss.mean().item())
        assert found[f"length_{times}x/loss_last_quarter"] == pytest.approx(loss[-4 * times :].mean().item())
    assert {name for name in result[0].metrics if name.startswith("length_")} == found.keys()


@pytest.mark.parametrize(("length", "n_held"), [(None, False), (None, True), (24, True)])
def test_streaming_compares_the_same_tokens(length, n_held):
    model = DecoderLM(TINY.model, 9, 16, seed=1).double()
    found = dataclasses.replace(STREAMING, length=length, n_held=n_held).measure(model, SMALL)
    batch = validation(length or 32, 4)
    whole = loss_by_position(model, batch)[7:].mean().item()
    expected = {"streaming/whole/loss": whole}
    for first in (0, 2):
        for held in (False, True) if n_held else (False,):
            loss = loss_by_position(model, batch, Eviction(first, 5), n_held=held)[7:].mean().item()
            name = f"streaming/{first}_and_5{'_n_held' if held else ''}"
            expected |= {f"{name}/loss": loss, f"{name}/loss_excess": loss - whole}
            assert loss != whole
    assert found == pytest.approx(expected)


def test_a_contrast_with_a_group_without_rows_is_undefined():
    source = TINY.data.load()
    none = torch.zeros(len(source.validation), source.context_length, dtype=torch.bool)
    validation = TokenDataset(source.validation.sequences, {"none": none, "every": ~none})
    groups = "none", "every"
    source = dataclasses.replace(source, validation=validation, row_groups=groups, row_contrast=groups)
    model = DecoderLM(TINY.model, source.vocab_size, source.context_length, seed=0)
    found = evaluate(model, source, "fp32", 8)
    assert {name for name in found if name.startswith("mass/")} == {"mass/every"}


def test_varied_data_are_evaluated_as_the_usual_ones(result):
    model = DecoderLM(TINY.model, TINY.data.load().vocab_size, TINY.data.context_length, seed=0)
    found = Varied("validation_sequences", (TINY.data.validation_sequences,)).measure(model, TINY.data)
    usual = evaluate(model, TINY.data.load(), "fp32", 32)
    assert {name.partition("/")[2]: value for name, value in found.items()} == usual
    assert {f"validation_sequences_{n}/loss/val" for n in (16, 32)} <= result[0].metrics.keys()


def test_of_text_they_are_bits_per_byte_too():
    cfg = experiment("stdlib_tiny")
    source = cfg.data.load()
    model, found = DecoderLM(cfg.model, source.vocab_size, source.context_length, seed=0), {}
    for evaluation in (Lengths((1,), sequences=2), Streaming((1,), 8, sequences=2), Int8(sequences=2)):
        found |= evaluation.measure(model, cfg.data)
    for name in ("length_1x/loss_last_quarter", "streaming/1_and_8/loss_excess", "int8/loss_rise"):
        bits = found[name] / np.log(2) / source.info["bytes_per_token"]
        assert found[name.replace("loss", "bits_per_byte")] == pytest.approx(bits)


def test_a_custom_one_is_measured_and_what_is_undefined_left_out(result, tmp_path):
    found = run(dataclasses.replace(TINY, evaluations=(Mine("a"), Mine("b"))), tmp_path)
    assert {name for name in found.metrics if name.startswith("mine/")} == {"mine/a", "mine/b"}
    assert found.evaluations == {evaluation_key(Mine(name)): [f"mine/{name}"] for name in ("a", "b")}
    assert found.training_key == cell_key(TINY, found.fingerprint) != found.key
    assert checkpoints.load(result[1] / "final.ckpt").cfg.evaluations == (LENGTHS, STREAMING, VARIED, *RETRIEVAL)


def test_what_a_finished_training_did_not_measure_is_measured_on_its_kept_model(result, tmp_path, monkeypatch):
    plain = run(dataclasses.replace(TINY, evaluations=(Mine("b"),)), tmp_path / "plain", keep_checkpoint=True)
    monkeypatch.setattr(sys.modules["lit_lazy.training.run"], "fit", lambda *_: pytest.fail("it trains again"))
    asked = dataclasses.replace(TINY, evaluations=(LENGTHS, Mine("a")))
    found = run(asked, tmp_path / "more")
    assert found.key == cell_key(asked, plain.fingerprint)
    assert found.training_key == plain.training_key
    assert found.evaluations.keys() == {evaluation_key(one) for one in asked.evaluations}
    assert {name for name in found.metrics if name.startswith("mine/")} == {"mine/a"}
    for name, value in found.metrics.items():
        assert name == "mine/a" or value == result[0].metrics[name]
    for file in ("diagnostics.npz", "metrics.jsonl"):
        assert (tmp_path / "more" / file).exists() == (tmp_path / "plain" / file).exists()
    fewer = run(dataclasses.replace(TINY, evaluations=(LENGTHS,)), tmp_path / "fewer")
    assert fewer.metrics == {name: value for name, value in found.metrics.items() if name != "mine/a"}


TEXT = {"data": Stdlib(context_length=96)}
RECURRENT = dataclasses.replace(TINY.model, mixer=RetNet())
ABSOLUTE = dataclasses.replace(TINY.model, position=LearnedAbsolute(), attention=AttentionSpec(Elastic()))


@pytest.mark.parametrize(
    ("evaluation", "changes", "message"),
    [
        (Lengths((1, 2)), {"model": ABSOLUTE}, r"Lengths: .*32"),
        (STREAMING, {"model": ABSOLUTE}, r"Streaming: model\.position=LearnedAbsolute"),
        (Streaming(window=20, length=24), {}, r"Streaming: Streaming\.window=20: must evict within 24 tokens"),
        (Lengths((1, 2)), {"data": Fixed()}, r"Lengths: data=Fixed: context_length=32: load\(\) gives sequences of 16"),
        (Passkey((24,), digits=2), {"data": Fixed()}, r"Passkey: data=Fixed: context_length=24: load\(\) gives"),
        (Costs(decoded=4, divisors=(2,)), {"data": Fixed()}, r"Costs: data=Fixed: context_length=8: load\(\) gives"),
        (Varied("context_length", (32,)), {"data": Fixed()}, r"Varied: data=Fixed: context_length=32: load\(\) gives"),
        (Varied("pears", (1,)), {}, r"Varied: Varied\.field='pears': data=Backcopy has no such field; give other data"),
        (Varied("vocab_size", (30,)), {}, r"Varied: data\.vocab_size=30: changes the vocabulary size"),
        (Costs(decoded=16), {}, r"Costs: Costs\.decoded=16: must be below the context's 16 tokens"),
        (Costs(decoded=4, divisors=(3,)), {}, r"Costs: Costs\.divisors=3: must divide the context's 16 tokens"),
        (Costs(decoded=4), {"model": RECURRENT}, r"Costs: model\.mixer=.*RetNet.*: has no attention"),
        (LmEval(("pika",)), TEXT, r"LmEval: tasks='pika': no such task; known are wikitext,.*a task folder"),
        (LmEval(("mine",), task_folder="/proc/none"), TEXT, r"LmEval: LmEval\.task_folder='/proc/none': must be a"),
        (LmEval(("piqa",)), {}, r"LmEval: its data \(Backcopy\) is not text"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_what_cannot_be_measured_is_one_line_before_anything_is_created(evaluation, changes, message):
    with pytest.raises(ValueError, match=f"^evaluations: {message}.*$"):
        prepare(dataclasses.replace(TINY, evaluations=(evaluation,), **changes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Streaming(times=3, length=99), r"Streaming\.times=3: has no effect with Streaming\.length=99; leave"),
        (lambda: Needle(depths=(0.5, 0, 0.5)), r"Needle\.depths=\(0\.5, 0, 0\.5\): .* differ"),
        (lambda: dataclasses.replace(TINY, evaluations=(LENGTHS, LENGTHS)), "is given twice"),
        (lambda: dataclasses.replace(TINY, evaluations=(Mine(3),)), r"Mine\.name=3: must be text"),
    ],
)
def test_mistakes_in_their_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_they_leave_the_model_as_it_was():
    model = DecoderLM(TINY.model, TINY.data.load().vocab_size, TINY.data.context_length, seed=1).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for evaluation in (LENGTHS, STREAMING, VARIED, *RETRIEVAL, Costs(sequences=2, rounds=2, decoded=4)):
        evaluation.measure(model, TINY.data)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


NUMBERS = {"int": 3, "bool": True, "numpy": np.float32(0.5), "tensor": torch.tensor([2.5]), "undefined": math.inf}
WRONG = {
    "must be a dict of numbers by name": [1.0],
    "mine/a='high' (could not convert": {"mine/a": "high"},
    "mine/a={'b': 1} (float() argument": {"mine/a": {"b": 1}},
    "mine/a=tensor([0., 0.]) (": {"mine/a": torch.zeros(2)},
    f"mine/a={10**400} ("[:100]: {"mine/a": 10**400},
    "mine/a=1e+200: must be a finite number of at least": {"mine/a": 1e200},
    "measure()=3: MLflow takes no metric of this name": {3: 1.0},
    "measure()='a\\n': MLflow takes no metric of this name": {"a\n": 1.0},
    "ZeroDivisionError (test_evaluations.py, line": ZeroDivisionError(),
}


@dataclasses.dataclass(frozen=True)
class Returning(Evaluation):
    """Changes the model that it is given, and returns or raises what it is told."""

    number: int = -1

    def measure(self, model, data):  # noqa: ARG002
        model.train()
        torch.nn.init.zeros_(model.embedding.weight)
        returned = NUMBERS if self.number < 0 else [*WRONG.values()][self.number]
        if isinstance(returned, Exception):
            raise returned
        return returned


def test_a_users_metric_may_return_any_number_and_changes_nothing(tmp_path):
    alone, both = (run(dataclasses.replace(TINY, evaluations=x), tmp_path / str(len(x))) for x in [(), (Returning(),)])
    assert both.metrics == alone.metrics | {"int": 3.0, "bool": 1.0, "numpy": 0.5, "tensor": 2.5}
    assert RunResult.load(tmp_path / "1" / "result.json").metrics == both.metrics


@pytest.mark.parametrize("number", range(len(WRONG)), ids=WRONG)
def test_a_wrong_metric_is_named(number, result):
    model = checkpoints.load(result[1] / "final.ckpt").model
    with pytest.raises(ValueError, match=re.escape([*WRONG][number])) as raised:
        measure_evaluation(Returning(number), model, TINY.data)
    assert str(raised.value).startswith("evaluations: Returning: ")


def test_it_is_named_before_the_training(tmp_path):
    with pytest.raises(ValueError, match=re.escape(next(iter(WRONG)))):
        run(dataclasses.replace(TINY, evaluations=(Returning(0),)), tmp_path)
    assert not (tmp_path / "checkpoints" / "last.ckpt").exists()


@dataclasses.dataclass(frozen=True)
class Clashing(Evaluation):
    def measure(self, model, data):  # noqa: ARG002
        return {"loss/excess": -5.0, "loss/val": 7.0}


def test_no_metric_takes_the_place_of_another(tmp_path):
    """Neither of the run's own nor of those that another evaluation of the same class gives."""
    few, more = (Lengths((1,), sequences=n) for n in (2, 16))
    alone = [run(dataclasses.replace(TINY, evaluations=(one,)), tmp_path / str(one)).metrics for one in (few, more)]
    every = dataclasses.replace(TINY, evaluations=(few, Clashing(), more))
    metrics = run(every, tmp_path / "all" / "a", keep_checkpoint=True).metrics
    name, (first, second) = "length_1x/loss", alone
    assert first[name] != second[name]
    assert metrics[name] == first[name]
    assert metrics[f"Lengths-{evaluation_key(more)[:6]}/{name}"] == second[name]
    assert all(metrics[own] == first[own] for own in Clashing().measure(None, None))
    assert metrics[f"Clashing-{evaluation_key(Clashing())[:6]}/loss/excess"] == -5
    again = run(dataclasses.replace(TINY, evaluations=(more,)), tmp_path / "all" / "b").metrics
    assert again[name] == second[name], "the names of one do not depend on what else was measured before"
