"""Wrong input, sizes that no machine holds, users' files that misbehave: one line, status 2, nothing created or run."""

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
from tokenizers import Tokenizer, models, pre_tokenizers
from wrong_values import wrong_texts

from lit_lazy.command import options
from lit_lazy.command.doctor_new_fields import identifier
from lit_lazy.command.export_import import digest, find_source
from lit_lazy.command.main import main, make_parser
from lit_lazy.command.tokenise_train_generate import prompt_file
from lit_lazy.config.checkpoint_file import read_checkpoint
from lit_lazy.report.diagnose_checkpoint import read_checkpoint_history
from lit_lazy.support.checks import parse
from lit_lazy.support.errors import LONGEST_MESSAGE, sanitise, short_repr
from lit_lazy.support.names_to_paths import find_python_file
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, RESULT

TRAIN = ["train", "backcopy_tiny"]
GONE = "cannot be read (No such file or directory)"
RUN = ["ablate", "run", "table2", "--base", "backcopy_tiny"]
TABLE1 = ["ablate", "run", "table1", "--base", "backcopy_tiny"]
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


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_argument_that_a_command_lacks(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for action in COMMANDS[words]._get_positional_actions()[:1]:
        if action.required:
            assert f"arguments are required: {action.metavar}" in expect_refusal(words, capsys)


OPTIONS = [
    (["train", "backcopy_tniy"], "experiment 'backcopy_tniy': unknown (did you mean backcopy_tiny?); there are "),
    (["train", "my_softpick"], "'my_softpick': unknown (did you mean my_softpick.py?)"),
    (["ablate", "run", "backcopy"], "unknown; it is an experiment: `lit-lazy train backcopy` runs it"),
    (["train", "table2"], "unknown; it is an ablation: `lit-lazy ablate run table2` runs it"),
    (["ablate", "search", "table2"], "defines no `search`; `lit-lazy ablate run table2` runs what it defines"),
    (["ablate", "run", "lazy_search"], "defines no `ablation`; `lit-lazy ablate search lazy_search` runs w"),
    (["ablate", "search", "lazy_search", "--base", "backcopy_tiny", "--train.lr=0.1"], "is an axis of search"),
    ([*RUN, "--rows", "softmaxx"], "--rows 'softmaxx': is unknown (did you mean softmax?); known are softmax"),
    ([*RUN, "--rows", "softmax", "--baseline", "lazy"], "--baseline 'lazy': is unknown; known are softmax"),
    ([*RUN, "--results", DEVICE, "--keep-checkpoint"], "--results, --keep-checkpoint: a packed file holds no models; "),
    (["ablate", "run", "q_mask_2", "--looks", "1", "--seeds", "7"], "--looks=1: there are 0, and with --rows or --se"),
    (["ablate", "run", "q_mask_2", "--looks", "5"], "--looks=5: there are 4, and with --rows or --seeds none"),
    ([*TRAIN, "--logger", "tensorbord"], "'wandb') (did you mean tensorboard?); see `lit-lazy train --help`"),
    ([*TRAIN, "--logger", "csv", "--logger", "csv"], "--logger csv: is given twice; leave one out"),
    (["trian", "backcopy"], "argument COMMAND: invalid choice: 'trian' (choose from 'tokenise', 'train'"),
    (["ablate", "rum"], "(did you mean run?); see `lit-lazy ablate --help`"),
    ([], "the following arguments are required: COMMAND"),
    (["fields", "backcopy", "extra"], "unknown argument 'extra'; see `lit-lazy fields --help`"),
    (["export", "--", DEVICE, "--"], "OUT: is missing behind '--'; see `lit-lazy export --help`"),
    (["dashboard", "--runs=--"], "--runs=--: has no value; give one as in --runs=VALUE"),
    ([*TRAIN, "--runs", "/proc/runs"], "--runs '/proc/runs': nothing can be written there"),
    ([*TRAIN, "--runs", "/".join([LONG[:200]] * 18)], "nothing can be written there (File name too long)"),
    ([*RUN, "--seed=3"], "--seed: an ablation's seeds are given by --seeds"),
    ([*RUN, f"{BIAS}=Alibi"], f"{BIAS}: row 'softmax' sets model.attention.bias itself; leave one of the two out"),
    ([*RUN, "--seeds", ",".join(map(str, range(150_000)))], "cells of the grid=2550000: must be at most 100000"),
    ([*RUN, "--micro-batch", "5"], "--micro-batch=5: must divide the 8 of 8 sequences"),
    ([*TRAIN, "--devices", "400"], "--devices=400: must be at most the"),
    ([*TRAIN, "--strategy", "fsdp"], "--strategy='fsdp': shards a model over devices"),
    (["ablate", "status", "table2"], "--runs 'runs': does not exist; `lit-lazy train` or `ablate run` creates it"),
    (["ablate", "table", "table2", "--runs", "."], "'table2-backcopy': . holds no such grid; it has none; `li"),
    (["ablate", "table", "table2", "--from", "no.json"], "--from 'no.json': is no table.json (FileNotFoundError"),
    (["ablate", "table", "table2", "--from", str(RESULTS)], "is a folder; give the table.json in it, --from "),
    (["train", "smollm2"], f"data.tokenizer='models/tokenizer.json': {GONE}; `make smollm2` makes it"),
    (["diagnose", "models/smollm2.ckpt"], f"checkpoint 'models/smollm2.ckpt': {GONE}; `make smollm2` makes it"),
    (["ablate", "verdicts", str(RESULTS)], f"'{RESULTS}': is the folder of one table; give its parent folder"),
    (["dashboard"], "--runs runs: holds no runs yet; `make table2` or `lit-lazy train EXPERIMENT` creates some"),
    (["new", "data", "torch"], "NAME 'torch.py': torch is the name of a Python module"),
    (["new", "data", "x" * 101], "use at most 100 bytes"),
    (["new", "data", "mine", "--out", "mine.txt"], "--out 'mine.txt': must end in .py"),
    (["new", "data", "my_softpick"], "NAME 'my_softpick.py': exists already"),
    (["new", "data", "mine", "--out", "my_softpick.py/mine.py"], "--out 'my_softpick.py': nothing can be written"),
    (["evaluate", "fifo"], "cannot be read (It is a pipe or a device, and no file)"),
    ([*TABLE1, "--model.d_ff=64"], "--model.d_ff: row 'RetNet' sets model.d_ff itself"),
]
FIELDS = [
    (["--train.device=cuda"], "--train.device: no such option or field (did you mean --devices?); `lit-lazy fields"),
    (["--thread", "2"], "--thread: no such option or field (did you mean --threads?); `lit-lazy fields EXPERIMENT` "),
    (["--init_from=a", "--init-from", DEVICE], "--init_from: is given twice, as 'a' and as '"),
    (["--model.d_model=15", "--model.n_heads=3"], "Rope: the head dimension must be even, got 5; choose another"),
    ([f"{MIXER}=RetNet", "--model.attention.window=4"], "model.attention.window=4: has no effect in"),
    ([f"{MIXER}=RetNet", f"{NORMALISER}=Elastic"], "model.attention.normaliser=Elastic("),
    ([f"{MIXER}=RetNet", "--model.backend=reference"], "model.backend='reference': has no effect in model.mixer=RetN"),
    ([f"{MIXER}=Mamba2", f"{MIXER}.head_dim=5"], "Mamba2.head_dim=5: must divide 2 * model.d_model=32"),
    (["--train.batch_size=1000"], "train.batch_size=1000: must not exceed the 256 training sequences"),
    (["--data=Stdlib", "--data.context_length=100000000"], "bytes; choose a smaller length"),
    (["--data=Stdlib", "--data.validation_windows=99999999"], "choose fewer or shorter ones"),
    ([f"{BIAS}=Fire", f"{BIAS}.length=8"], "Fire.length=8: cannot serve 16 keys"),
    ([f"--{'x' * 120_000}=1"], "no such field"),
    ([f"{NORMALISER}.help=Nothing"], "Normaliser='Nothing': unknown"),
    (["--\x1b[31m\n=1"], r"\x1b[31m"),
    (["--\ud800=1"], r"\ud800"),
    (["--storage", "postgresql://me:geheim@h/x"], "--storage='postgresql://me:***@h/x': no such field"),
    (["--data=Text", "--data.path=loop"], "data.path='loop': Too many levels of symbolic links; choose another path"),
    (["--data=Text", f"--data.path={LONG}"], "File name too long; choose another path"),
    (["--data=Text", "--data.path=notes.md", "--data.tokenizer=fifo"], "It is a pipe or a device, and no file"),
    (["--data=Text", "--data.path=notes.md", "--data.tokenizer=words.json"], "cannot encode the text (WordLevel"),
    (["--data=Text", "--data.path=deep.jsonl"], "line 1 is not JSON (maximum recursion depth exceeded"),
]
"""Of `train`."""
SIZES = [
    *(([*TRAIN, f"--{field}={TRILLION}"], f"{field}={TRILLION}") for field in ("model.d_model", "data.context_length")),
    ([*TRAIN, "--model.n_layers=1000000000"], "model.n_layers=1000000000"),
    ([*TRAIN, f"--data.train_sequences={TRILLION}"], f"data.train_sequences={TRILLION}"),
    ([*TRAIN, f"{BIAS}=Fire", f"{BIAS}.width={TRILLION}"], "model.attention="),
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
def traps(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of things that are no files, or no good ones."""
    monkeypatch.setenv("LIT_LAZY_CACHE", str(place.parent / "cache"))
    (place / "my_softpick.py").write_text("")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
    (place / "notes.md").write_text("unknown words\n\n" * 5000)
    (place / "deep.jsonl").write_text("[" * 200_000)
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(place / "words.json"))
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
    for arguments in (TRAIN, RUN, ["ablate", "status", "table2"]):
        assert expect_refusal(arguments, capsys).startswith(
            "lit-lazy: TMPDIR cannot be used (No usable temporary directory"
        )


REFUSED = [
    (["--model.d_model=9999998"], "model.d_model=9999998", "choose smaller ones"),
    (["--logger", "wandb"], "--logger wandb: needs the package wandb", "pip install 'lit-lazy[wandb]'"),
]


@pytest.mark.usefixtures("traps")
@pytest.mark.parametrize(("arguments", "named", "fix"), REFUSED, ids=lambda value: " ".join(value))
def test_a_dry_run_refuses_what_the_training_does(arguments, named, fix, capsys, monkeypatch) -> None:
    """And neither creates anything."""
    monkeypatch.setattr("lit_lazy.training.logger_kinds.find_spec", lambda _package: None)
    for more in ([], ["--dry-run"]):
        said = expect_refusal([*TRAIN, *arguments, *more], capsys)
        assert named in said
        assert fix in said


BASE = """
import asyncio, dataclasses, sys
import torch
from lit_lazy.config import *
from lit_lazy.data import DataConfig, DataSource, TokenDataset
from lit_lazy.data.backcopy import Backcopy
DATA = Backcopy(vocab_size=16, context_length=16, train_sequences=256, validation_sequences=64)
MODEL, TRAINING = dict(d_model=16, d_ff=32), dict(steps=6, batch_size=8, warmup_steps=2)
class Odd(BaseException): pass
class Mute(Exception):
    def __str__(self): raise ValueError
class Shy:
    def __repr__(self): raise ValueError
def made(model={}, train={}, **rest):
    rest = dict(data=DATA) | rest
    return RunConfig(model=ModelConfig(**MODEL | model), train=TrainConfig(**TRAINING | train), **rest)
"""
EXPERIMENTS = {
    "def config(:": "line 1: SyntaxError",
    "import nothing_of_this_name": "line 1: ModuleNotFoundError: No module named",
    "import sys\nsys.exit(3)": "line 2: SystemExit: 3",
    "x = 1": "defines no function config(); give it one that returns a RunConfig",
    "ablation = 1": "defines no function config(); `lit-lazy ablate run ",
    "\0\1\2": "null bytes",
}
"""Content -> what is said of it."""
CONFIGS = {
    "return 1 / 0": "ZeroDivisionError: division by zero",
    "raise RuntimeError('a\\nb')": "RuntimeError: a b",
    "raise RuntimeError('x' * 100000)": "RuntimeError: xxx",
    "return None": "config() returned None; it must return a RunConfig",
    "return 10**5000": "config() returned a int; it must",
    "return Shy()": "config() returned a Shy; it must",
    "return config()": "RecursionError: maximum recursion depth exceeded",
    "raise Odd('x')": "Odd: x",
    "raise Mute": "Mute",
    "return made(train=dict(betas=[0.9, 0.95]))": "train.betas=[0.9, 0.95]: must be 2 items in brackets",
    "return made(train=dict(lr=torch.tensor(0.1)))": "train.lr=tensor(0.1000): must be a finite number",
    "return made(data=None)": "data=None: must be a DataConfig, such as Backcopy()",
}
UNEQUAL = "targets=-100 * ((torch.arange(80)[:, None] > 64) & (torch.arange(16) > 1)).long()"
"""16 targets in each sequence at first, later 2."""
LOADS = {
    "raise RuntimeError('a\\nb')": "data=Mine: RuntimeError (e.py, line ",
    "return None": "data=Mine: load() returned None; let it return a DataSource",
    "sys.exit(3)": "data=Mine: SystemExit (e.py",
    "return self.load()": "data=Mine: RecursionError (e.py",
    "return but(vocab_size=-1)": "data=Mine: vocab_size=-1: must be a whole number of at least 1",
    "return but(vocab_size=10**12)": MEMORY,
    "return but(vocab_size=3)": "tokens must be 0 to 2",
    "return but(context_length=9)": "must be whole numbers of shape [N, 10]",
    "return but(fingerprint=None)": "data=Mine: fingerprint=None: must be one line",
    "return but(info={'x': object()})": "must be texts and numbers by name",
    "return but(train=None)": "data=Mine: train=None: must be a TokenDataset",
    "return but(train=TokenDataset(torch.rand(64, 17)))": "must be whole numbers of shape [N, 17]",
    "return but(validation=TokenDataset(NONE[:0]))": "must hold at least one sequence",
    "return but(train=TokenDataset(NONE, targets=NONE))": (
        "train: targets='torch.int64 [64, 17]': must be whole numbers of shape [64, 16]"
    ),
    "return but(train=TokenDataset(NONE, targets=NONE[:, 1:] - 1))": (
        "train: targets=[-1]: must be 0 to 16, or -100 where nothing is predicted"
    ),
    f"return but(train=TokenDataset(torch.zeros(80, 17).long(), {UNEQUAL}))": (
        "train: targets=[2, 16]: every sequence must have the same number, at least 1"
    ),
    "return but(row_groups=('nothing',))": "row_groups=['nothing']: has no such positions",
}


@pytest.mark.parametrize("body", LOADS)
def test_data_of_users(body: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"Mine{list(LOADS).index(body)}"  # each is known as long as the process lives
    mine = f"@dataclasses.dataclass(frozen=True)\nclass {name}(DataConfig):\n    x: int = 1\n    def load(self):\n"
    but = "NONE = torch.zeros(64, 17).long()\ndef but(**changes): return dataclasses.replace(DATA.load(), **changes)\n"
    (place / "e.py").write_text(f"{BASE}\n{but}\n{mine}        {body}\ndef config(): return made(data={name}())\n")
    priced = [] if LOADS[body] == MEMORY else [["train", "e.py", "--dry-run"]]  # for a machine with more memory, too
    for words in (["train", "e.py"], *priced):
        assert LOADS[body].replace("Mine", name) in expect_refusal(words, capsys)


def test_data_of_users_are_loaded_no_third_time(place: Path, runs: Path) -> None:
    """A source without a cache of its own is loaded to be checked and to be trained on."""
    (place / "e.py").write_text(
        f"{BASE}\n@dataclasses.dataclass(frozen=True)\nclass Counted(DataConfig):\n    x: int = 1\n"
        "    def load(self):\n        with open('loads', 'a') as file: file.write('.')\n"
        "        return DATA.load()\ndef config(): return made(data=Counted())\n"
    )
    assert main(["train", "e.py", "--runs", str(runs), "--train.steps=1", "--train.warmup_steps=0"]) == 0
    assert (place / "loads").read_text() == ".."


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
    "name=''": "ablation '': is used as a folder name",
    "name='a' * 300": "is used as a folder name",
    "rows=(SOFT, SOFT)": "rows=['softmax']: must each occur once",
    "rows=(SOFT, Row('b', {NORMALISER: Softmax()}, 'ours'))": "rows 'softmax' and 'b' are the same training (seed 0)",
    "rows=(SOFT, Row('', {}, 'ours'))": "row '' has an empty, long or unprintable name; rename it",
    "rows=(SOFT, Row('a,b', {}, 'ours'))": "row='a,b': has a comma, which separates the names of rows",
    "rows=(SOFT, Row('../x', {}, 'ours'))": "row '../x': MLflow would read its name as a path",
    "rows=(SOFT, Row('b', {'model.width': 3}, 'ours'))": "row 'b': ModelConfig has no field 'width'",
    "rows=(SOFT, Row('b', {NORMALISER: 'Elastic'}, 'ours'))": "model.attention.normaliser='Elastic': must be a Normali",
    "rows=(SOFT, Row('b', {'model.n_heads': 3}, 'ours'))": "row 'b': model.n_heads=3: must divide",
    "rows=(SOFT, Row('b', {'model.d_model': 10**12}, 'ours'))": "row 'b': model.d_model=1000000000000",
    "rows=(SOFT, Row('b', {}, 'ours', seeds=(2, 2)))": "row 'b': seeds=[2]: must each occur once",
    "seeds=()": "seeds=(): must be a tuple, ",
    "baseline='lazy'": "baseline 'lazy': is unknown; known are softmax, elastic",
    "rows=()": "give either rows or axes",
    "rows=(), axes={'model.d_model': ()}": "its axes have no point; give each axis a value",
    "rows=(), axes={'model.d_model': (8, 16)}": "baseline 'softmax': is unknown; known are d_model=8, d_model=16",
    "rows=(), axes={'model.d_model': range(10**9)}": "points of its axes=1000000000: must be at most 100000",
    "base='nothing'": "experiment 'nothing': unknown; there are backcopy",
    "sedes=(0,)": "unexpected keyword argument 'sedes'",
    "columns=()": "columns=(): must be a tuple, each item a Column, of length 1 or more",
    "columns=(Column('loss//val', 'b'),)": "MLflow takes no metric of this name",
    "columns=(*COLUMNS, COLUMNS[0])": "columns=['loss/excess']: must each occur once",
    "columns=(Column('a', 'b', scale=0),)": "column 'a': scale=0: must not be 0; 1 shows values as they are",
    "contrasts=(Contrast('x', {'softmax': 1, 'b': -1}),)": "contrast 'x': row 'b': is unknown; known are softmax, ela",
    "contrasts=(Contrast('x', {'softmax': 1, 'elastic': -1}),) * 2": "contrasts=['x']: must each occur once",
    "primary=('los',)": "primary 'los': is unknown; known are loss/excess, ",
}


SEARCH = """
from lit_lazy.grid.search.definition import Real, Search

rest = dict(name="mine", axes={{"train.lr": Real(1e-4, 1e-2, log=True)}}, base="backcopy_tiny")
search = Search(**(rest | dict({settings})))
"""
SEARCHES = {
    "name='/../../x'": "search '/../../x': is used as a folder name; use letters, digits, _, - and .",
    "axes={'train.lr': (1, 2)}": "each value a Real",
    "axes={f'train.lr{i}': Real(0, 1) for i in range(40)}": "must be 1 to 10",
    "trials=10**12": "trials=1000000000000: must be a whole number of at least 1 and at most 100000",
}
WRITTEN = [
    *(("train", content, named) for content, named in EXPERIMENTS.items()),
    *(("train", f"{BASE}\ndef config():\n    {body}\n", named) for body, named in CONFIGS.items()),
    *(("ablate run", ABLATION.format(settings=settings), named) for settings, named in ABLATIONS.items()),
    ("ablate run", "ablation = 3", "its `ablation` is a int; make it Ablation(...)"),
    ("ablate run", "rows = 3", "defines no `ablation`; give it one, Ablation(...)"),
    ("ablate run", "def config(): ...", "; `lit-lazy train "),
    *(("ablate search", SEARCH.format(settings=settings), named) for settings, named in SEARCHES.items()),
]


@pytest.mark.parametrize(
    ("command", "content", "named"), WRITTEN, ids=[f"{words} {said}" for words, _, said in WRITTEN]
)
def test_files_of_users(command: str, content: str, named: str, place: Path, capsys: Any) -> None:
    (place / "e.py").write_text(content)
    error = expect_refusal([*command.split(), "e.py"], capsys)
    assert named in error
    assert error.startswith(f"lit-lazy: {place / 'e.py'}: ") or content not in EXPERIMENTS


def random_bytes(path: Path, _store: Path) -> None:
    path.write_bytes(b"SQLite" + os.urandom(4096))


def a_folder(path: Path, _store: Path) -> None:
    path.mkdir()


def mlflows(path: Path, store: Path) -> None:
    shutil.copy(store, path)


STORAGES = [
    (random_bytes, "sqlite:///{path}", "file is not a database); move that file away, or name another"),
    (a_folder, "sqlite:///{path}", "cannot be used (Is a directory); name another"),
    (mlflows, "sqlite:///{path}", "is another program's database; name another"),
    (None, "sqlite:////proc/queue.db", "--storage '/proc': nothing can be written there"),
    (None, "sqlite:////dev/zero", "cannot be used (It is a pipe or a device, and no file); name another"),
    (None, f"sqlite:///{LONG}.db", "File name too long"),
    (None, "sqlite:///a?b.db", "has a ?, which starts a query; write %3F for one in a path"),
    (None, "sqlite:///:memory:", "--storage 'sqlite:///:memory:': must be sqlite:///FILE"),
    (None, "mysql://me:geheim@localhost/x", "--storage 'mysql://me:***@localhost/x': must be sqlite:///FILE or"),
    (None, "postgresql://me:geheim@127.0.0.1:{port}/x", "are server, user, password and database right?"),
    (None, "postgresql://127.0.0.1:{port}/x?user=me&password=geheim", "are server, user, password and database right?"),
    (None, "postgresql://me:geh@geheim@localhost/x", "with %40 for an @ in the password"),
    (None, "postgresql://me:geheim@localhost:port/x", "is not a database URL; give SCHEME://USER:PASSWORD@HOST"),
]


@pytest.mark.parametrize(("make", "url", "named"), STORAGES, ids=[url for _, url, _ in STORAGES])
def test_storages(make, url, named, empty_store, closed_port, capsys) -> None:
    path = Path.cwd() / "storage"
    if make is not None:
        make(path, empty_store)
    storage = url.format(path=path, port=closed_port)
    assert named in expect_refusal([*CELL, "--storage", storage], capsys)


TRACKING = [
    ("http://me:geheim@127.0.0.1:{port}", "MLFLOW_TRACKING_URI=http://me:***@127.0.0.1:"),
    ("http://127.0.0.1:{port}", "Connection refused); start the server, or unset the variable"),
    ("postgresql://me:geheim@127.0.0.1:{port}/x", "MLFLOW_TRACKING_URI 'postgresql://me:***@127.0.0.1:"),
    ("file:{place}/mlruns", "must be http://HOST:PORT, sqlite:///FILE or postgresql://"),
    ("sqlite://", "MLFLOW_TRACKING_URI=sqlite://: must be http://HOST:PORT"),
    ("sqlite:///{place}/runs/mlflow.db", "mlflow.db': cannot be used (file is not a database); move that file away"),
    ("", "mlflow.db': cannot be used (file is not a database); move that file away"),
    ("sqlite:////proc/mlflow.db", "MLFLOW_TRACKING_URI '/proc': nothing can be written there"),
]


@pytest.mark.parametrize(("uri", "named"), TRACKING, ids=[uri for uri, _ in TRACKING])
def test_tracking_stores(uri: str, named: str, place: Path, closed_port: int, monkeypatch: Any, capsys: Any) -> None:
    """Without an address the store is in the runs folder, damaged here."""
    (place / "runs").mkdir()
    random_bytes(place / "runs" / "mlflow.db", place)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(place=place, port=closed_port))
    for command in (TRAIN, CELL, ["dashboard"]):
        assert named in expect_refusal(command, capsys), command


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


def compress(_trained: Path) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**20)
    return file.getvalue()


DAMAGED, FOREIGN = "is no checkpoint, or damaged (", "was not made by this project; give a final.ckpt"
FILES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "truncated": (lambda trained: trained.read_bytes()[:-1000], DAMAGED),
    "a pickle bomb": (lambda _: pickle.dumps(Bomb(Path.cwd() / "exploded")), DAMAGED),
    "compressed": (compress, "BadZipFile: it is compressed, which torch does not do"),
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
    "no config": (lambda content: content | {"hyper_parameters": {"config": "x", "vocab_size": 1}}, FOREIGN),
}
"""What stands in the file in place of the content."""
CHANGES: dict[str, tuple[Change, str]] = {
    "other weights": (
        lambda content: content["state_dict"].pop("model.blocks.0.attention.normaliser.tau"),
        "the weights are another architecture's (model.blocks.0.attention.normaliser.tau is missing",
    ),
    "other data": (use_other_data, "was trained on data with vocab_size=5, which now has vocab_size=17"),
    "vocabulary -1": (setting("vocab_size", -1), "vocab_size=-1: must be a whole number of at least 1"),
    "length 1e12": (setting("context_length", 10**12), "GB of memory, of which this machine has"),
    "layers": (of_model("n_layers", 10**9), "model.n_layers=1000000000: it has weights of fewer layers"),
    "sparse": (weight(EMBEDDING, torch.Tensor.to_sparse), FOREIGN),
    "int8": (weight(EMBEDDING, lambda value: value.to(torch.int8)), "is (17, 16) of torch.int8, should be (17, 16)"),
    "NaN": (weight(EMBEDDING, lambda value: value * torch.nan), "the weights are not finite (model.embedding.weight)"),
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
    own = capsys.readouterr().out
    assert main(["evaluate", str(trained / FINAL_CHECKPOINT), "--threads", "1"]) == 0
    assert own == capsys.readouterr().out


def test_in_a_process_of_its_own(place: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "LIT_LAZY"))}
    command = [sys.executable, "-m", "lit_lazy", *TRAIN, "--model.n_heads=3"]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert not [*place.iterdir()]
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"lit-lazy[^\n]*: model.n_heads=3: must divide model.d_model=16[^\n]*\n", done.stderr), (
        done.stderr
    )


def test_passwords_are_not_kept_with_the_command_either(monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_lazy.support.secrets import format_command_line

    url = f"postgresql://me:{PASSWORD}@host/x"
    for words in (["--storage", url], [f"--storage={url}"]):
        monkeypatch.setattr(sys, "argv", ["lit-lazy", "ablate", "run", "table2", *words])
        assert PASSWORD not in format_command_line()
        assert "postgresql://me:***@host/x" in format_command_line()


@pytest.mark.parametrize(
    "taus", [3, {"a": torch.zeros(1, 1)}, {1: torch.zeros(1)}, {1: None}, {1: torch.zeros(1, 1), 2: torch.zeros(2, 1)}]
)
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


def test_a_message_is_one_line_without_passwords() -> None:
    url = "postgresql://me:ge@he/im geheim@host/x?password=geheim&a=b"
    assert sanitise(f"--storage '{url}'\n: no") == "--storage 'postgresql://me:***@host/x?password=***&a=b' : no"
    assert sanitise("http://127.0.0.1:5000/a me@host").startswith("http://127.0.0.1:")
    assert sanitise("write postgresql://USER:PASSWORD@HOST") == "write postgresql://USER:PASSWORD@HOST"
    long = sanitise(f"--x='{'y' * 10**6}': fix")
    assert len(long) < LONGEST_MESSAGE + 10
    assert long.startswith("--x='yyy")
    assert long.endswith("': fix")
