"""Wrong input: one line that names it and the fix, exit status 2, nothing created or changed, no code run."""

import argparse
import io
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from mistakes import PASSWORD, expect_refusal, iter_commands, snapshot_tree
from wrong_values import wrong_texts

from lit_lazy.command import options
from lit_lazy.command.generate import prompt_file
from lit_lazy.command.import_ import digest, find_source
from lit_lazy.command.main import main, make_parser
from lit_lazy.command.new import identifier
from lit_lazy.config.checkpoint_file import read_checkpoint
from lit_lazy.support.checks import parse
from lit_lazy.support.errors import short_repr
from lit_lazy.support.named_files import find_python_file
from lit_lazy.training.result import FINAL_CHECKPOINT, RESULT

TRAIN = ["train", "backcopy_tiny"]
GONE = "cannot be read (No such file or directory)"
RUN = ["ablate", "run", "table2", "--base", "backcopy_tiny"]
CELL = [*RUN, "--rows", "softmax", "--seeds", "0", "--workers", "1"]
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "rivals-stdlib"
DEVICE = os.devnull
"""In place of a checkpoint, to check other options: only files and folders are refused at once."""
NORMALISER, BIAS = "--model.attention.normaliser", "--model.attention.bias"
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
def test_a_value_that_an_option_does_not_take(
    words: tuple[str, ...], action: argparse.Action, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_argument_that_a_command_lacks(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for action in COMMANDS[words]._get_positional_actions()[:1]:
        if action.required:
            assert f"arguments are required: {action.metavar}" in expect_refusal(words, capsys)


OPTIONS = [
    (["train", "notes.txt"], "experiment 'notes.txt': unknown (did you mean text?); there are backcopy"),
    (["train", "backcopy_tniy"], "experiment 'backcopy_tniy': unknown (did you mean backcopy_tiny?); there are "),
    (["ablate", "run", "backcopy"], "unknown; it is an experiment: `lit-lazy train backcopy` runs it"),
    (["train", "table2"], "unknown; it is an ablation: `lit-lazy ablate run table2` runs it"),
    ([*RUN, "--rows", "softmaxx"], "--rows 'softmaxx': table2 has no such row (did you mean softmax?); it has softmax"),
    ([*RUN, "--rows", "softmax", "--baseline", "lazy"], "--baseline 'lazy': is not among the rows; they are softmax"),
    ([*RUN, "--baseline", "softmaxx"], "--baseline 'softmaxx': is not among the rows (did you mean softmax?)"),
    ([*TRAIN, "--logger", "tensorbord"], "'wandb') (did you mean tensorboard?); see `lit-lazy train --help`"),
    (["trian", "backcopy"], "invalid choice: 'trian' (choose from 'tokenise', 'train'"),
    (["trian", "backcopy"], "(did you mean train?); see `lit-lazy --help`"),
    (["ablate", "rum"], "invalid choice: 'rum' (choose from 'run'"),
    (["ablate"], "the following arguments are required: COMMAND"),
    ([], "the following arguments are required: COMMAND"),
    (["fields", "backcopy", "extra"], "unknown argument 'extra'; see `lit-lazy fields --help`"),
    (["ablate", "list", "--nothing=1"], "unknown argument '--nothing=1'; see `lit-lazy ablate list --help`"),
    (["export", "--", DEVICE, "--"], "OUT: is missing behind '--'; see `lit-lazy export --help`"),
    (["dashboard", "--runs=--"], "--runs=--: has no value; give one as in --runs=VALUE"),
    ([*TRAIN, "--runs", "/proc/runs"], "--runs '/proc/runs': nothing can be written there"),
    ([*TRAIN, "--runs", f"{__file__}/runs"], "/runs': nothing can be written there (Not a directory); name another"),
    ([*RUN, "--seed=3"], "--seed: an ablation's seeds are given by --seeds"),
    ([*RUN, f"{BIAS}=Alibi"], f"{BIAS}: row 'softmax' sets model.attention.bias itself; leave one of the two out"),
    (["ablate", "status", "table2"], "--runs 'runs': does not exist; `lit-lazy train` or `ablate run` creates it"),
    (["ablate", "table", "table2", "--runs", "."], "'table2': . holds no grids; `lit-lazy ablate run` creates them"),
    (["mirror", "table2", "--runs", "."], "'table2': . holds no grids; `lit-lazy ablate run` creates them"),
    (["ablate", "table", "table2", "--from", "no.json"], "--from 'no.json': is no table.json (FileNotFoundError"),
    (
        ["ablate", "table", "table2", "--from", str(RESULTS)],
        f"--from '{RESULTS}': is a folder; give the table.json in it, --from {RESULTS}/table.json",
    ),
    (["ablate", "table", "nothing", "--from", "table.json"], "ablation 'nothing': unknown"),
    (["train", "smollm2"], f"data.tokenizer='models/tokenizer.json': {GONE}; `make smollm2` makes it"),
    (["ablate", "run", "adapt"], f"init_from='models/smollm2.ckpt': {GONE}; `make smollm2` makes it"),
    (["diagnose", "models/smollm2.ckpt"], f"checkpoint 'models/smollm2.ckpt': {GONE}; `make smollm2` makes it"),
    (["ablate", "verdicts", str(RESULTS)], f"'{RESULTS}': is the folder of one table; give its parent folder"),
    (["dashboard"], "--runs runs: holds no runs yet; `make table2` or `lit-lazy train EXPERIMENT` creates some"),
]
FIELDS = [
    (["--train.device=cuda"], "--train.device: no such field (did you mean the option --devices?); `lit-lazy fields"),
    (["--model.d_modl=3"], "--model.d_modl='3': no such field (did you mean --model.d_model?); `lit-lazy fields"),
    (["--thread", "2"], "--thread: no such option or field (did you mean --threads?); `lit-lazy fields EXPERIMENT` "),
    (["--init_from=a", "--init-from", DEVICE], "--init_from: is given twice, as 'a' and as '"),
    (["--model.d_model=15", "--model.n_heads=3"], "Rope: the head dimension must be even, got 5; choose another"),
    (["--model.head_dim=4", "--model.mixer=RetNet"], "model.head_dim=4: has no effect in model.mixer=RetNet"),
    (["--train.batch_size=1000"], "train.batch_size=1000: must not exceed the 256 training sequences"),
    (["--data=Stdlib", "--data.context_length=100000000"], "bytes; choose a smaller length"),
    (["--data=Stdlib", "--data.validation_windows=99999999"], "choose fewer or shorter ones"),
    ([f"{BIAS}=Fire", f"{BIAS}.length=8"], "Fire.length=8: cannot serve 16 keys"),
    (
        [f"{NORMALISER}=Elastic", f"{NORMALISER}.threshold=constant"],
        "Elastic.tau_init=1.0 with Elastic.threshold='constant': no weight exceeds 1",
    ),
    ([f"--{'x' * 120_000}=1"], "no such field"),
    ([f"{NORMALISER}.help=Nothing"], "Normaliser='Nothing': unknown"),
    (["--\x1b[31m\n=1"], r"\x1b[31m"),
    (["--\ud800=1"], r"\ud800"),
    (["--storage", "postgresql://me:geheim@h/x"], "--storage='postgresql://me:***@h/x': no such field"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device that is asked for")
@pytest.mark.parametrize("command", [TRAIN, RUN])
def test_a_backend_without_its_device(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flash_lazy.fused.configurations.INTERPRETED", False)
    said = expect_refusal([*command, "--model.backend=triton"], capsys)
    assert "model.backend='triton': needs a GPU, and this machine has none; leave it at auto, or give chunked" in said
    assert " q" not in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [*OPTIONS, *(([*TRAIN, *fields], named) for fields, named in FIELDS)],
    ids=lambda value: " ".join(value).replace(str(Path(__file__).parent), "") if isinstance(value, list) else "",
)
def test_options_and_fields(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in expect_refusal(arguments, capsys)


REFUSED = [
    (["--model.d_model=9999998"], "model.d_model=9999998", "choose smaller ones"),
    (["--init-from", "nofile"], "nofile': cannot be read (No such file or directory)", "give a final.ckpt"),
    (["--init-from", "notes.md"], "notes.md': is no checkpoint, or damaged (", "give a final.ckpt"),
    (["--logger", "wandb"], "--logger wandb: needs the package wandb", "pip install 'lit-lazy[wandb]'"),
    (["--devices", "2", "--strategy", "fsdp", "--train.optimiser=Muon"], "train.optimiser='Muon'", "--strategy ddp"),
]


@pytest.mark.parametrize(("arguments", "named", "fix"), REFUSED, ids=lambda value: " ".join(value))
def test_a_dry_run_refuses_what_the_training_does(
    arguments: list[str],
    named: str,
    fix: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And neither creates anything."""
    monkeypatch.setattr("lit_lazy.tracking.logger_kinds.find_spec", lambda _package: None)
    (place / "notes.md").write_text("# Notes\n")
    for more in ([], ["--dry-run"]):
        said = expect_refusal([*TRAIN, *arguments, *more], capsys)
        assert named in said
        assert fix in said


EXPERIMENTS = {
    "syntax": ("def config(:\n", "line 1: SyntaxError"),
    "import": ("\nimport nothing_of_this_name\n", "line 2: ModuleNotFoundError: No module named"),
    "raises": ("def config():\n    return 1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
    "exits": ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
    "other": ("def config():\n    return 1\n", "config() returned 1; it must return a RunConfig"),
    "none": ("x = 1\n", "defines no function config(); give it one that returns a RunConfig"),
    "an ablation": ("ablation = 1\n", "defines no function config(); `lit-lazy ablate run "),
    "no text": ("\0\1\2", "null bytes"),
    "class for a part": (
        "from lit_lazy.config.schema import RunConfig\nfrom lit_lazy.data.backcopy import Backcopy\n"
        "def config():\n    return RunConfig(Backcopy)\n",
        "data=<class 'lit_lazy.data.backcopy.Backcopy'>: must be a DataConfig, such as Backcopy()",
    ),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_files(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, named = EXPERIMENTS[name]
    path = place / f"broken {name}.py"
    path.write_text(content)
    for command in ("train", "fields"):
        error = expect_refusal([command, path.name], capsys) if "<class" not in named else said_of(path, capsys)
        assert error.startswith(f"lit-lazy: {path}: ")
        assert named in error
    assert named in error


def said_of(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Like `refused`, for a message that shows the user's own value, which looks like jargon."""
    assert main(["train", path.name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


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
    "name='../a'": "ablation '../a': is used as a folder name",
    "name='a b'": "ablation 'a b': is used as a folder name",
    'name="it\'s"': 'ablation "it\'s": is used as a folder name',
    "name=''": "ablation '': is used as a folder name",
    "name='a\\n'": "ablation 'a\\n': is used as a folder name",
    "rows=(SOFT, SOFT)": "two rows have the same name 'softmax'; rename one",
    "rows=(SOFT, Row('b', {NORMALISER: Softmax()}, 'ours'))": "rows 'softmax' and 'b' are the same training (seed 0)",
    "rows=(SOFT, Row('', {}, 'ours'))": "row '' has an empty, long or unprintable name; rename it",
    "rows=(SOFT, Row('a,b', {}, 'ours'))": "row 'a,b' has a comma in its name",
    "rows=(SOFT, Row('b', {'model.width': 3}, 'ours'))": "row 'b': ModelConfig has no field 'width'",
    "rows=(SOFT, Row('b', {'train.lr': 'fast'}, 'ours'))": "row 'b': train.lr='fast': must be a finite number",
    "rows=(SOFT, Row('b', {NORMALISER: 'Elastic'}, 'ours'))": "model.attention.normaliser='Elastic': must be a Normali",
    "rows=(SOFT, Row('b', {'model.n_heads': 3}, 'ours'))": "row 'b': model.n_heads=3: must divide",
    "rows=(SOFT, Row('b', {}, 'ours', seeds=(2, 2)))": "seeds=(2, 2): must be distinct",
    "seeds=(0, 0)": "seeds=(0, 0): must be distinct",
    "baseline='lazy'": "baseline 'lazy' is not one of its rows; they are 'softmax', 'elastic'",
    "rows=()": "give either rows or axes",
    "rows=(), axes={'model.d_model': ()}": "its axes have no point; give each axis a value",
    "rows=(), axes={'model.d_model': (8, 16)}": "'softmax' is not one of its rows; they are 'd_model=8', 'd_model=16'",
    "base='nothing'": "experiment 'nothing': unknown; there are backcopy",
    "sedes=(0,)": "unexpected keyword argument 'sedes'",
    "name='a' * 300": "is used as a folder name",
    "rows=(SOFT, Row('b' * 300, {}, 'ours'))": "has an empty, long or unprintable name",
    "rows=(SOFT, Row('b\\n', {}, 'ours'))": "row 'b\\n' has an empty, long or unprintable name",
    **{
        f"rows=(SOFT, Row({name!r}, {{}}, 'ours'))": f"row {name!r}: MLflow would read its name as a path"
        for name in ("a//b", "../x", "x/..", "./x", "x/", "/x", ".", "..", "x/./y")
    },
    "columns=(Column('loss//val', 'b'),)": "MLflow takes no metric of this name",
    "columns=(Column('loss%', 'b'),)": "MLflow takes no metric of this name",
    "rows=(SOFT, Row('b', {'model.d_model': 10**12}, 'ours'))": "row 'b': model.d_model=1000000000000",
    "columns=()": "columns=(): needs at least one; COLUMNS has the usual ones",
    "columns=(*COLUMNS, COLUMNS[0])": "two columns are 'loss/excess'; leave one out",
    "columns=(Column('a', 'b', scale=0),)": "column 'a': scale=0: must not be 0; 1 shows values as they are",
    "columns=(Column('a', 'b', digits=10**9),)": "column 'a': digits=1000000000: must be",
    "columns=(Column('a\\n', 'b'),)": "must be 1 to 250 printable characters",
    "contrasts=(Contrast('x', {'softmax': 1, 'b': -1}),)": "contrast 'x': 'b' is not one of its rows",
    "primary=('los',)": "primary 'los' is not one of its columns",
    "contrasts=(Contrast('x', {'softmax': 1, 'elastic': -1}),) * 2": "two contrasts are 'x'; leave one out",
    "rows=(), axes={'model.d_model': range(10**9)}": "points of its axes=1000000000: must be at most 100000",
}


@pytest.mark.parametrize("settings", ABLATIONS)
def test_ablation_files(settings: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "mine.py").write_text(ABLATION.format(settings=settings))
    assert ABLATIONS[settings] in expect_refusal(["ablate", "run", "mine.py"], capsys)


SEARCHES = {
    "name='/../../x'": "search '/../../x': is used as a folder name; use letters, digits, _, - and .",
    "axes={'train.lr': (1, 2)}": "each value a Real",
    "axes={'train.lr': Real(2, 1)}": "Real(2, 1): low=2: must be below high=1",
    "axes={f'train.lr{i}': Real(0, 1) for i in range(40)}": "must be at most 10",
    "trials=10**12": "trials=1000000000000: must be at most 100000",
}


@pytest.mark.parametrize("settings", SEARCHES)
def test_search_files(settings: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "s.py").write_text(
        "from lit_lazy.grid.search.definition import Real, Search\n"
        "rest = dict(name='mine', axes={'train.lr': Real(1e-4, 1e-2, log=True)}, base='backcopy_tiny')\n"
        f"search = Search(**(rest | dict({settings})))\n"
    )
    assert SEARCHES[settings] in expect_refusal(["ablate", "search", "s.py"], capsys)
    assert not list(place.parent.glob("x*"))


def test_a_file_without_an_ablation(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "empty.py").write_text("ablation = 3\n")
    assert "defines no `ablation`; give it one" in expect_refusal(["ablate", "run", "empty.py"], capsys)
    (place / "trained.py").write_text("def config(): ...\n")
    assert "; `lit-lazy train " in expect_refusal(["ablate", "run", "trained.py"], capsys)


def random_bytes(path: Path, _store: Path) -> None:
    path.write_bytes(b"SQLite" + os.urandom(4096))


def a_folder(path: Path, _store: Path) -> None:
    path.mkdir()


def mlflows(path: Path, store: Path) -> None:
    shutil.copy(store, path)


STORAGES = [
    (random_bytes, "sqlite:///{path}", "file is not a database); move that file away, or name another"),
    (a_folder, "sqlite:///{path}", "unable to open database file"),
    (mlflows, "sqlite:///{path}", "is another program's database; name another"),
    (None, "sqlite:///{path}/x/queue.db", "does not exist"),
    (None, "sqlite:////proc/queue.db", "--storage '/proc': nothing can be written there"),
    (None, "sqlite://", "--storage 'sqlite://': must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"),
    (None, "sqlite:///:memory:", "--storage 'sqlite:///:memory:': must be sqlite:///FILE"),
    (None, "queue.db", "--storage 'queue.db': must be sqlite:///FILE or postgresql://"),
    (None, "mysql://me:geheim@localhost/x", "--storage 'mysql://me:***@localhost/x': must be sqlite:///FILE or"),
    (None, "postgres//me:geheim@localhost/x", "--storage 'postgres//me:***@localhost/x': must be sqlite:///FILE or"),
    (None, "postgresql://me:geheim@127.0.0.1:{port}/x", "are server, user, password and database right?"),
    (None, "postgresql://127.0.0.1:{port}/x?user=me&password=geheim", "are server, user, password and database right?"),
    (None, "postgresql://me:geh@geheim@localhost/x", "has more than one @; write %40 for one in a password"),
    (None, "postgresql://me:geheim@localhost:port/x", "is not a database URL; give SCHEME://USER:PASSWORD@HOST"),
]


@pytest.mark.parametrize(("make", "url", "named"), STORAGES, ids=[url for _, url, _ in STORAGES])
def test_storages(
    make: Callable[[Path, Path], None] | None,
    url: str,
    named: str,
    empty_store: Path,
    closed_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path.cwd() / "storage"
    if make is not None:
        make(path, empty_store)
    storage = url.format(path=path, port=closed_port)
    assert named in expect_refusal([*CELL, "--storage", storage], capsys)


TRACKING = [
    ("http://127.0.0.1:{port}", "Connection refused); start the server, or unset the variable"),
    ("http://me:geheim@127.0.0.1:{port}", "MLFLOW_TRACKING_URI=http://me:***@127.0.0.1:"),
    ("http://127.0.0.1:port", "does not answer"),
    ("postgresql://me:geheim@127.0.0.1:{port}/x", "MLFLOW_TRACKING_URI 'postgresql://me:***@127.0.0.1:"),
    ("file:{place}/mlruns", "must be http://HOST:PORT, sqlite:///FILE or postgresql://"),
    ("file://{place}/mlruns", "must be http://HOST:PORT, sqlite:///FILE or postgresql://"),
    ("mlruns", "MLFLOW_TRACKING_URI=mlruns: must be http://HOST:PORT"),
    ("sqlite://", "MLFLOW_TRACKING_URI=sqlite://: must be http://HOST:PORT"),
    ("nonsense://x", "MLFLOW_TRACKING_URI=nonsense://x: must be http://HOST:PORT"),
    ("sqlite:///{place}/random.db", "random.db': cannot be used (file is not a database); move that file away"),
    ("sqlite:////proc/mlflow.db", "MLFLOW_TRACKING_URI '/proc': nothing can be written there"),
]


@pytest.mark.parametrize(("uri", "named"), TRACKING, ids=[uri for uri, _ in TRACKING])
def test_tracking_stores(
    uri: str,
    named: str,
    place: Path,
    closed_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    random_bytes(place / "random.db", place)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(place=place, port=closed_port))
    for command in (TRAIN, CELL, ["dashboard"]):
        assert named in expect_refusal(command, capsys), command


def test_a_damaged_store_in_the_runs_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "runs").mkdir()
    random_bytes(place / "runs" / "mlflow.db", place)
    for command in (TRAIN, CELL, ["dashboard"]):
        said = expect_refusal(command, capsys)
        assert "mlflow.db': cannot be used (file is not a database); move that file away" in said


def test_a_port_in_use(place: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "runs").mkdir()
    shutil.copy(empty_store, place / "runs" / "mlflow.db")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = expect_refusal(["dashboard", "--port", str(port)], capsys)
    assert f"--port {port}: is in use; choose another port" in error


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A finished run folder with its checkpoint."""
    runs = tmp_path_factory.mktemp("trained")
    shutil.copy(empty_store, runs / "mlflow.db")
    torch.set_num_threads(1)
    lazy = [f"{NORMALISER}=Elastic", f"{BIAS}=LearnedBias"]
    assert main([*TRAIN, *lazy, "--keep-checkpoint", "--runs", str(runs)]) == 0
    return next((runs / "train-backcopy_tiny").iterdir())


def test_evaluate_measures_what_the_run_did_and_creates_nothing(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot_tree(trained.parent)
    assert main(["evaluate", str(trained / FINAL_CHECKPOINT), "--threads", "1"]) == 0
    measured = dict(line.split() for line in capsys.readouterr().out.splitlines())
    metrics = json.loads((trained / RESULT).read_text())["metrics"]
    of_the_training = ("init/", "loss/at_", "steps/")
    assert measured == {name: f"{value:.6g}" for name, value in metrics.items() if not name.startswith(of_the_training)}
    assert {"loss/val", "sparsity/zero", "tau/mean", "model/parameters"} <= measured.keys()
    assert snapshot_tree(trained.parent) == before
    assert snapshot_tree(Path.cwd()) == {}


def test_evaluate_measures_what_it_is_asked_for(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def setting(name: str, value: object) -> Change:
    return lambda content: content["hyper_parameters"].__setitem__(name, value)


def of_model(name: str, value: object) -> Change:
    return lambda content: content["hyper_parameters"]["config"]["model"].__setitem__(name, value)


def weight(name: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda content: content["state_dict"].__setitem__(name, change(content["state_dict"][EMBEDDING]))


def use_other_data(content: dict[str, Any]) -> None:
    """As if trained when the same data had another vocabulary."""
    setting("vocab_size", 5)(content)
    for name in (EMBEDDING, "model.head.weight"):
        content["state_dict"][name] = content["state_dict"][name][:5].clone()


def flip_bit(trained: Path) -> bytes:
    """In the middle of the greatest weight, where torch would not see it."""
    content = bytearray(trained.read_bytes())
    with zipfile.ZipFile(trained) as archive:
        record = max(archive.infolist(), key=lambda info: info.file_size if "/data/" in info.filename else 0)
    content[record.header_offset + 200 + record.file_size // 2] ^= 1
    return bytes(content)


def compress(_trained: Path) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**20)
    return file.getvalue()


DAMAGED, FOREIGN = "is no checkpoint, or damaged (", "was not made by this project; give a final.ckpt"
FILES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "empty": (lambda _: b"", DAMAGED),
    "text": (lambda _: b"the weights\n", DAMAGED),
    "truncated": (lambda trained: trained.read_bytes()[:-1000], DAMAGED),
    "a flipped bit": (flip_bit, f"{DAMAGED}BadZipFile: bad checksum of "),
    "compressed": (compress, "BadZipFile: it is compressed, which torch does not do"),
    "a pickle bomb": (lambda _: pickle.dumps(Bomb(Path.cwd() / "exploded")), DAMAGED),
}
OTHERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a torch bomb": (
        lambda content: content | {"extra": Bomb(Path.cwd() / "exploded")},
        "holds more than weights and numbers, so it is not loaded: it could run code; give a final.ckpt",
    ),
    "another project's": (
        lambda _: {"state_dict": {"w": torch.zeros(2)}, "hyper_parameters": {"lr": 0.1}, "global_step": 3},
        FOREIGN,
    ),
    "a tensor": (lambda _: torch.zeros(3), FOREIGN),
    "no config": (lambda content: content | {"hyper_parameters": {"config": "x", "vocab_size": 1}}, FOREIGN),
    "step -1": (lambda content: content | {"global_step": -1}, FOREIGN),
    "callbacks": (lambda content: content | {"callbacks": []}, FOREIGN),
}
"""What stands in the file in place of the content."""
CHANGES: dict[str, tuple[Change, str]] = {
    "other weights": (
        lambda content: content["state_dict"].pop("model.blocks.0.attention.normaliser.tau"),
        "the weights are another architecture's (model.blocks.0.attention.normaliser.tau is missing",
    ),
    "an unknown class": (
        lambda content: of_model("attention", {"bias": {"class": "NobodysBias"}})(content),
        "needs the class NobodysBias, which is not imported; add --import FILE",
    ),
    "other data": (use_other_data, "was trained on data with vocab_size=5, which now has vocab_size=17"),
    "vocabulary -1": (setting("vocab_size", -1), "vocab_size=-1: must be a whole number of at least 1"),
    "vocabulary 1e12": (setting("vocab_size", 10**12), "the embedding must have shape [1000000000000, 16]"),
    "length -1": (setting("context_length", -1), "context_length=-1: must be a whole number of at least 1"),
    "length 1e12": (setting("context_length", 10**12), "GB of memory, of which this machine has"),
    "width": (of_model("d_model", 10**12), "the embedding must have shape [17, 1000000000000]"),
    "layers": (of_model("n_layers", 10**9), "model.n_layers=1000000000: it has weights of fewer layers"),
    "sparse": (weight(EMBEDDING, torch.Tensor.to_sparse), FOREIGN),
    "csr": (weight(EMBEDDING, torch.Tensor.to_sparse_csr), FOREIGN),
    "meta": (weight(EMBEDDING, lambda value: value.to("meta")), FOREIGN),
    "complex": (weight(EMBEDDING, lambda value: value.to(torch.complex64)), FOREIGN),
    "int8": (weight(EMBEDDING, lambda value: value.to(torch.int8)), "is (17, 16) of torch.int8, should be (17, 16)"),
    "NaN": (weight(EMBEDDING, lambda value: value * torch.nan), "the weights are not finite (model.embedding.weight)"),
    "a number for a name": (weight(3, torch.clone), FOREIGN),
    "a long name": (weight("x" * 10**6, torch.clone), "the weights are another architecture's (xxx"),
    "a name of two lines": (weight("0\n\x1b", torch.clone), r"(0 \x1b is (17, 16), should be missing)"),
}


def spoil(trained: Path, path: Path, kind: str) -> str:
    """Write a checkpoint that is wrong in this way; what is to be said of it."""
    if kind in FILES:
        make, named = FILES[kind]
        path.write_bytes(make(trained / FINAL_CHECKPOINT))
        return named
    content = read_checkpoint(trained / FINAL_CHECKPOINT)
    change, named = (OTHERS | CHANGES)[kind]
    changed = change(content)
    torch.save(changed if kind in OTHERS else content, path)
    return named


@pytest.mark.parametrize("kind", [*FILES, *OTHERS, *CHANGES])
def test_checkpoints(kind: str, trained: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = spoil(trained, place / "some.ckpt", kind)
    error = expect_refusal(["evaluate", "some.ckpt"], capsys)
    assert "checkpoint 'some.ckpt': " in error
    assert named in error
    assert not (place / "exploded").exists()


def test_the_bombs_do_explode_where_they_are_trusted(trained: Path, place: Path) -> None:
    """Else the tests above would show nothing."""
    spoil(trained, place / "some.ckpt", "a torch bomb")
    torch.load(place / "some.ckpt", weights_only=False)
    assert (place / "exploded").exists()


@pytest.mark.parametrize("kind", ["truncated", "a pickle bomb", "a torch bomb", "another project's"])
def test_a_checkpoint_that_cannot_be_resumed_from_is_quarantined_and_said(
    kind: str, trained: Path, runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = runs / "train-backcopy_tiny" / trained.name / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    named = spoil(trained, last, kind).partition(";")[0]
    left = last.read_bytes()
    lazy = [f"{NORMALISER}=Elastic", f"{BIAS}=LearnedBias"]
    assert main([*TRAIN, *lazy, "--runs", str(runs)]) == 0
    (said,) = [record.getMessage() for record in caplog.records if record.name == "lit_lazy.support.disk"]
    assert said.startswith(f"{last}: {named}")
    assert said.endswith("quarantined as last.ckpt.damaged, started again without it")
    assert "\n" not in said
    assert not (Path.cwd() / "exploded").exists()
    first, again = (json.loads((folder / RESULT).read_text()) for folder in (trained, last.parents[1]))
    assert again["metrics"] == first["metrics"]
    assert (last.parents[1] / "last.ckpt.damaged").read_bytes() == left


OWN_CLASS = """
from dataclasses import dataclass
from lit_lazy.attention import LearnedBias

@dataclass(frozen=True)
class MyOwnBias(LearnedBias):
    pass
"""


def test_a_checkpoint_of_ones_own_class_wants_its_file(
    trained: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    own = capsys.readouterr().out
    assert main(["evaluate", str(trained / FINAL_CHECKPOINT), "--threads", "1"]) == 0
    assert own == capsys.readouterr().out


def real(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


PROCESSES = [
    (real, ["ablate", "run", "table2", "--workers", "two"], "'two': must be a whole number of at least 1"),
    (real, [*TRAIN, "--model.n_heads=3"], "model.n_heads=3: must divide model.d_model=16"),
    (forked.run, ["evaluate", "bomb.ckpt"], "could run code"),
    (
        forked.run,
        [*CELL, "--storage", "postgresql://me:geheim@127.0.0.1:{port}/x"],
        "are server, user, password and database right?",
    ),
]


@pytest.mark.parametrize(("run", "arguments", "named"), PROCESSES, ids=[" ".join(words) for _, words, _ in PROCESSES])
def test_in_a_process_of_its_own(
    run: Callable[..., subprocess.CompletedProcess[str]],
    arguments: list[str],
    named: str,
    trained: Path,
    place: Path,
    closed_port: int,
) -> None:
    spoil(trained, place / "bomb.ckpt", "a torch bomb")
    before = snapshot_tree(place)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "LIT_LAZY"))}
    words = [argument.format(port=closed_port) for argument in arguments]
    command = [sys.executable, "-m", "lit_lazy.command", *words]
    done = run(command, cwd=place, env=environment | {"OMP_NUM_THREADS": "1"})
    assert snapshot_tree(place) == before
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"lit-lazy[^\n]*: [^\n]+\n", done.stderr), done.stderr
    assert named in done.stderr
    assert PASSWORD not in done.stderr


def test_passwords_are_not_kept_with_the_command_either(monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_lazy.support.secrets import format_command_line

    url = f"postgresql://me:{PASSWORD}@host/x"
    for words in (["--storage", url], [f"--storage={url}"]):
        monkeypatch.setattr(sys, "argv", ["lit-lazy", "ablate", "run", "table2", *words])
        assert PASSWORD not in format_command_line()
        assert "postgresql://me:***@host/x" in format_command_line()


@pytest.mark.parametrize("words", [["train"], ["ablate", "run"]])
def test_a_file_without_its_ending_is_guessed(
    words: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "my_softpick.py").write_text("")
    assert "'my_softpick': unknown (did you mean my_softpick.py?)" in expect_refusal([*words, "my_softpick"], capsys)


def test_trainings_are_not_offered_as_ablations(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train-own", "diagnose-own", "mlartifacts", "duo-tiny"):
        (place / "runs" / name).mkdir(parents=True)
    said = expect_refusal(["ablate", "status", "nothing"], capsys)
    assert said.endswith("'nothing': 'runs' has no such results; it has duo-tiny\n")
