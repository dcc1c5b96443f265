"""Wrong input, sizes that no machine holds, users' files that misbehave: one line, status 2, nothing created or run."""

import argparse
import io
import json
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import PASSWORD, expect_refusal, iter_commands, snapshot_tree
from stores import make_runs
from wrong_values import wrong_texts

from lit_lazy.command import options
from lit_lazy.command.doctor_new_fields import identifier
from lit_lazy.command.export_import import digest, find_source
from lit_lazy.command.main import main, make_parser
from lit_lazy.command.tokenise_train_generate import prompt_file
from lit_lazy.config.checkpoint_file import read_checkpoint
from lit_lazy.report.diagnose_checkpoint import read_checkpoint_history
from lit_lazy.support.checked_fields import parse
from lit_lazy.support.error_messages import LONGEST_MESSAGE, sanitise, short_repr
from lit_lazy.support.names_to_paths import find_python_file
from lit_lazy.support.secrets import format_command_line
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, RESULT

TRAIN = ["train", "backcopy_tiny"]
RUN = ["ablate", "run", "table2", "--base", "backcopy_tiny"]
CELL = [*RUN, "--rows", "softmax", "--seeds", "0", "--workers", "1"]
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "rivals-stdlib"
DEVICE = os.devnull
"""In place of a checkpoint, to check other options: only files and folders are refused at once."""
NORMALISER, BIAS, MIXER = "--model.attention.normaliser", "--model.attention.bias", "--model.mixer"
TRILLION, LONG = "1000000000000", "x" * 300
MEMORY = "GB of memory, of which this machine has"
pytestmark = pytest.mark.usefixtures("place")

COMMANDS = dict(iter_commands(make_parser()))
"""Words -> parser, of each command."""
VALUED = [
    (words, action)
    for words, parser in COMMANDS.items()
    for action in parser._actions
    if (action.type is not None or action.choices is not None) and action.metavar != "COMMAND"
]
EARLIER = {"checkpoint": DEVICE, "source": ".", "kind": "normaliser", "a": "x"}
"""A value of an argument that stands before others."""
WRONG: dict[Any, tuple[str, ...]] = {
    options.path: ("x" * 300, "x/" * 3000, "a\0b", "loop/x"),
    options.folder: (__file__, "", "x" * 300, "loop/x", "lost"),
    options.checkpoint: ("nofile", "nofile.ckpt", ".", __file__),
    options.experiment_name: ("nothing", "", "nothing.py", "table2", "x" * 300),
    options.ablation_name: ("nothing", "nothing.py", "backcopy", "x" * 300),
    options.json_file: ("out", "out.txt"),
    options.duration: ("90", "0m", "-1h", "soon", "1" * 99 + "m"),
    options.gpu_share: ("-1", "1.5", "nan", "half", "0.00001"),
    find_python_file: ("mine.py", "."),
    digest: ("x", "A" * 64, "a" * 63),
    identifier: ("1x", "class", "a-b"),
    find_source: ("./nofile", "a/b/c"),
    prompt_file: ("nofile", "."),
}
"""Option type -> texts that it refuses; a new type must be given some."""


def list_wrong_texts(action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return ["nothing", ""]
    kind = action.type
    given = kind.keywords if isinstance(kind, partial) else {}
    function = kind.func if isinstance(kind, partial) else kind
    if "kind" not in given:
        return [*WRONG[function]]
    texts = ["", *wrong_texts(given["kind"])] if function is options._parse_option else [",", "a,,b", "1,2,1"]
    return [*texts, "x,1.5", "9" * 5000] if parse_or_none(given["kind"], "x") is None else texts


def parse_or_none(kind: Any, text: str) -> Any:
    try:
        return parse(text, kind)
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("words", "action"), VALUED, ids=[f"{' '.join(words)} {action.dest}" for words, action in VALUED]
)
def test_a_value_that_an_option_does_not_take(words, action, place, capsys) -> None:
    """Every option and argument of every command, by its type: the option, the value and what it must be."""
    (place / "loop").symlink_to("loop")
    (place / "lost").symlink_to("nowhere/x")
    positionals = COMMANDS[words]._get_positional_actions()
    before = [] if action.option_strings else [EARLIER[one.dest] for one in positionals[: positionals.index(action)]]
    name = (action.option_strings or [action.metavar])[0]
    assert list_wrong_texts(action)
    for text in list_wrong_texts(action):
        given = [f"{name}={text}"] if action.option_strings else [*before, text]
        said = expect_refusal([*words, *given], capsys)
        assert re.match(rf"lit-lazy {' '.join(words)}: argument (\S+/)?{name}: ", said), said
        assert short_repr(text)[:40] in said or action.choices


OPTIONS = [
    (["train", "table2"], "unknown; it is an ablation: `lit-lazy ablate run table2` runs it"),
    ([*RUN, "--results", DEVICE, "--keep-checkpoint"], "--results, --keep-checkpoint: a packed file holds no models; "),
    (["ablate", "run", "q_mask_2", "--looks", "5"], "--looks=5: there are 4, and with --rows or --seeds none"),
    (["fields", "backcopy", "extra"], "unknown argument 'extra'; see `lit-lazy fields --help`"),
    ([*TRAIN, "--runs", "/".join([LONG[:200]] * 18)], "nothing can be written there (File name too long)"),
    ([*RUN, f"{BIAS}=Alibi"], f"{BIAS}: row 'softmax' sets model.attention.bias itself; leave one of the two out"),
    ([*RUN, "--seeds", ",".join(map(str, range(150_000)))], "cells of the grid=2550000: must be at most 100000"),
    (["ablate", "table", "table2", "--from", str(RESULTS)], "is a folder; give the table.json in it, --from "),
    (["dashboard"], "--runs runs: holds no runs yet; `make table2` or `lit-lazy train EXPERIMENT` creates some"),
    (["new", "data", "torch"], "NAME 'torch.py': torch is the name of a Python module"),
    (["new", "data", "my_softpick"], "NAME 'my_softpick.py': exists already"),
    (["evaluate", "fifo"], "cannot be read (It is a pipe or a device, and no file)"),
]
FIELDS = [
    ([f"{MIXER}=RetNet", "--model.attention.window=4"], "model.attention.window=4: has no effect in"),
    (["--train.batch_size=1000"], "train.batch_size=1000: must not exceed the 256 training sequences"),
    (["--\x1b[31m\n=1"], r"\x1b[31m"),
    (["--storage", "postgresql://me:geheim@h/x"], "--storage='postgresql://me:***@h/x': no such field"),
    (["--data=Text", "--data.path=loop"], "data.path='loop': Too many levels of symbolic links; choose another path"),
]
"""Of `train`."""
SIZES = [
    ([*TRAIN, "--dry-run", f"--model.d_model={TRILLION}"], f"model.d_model={TRILLION}"),
    ([*TRAIN, f"--data.train_sequences={TRILLION}"], f"data.train_sequences={TRILLION}"),
    ([*CELL, f"--model.d_model={TRILLION}"], f"row 'softmax': model.d_model={TRILLION}"),
    ([*CELL, "--workers", TRILLION], f"--workers={TRILLION}"),
]
"""Refused by an estimate."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device that is asked for")
@pytest.mark.parametrize("command", [TRAIN, RUN])
def test_a_backend_without_its_device(command, monkeypatch, capsys) -> None:
    monkeypatch.setattr("flash_lazy.fused.configurations.INTERPRETED", False)
    said = expect_refusal([*command, "--model.backend=triton"], capsys)
    assert "model.backend='triton': needs a GPU, and this machine has none; leave it at auto, or give chunked" in said
    assert " q" not in said


@pytest.fixture
def traps(place: Path) -> Path:
    """A folder of things that are no files, or no good ones."""
    (place / "my_softpick.py").write_text("")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
    return place


@pytest.mark.usefixtures("traps")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [*OPTIONS, *(([*TRAIN, *fields], named) for fields, named in FIELDS), *SIZES],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_and_fields(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = expect_refusal(arguments, capsys)
    assert named in said
    assert len(said) < LONGEST_MESSAGE + 200
    assert (arguments, named) not in SIZES or MEMORY in said


def test_a_machine_without_a_folder_for_temporary_files_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    """Libraries ask for one when they are imported, and fail with a traceback."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    assert expect_refusal(TRAIN, capsys).startswith("lit-lazy: TMPDIR cannot be used (No usable temporary directory")


VARIABLES = {
    "MPLBACKEND": ("matplotlib", "matplotlib refuses it (Key backend: 'odd' is not a valid value"),
    "HF_HUB_DOWNLOAD_TIMEOUT": ("huggingface_hub.constants", "huggingface_hub.constants refuses it (invalid literal"),
    "TORCHELASTIC_RUN_ID": ("", "says that torchrun started this process, which sets WORLD_SIZE to a number"),
}


@pytest.mark.parametrize(("name", "module", "problem"), [(name, *found) for name, found in VARIABLES.items()])
def test_a_variable_that_stops_a_library_is_named(name, module, problem, monkeypatch, capsys) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)  # which is imported once in this process
    monkeypatch.setenv(name, "odd")
    for command in (TRAIN, CELL):
        error = expect_refusal(command, capsys)
        assert error.startswith(f"lit-lazy: {name}='odd': {problem}")
        assert "; unset it, or " in error


BASE = """
import dataclasses
import torch
from lit_lazy.config import *
from lit_lazy.data import DataConfig, DataSource, TokenDataset
from lit_lazy.data.backcopy import Backcopy
DATA = Backcopy(vocab_size=16, context_length=16, train_sequences=256, validation_sequences=64)
MODEL, TRAINING = dict(d_model=16, d_ff=32), dict(steps=6, batch_size=8, warmup_steps=2)
class Odd(BaseException): pass
class Mute(Exception):
    def __str__(self): raise ValueError
def made(model={}, train={}, **rest):
    rest = dict(data=DATA) | rest
    return RunConfig(model=ModelConfig(**MODEL | model), train=TrainConfig(**TRAINING | train), **rest)
"""
EXPERIMENTS = {
    "def config(:": "line 1: SyntaxError",
    "import sys\nsys.exit(3)": "line 2: SystemExit: 3",
    "x = 1": "defines no function config(); give it one that returns a RunConfig",
    "ablation = 1": "defines no function config(); `lit-lazy ablate run ",
}
"""Content -> what is said of it."""
CONFIGS = {
    "raise RuntimeError('a\\nb')": "RuntimeError: a b",
    "return 10**5000": "config() returned a int; it must",
    "return config()": "RecursionError: maximum recursion depth exceeded",
    "raise Odd('x')": "Odd: x",
    "raise Mute": "Mute",
}
UNEQUAL = "targets=-100 * ((torch.arange(80)[:, None] > 64) & (torch.arange(16) > 1)).long()"
"""16 targets in each sequence at first, later 2."""
LOADS = {
    "raise RuntimeError('a\\nb')": "data=Mine: RuntimeError (e.py, line ",
    "return None": "data=Mine: load() returned None; let it return a DataSource",
    "return but(vocab_size=10**12)": MEMORY,
    "return but(vocab_size=3)": "tokens must be 0 to 2",
    "return but(context_length=9)": "must be whole numbers of shape [256, 10]",
    "return but(train=TokenDataset(NONE, targets=NONE))": "must be whole numbers of shape [64, 16]",
    "return but(fingerprint=None)": "data=Mine: fingerprint=None: must be text",
    "return but(train=[1])": "data=Mine: train=[1]: must be a TokenDataset",
    "return but(info={'bytes_per_token': 0})": "data=Mine: info['bytes_per_token']=0: must be a finite number above 0",
    "return but(info={'chance_nats': 'high'})": "info['chance_nats']='high': must be a finite number",
    "return but(info={'note': float('nan')})": "info={'note': nan}: must be a dict, each key text, each value text or",
    "return but(watched_key=0)": "watched_key=0: must be a whole number of at least 1 and at most 16 or None",
    "return but(row_contrast=('trigger', 'x'))": "row_contrast=('trigger', 'x'): must be two of row_groups=(",
    "return but(row_groups=('oracle_nll',))": "row_groups=['oracle_nll']: must each be among the validation's",
    "return but(validation=TokenDataset(NONE, {'x': NONE}))": "validation: positions['x']=[64, 17]: must be of shape",
    "return but(validation=TokenDataset(NONE, {'oracle_nll': NONE[:, 1:] / 0}), row_groups=(), row_contrast=None)": (
        "validation: positions='oracle_nll': must be finite"
    ),
    "return but(train=TokenDataset((99 * torch.eye(2000)[:, :17].flip(0)).long()))": "tokens must be 0 to 16",
    "return but(train=TokenDataset(NONE, {'tokens': NONE[:, 1:]}))": "train: positions=['tokens']: would replace the",
    "return but(validation=TokenDataset(NONE, {'place': NONE[:, 1:]}), row_groups=(), row_contrast=None)": (
        "positions with place=['validation']: must be those of train and validation, or neither"
    ),
    "return but(train=TokenDataset(NONE, {'place': NONE[:, 1:] + 3}))": "positions['place']=torch.int64: must be int64",
    "return but(train=PLACED, validation=PLACED, row_groups=(), row_contrast=None, watched_key=2)": (
        "watched_key=2: needs data without place"
    ),
    "return but(context_length=1)": "context_length=1: must be a whole number of at least 2",
    "return but(validation=TokenDataset(NONE[:0]))": "must hold at least one sequence",
    "return but(train=TokenDataset(NONE, targets=NONE[:, 1:] - 1))": (
        "train: targets=[-1]: must be 0 to 16, or -100 where nothing is predicted"
    ),
    f"return but(train=TokenDataset(torch.zeros(80, 17).long(), {UNEQUAL}))": (
        "train: targets=[2, 16]: every sequence must have the same number, at least 1"
    ),
    "return but(row_groups=('nothing',))": "row_groups=['nothing']: must each be among the validation's positions",
}


@pytest.mark.parametrize("body", LOADS)
def test_data_of_users(body: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"Mine{list(LOADS).index(body)}"  # each is known as long as the process lives
    mine = f"@dataclasses.dataclass(frozen=True)\nclass {name}(DataConfig):\n    x: int = 1\n    def load(self):\n"
    but = "NONE = torch.zeros(64, 17).long()\nPLACED = TokenDataset(NONE, {'place': NONE[:, 1:]})\n"
    but += "def but(**changes): return dataclasses.replace(DATA.load(), **changes)\n"
    (place / "e.py").write_text(f"{BASE}\n{but}\n{mine}        {body}\ndef config(): return made(data={name}())\n")
    priced = [] if LOADS[body] == MEMORY else [["train", "e.py", "--dry-run"]]  # for a machine with more memory, too
    for words in (["train", "e.py"], *priced):
        assert LOADS[body].replace("Mine", name) in expect_refusal(words, capsys)


def test_an_interrupt_in_a_users_file_is_an_interrupt(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for body in ("raise KeyboardInterrupt", "def config():\n    raise KeyboardInterrupt"):
        (place / "e.py").write_text(body)
        assert main(["train", "e.py"]) == 130
        assert capsys.readouterr().err == "interrupted; the same command resumes\n"
        time.sleep(0.01)  # another time of change, or Python takes the compiled file of before
    (place / "a.py").write_text("raise KeyboardInterrupt")
    assert main(["ablate", "run", "a.py", "--fresh"]) == 130
    assert capsys.readouterr().err == "interrupted; the same command without --fresh resumes\n"


ABLATION = """
from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Column, Contrast

NORMALISER = "model.attention.normaliser"
SOFT, ELASTIC = Row("softmax", {{NORMALISER: Softmax()}}, "ours"), Row("elastic", {{NORMALISER: Elastic()}}, "ours")
rest = dict(name="mine", baseline="softmax", seeds=(0, 1), columns=COLUMNS, base="backcopy_tiny", rows=(SOFT, ELASTIC))
ablation = Ablation(**(rest | dict({settings})))
"""
ABLATIONS = {
    "name='a/b'": "ablation 'a/b': is used as a folder name; use letters, digits, _, - and .",
    "rows=(SOFT, Row('b', {NORMALISER: Softmax()}, 'ours'))": "rows 'softmax' and 'b' are the same training (seed 0)",
    "rows=(SOFT, SOFT)": "rows=['softmax']: must each occur once",
    "rows=(SOFT, Row('', {}, 'ours'))": "row '' has an empty, long or unprintable name; rename it",
    "rows=(SOFT, Row('a,b', {}, 'ours'))": "row='a,b': has a comma, which separates the names of rows",
    "rows=(SOFT, Row('../x', {}, 'ours'))": "row '../x': MLflow would read its name as a path",
    "rows=(SOFT, Row('b', {'model.width': 3}, 'ours'))": "row 'b': ModelConfig has no field 'width'",
    "rows=(SOFT, Row('b', {}, 'ours', seeds=(2, 2)))": "row 'b': seeds=[2]: must each occur once",
    "baseline='lazy'": "baseline 'lazy': is unknown; known are softmax, elastic",
    "rows=(), axes={'model.d_model': ()}": "its axes have no point; give each axis a value",
    "columns=(Column('loss//val', 'b'),)": "MLflow takes no metric of this name",
    "columns=(Column('a', 'b', scale=0),)": "column 'a': scale=0: must be above 0; 1 shows values as they are",
    "contrasts=(Contrast('x', {'softmax': 1, 'b': -1}),)": "contrast 'x': row 'b': is unknown; known are softmax, ela",
}


WRITTEN = [
    *(("train", content, named) for content, named in EXPERIMENTS.items()),
    *(("train", f"{BASE}\ndef config():\n    {body}\n", named) for body, named in CONFIGS.items()),
    *(("ablate run", ABLATION.format(settings=settings), named) for settings, named in ABLATIONS.items()),
]


@pytest.mark.parametrize(
    ("command", "content", "named"), WRITTEN, ids=[f"{words} {said}" for words, _, said in WRITTEN]
)
def test_files_of_users(command: str, content: str, named: str, place: Path, capsys: Any) -> None:
    (place / "e.py").write_text(content)
    error = expect_refusal([*command.split(), "e.py"], capsys)
    assert named in error
    assert error.startswith(f"lit-lazy: {place / 'e.py'}: ") or content not in EXPERIMENTS


STORAGES = [
    ("sqlite:///damaged.db", "file is not a database); move that file away, or name another"),
    ("sqlite:///theirs.db", "is another program's database; name another"),
    ("sqlite:///a?b.db", "has a ?, which starts a query; write %3F for one in a path"),
    ("mysql://me:geheim@localhost/x", "--storage 'mysql://me:***@localhost/x': must be sqlite:///FILE or"),
    ("postgresql://me:geheim@127.0.0.1:{port}/x", "are server, user, password and database right?"),
    ("postgresql://me:geheim@localhost:port/x", "is not a database URL; give SCHEME://USER:PASSWORD@HOST"),
]


@pytest.mark.parametrize(("url", "named"), STORAGES, ids=[url for url, _ in STORAGES])
def test_storages(url, named, place, empty_store, closed_port, capsys) -> None:
    (place / "damaged.db").write_bytes(b"SQLite" + os.urandom(4096))
    shutil.copy(empty_store, place / "theirs.db")
    assert named in expect_refusal([*CELL, "--storage", url.format(port=closed_port)], capsys)


TRACKING = [
    ("http://me:geheim@127.0.0.1:{port}", "MLFLOW_TRACKING_URI=http://me:***@127.0.0.1:"),
    ("postgresql://me:geheim@127.0.0.1:{port}/x", "MLFLOW_TRACKING_URI 'postgresql://me:***@127.0.0.1:"),
    ("file:{place}/mlruns", "must be http://HOST:PORT, sqlite:///FILE or postgresql://"),
    ("sqlite:///{place}/runs/mlflow.db", "mlflow.db': cannot be used (file is not a database); move that file away"),
    ("", "mlflow.db': cannot be used (file is not a database); move that file away"),
]


@pytest.mark.parametrize(("uri", "named"), TRACKING, ids=[uri for uri, _ in TRACKING])
def test_tracking_stores(uri: str, named: str, place: Path, closed_port: int, monkeypatch: Any, capsys: Any) -> None:
    """Without an address the store is in the runs folder, damaged here."""
    (place / "runs").mkdir()
    (place / "runs" / "mlflow.db").write_bytes(b"SQLite" + os.urandom(4096))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(place=place, port=closed_port))
    for command in (TRAIN, CELL, ["dashboard"]):
        assert named in expect_refusal(command, capsys), command


def test_a_port_in_use(place: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_runs(place, empty_store)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = expect_refusal(["dashboard", "--port", str(port)], capsys)
    assert f"--port {port}: is in use; choose another port" in error


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A finished run folder with its checkpoint."""
    runs = make_runs(tmp_path_factory.mktemp("trained"), empty_store)
    torch.set_num_threads(1)
    lazy = [f"{NORMALISER}=Elastic", f"{BIAS}=LearnedBias", "--diagnosed_sequences=2"]
    assert main([*TRAIN, *lazy, "--keep-checkpoint", "--runs", str(runs)]) == 0
    return next((runs / "train-backcopy_tiny").glob("*/"))


def test_evaluate_measures_what_the_run_did_and_creates_nothing(trained, capsys) -> None:
    before = snapshot_tree(trained.parent)
    assert main(["evaluate", str(trained / FINAL_CHECKPOINT), "--threads", "1"]) == 0
    measured = dict(line.split() for line in capsys.readouterr().out.splitlines())
    metrics = json.loads((trained / RESULT).read_text())["metrics"]
    of_the_training = ("init/", "loss/at_", "steps/")
    assert measured == {name: f"{value:.6g}" for name, value in metrics.items() if not name.startswith(of_the_training)}
    assert {"loss/val", "sparsity/zero", "tau/mean", "model/parameters"} <= measured.keys()
    assert snapshot_tree(trained.parent) == before
    assert snapshot_tree(Path.cwd()) == {}
    asked = "Passkey((16,), depths=(0, 1), digits=2), Lengths((1,))"
    assert main(["evaluate", str(trained / FINAL_CHECKPOINT), "--threads", "1", "--evaluations", asked]) == 0
    measured = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert {"passkey/accuracy_16_at_1", "passkey/loss_16", "length_1x/loss"} <= measured.keys()
    assert "loss/val" not in measured


class Bomb:
    """What a pickle may do to those who load it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


EMBEDDING = "model.embedding.weight"
Change = Callable[[dict[str, Any]], object]
"""Changes the content, or returns what stands in its place."""


def setting(name: str, value: object) -> Change:
    return lambda content: content["hyper_parameters"].__setitem__(name, value)


def weight(name: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda content: content["state_dict"].__setitem__(name, change(content["state_dict"][EMBEDDING]))


def use_other_data(content: dict[str, Any]) -> None:
    """As if trained when the same data had another vocabulary."""
    setting("vocab_size", 5)(content)
    for name in (EMBEDDING, "model.head.weight"):
        content["state_dict"][name] = content["state_dict"][name][:5].clone()


def compress(_content: object) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**20)
    return file.getvalue()


TAU = "model.blocks.0.attention.normaliser.tau"
CHECKPOINTS: dict[str, tuple[Change, str]] = {
    "a pickle bomb": (lambda _: pickle.dumps(Bomb(Path.cwd() / "exploded")), "is no checkpoint, or damaged ("),
    "compressed": (compress, "BadZipFile: it is compressed, which torch does not do"),
    "a torch bomb": (
        lambda content: content | {"extra": Bomb(Path.cwd() / "exploded")},
        "holds more than weights and numbers, so it is not loaded: it could run code; give a final.ckpt",
    ),
    "another project's": (lambda _: {"state_dict": {"w": torch.zeros(2)}}, "was not made by this project"),
    "other weights": (
        lambda content: content["state_dict"].__delitem__(TAU),
        f"the weights are another architecture's ({TAU} is missing",
    ),
    "other data": (use_other_data, "was trained on data with vocab_size=5, which now has vocab_size=17"),
    "length 1e12": (setting("context_length", 10**12), "GB of memory, of which this machine has"),
    "layers": (
        lambda content: content["hyper_parameters"]["config"]["model"].update(n_layers=10**9),
        "model.n_layers=1000000000: it has weights of fewer layers",
    ),
    "NaN": (weight(EMBEDDING, lambda value: value * torch.nan), "the weights are not finite (model.embedding.weight)"),
    "a name of two lines": (weight("0\n\x1b", torch.clone), r"(0 \x1b is (17, 16), should be missing)"),
}


def spoil(trained: Path, path: Path, kind: str) -> str:
    """Write a checkpoint that is wrong in this way; what is to be said of it."""
    content = read_checkpoint(trained / FINAL_CHECKPOINT)
    change, named = CHECKPOINTS[kind]
    changed = change(content)
    if isinstance(changed, bytes):
        path.write_bytes(changed)
    else:
        torch.save(changed or content, path)
    return named


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints(kind: str, trained: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = spoil(trained, place / "some.ckpt", kind)
    error = expect_refusal(["evaluate", "some.ckpt"], capsys)
    assert "checkpoint 'some.ckpt': " in error
    assert named in error
    assert not (place / "exploded").exists()


def test_the_bombs_do_explode_where_they_are_trusted(trained: Path, place: Path) -> None:
    spoil(trained, place / "some.ckpt", "a torch bomb")
    torch.load(place / "some.ckpt", weights_only=False)
    assert (place / "exploded").exists()


OWN_CLASS = """
from dataclasses import dataclass
from lit_lazy.attention import LearnedBias

@dataclass(frozen=True)
class MyOwnBias(LearnedBias):
    pass
"""


def test_a_checkpoint_of_ones_own_class_wants_its_file(trained, place, capsys) -> None:
    content = read_checkpoint(trained / FINAL_CHECKPOINT)
    content["hyper_parameters"]["config"]["model"]["attention"]["bias"]["class"] = "MyOwnBias"
    torch.save(content, place / "own.ckpt")
    (place / "own.py").write_text(OWN_CLASS)
    error = expect_refusal(["evaluate", "own.ckpt"], capsys)
    needs = "needs the class MyOwnBias, which is not imported"
    assert error.startswith(f"lit-lazy: checkpoint 'own.ckpt': {needs}; add --import FILE, the file that defines it")
    assert "known are" not in error
    error = expect_refusal([*TRAIN, "--init-from", "own.ckpt"], capsys)
    assert f"own.ckpt': {needs}; import the file that defines it in that of the experiment" in error
    assert main(["evaluate", "own.ckpt", "--threads", "1", "--import", "own.py"]) == 0


@pytest.mark.parametrize("taus", [3, {1: torch.zeros(1)}, {1: torch.zeros(1, 1), 2: torch.zeros(2, 1)}])
def test_taus_that_are_none(taus: Any, trained: Path, place: Path) -> None:
    torch.save(read_checkpoint(trained / FINAL_CHECKPOINT) | {"callbacks": {"Watch": {"taus": taus}}}, place / "c.ckpt")
    with pytest.raises(ValueError, match=r"^checkpoint '.*c.ckpt': the learned parameters .* are damaged"):
        read_checkpoint_history(place / "c.ckpt")


def test_a_folder_where_a_lock_should_be(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "runs" / "table2-backcopy_tiny" / "plan.json.lock").mkdir(parents=True)
    assert main([*RUN, "--runs", "runs"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lit-lazy: ")
    assert line.endswith("plan.json.lock': cannot be used (Is a directory)")


def test_neither_a_message_nor_the_command_that_is_kept_has_a_password(monkeypatch) -> None:
    """A message is one line, and short."""
    url = f"postgresql://me:{PASSWORD}@host/x"
    for words in (["--storage", url], [f"--storage={url}"]):
        monkeypatch.setattr(sys, "argv", ["lit-lazy", "ablate", "run", "table2", *words])
        assert "postgresql://me:***@host/x" in (kept := format_command_line())
        assert PASSWORD not in kept
    url = "postgresql://me:ge@he/im geheim@host/x?password=geheim&a=b"
    assert sanitise(f"--storage '{url}'\n: no") == "--storage 'postgresql://me:***@host/x?password=***&a=b' : no"
    assert sanitise("http://127.0.0.1:5000/a me@host").startswith("http://127.0.0.1:")
    assert sanitise("write postgresql://USER:PASSWORD@HOST") == "write postgresql://USER:PASSWORD@HOST"
    long = sanitise(f"--x='{'y' * 10**6}': fix")
    assert len(long) < LONGEST_MESSAGE + 10
    assert long.startswith("--x='yyy")
    assert long.endswith("': fix")
