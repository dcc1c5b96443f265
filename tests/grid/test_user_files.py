"""A user's own files: they import the files beside them, in every worker too, and their code decides what is run."""

import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from lit_lazy.config.files import load_module
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.grid.queue.storage import default_storage

ABLATION = """
from beside import TAU, Mine
from lit_lazy.attention import Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS

NORMALISER = "model.attention.normaliser"
ablation = Ablation(
    name="mine",
    baseline="softmax",
    seeds=(0,),
    columns=COLUMNS,
    base="backcopy_tiny",
    rows=(Row("softmax", {NORMALISER: Softmax()}, "ours"), Row("mine", {NORMALISER: Mine(tau_init=TAU)}, "ours")),
)
"""
BESIDE = """
from dataclasses import dataclass

from lit_lazy.attention import Elastic

TAU = 0.5


@dataclass(frozen=True)
class Mine(Elastic):
    '''Elastic, with its offset parameter doubled.'''

    def build(self, shape):
        module = super().build(shape)
        module.tau.data *= 2
        return module
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """An ablation, a file that it imports, and one called like a module of Python's that everything needs."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "beside.py").write_text(BESIDE)
    (folder / "queue.py").write_text("raise RuntimeError('took the place of the queue')\n")
    path = folder / "mine.py"
    path.write_text(ABLATION)
    return path


def command(path: Path, runs: Path, *more: str) -> list[str]:
    """`lit-lazy ablate run`."""
    words = [sys.executable, "-P", "-m", "lit_lazy.command", "ablate", "run", str(path), "--runs", str(runs)]
    return [*words, "--workers", "1", *more]


def test_files_beside_it_reach_every_worker_and_edited_code_is_another_cell(mine: Path, runs: Path) -> None:
    # Real processes, in the folder of the ablation: a fork has imported Python's own queue already.
    done = subprocess.run(command(mine, runs), capture_output=True, text=True, cwd=mine.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(Queue(default_storage(runs), "mine-backcopy_tiny").states().values()) == {"complete"}
    results = {path.parent for path in (runs / "mine-backcopy_tiny" / "cells").glob("*/result.json")}
    assert len(results) == 2

    (mine.parent / "beside.py").write_text(BESIDE.replace("*= 2", "*= 3"))
    again = forked.run(command(mine, runs), cwd=mine.parent)
    assert again.returncode == 2
    assert again.stderr == (
        "lit-lazy: row 'mine': its experiment, ablation, code or data changed since this grid was begun; "
        "--fresh moves the former results away, another file name keeps both\n"
    )

    fresh = forked.run(command(mine, runs, "--fresh"), cwd=mine.parent)
    assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    keys = {path.parent.name for path in (runs / "mine-backcopy_tiny" / "cells").glob("*/result.json")}
    assert len(keys - {path.name for path in results}) == 1, "softmax is as it was, the rule is another"


def test_a_file_that_is_hidden_by_another_module_is_named(mine: Path, tmp_path: Path) -> None:
    (mine.parent / "queue.py").write_text("MINE = 1\n")
    mine.write_text("import queue\n")
    with pytest.raises(ValueError, match=r"mine\.py: imports 'queue', which is .* and not queue\.py beside it; rename"):
        load_module(mine)
    other = tmp_path / "other"
    shutil.copytree(mine.parent, other)
    for folder in (mine.parent, other):
        (folder / "twin.py").write_text("X = 1\n")
        (folder / "uses.py").write_text("import twin\n")
    deep = mine.with_name("deep.py")
    deep.write_text("import through\n")
    deep.with_name("through.py").write_text("import queue\n")
    with pytest.raises(ValueError, match=r"deep\.py: imports 'queue', which is .* and not queue\.py beside it"):
        load_module(deep)
    load_module(mine.with_name("uses.py"))
    with pytest.raises(ValueError, match=r"imports 'twin', which is .*mine.twin\.py and not twin\.py beside it"):
        load_module(other / "uses.py")
    del sys.modules["twin"], sys.modules["through"]
