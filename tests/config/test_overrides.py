"""`--path=value` on the command line, for every leaf of every exchangeable part and every field."""

import dataclasses
import json
import re
import typing

import forked
import pytest
from wrong_values import other_value, wrong_texts

from lit_lazy.attention import AttentionSpec, Bias, Elastic, Gate, LearnedBias, NoBias, Normaliser, Position, Rope
from lit_lazy.command.doctor_new_fields import fill_template
from lit_lazy.config.overrides import apply_overrides, check_field_names, list_fields
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import find_leaf_classes, flatten, replace_at, to_dict
from lit_lazy.config.user_files import load_experiment
from lit_lazy.data import DataConfig
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.packages import Packages
from lit_lazy.data.text import Text
from lit_lazy.measure.evaluation import Varied
from lit_lazy.measure.lengths import Lengths
from lit_lazy.measure.retrieval import Needle, Passkey
from lit_lazy.optim import Muon
from lit_lazy.support.checked_fields import describe_kind, field_types, is_group, is_part

NORMALISER, BIAS, POSITION, DATA = "model.attention.normaliser", "model.attention.bias", "model.position", "data"
PARTS = {NORMALISER: Normaliser, BIAS: Bias, "model.attention.gate": Gate, POSITION: Position, DATA: DataConfig}
LEAVES = [
    (path, cls)
    for path, base in PARTS.items()
    for cls in find_leaf_classes(base).values()
    if cls.__module__.startswith("lit_lazy.")
]
GROUPS = [("", RunConfig), ("model", ModelConfig), ("train", TrainConfig), ("model.attention", AttentionSpec)]
BASE = RunConfig(Backcopy(context_length=20, task_seed=3))
SET = RunConfig(
    Backcopy(context_length=20, task_seed=3),
    ModelConfig(
        attention=AttentionSpec(Elastic(tau_init=0.25, renormalise=True), LearnedBias(length=9, init_std=0.5)),
        position=Rope(base=77.0),
    ),
    TrainConfig(steps=90),
)


BOUND = {
    ("Backcopy", "fixed_token_at"): 3,
    ("Recall", "queries"): 14,
    ("Distractors", "queries"): 6,
    ("Mqar", "context_length"): 514,
    **{(name, "max_tokens"): 300 for name in ("Packages", "StdlibText", "Text")},
}
"""Other values of fields that others beside them, or being even, bind."""


def leaf_fields():
    for path, cls in LEAVES:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if issubclass(cls, Text) and field.name in ("stream", "begin_of_text", "end_of_text"):
                continue  # refused without others beside them, which tests/data/test_text.py gives
            if issubclass(cls, Packages) and field.name == "validation":
                continue  # the same, in tests/data/test_packages.py
            if issubclass(cls, Elastic) and field.name in ("tau_ramp", "tau_final", "learn_after_ramp"):
                continue  # refused without each other
            if field.name in ("scaling", "special_tokens"):
                continue  # parts, whose leaves tests/model/test_export.py and test_import.py have
            bound = BOUND.get((cls.__name__, field.name))
            value = other_value(field.default, hints[field.name]) if bound is None else bound
            yield path, cls, field.name, value if isinstance(value, str) else json.dumps(value), value


def apply(*arguments, base=BASE):
    return apply_overrides(base, arguments)


def test_a_leaf_by_its_name_has_its_defaults():
    """And nothing of the leaf it takes the place of, also where a field has the same name; the one there stays."""
    for path, cls in LEAVES:
        expected = SET if cls in (Backcopy, Elastic, LearnedBias, Rope) else replace_at(SET, {path: cls()})
        assert apply(f"--{path}={cls.__name__}", base=SET) == (expected, [path])


def test_a_leaf_and_one_of_its_fields():
    for path, cls, name, text, value in leaf_fields():
        base = replace_at(BASE, {path: cls()})
        assert getattr(cls(), name) != value
        arguments = (f"--{path}={cls.__name__}", f"--{path}.{name}={text}")
        start = replace_at(SET, {path: next(leaf() for p, leaf in LEAVES if p == path and leaf is not cls)})
        assert apply(*arguments, base=start)[0] == replace_at(start, {path: cls(**{name: value})}), (path, cls, name)
        expected = replace_at(base, {f"{path}.{name}": value}), [path, f"{path}.{name}"]
        assert apply(*arguments, base=base) == expected, (path, cls, name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ()),
        ("Varied('queries', (4,))", (Varied("queries", (4,)),)),
        ("(Lengths((1, 2), sequences=8), Needle())", (Lengths((1, 2), sequences=8), Needle())),
        ("[Passkey(seed=-0)]", (Passkey(),)),
    ],
)
def test_evaluations_are_given_as_calls(text, value):
    assert apply(f"--evaluations={text}") == (replace_at(BASE, {"evaluations": value}), ["evaluations"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Passkeys()", "Evaluation='Passkeys': unknown (did you mean Passkey?); known are"),
        ("Passkey", "write Passkey(), with settings in the brackets, as in NAME(FIELD=VALUE)"),
        ("Passkey(depth=1)", "unexpected keyword argument 'depth'"),
        ("Passkey(seed=open('file'))", "open('file') is no plain value"),
    ],
)
def test_wrong_evaluations_are_one_line(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        apply(f"--evaluations={text}")
    assert "\n" not in str(error.value)


GIVEN = [
    ("train.steps", "5", 5),
    (NORMALISER, "Elastic", Elastic(0.02, "constant", learn_tau=False, renormalise=True)),
    (f"{NORMALISER}.threshold", "constant", "constant"),
    (f"{NORMALISER}.tau_init", "0.02", 0.02),
    (f"{NORMALISER}.learn_tau", "false", False),
    ("train.warmup_steps", "1", 1),
    (f"{BIAS}.length", "null", None),
    (f"{POSITION}.base", "500", 500.0),
    ("train.betas", "[0.5,0.75]", (0.5, 0.75)),
    ("train.optimiser", "Muon", Muon()),
    ("train.z_loss", "1e-4", 1e-4),
]


def test_several_at_once():
    """Pairs that are valid only together, both forms, each kind of text, and the paths in their order."""
    expected = replace_at(SET, {path: value for path, _, value in GIVEN}), [path for path, _, _ in GIVEN]
    assert apply(*(f"--{path}={text}" for path, text, _ in GIVEN), base=SET) == expected
    assert apply(*(word for path, text, _ in GIVEN for word in (f"--{path}", text)), base=SET) == expected


def test_an_experiments_own_class_is_found_by_its_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(fill_template("bias", "steep"))
    base = load_experiment(path)
    own = type(base.model.attention.bias)
    assert apply("--seed=1", base=base)[0] == replace_at(base, {"seed": 1})
    assert apply(f"--{BIAS}.power=3", base=base)[0].model.attention.bias == own(3.0)
    assert apply(f"--{BIAS}=MySteep", f"--{BIAS}.power=3", base=BASE)[0].model.attention.bias == own(3.0)
    assert apply(f"--{BIAS}=NoBias", base=base)[0].model.attention.bias == NoBias()


@pytest.mark.parametrize("arguments", ["--modle.d_model=3", "--seed=1 --train.step=5", "--model.attntion.window=4"])
def test_a_misspelt_field_is_named_alike_before_torch_is_imported(arguments):
    with pytest.raises(ValueError, match="no such field") as late:
        apply(*arguments.split())
    with pytest.raises(ValueError, match=f"^{re.escape(str(late.value))}$"):
        check_field_names(arguments.split())
    # Other fields are left to the settings.
    check_field_names(["--model.d_model=3", "--train.lr", "0.1", "--data=Stdlib", f"--{NORMALISER}=Own"])
    check_field_names([f"--{NORMALISER}.own_field=2", "--data.pth=x", "--model.width=3", "--workrs=2", "steps=5"])


@pytest.mark.parametrize(("path", "cls"), [*GROUPS, *LEAVES])
def test_a_wrong_text_is_named_with_what_the_field_takes(path, cls):
    """Every field of every class, and a misspelt one."""
    base = BASE if (path, cls) in GROUPS else replace_at(BASE, {path: cls()})
    hints = field_types(cls)
    for name in [field.name for field in dataclasses.fields(cls)]:
        field = f"{path}.{name}".lstrip(".")
        for text in () if name == "evaluations" else wrong_texts(hints[name]):  # a text is a call there
            needs = f"must be {describe_kind(hints[name])}"
            if is_part(hints[name]):
                needs = "its fields are set one by one" if is_group(hints[name]) else "unknown"
            with pytest.raises(ValueError, match=rf"^--{field}={re.escape(repr(text))}: .*{re.escape(needs)}") as error:
                apply(f"--{field}={text}", base=base)
            assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=rf"^--{field}x='1': no such field.*; `lit-lazy fields EXPERIMENT` lists"):
            apply(f"--{field}x=1", base=base)


WRONG = [
    (["--lr=5"], "(did you mean --train.lr?)"),
    (["steps=5"], "unknown argument 'steps=5'; a field is set by --FIELD=VALUE"),
    (["--train.steps"], "--train.steps: has no value; give one as in --train.steps=VALUE"),
    (["--train.steps", "5", "--train.steps=7"], "--train.steps: is given twice, as '5' and as '7'; leave one out"),
    ([f"--train.betas={'[' * 9999}"], "maximum recursion depth exceeded"),
    ([f"--evaluations={'(' * 9999}"], "too many nested parentheses"),
    ([f"--{BIAS}=T5Bais"], f"--{BIAS}='T5Bais': unknown (did you mean T5Bias?); there are Alibi, "),
    (
        [f"--{BIAS}=LearnedBias", f"--{BIAS}.n_buckets=8"],
        f"no such field; it is T5Bias's: give --{BIAS}=T5Bias; LearnedBias has length, init_std; `",
    ),
    (["--train.steps=10"], "train.warmup_steps=50: must be below train.steps=10; give --train.warmup_steps too"),
    # The value of one field, made wrong by another's, is not blamed on its type.
    (["--train.warmup_steps=9999", "--train.lr=x"], "--train.lr='x': must be a finite number"),
]


@pytest.mark.parametrize(("arguments", "named"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_what_is_wrong_is_named_in_one_line(arguments, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        apply(*arguments)
    assert "\n" not in str(error.value)


def test_help_is_the_fields_docstrings(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        apply(f"--{BIAS}.help=T5Bias")
    assert "Distance from which all keys share the last bucket." in " ".join(capsys.readouterr().out.split())


def test_the_experiment_s_own_parts_are_listed_first_and_others_on_demand():
    own, every = list_fields(SET), list_fields(SET, others=True)
    assert every[: len(own)] == own
    text = " ".join("\n".join(every).split())
    assert "--train.steps=90 Optimiser steps. (a whole number of at least 1)" in text
    assert "--model.attention.normaliser.tau_init=0.25 Initial offset parameter." in text  # the config's own
    assert "--model.attention.bias.n_buckets=" in text  # of a class that it has not
    assert not re.search(r"<class|typing|MISSING", text)
    used = {path: name for path, name in flatten(to_dict(SET)).items() if f"--{path}={name}" in own}
    assert used[NORMALISER] == "Elastic"
    assert {line for line in own if line.startswith("--")} == {f"--{path}={name}" for path, name in used.items()}
    assert "--model.attention.normaliser=Softpick" in every[len(own) :]
    heads = [line for line in every if line.startswith("--")]
    assert len(heads) == len({*heads}), "none twice"
    flat = [line.strip() for line in own if re.match(r"  --((model|train)\.)?[a-z_]+=", line)]
    assert len(flat) > 25
    assert apply_overrides(SET, flat)[0] == SET, "what is listed can be given"

    def listed() -> list[str]:
        prompt = {"__name__": "typed_at_a_prompt"}
        exec(TYPED, prompt)
        return [line for line in list_fields(SET, others=True) if prompt["Typed"]]

    lines = forked.run_in_fork(listed)  # this process is not to know it
    assert {"--model.attention.normaliser=Typed", "  --model.attention.normaliser.strength=2.0"} <= {*lines}


TYPED = """
from dataclasses import dataclass
from lit_lazy.attention import Normaliser

@dataclass(frozen=True)
class Typed(Normaliser):
    strength: float = 2.0
"""
