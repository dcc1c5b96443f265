"""Keys of cells: unchanged by new options, changed by edited code, and equal for equal settings."""

import dataclasses
import enum
import importlib
import itertools
import json
import lzma
import runpy
import sys
import types
import typing
from abc import ABC
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest

from lit_lazy.attention import Alibi, AttentionSpec, Elastic, LearnedBias, Normaliser, Softmax
from lit_lazy.config import ModelConfig, RunConfig, key, replace_at
from lit_lazy.config.key import SCHEMA, cell_key, evaluation_key, list_changes, settings_key, training_key
from lit_lazy.config.serialisation import find_leaf_classes, from_dict, shorten_paths, to_dict
from lit_lazy.config.user_classes import hash_user_code, require_unedited_code
from lit_lazy.config.user_files import experiment, load_experiment, load_module
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.recall import Recall
from lit_lazy.grid.ablation import load_defined
from lit_lazy.grid.question import load_ablation_or_question
from lit_lazy.grid.search.definition import Search
from lit_lazy.grid.stages import FirstStageMissing
from lit_lazy.measure.evaluation import Varied
from lit_lazy.measure.lengths import Lengths
from lit_lazy.measure.lm_eval import LmEval
from lit_lazy.support.names_to_paths import find, list_available
from lit_lazy.training.check_before_run import prepare_outline
from lit_lazy.training.ineffective_settings import list_ineffective

ROOT = Path(__file__).parents[2]
SMOLLM2 = "aed716192e6b08fc1e30ad72709874d198441660e45513807d874646b84d68ab"
"""`hash_model` of what `make smollm2` makes, which is no part of a clone; tests/model/test_import.py compares them."""
SHIPPED = Path(__file__).with_name("shipped_keys.json")
NORMALISER = "model.attention.normaliser"


def current() -> dict[str, typing.Any]:
    """The schema, the defaults of every class of settings, and the key of every shipped row with seed 0.

    Of a question that waits for another's table none: its rows are not known yet.
    """
    keys = {}
    for name in list_available("ablations"):
        path = find("ablations", name)
        if hasattr(load_module(path), "search"):
            search = load_defined(path, "search", Search)
            base = load_experiment(find("experiments", search.base))
            keys[name] = {"": cell_key(replace_at(base, search.common), "data")}
            continue
        try:
            ablation, _ = load_ablation_or_question(path)
        except FirstStageMissing:
            continue
        # A key has the content of init_from, which is no part of a clone.
        base = replace_at(load_experiment(find("experiments", ablation.base)), ablation.common | {"init_from": None})
        keys[name] = {row.name: cell_key(row.apply_to(base), "data") for row in ablation.all_rows}
    return {"schema": SCHEMA, "defaults": defaults(RunConfig), "keys": keys}


def defaults(cls: type) -> dict[str, dict[str, typing.Any]]:
    """Of a dataclass and of all that its fields may hold: class name -> field -> default."""
    found: dict[str, dict[str, typing.Any]] = {cls.__name__: {}}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[cls.__name__][field.name] = to_dict(field.default, hints[field.name])
        elif field.default_factory is not dataclasses.MISSING:
            found[cls.__name__][field.name] = to_dict(field.default_factory())
        hint = hints[field.name]
        parts = find_leaf_classes(hint).values() if ABC in getattr(hint, "__mro__", ()) else [hint]
        for part in parts:
            if dataclasses.is_dataclass(part) and part.__module__.startswith("lit_lazy."):
                found |= defaults(part)
    return found


def test_shipped_keys_and_defaults_are_as_they_were() -> None:
    """A key that changes orphans results. Where a default or a meaning has to change, raise SCHEMA and write this file
    again: `python tests/config/test_key.py`."""
    assert current() == json.loads(SHIPPED.read_text())


def test_committed_results_have_the_keys_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they can be taken instead of trained, and a grid of them extended. The first cell of each row is read."""
    monkeypatch.setattr(key, "hash_model", {"models/smollm2.ckpt": SMOLLM2}.__getitem__)
    packs = sorted((ROOT / "docs" / "results").glob("*/*.jsonl.xz"))
    assert packs
    for pack in packs:
        _, *cells = map(json.loads, lzma.decompress(pack.read_bytes()).splitlines())
        for cell in {cell["variant"]: cell for cell in reversed(cells)}.values():
            config, fingerprint = from_dict(RunConfig, cell["config"]), cell["fingerprint"]
            assert cell_key(config, fingerprint) == cell["key"], (pack, cell["variant"])
            # Two packs are older than keys of trainings.
            assert cell["training_key"] in ("", training_key(config, fingerprint)), (pack, cell["variant"])


def test_changes_of_an_experiment_are_told_by_the_shortest_names_and_tell_it_apart() -> None:
    cfg = RunConfig(data=Backcopy(), model=ModelConfig(attention=AttentionSpec(Elastic(0.5), Alibi((1.0,))), n_heads=1))
    bias, tau = "model.attention.bias", f"{NORMALISER}.tau_init"
    every = [replace_at(cfg, {"data": Recall()}), replace_at(cfg, {"data": Recall(pairs=9)})]
    for changes, told in (
        ({}, {}),
        ({tau: 0.5, "seed": 0}, {}),  # set to what it is
        ({"train.steps": 400}, {"steps": 400}),
        ({tau: 1.0}, {"tau_init": 1.0}),  # a default
        ({NORMALISER: Softmax(), "train.lr": 0.5}, {"normaliser": "Softmax", "lr": 0.5}),
        ({bias: LearnedBias(init_std=0.5)}, {"bias": "LearnedBias", "bias.init_std": 0.5}),
        ({"evaluations": (Lengths((2,)),)}, {"evaluations": [to_dict(Lengths((2,)))]}),
    ):
        every.append(replace_at(cfg, changes))
        assert list_changes(cfg, every[-1]) == told
    assert len({*map(settings_key, every)}) == len({str(list_changes(cfg, one)) for one in every})
    assert shorten_paths(["a.b.c", "d.b.c", "b.e", "c"]) == {"a.b.c": "a.b.c", "d.b.c": "d.b.c", "b.e": "e", "c": "c"}


def test_evaluations_are_in_a_cells_key_and_not_in_its_trainings(tmp_path: Path) -> None:
    """Each has a key of its own, which its settings and its files change."""
    plain = RunConfig(data=Backcopy())
    asked = replace_at(plain, {"evaluations": (Lengths(times=(2,)), LmEval(task_folder=str(tmp_path)))})
    assert training_key(asked, "x") == training_key(plain, "x") == cell_key(plain, "x") != cell_key(asked, "x")
    others = (replace_at(plain, {"seed": 1}), "x"), (plain, "y")
    assert training_key(plain, "x") not in {training_key(*other) for other in others}
    before = list(map(evaluation_key, asked.evaluations))
    (tmp_path / "task.yaml").write_text("task: mine")
    assert len({*before, evaluation_key(Lengths()), *map(evaluation_key, asked.evaluations)}) == 4


def test_a_file_that_an_evaluation_reads_is_in_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, by its folder, and by a pattern."""
    (file := tmp_path / "other.txt").write_text("a")
    asked = [Varied("validation", (str(path),)) for path in (file, tmp_path, tmp_path / "*.txt")]
    choice = Varied("validated", ("packages",))
    before, chosen = [*map(evaluation_key, asked)], evaluation_key(choice)
    file.write_text("bc")
    assert {*before}.isdisjoint(map(evaluation_key, asked))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "x.txt").write_text("a")
    assert evaluation_key(choice) == chosen, "a value that names no file"


RULE = """
from dataclasses import dataclass
from lit_lazy.attention import Elastic
from lit_lazy.config import replace_at
from lit_lazy.config.user_files import load_experiment
from lit_lazy.support.names_to_paths import find
from factors import FACTOR

search = 3


@dataclass(frozen=True)
class Times(Elastic):
    '''A rule.'''

    strength: float = 1.0

    def build(self, shape):
        return super().build(shape)  # times FACTOR

    def read(self, config=None):
        return look(config)


def look(_):
    return search


def config():
    base = load_experiment(find("experiments", "backcopy_tiny"))
    return replace_at(base, {"model.attention.normaliser": Times()})


if __name__ == "__main__":
    print(config())
"""


NUMBERS = itertools.count()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "factors.py").write_text("from deeper import BASE\n\nFACTOR = 2 * BASE\n")
    (tmp_path / "deeper.py").write_text("BASE = 1\n")
    (tmp_path / "unrelated.py").write_text("X = 1\n")
    path = tmp_path / "mine.py"
    path.write_text(RULE.replace("Times", f"Times{next(NUMBERS)}"))  # classes of earlier tests are still known
    yield path
    for name in ("factors", "deeper", "mine"):
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def make_key(path: Path) -> str:
    """The key in a new process."""
    return forked.run_in_fork(lambda: cell_key(load_experiment(path), "x"))


EDITS = [
    ("mine.py", "build(shape)", "build(shape).half()", True),
    ("mine.py", "@dataclass(frozen=True)", "@dataclass(frozen=True, slots=True)", True),
    ("mine.py", "search = 3", "search = 4", True),
    ("factors.py", "2 * BASE", "3 * BASE", True),
    ("deeper.py", "BASE = 1", "BASE = 7", True),
    ("mine.py", "()})", "(), 'seed': 0})", False),  # made settings are in the key already
    ("mine.py", "  # times FACTOR", "\n\n\n# a remark between statements", False),
    ("mine.py", "1.0\n", "1.0\n    '''Documented.'''\n", False),
    ("mine.py", "super().build(shape)", "(\n            super()\n            .build(shape,)\n        )", False),
    ("factors.py", "from", "'Factors.'\nfrom", False),
    ("deeper.py", "BASE = 1", "BASE = (1)  # as agreed", False),
    ("unrelated.py", "X = 1", "X = 2", False),
]


@pytest.mark.parametrize(("name", "old", "new", "counts"), EDITS, ids=[f"{name} {new}" for name, _, new, _ in EDITS])
def test_the_users_code_is_in_the_key_and_what_changes_no_result_is_not(name, old, new, counts, mine) -> None:
    """Comments, docstrings, layout, settings beside a class and files that it does not import change none."""
    before = make_key(mine)
    edit(mine.with_name(name), old, new)
    assert (make_key(mine) != before) == counts
    assert hash_user_code(load_experiment(find("experiments", "backcopy_tiny"))) == []


@pytest.mark.parametrize(
    ("how", "name", "old", "new"),
    [
        ("loaded", "mine.py", "# times", "* 2 # times"),
        ("imported", "factors.py", "2 *", "3 *"),
        ("loaded", "deeper.py", "1", ""),
    ],
)
def test_an_edit_after_the_import_asks_for_a_new_process(how, name, old, new, mine, monkeypatch) -> None:
    """A key of new code for a model of old code would spoil the runs folder for good."""
    monkeypatch.syspath_prepend(mine.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    former = load_experiment(mine) if how == "loaded" else importlib.import_module("mine").config()
    key, file = cell_key(former, "x"), mine.with_name(name)
    text = file.read_text()
    file.write_text(f"# a remark\n{text}")
    require_unedited_code(former)
    if how == "loaded":
        load_experiment(mine)
    if new:
        file.write_text(text.replace(old, new))
    else:
        file.unlink()
    for use in (lambda: require_unedited_code(former), lambda: load_experiment(mine)):
        with pytest.raises(ValueError, match=rf"^/.*/{name}: was edited after it was imported; start a new process"):
            use()
    assert cell_key(former, "x") == key
    file.write_text(text)
    require_unedited_code(former)


def test_a_file_whose_import_failed_may_be_edited(mine: Path) -> None:
    """And what it has imported by then may not, nor a file without classes."""
    text, deeper = mine.read_text(), mine.with_name("deeper.py")

    def retry() -> bool:
        mine.write_text(f"{text}\nunknown\n")
        with pytest.raises(ValueError, match="NameError"):
            load_experiment(mine)
        mine.write_text(text.replace("# times", "* 2 # times"))
        edit(deeper, "1", "2")
        with pytest.raises(ValueError, match=r"deeper\.py: was edited after it was imported"):
            load_experiment(mine)
        edit(deeper, "2", "1")
        cfg = load_experiment(mine)
        require_unedited_code(cfg)
        return cfg == from_dict(RunConfig, to_dict(cfg))

    assert forked.run_in_fork(retry)  # this process is not to know two classes of one name


DEEP = """
from dataclasses import dataclass
from lit_lazy.support.checked_fields import CheckedFields
@dataclass(frozen=True)
class Deep(CheckedFields):
    pass
"""


def test_one_file_is_one_module_however_it_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ablation may import the experiment that it runs on; files and classes of one name elsewhere are others."""
    known = {*sys.modules}
    monkeypatch.setattr(sys, "path", [*sys.path])
    for first in ("deepone", "deeptwo"):
        (tmp_path / f"{first}.py").write_text(DEEP)
        (tmp_path / f"{first}_ablation.py").write_text(f"from {first} import Deep\n")
    one, two = tmp_path / "deepone.py", tmp_path / "deeptwo.py"
    deep = load_module(one).Deep
    assert load_module(tmp_path / "deepone_ablation.py").Deep is deep
    imported = load_module(tmp_path / "deeptwo_ablation.py").Deep
    assert load_module(two).Deep is imported
    found = []
    for place, more in (("a", ""), ("b", "    field: int = 1\n")):
        path = tmp_path / place / "exp" / "deepmine.py"
        path.parent.mkdir(parents=True)
        path.write_text(DEEP + more)
        found += hash_user_code(load_module(path).Deep())
    assert len({*found}) == 2
    for name in {*sys.modules} - known:
        del sys.modules[name]


def make_rule(scale: float) -> type:
    @dataclasses.dataclass(frozen=True)
    class Scaled(Elastic):
        tau_init: float = scale

    return Scaled


def test_a_class_whose_source_does_not_tell_what_it_does_is_refused(mine, monkeypatch) -> None:
    """Without a file, typed at a prompt, with values from around it, or defined twice, as in an exported notebook."""
    unread = r"its source cannot be read.*define it in a \.py file$"
    for file in (None, "<stdin>"):
        piped = types.ModuleType("piped")
        piped.__file__ = file
        monkeypatch.setitem(sys.modules, "piped", piped)
        with pytest.raises(ValueError, match=f"^Piped: {unread}"):
            hash_user_code(dataclasses.make_dataclass("Piped", (), namespace={"__module__": "piped"})())
    names = {"__name__": __name__, "Elastic": Elastic}
    exec("class Typed(Elastic):\n    def build(self, shape):\n        return None\n", names)
    with pytest.raises(ValueError, match=rf"^Typed\.build: {unread}"):
        hash_user_code(names["Typed"]())
    with pytest.raises(ValueError, match=r"^Scaled: is not what its file defines .* at the top of a file, with fields"):
        hash_user_code(make_rule(9.0)())
    mine.write_text(mine.read_text() + "\n\nclass Helper:\n    x = 1\n\n\nclass Helper:\n    x = 2\n")
    with pytest.raises(ValueError, match=r"^mine\.py: defines the class Helper twice, .*; rename one$"):
        hash_user_code(load_experiment(mine))


class Kind(enum.Enum):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Flat:
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Steep(Flat):
    pass


@dataclasses.dataclass(frozen=True)
class Holds(Elastic):
    number: int | float = 2
    pair: tuple[float, int] = (1.0, 1)
    anything: Any = False
    flat: Flat = Flat()
    parts: tuple[tuple[Normaliser, ...], ...] = ()


def make_holder_key(**fields: Any) -> str:
    changes = {"model.attention.normaliser": Holds(**fields)}
    return cell_key(experiment("backcopy_tiny", changes), "x")


@pytest.mark.parametrize(
    ("field", "value"),
    [("anything", Kind.ONE), ("anything", Path("x")), ("anything", len), ("flat", Steep())],
    ids=str,
)
def test_a_value_that_a_file_would_not_give_back_is_refused(field: str, value: Any) -> None:
    """A model is made from a file: it would be another, or none, after all had been checked."""
    with pytest.raises(ValueError, match=rf"^Holds\.{field}=.*: would be read from a file as "):
        prepare_outline(experiment("backcopy_tiny", {"model.attention.normaliser": Holds(**{field: value})}))


def test_values_that_a_file_tells_apart_have_keys_of_their_own(mine: Path) -> None:
    """Also those that Python calls equal, and the code of parts at any depth."""
    fields: list[dict[str, Any]] = [{}, {"number": 1}, {"number": 1.0}, {"number": 2.0}, {"pair": (2, 2)}]
    fields += [{"anything": value} for value in (0, 0.0, -0.0, True, 1)]
    keys = [make_holder_key(**each) for each in fields]
    assert len({*keys}) == len(fields)
    assert make_holder_key(pair=(2.0, 2)) == keys[4], "an int in a field of floats"
    told = list_ineffective(experiment("backcopy_tiny", {"model.attention.normaliser": Holds(flat=Flat(3))}), 16)
    assert any("Holds" in line or "flat" in line for line in told), "it does nothing, and fails at nothing"
    rule = load_experiment(mine).model.attention.normaliser
    assert {*hash_user_code(rule)} < {*hash_user_code(Holds(parts=((rule,),)))}


def test_classes_of_one_name_are_named_with_their_files(mine: Path) -> None:
    other = mine.with_name("other.py")
    other.write_text(mine.read_text())

    def load_both() -> None:
        to_dict(load_experiment(mine))
        made = load_experiment(other)
        assert from_dict(RunConfig, to_dict(load_experiment(find("experiments", "backcopy_tiny"))))  # unconcerned
        from_dict(RunConfig, to_dict(made))

    with pytest.raises(RuntimeError, match=rf"two classes have the name Times\d+, in {mine} and {other}; rename a cus"):
        forked.run_in_fork(load_both)


MAKES_ITS_KEY = "\n\nfrom lit_lazy.config.key import cell_key\n\nKEY = cell_key(config(), 'x')\n"


def run(name: str) -> str:
    """As `python -m`."""
    return runpy.run_module(name, run_name="__main__", alter_sys=True)["KEY"]


def test_a_file_has_one_key_however_it_is_started(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training would be repeated otherwise."""
    monkeypatch.syspath_prepend(mine.parent)
    mine.write_text(mine.read_text() + MAKES_ITS_KEY)
    starts = [lambda: load_module(mine).KEY, lambda: importlib.import_module("mine").KEY, lambda: run("mine")]
    starts.append(lambda: runpy.run_path(str(mine), run_name="__main__")["KEY"])
    assert len(set(map(forked.run_in_fork, starts))) == 1
    monkeypatch.syspath_prepend(mine.parent.parent)
    (sub := mine.parent / "sub").mkdir()
    (sub / "mine.py").write_text(mine.read_text().replace("from factors", "from ..factors"))
    edit(mine.with_name("factors.py"), "from deeper", "from .deeper")
    name = f"{mine.parent.name}.sub.mine"
    starts = [lambda: importlib.import_module(name).KEY, lambda: run(name)]
    keys = list(map(forked.run_in_fork, starts))
    edit(mine.with_name("deeper.py"), "1", "2")
    assert keys[0] == keys[1] != forked.run_in_fork(starts[0]), "a module of a package"


if __name__ == "__main__":
    SHIPPED.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")
