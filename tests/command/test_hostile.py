"""Sizes that no machine holds, users' files that misbehave, and what is no file: one line, and nothing created.

What asks the most of a machine is refused by an estimate; nothing here is large.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import expect_refusal
from tokenizers import Tokenizer, models, pre_tokenizers

from lit_lazy.command.main import main
from lit_lazy.config.user_files import experiment
from lit_lazy.grid.plan import Plan
from lit_lazy.report.checkpoint import read_taus
from lit_lazy.support.errors import LONGEST_MESSAGE, sanitise
from lit_lazy.training.result import RESULT, RunResult

pytestmark = pytest.mark.usefixtures("place")
TRAIN = ["train", "backcopy_tiny"]
RUN = ["ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", "softmax"]
SEARCH = ["ablate", "search", "lazy_search", "--base", "backcopy_tiny"]
LONG = "x" * 300
TRILLION, TEXT = "1000000000000", ["--data=Text"]
MEMORY = "GB of memory, of which this machine has"

SIZES = [
    *(([*TRAIN, f"--{field}={TRILLION}"], f"{field}={TRILLION}") for field in ("model.d_model", "model.d_ff")),
    ([*TRAIN, "--model.n_layers=1000000000"], "model.n_layers=1000000000"),
    ([*TRAIN, f"--data.train_sequences={TRILLION}"], f"data.train_sequences={TRILLION}"),
    ([*TRAIN, f"--data.validation_sequences={TRILLION}"], f"data.validation_sequences={TRILLION}"),
    ([*TRAIN, f"--data.context_length={TRILLION}"], f"data.context_length={TRILLION}"),
    ([*TRAIN, "--model.attention.bias=Fire", f"--model.attention.bias.width={TRILLION}"], "model.attention="),
    ([*TRAIN, "--model.attention.bias=LearnedBias", f"--model.attention.bias.length={TRILLION}"], "model.attention="),
    ([*RUN, f"--model.d_model={TRILLION}"], f"row 'softmax': model.d_model={TRILLION}"),
    ([*RUN, "--workers", TRILLION], f"--workers={TRILLION}"),
]


@pytest.mark.parametrize(("arguments", "named"), SIZES, ids=lambda value: value if isinstance(value, str) else "")
def test_sizes_are_refused_by_an_estimate(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = expect_refusal(arguments, capsys)
    assert named in said
    assert MEMORY in said


def test_a_machine_without_a_folder_for_temporary_files_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries ask for one when they are imported, and fail with a traceback."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    for arguments in (TRAIN, RUN, ["ablate", "status", "table2"]):
        assert expect_refusal(arguments, capsys).startswith("lit-lazy: TMPDIR: No usable temporary directory")


LIMITS = [
    ([*RUN, "--seeds", ",".join(map(str, range(150_000)))], "cells of the grid=150000: must be at most 100000"),
    ([*SEARCH, "--trials", TRILLION], f"--trials={TRILLION}: must be at most 100000"),
    ([*TRAIN, "--runs", "/".join([LONG[:200]] * 18)], "nothing can be written there (File name too long)"),
    ([*TRAIN, *TEXT, "--data.path=loop"], "data.path='loop': Too many levels of symbolic links; choose another path"),
    ([*TRAIN, *TEXT, f"--data.path={LONG}"], "File name too long; choose another path"),
    ([*TRAIN, *TEXT, "--data.path=notes.txt", "--data.tokenizer=fifo"], "It is a pipe or a device, and no file"),
    ([*TRAIN, *TEXT, "--data.path=notes.txt", "--data.tokenizer=/dev/zero"], "It is a pipe or a device"),
    ([*TRAIN, *TEXT, "--data.path=notes.txt", "--data.tokenizer=words.json"], "cannot encode the text (WordLevel"),
    ([*TRAIN, *TEXT, "--data.path=deep.jsonl"], "line 1 is not JSON (maximum recursion depth exceeded"),
    (["evaluate", "fifo"], "cannot be read (It is a pipe or a device, and no file)"),
    (["diagnose", "/dev/zero"], "cannot be read (It is a pipe or a device, and no file)"),
    ([*RUN, "--storage", "sqlite:////dev/zero"], "is a pipe or a device, not a file; name another"),
    ([*RUN, "--storage", f"sqlite:///{LONG}.db"], "File name too long"),
    ([*RUN, "--storage", "sqlite:///a?b.db"], "has a ?, which starts a query; write %3F for one in a path"),
]


@pytest.fixture
def traps(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of things that are no files, or no good ones."""
    monkeypatch.setenv("LIT_LAZY_CACHE", str(place.parent / "cache"))
    (place / "loop").symlink_to("loop")
    (place / "lost").symlink_to("nowhere/x")
    (place / "folder.json").mkdir()
    os.mkfifo(place / "fifo")
    (place / "notes.txt").write_text("unknown words\n\n" * 5000)
    (place / "deep.jsonl").write_text("[" * 200_000)
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(place / "words.json"))
    return place


@pytest.mark.parametrize(("arguments", "named"), LIMITS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.usefixtures("traps")
def test_limits_and_what_is_no_file(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = expect_refusal(arguments, capsys)
    assert named in said
    assert len(said) < LONGEST_MESSAGE + 200


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
CONFIGS = {
    "raise RuntimeError('a\\nb')": "RuntimeError: a b",
    "raise RuntimeError('x' * 100000)": "RuntimeError: xxx",
    "return None": "config() returned None; it must return a RunConfig",
    "return [1] * 100000": "config() returned [1, 1, 1,",
    "return 10**5000": "config() returned a int; it must",
    "return Shy()": "config() returned a Shy; it must",
    "sys.exit(3)": "SystemExit: 3",
    "return config()": "RecursionError: maximum recursion depth exceeded",
    "raise Odd('x')": "Odd: x",
    "raise Mute": "Mute",
    "raise GeneratorExit": "GeneratorExit",
    "return made(train=dict(betas=[0.9, 0.95]))": "train.betas=[0.9, 0.95]: must be 2 items in brackets",
    "return made(train=dict(lr=torch.tensor(0.1)))": "train.lr=tensor(0.1000): must be a finite number",
    "return made(data=None)": "data=None: must be a DataConfig, such as Backcopy()",
}
LOADS = {
    "raise RuntimeError('a\\nb')": "data=Mine: RuntimeError (e.py, line ",
    "return None": "data=Mine: load() returned None; let it return a DataSource",
    "return {}['x']": "data=Mine: KeyError (e.py",
    "sys.exit(3)": "data=Mine: SystemExit (e.py",
    "return self.load()": "data=Mine: RecursionError (e.py",
    "raise MemoryError": "data=Mine: MemoryError (e.py",
    "open('/proc/nonexistent')": "data=Mine: FileNotFoundError (e.py",
    "return but(vocab_size=-1)": "data=Mine: vocab_size=-1: must be a whole number of at least 1",
    "return but(vocab_size=10**12)": MEMORY,
    "return but(vocab_size=3)": "tokens must be 0 to 2",
    "return but(context_length='a')": "data=Mine: context_length='a': must be a whole number of at least 1",
    "return but(context_length=9)": "must be whole numbers of shape [N, 10]",
    "return but(fingerprint=None)": "data=Mine: fingerprint=None: must be one line",
    "return but(name='a\\nb')": "data=Mine: name='a\\nb': must be one line",
    "return but(info={'x': object()})": "must be texts and numbers by name",
    "return but(train=None)": "data=Mine: train=None: must be a TokenDataset",
    "return but(train=TokenDataset(torch.rand(64, 17)))": "must be whole numbers of shape [N, 17]",
    "return but(validation=TokenDataset(torch.zeros(0, 17).long()))": "must hold at least one sequence",
    "return but(train=TokenDataset(torch.zeros(64, 17).long(), targets=torch.zeros(64, 17).long()))": (
        "train: targets='torch.int64 [64, 17]': must be whole numbers of shape [64, 16]"
    ),
    "return but(train=TokenDataset(torch.zeros(64, 17).long(), targets=torch.full((64, 16), -1)))": (
        "train: targets=[-1]: must be 0 to 16, or -100 where nothing is predicted"
    ),
    "return but(train=TokenDataset(torch.zeros(64, 17).long(), targets=100 * torch.eye(64, 16).long() - 100))": (
        "every sequence must have the same number, at least 1"
    ),
    "return but(row_groups=('nothing',))": "row_groups=['nothing']: has no such positions",
}


@pytest.mark.parametrize("body", CONFIGS)
def test_configs_of_users(body: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "e.py").write_text(f"{BASE}\ndef config():\n    {body}\n")
    assert CONFIGS[body] in expect_refusal(["train", "e.py"], capsys)


@pytest.mark.parametrize("body", LOADS)
def test_data_of_users(body: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"Mine{list(LOADS).index(body)}"  # each is known as long as the process lives
    mine = f"@dataclasses.dataclass(frozen=True)\nclass {name}(DataConfig):\n    x: int = 1\n    def load(self):\n"
    but = "def but(**changes): return dataclasses.replace(DATA.load(), **changes)\n"
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


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, Any]:
    """The content of one, not trained."""
    from lit_lazy.training.module import LitLM

    cfg = experiment("backcopy_tiny")
    module = LitLM.create(cfg, 17, 16)
    return {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "global_step": 1}


@pytest.mark.parametrize(
    "taus", [3, {"a": torch.zeros(1, 1)}, {1: torch.zeros(1)}, {1: None}, {1: torch.zeros(1, 1), 2: torch.zeros(2, 1)}]
)
def test_taus_that_are_none(taus: Any, checkpoint: dict[str, Any], place: Path) -> None:
    torch.save(checkpoint | {"callbacks": {"Watch": {"taus": taus}}}, place / "c.ckpt")
    with pytest.raises(ValueError, match=r"^checkpoint '.*c.ckpt': the taus recorded during training are damaged"):
        read_taus(place / "c.ckpt")


@pytest.mark.parametrize("content", ["[" * 200_000, "[]", "3", "{}", '{"key": 3}'])
def test_results_and_plans_that_are_none(content: str, place: Path) -> None:
    (place / RESULT).write_text(content)
    assert RunResult.read(place) is None
    assert (place / f"{RESULT}.damaged").exists()
    with pytest.raises(ValueError, match=r"^no plan \([^\n]*\)$"):
        Plan.from_json(content)


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


def test_json_of_a_result_is_read_back(place: Path) -> None:
    result = RunResult("k", {"train": {"steps": 1}}, {"n": 1}, {"loss/val": 1}, {}, {"s": 1.0}, {"git_sha": "a"}, "f")
    (place / RESULT).write_text(json.dumps(result.__dict__))
    assert RunResult.read(place) == result
