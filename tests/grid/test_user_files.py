"""User files import their neighbours, in every worker too, and their code is part of the cells' keys."""

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import forked
import pytest
from mistakes import snapshot_tree

from lit_lazy.config.user_files import load_module
from lit_lazy.grid.grid_folder import read_grid
from lit_lazy.table.build import read_table
from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.run_folder import FINAL_CHECKPOINT

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

METRIC = """
from dataclasses import dataclass

from lit_lazy.config.evaluation import Evaluation
from lit_lazy.table.records import Column

COLUMN = Column("own/size", "size", plotted=True)


@dataclass(frozen=True)
class Own(Evaluation):
    def measure(self, model, data):
        return {"own/size": 1.0}
"""
MEASURED = f"from metric import COLUMN, Own\n{ABLATION}".replace(
    "columns=COLUMNS,", 'columns=(COLUMN, *COLUMNS), common={"evaluations": (Own(),)},'
)


def shadow(folder: Path) -> Path:
    """Files named like essential modules of Python."""
    folder.mkdir()
    for name in ("queue", "random", "logging"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('took the place of {name}')\n")
    return folder


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """An ablation and a file that it imports, next to shadowing files."""
    folder = shadow(tmp_path / "mine")
    (folder / "beside.py").write_text(BESIDE)
    path = folder / "mine.py"
    path.write_text(ABLATION)
    return path


def command(path: Path, runs: Path, *more: str) -> list[str]:
    words = [sys.executable, "-P", "-m", "lit_lazy", "ablate", "run", str(path), "--runs", str(runs)]
    return [*words, "--workers", "1", *more]


def run_command(path: Path, runs: Path, *more: str, status: int = 0) -> str:
    done = forked.run(command(path, runs, *more), cwd=path.parent)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


def test_files_beside_it_reach_every_worker_and_edited_code_is_refused(mine: Path, runs: Path) -> None:
    run, grid = partial(run_command, mine, runs), runs / "mine-backcopy_tiny"
    run("--rows", "mine")
    assert len(list(grid.glob("cells/*/result.json"))) == 1
    before = snapshot_tree(runs)
    dry = run("--dry-run")
    assert dry.startswith("1 of 2 cells are finished already\nsoftmax "), dry
    assert "\n1 cells of mine-backcopy_tiny: about " in dry
    assert run("--dry-run", "--rows", "mine") == "1 cells, all finished: nothing to do\n"

    (mine.parent / "beside.py").write_text(BESIDE.replace("*= 2", "*= 3"))
    for more, what in ((["--rows", "softmax"], "settings, code or data"), ([], "code or data")):
        said = run("--dry-run", *more, status=2)
        assert said.startswith(f"lit-lazy: row 'mine': its {what} changed since this grid began; --changed trains it")
    assert snapshot_tree(runs) == before
    assert "'mine': its code or data changed since this grid began; " in run(status=2)

    assert "\n2 cells of mine-backcopy_tiny: about " in run("--dry-run", "--changed")
    assert "2 cells, 0 already finished, 2 to train" in run("--changed")
    plan = read_grid(grid).plan
    old = plan.rows[-1].variant
    assert [row.variant for row in plan.rows] == ["softmax", "mine", old]
    assert re.fullmatch(r"mine \(version \w{6}\)", old)
    notes = {row.variant: row.note for row in read_table(grid / "table.json").rows}
    versions = [f"version {plan.definitions['mine'][:6]}", "before its code or data changed"]
    assert notes == dict(zip(("softmax", "mine", old), ("", *versions), strict=True))
    assert len({cell.metrics["loss/val"] for cell in read_grid(grid).cells}) == 3
    said = run()
    assert "2 cells, all finished: nothing to do" in said
    assert f"Also in the table, by earlier commands: {old} (seeds 0)." in said


@pytest.mark.long
@pytest.mark.parametrize("kind", ["a worker", "a task of Ray", "the dashboard's server"])
def test_no_process_takes_a_module_from_the_current_folder(kind, mine, runs, tmp_path, closed_port) -> None:
    """Real processes: a fork has already imported Python's modules."""
    if kind == "a task of Ray":
        pytest.importorskip("ray", reason="needs Ray: pip install 'lit-lazy[ray]'")
    Tracker(default_uri(runs), "x").create_run("x", {"kind": "run"})
    program = str(Path(sys.executable).with_name("lit-lazy"))
    words = {
        "a worker": command(mine, runs, "--rows", "mine"),
        "a task of Ray": command(mine, runs, "--launcher", "ray"),
        "the dashboard's server": [program, "dashboard", "--runs", str(runs), "--port", str(closed_port)],
    }[kind]
    here = shadow(tmp_path / "here")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=here)
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ctrl-C stops the server" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait() == 0, "".join(said)


def test_a_metric_is_added_to_or_left_out_of_a_finished_grid_without_training_if_its_models_were_kept(mine, runs):
    def read_cells() -> dict[str, tuple[float, float | None, bool]]:
        """When each row was trained, its own metric, and whether its model is kept."""
        found = {}
        for cell in read_grid(grid).cells:
            kept = (cell.folder / FINAL_CHECKPOINT).exists()
            found[cell.variant] = cell.metrics["time/train_seconds"], cell.metrics.get("own/size"), kept
        return found

    run, grid = partial(run_command, mine, runs), runs / "mine-backcopy_tiny"
    run("--rows", "mine")
    (mine.parent / "metric.py").write_text(METRIC)
    mine.write_text(MEASURED)
    for more in (["--dry-run"], []):
        before = snapshot_tree(grid)
        said = run(*more, status=2)
        assert said.startswith("lit-lazy: evaluations: changed, and 1 finished cells kept no model")
        assert snapshot_tree(grid).keys() == before.keys()
    run("--changed", "--keep-checkpoint")
    trained = read_cells()
    assert {row: cell[1:] for row, cell in trained.items()} == {"softmax": (1.0, True), "mine": (1.0, True)}
    (mine.parent / "metric.py").write_text(METRIC.replace("1.0", "2.0"))
    only = "2 cells trained already: only evaluations are measured\n0 of 2 cells are finished already\n"
    assert run("--dry-run") == only
    run()
    assert read_cells() == {row: (cell[0], 2.0, True) for row, cell in trained.items()}
    assert read_table(grid / "table.json").main_columns[0].key == "loss/excess"
    mine.write_text(ABLATION)  # without a metric, as one cell was trained at first
    only = "1 cell trained already: only evaluations are measured\n1 of 2 cells are finished already\n"
    assert run("--dry-run") == only
    run()
    assert {row: cell[1] for row, cell in read_cells().items()} == dict.fromkeys(trained)


def test_a_file_that_is_hidden_by_another_module_is_named(mine: Path, tmp_path: Path) -> None:
    (mine.parent / "queue.py").write_text("MINE = 1\n")
    mine.write_text("import queue\n")
    with pytest.raises(ValueError, match=r"mine\.py: imports 'queue', which is .* and not queue\.py next to it; ren"):
        load_module(mine)
    other = tmp_path / "other"
    shutil.copytree(mine.parent, other)
    for folder in (mine.parent, other):
        (folder / "twin.py").write_text("X = 1\n")
        (folder / "uses.py").write_text("import twin\n")
    load_module(mine.with_name("uses.py"))
    with pytest.raises(ValueError, match=r"imports 'twin', which is .*mine.twin\.py and not twin\.py next to it"):
        load_module(other / "uses.py")
    del sys.modules["twin"]


def test_a_file_runs_as_it_is_however_alike_its_former_version_was(tmp_path, monkeypatch) -> None:
    """Python reuses bytecode if size and time are equal; keys depend on the source."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path, beside = tmp_path / "uses_constant.py", tmp_path / "its_constant.py"
    path.write_text("from its_constant import x\n\ny = 1\n")
    beside.write_text("x = 1\n")
    for value in (1, 2):
        for file in (path, beside):
            file.write_text(file.read_text().replace("= 1", f"= {value}"))
            os.utime(file, (0, 0))
        assert forked.run_in_fork(lambda: (load_module(path).x, load_module(path).y)) == (value, value)
    assert sorted(tmp_path.iterdir()) == [beside, path]
