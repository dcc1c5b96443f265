"""Configs survive the trip through plain dicts and JSON, every field counts in a cell's key, and errors are named."""

import dataclasses
import functools
import json
import re
import typing
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import untrained
from wrong_values import GIVEN, PARTS, SETTINGS, other_value, wrong_values

from lit_lazy.attention import (
    AttentionSpec,
    Bias,
    Elastic,
    Fire,
    LearnedBias,
    NoPosition,
    OutputGate,
    SelfAttention,
    Softmax,
    T5Bias,
)
from lit_lazy.attention.position import LinearScaling, Llama3Scaling
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import flatten, from_dict, replace_at, to_dict
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.stdlib import Stdlib
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.search.definition import Real, Search
from lit_lazy.measure.lengths import Lengths
from lit_lazy.measure.retrieval import Passkey
from lit_lazy.model.generation import Sampling
from lit_lazy.optim import SGD, WSD, Constant, Logits
from lit_lazy.support.checked_fields import check_value, describe_kind, field_types
from lit_lazy.table.records import Column, Contrast

BASE = RunConfig(
    Backcopy(), ModelConfig(n_heads=2, attention=AttentionSpec(Elastic(), LearnedBias(length=9), window=5))
)


@dataclass(frozen=True)
class OwnAttention(SelfAttention):
    """A user's own mixer that attends."""


class TestRoundTrip:
    @pytest.mark.parametrize("cls", SETTINGS)
    def test_settings(self, cls):
        good = cls(**GIVEN.get(cls, {}))
        plain = to_dict(good)
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        base = next((part for part in PARTS if issubclass(cls, part)), cls)
        assert from_dict(base, plain) == good

    def test_what_is_left_out_has_its_default(self):
        assert from_dict(RunConfig, {"data": {"class": "Stdlib"}}) == RunConfig(Stdlib())

    def test_unknown_names_and_wrong_values_are_named(self):
        for plain, message in (
            ({"data": {"class": "Wiki"}}, "DataConfig='Wiki': unknown; known are Backcopy"),
            ({"data": {}}, "DataConfig=None: unknown"),
            ({"data": {"class": "Stdlib", "vocab_size": 3}}, "Stdlib has no field vocab_size"),
            ({"data": {"class": "Stdlib"}, "train": {"class": "TrainConfig"}}, "TrainConfig has no field class"),
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                from_dict(RunConfig, plain)
        with pytest.raises(ValueError, match="A custom class is known once the file that defines it has been imp"):
            from_dict(Bias, {"class": "MyBias"})

    def test_a_wrong_value_in_a_record_is_named(self):
        """Of results, plans, packed files and checkpoints."""
        plain = to_dict(BASE)
        for path, value in flatten(plain).items():
            record = json.loads(json.dumps(plain))
            *parents, name = path.split(".")
            below = functools.reduce(dict.__getitem__, parents, record)
            below[name] = 3 if isinstance(value, str) or path == "init_from" else "nothing"
            with pytest.raises(ValueError, match=rf"\b{name}='?(nothing|3)'?: must be"):
                from_dict(RunConfig, record)


def changed_fields(config, prefix=""):
    """Dotted path -> another value, for every scalar field below a config."""
    changes = {}
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            changes |= changed_fields(value, f"{path}.")
        else:
            changes[path] = other_value(value, typing.get_type_hints(type(config))[field.name])
    return changes


class TestCellKey:
    CHANGES = changed_fields(BASE) | {
        "data": Stdlib(),
        "model.position": NoPosition(),
        "model.position.scaling": LinearScaling(),
        "model.attention.normaliser": Softmax(),
        "model.attention.bias": T5Bias(),
        "model.attention.gate": OutputGate(),
        "init_from": "model.ckpt",
        "model.mixer": OwnAttention(),
        "train.optimiser": SGD(),
        "train.schedule": WSD(),
        "train.distillation": Logits(),
        "train.trainable": ("*.q.weight",),
        "evaluations": (Lengths(),),
    }

    def test_every_field_counts(self, tmp_path, monkeypatch):
        assert self.CHANGES.keys() == flatten(to_dict(BASE)).keys(), "none was forgotten"
        monkeypatch.chdir(tmp_path)
        untrained.save(tmp_path / "model.ckpt", BASE)
        for path, value in self.CHANGES.items():
            ramp = {"tau_ramp": 0.5, "tau_init": 0.0} if path.endswith((".tau_final", ".learn_after_ramp")) else {}
            ramp |= {"tau_init": 0.0} if path.endswith(".tau_ramp") else {}
            base = replace_at(BASE, {f"model.attention.normaliser.{name}": given for name, given in ramp.items()})
            assert cell_key(replace_at(base, {path: value}), "x") != cell_key(base, "x"), path

    def test_an_int_given_for_a_float_is_the_same_setting(self):
        for path, whole, decimal in (("train.lr", 1, 1.0), ("train.betas", (0, 0), (0.0, 0.0))):
            as_int, as_float = replace_at(BASE, {path: whole}), replace_at(BASE, {path: decimal})
            assert json.dumps(to_dict(as_int)) == json.dumps(to_dict(as_float))
            assert cell_key(as_int, "x") == cell_key(as_float, "x")
        assert type(to_dict(BASE)["train"]["steps"]) is int


class TestReplaceAt:
    def test_changes_valid_only_together(self):
        rule, bias = "model.attention.normaliser", "model.attention.bias"
        changes = {f"{rule}.threshold": "constant", f"{rule}.tau_init": 0.02, bias: Fire(width=4), f"{bias}.length": 12}
        for order in (changes, dict(reversed(changes.items()))):
            changed = replace_at(BASE, order).model.attention
            assert (changed.normaliser, changed.bias) == (Elastic(0.02, "constant"), Fire(length=12, width=4))

    def test_unknown_paths_are_named(self):
        for path, message in (
            ("modle.d_model", "RunConfig has no field 'modle' (did you mean model?); it has data, model, train, seed,"),
            ("model.n_kv_heads.more", "NoneType has no field 'more'; it has none"),
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                replace_at(BASE, {path: 1})


@pytest.mark.parametrize("cls", SETTINGS)
def test_a_value_that_a_field_does_not_declare_is_named_with_what_it_must_be(cls):
    good = cls(**GIVEN.get(cls, {}))
    prefix = f"{cls.__name__}." if cls._prefix is None else cls._prefix
    for name in (field.name for field in dataclasses.fields(cls)):
        hint = field_types(cls)[name]
        for value in wrong_values(hint):
            with pytest.raises(ValueError, match=rf"^{prefix}{name}=.*: must be {re.escape(describe_kind(hint))}") as e:
                dataclasses.replace(good, **{name: value})
            assert "\n" not in str(e.value)


ROWS = (Row("a", {}, "ours"), Row("b", {"seed": 3}, "ours"))


@pytest.mark.parametrize(
    "good",
    [
        *(ROWS[0], Column("a", "b"), Contrast("c", {"a": 1.0, "b": -1.0}), Real(0.5, 1.0)),
        Ablation("mine", rows=(ROWS[0], Row("b", {"train.lr": 3.0}, "ours"))),
        Search("mine", {"train.lr": Real(0.5, 1.0)}, "backcopy"),
    ],
)
def test_a_value_that_a_users_file_does_not_declare_is_named(good):
    for name in (field.name for field in dataclasses.fields(good)):
        for value in wrong_values(field_types(type(good))[name]):
            with pytest.raises(ValueError, match=rf"{name}\b|used as a folder name") as error:
                dataclasses.replace(good, **{name: value})
            assert "\n" not in str(error.value)


RAMP = {"tau_ramp": 0.5}
EXCLUSIVE = [
    (ModelConfig, {"n_heads": 5}, "model.n_heads=5: must divide model.d_model=64"),
    (ModelConfig, {"n_heads": 4, "n_kv_heads": 3}, "model.n_kv_heads=3: must divide model.n_heads=4"),
    (TrainConfig, {"steps": 10, "warmup_steps": 10}, "train.warmup_steps=10: must be below train.steps=10"),
    (TrainConfig, {"optimiser": SGD(), "betas": (0.9, 0.99)}, "train.betas=(0.9, 0.99): has no effect with "),
    (
        TrainConfig,
        {"schedule": Constant(), "final_lr_fraction": 0.0},
        "train.final_lr_fraction=0.0: has no effect with train.schedule=Constant; leave it at 0.1",
    ),
    (SGD, {"momentum": 0.0, "nesterov": True}, "SGD.nesterov=True: needs a momentum above 0"),
    (Llama3Scaling, {"low": 4.0}, "Llama3Scaling.low=4.0: must be below high=4.0"),
    (Elastic, {"threshold": "constant"}, "Elastic.tau_init=1.0: must be below 1 with Elastic.threshold='constant'"),
    (Elastic, {"threshold": "constant", "tau_init": 0.0, **RAMP}, "Elastic.tau_final=1.0: must be below 1 with Elas"),
    (Elastic, {"learn_tau": False, "learn_after_ramp": True, **RAMP}, "Elastic.learn_after_ramp=True: needs Elastic.l"),
    (Elastic, {"tau_final": 2.0}, "Elastic.tau_final=2.0: needs a ramp: Elastic.tau_ramp above 0; leave it out"),
    (Elastic, {"learn_after_ramp": True}, "Elastic.learn_after_ramp=True: needs a ramp"),
    (Elastic, {"learn_tau": False, "tau_lr_scale": 2.0}, "Elastic.tau_lr_scale=2.0: needs a tau that is trained"),
    (Elastic, {"tau_init": 0.0, "tau_lr_scale": 2.0, **RAMP}, "Elastic.tau_lr_scale=2.0: needs a tau that is trained"),
    (Elastic, RAMP, "Elastic.tau_ramp=0.5: needs a tau_init other than tau_final=1.0, or learn_"),
    (RunConfig, {"evaluations": (Lengths(), Lengths())}, "evaluations=Lengths(times=(1, 2, 4), "),
]


def test_values_that_exclude_each_other_are_named():
    for cls, values, message in EXCLUSIVE:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
            cls(**GIVEN.get(cls, {}) | values)
        assert "\n" not in str(error.value)


def test_a_class_whose_values_are_no_fields_is_refused():
    """They would be no part of the key."""

    class Plain(Bias):
        def build(self, n_heads, context_length):
            raise NotImplementedError

    class Undecorated(Elastic):
        power: float = 2.0
        steps: typing.ClassVar[int] = 3

    @dataclass(frozen=True)
    class Untyped(Elastic):
        tau_init = 0.5

    @dataclass(frozen=True)
    class OwnInit(Elastic):
        def __init__(self, power=2.0):
            object.__setattr__(self, "power", power)

    class Inherits(Elastic):
        steps: typing.ClassVar[int] = 3

    assert Inherits() == Inherits(tau_init=1.0)
    for cls, message in (
        (Plain, r"^Plain: write @dataclass\(frozen=True\) above the class$"),
        (Undecorated, r"^Undecorated: write @dataclass\(.* as its settings are no fields: power$"),
        (OwnInit, r"^OwnInit: has an __init__ of its own, .* write @dataclass\("),
        (Untyped, r"^Untyped.tau_init: is .* write `tau_init: TYPE = VALUE`$"),
    ):
        with pytest.raises(ValueError, match=message):
            cls()


def test_bounds():
    """The tests above draw values from the declared bounds; these are beyond some, and at some."""
    for cls, name, beyond, at in (
        *((ModelConfig, "d_model", 0, 1), (ModelConfig, "residual_dropout", 1.0, 0.0), (TrainConfig, "lr", 0.0, 1.0)),
        *(
            (TrainConfig, "betas", (1.0, 0.9), (0.0, 0.9)),
            (TrainConfig, "warmup_steps", -1, 0),
            (SGD, "momentum", 1.0, 0.0),
        ),
        *((RunConfig, "seed", -1, 0), (AttentionSpec, "window", 0, 1), (Sampling, "top_p", 0.0, 1.0)),
        *((Passkey, "lengths", (), (2,)), (Sampling, "temperature", -1.0, 0.0)),
    ):
        with pytest.raises(ValueError, match=f"{name}={re.escape(repr(beyond))}: must be"):
            cls(**GIVEN.get(cls, {}) | {name: beyond})
        check_value(name, at, field_types(cls)[name])


def test_numbers_of_other_libraries_and_lists_are_made_plain():
    given = {"steps": np.int64(9), "lr": torch.tensor(0.5), "warmup_steps": 0, "betas": [np.float32(0.5), 0.25]}
    train = TrainConfig(**given)
    assert (train.steps, train.lr, train.betas) == (9, 0.5, (0.5, 0.25))
    assert [type(value) for value in (train.steps, train.lr, *train.betas)] == [int, *[float] * 3]
    rows = (Row(name, {"train.steps": steps}, "ours") for name, steps in (("a", 98), ("b", np.int64(99))))
    mine = Ablation("mine", rows=rows, base="backcopy_tiny", seeds=range(2))
    assert mine.seeds == (0, 1)
    assert replace_at(BASE, mine.rows[1].changes) == replace_at(BASE, {"train.steps": 99})
    assert Ablation("mine", rows=[ROWS[0]], base="backcopy_tiny", seeds=np.arange(2)).seeds == (0, 1)


def test_a_mistake_in_the_checks_of_a_custom_class_stays_its_own():
    @dataclass(frozen=True)
    class Mine(Bias):
        length: int = 1

        def __post_init__(self):
            raise TypeError(f"{self.missing if self.length > 1 else 'mine'}")

        def build(self, n_heads, context_length):
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"^mine$"):
        Mine()
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        Mine(length=2)
    with pytest.raises(ValueError, match=r"^Mine\.length='2': must be a whole number$"):
        Mine(length="2")
