"""User files import their neighbours, in every worker too, and their code is part of the cells' keys."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from mistakes import snapshot_tree

from lit_lazy.config.user_files import load_module
from lit_lazy.grid.plan import read_grid
from lit_lazy.table.stored import read_table
from lit_lazy.tracking.store import default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.result import FINAL_CHECKPOINT

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

MEASURES = """
from lit_lazy.command.main import main

if __name__ == "__main__":
    main(["ablate", "list"])
"""


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
    """`lit-lazy ablate run`."""
    words = [sys.executable, "-P", "-m", "lit_lazy.command", "ablate", "run", str(path), "--runs", str(runs)]
    return [*words, "--workers", "1", *more]


def refuse(mine: Path, runs: Path, *more: str) -> str:
    """What a command says that changed in a row since its grid began."""
    done = forked.run(command(mine, runs, *more), cwd=mine.parent)
    assert done.returncode == 2
    assert done.stderr.startswith("lit-lazy: row "), done.stderr
    said, _, fix = done.stderr.removeprefix("lit-lazy: row ").partition(" since this grid began; ")
    assert fix.startswith("another name=" if "was removed" in said else "--changed trains it anew and keeps its former")
    assert fix.endswith("and takes the results of other rows, --fresh moves all former results away\n")
    return said


def edit(mine: Path) -> None:
    (mine.parent / "beside.py").write_text(BESIDE.replace("*= 2", "*= 3"))


@pytest.mark.long
def test_no_process_takes_a_module_from_the_current_folder(mine: Path, runs: Path, tmp_path: Path) -> None:
    # Real processes: a fork has already imported Python's modules.
    here = shadow(tmp_path / "here")
    done = subprocess.run(command(mine, runs, "--rows", "mine"), capture_output=True, text=True, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {cell.status for cell in read_grid(runs / "mine-backcopy_tiny").cells} == {"complete"}


def test_files_beside_it_reach_every_worker_and_edited_code_is_refused(mine: Path, runs: Path) -> None:
    done = forked.run(command(mine, runs, "--rows", "mine"), cwd=mine.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((runs / "mine-backcopy_tiny" / "cells").glob("*/result.json"))) == 1

    before = snapshot_tree(runs)
    dry = forked.run(command(mine, runs, "--dry-run"), cwd=mine.parent).stdout
    assert dry.startswith("1 of 2 cells are finished already\nsoftmax "), dry
    assert "\n1 cells of mine-backcopy_tiny: about " in dry
    dry = forked.run(command(mine, runs, "--dry-run", "--rows", "mine"), cwd=mine.parent).stdout
    assert dry == "1 cells, all finished: nothing to do\n"

    edit(mine)
    assert refuse(mine, runs, "--dry-run", "--rows", "softmax") == "'mine': its settings, code or data changed"
    assert refuse(mine, runs, "--dry-run") == "'mine': its code or data changed"
    assert snapshot_tree(runs) == before
    assert refuse(mine, runs) == "'mine': its code or data changed"

    grid = runs / "mine-backcopy_tiny"
    dry = forked.run(command(mine, runs, "--dry-run", "--changed"), cwd=mine.parent).stdout
    assert "\n2 cells of mine-backcopy_tiny: about " in dry
    done = forked.run(command(mine, runs, "--changed"), cwd=mine.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cells, 0 already finished, 2 to train" in done.stdout
    plan = read_grid(grid).plan
    old = plan.rows[-1].variant
    assert [row.variant for row in plan.rows] == ["softmax", "mine", old]
    assert re.fullmatch(r"mine \(version \w{6}\)", old)
    notes = {row.variant: row.note for row in read_table(grid / "table.json").rows}
    versions = [f"version {plan.definitions['mine'][:6]}", "before its code or data changed"]
    assert notes == dict(zip(("softmax", "mine", old), ("", *versions), strict=True))
    assert len({cell.metrics["loss/val"] for cell in read_grid(grid).cells}) == 3
    done = forked.run(command(mine, runs), cwd=mine.parent)
    assert "2 cells, all finished: nothing to do" in done.stdout, done.stderr
    assert f"Also in the table, by earlier commands: {old} (seeds 0)." in done.stdout
    assert (
        forked.run(command(mine, runs, "--dry-run"), cwd=mine.parent).stdout == "2 cells, all finished: nothing to do\n"
    )


def test_a_metric_is_added_to_a_finished_grid_without_training_if_its_models_were_kept(mine: Path, runs: Path) -> None:
    def read_cells() -> dict[str, tuple[float, float | None, bool]]:
        """When each row was trained, its own metric, and whether its model is kept."""
        cells = read_grid(runs / "mine-backcopy_tiny").cells
        return {
            cell.variant: (
                cell.metrics["time/train_seconds"],
                cell.metrics.get("own/size"),
                (cell.folder / FINAL_CHECKPOINT).exists(),
            )
            for cell in cells
        }

    assert forked.run(command(mine, runs), cwd=mine.parent).returncode == 0
    (mine.parent / "metric.py").write_text(METRIC)
    mine.write_text(MEASURED)
    for more in (["--dry-run"], []):
        before = snapshot_tree(runs / "mine-backcopy_tiny")
        done = forked.run(command(mine, runs, *more), cwd=mine.parent)
        assert done.returncode == 2
        assert done.stderr.startswith("lit-lazy: evaluations: were added, and 2 finished cells kept no model")
        assert snapshot_tree(runs / "mine-backcopy_tiny").keys() == before.keys()
    done = forked.run(command(mine, runs, "--changed", "--keep-checkpoint"), cwd=mine.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = read_cells()
    assert {row: cell[1:] for row, cell in trained.items()} == {"softmax": (1.0, True), "mine": (1.0, True)}
    (mine.parent / "metric.py").write_text(METRIC.replace("1.0", "2.0"))
    dry = forked.run(command(mine, runs, "--dry-run"), cwd=mine.parent).stdout
    assert dry == "2 cells trained already: only evaluations are measured\n0 of 2 cells are finished already\n"
    done = forked.run(command(mine, runs), cwd=mine.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_cells() == {row: (cell[0], 2.0, True) for row, cell in trained.items()}
    assert read_table(runs / "mine-backcopy_tiny" / "table.json").main_columns[0].key == "loss/excess"


@pytest.mark.long
def test_changed_settings_are_named_also_by_a_dry_run(mine: Path, runs: Path) -> None:
    assert forked.run(command(mine, runs, "--rows", "mine"), cwd=mine.parent).returncode == 0
    mine.write_text(ABLATION.replace("tau_init=TAU", "tau_init=0.25"))
    changed = "'mine': model.attention.normaliser.tau_init changed from 0.5 to 0.25"
    assert refuse(mine, runs) == refuse(mine, runs, "--dry-run") == changed
    assert refuse(mine, runs, "--rows", "softmax", "--dry-run") == changed
    assert refuse(mine, runs, "--rows", "softmax") == "'mine': its settings, code or data changed"
    mine.write_text(ABLATION.replace('Row("mine"', 'Row("other"').replace("tau_init=TAU", "tau_init=0.25"))
    assert refuse(mine, runs) == refuse(mine, runs, "--dry-run") == "'mine': was removed from the ablation"
    assert forked.run(command(mine, runs, "--dry-run", "--fresh"), cwd=mine.parent).returncode == 0


@pytest.mark.long
def test_edited_code_is_another_cell(mine: Path, runs: Path) -> None:
    results = []
    for more in ([], ["--fresh"]):
        done = forked.run(command(mine, runs, *more), cwd=mine.parent)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append({path.parent.name for path in (runs / "mine-backcopy_tiny" / "cells").glob("*/result.json")})
        edit(mine)
    assert len(results[1] - results[0]) == 1, "softmax is as it was, the rule is another"


@pytest.mark.long
def test_ray_s_tasks_take_no_module_from_the_current_folder(mine: Path, runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'lit-lazy[ray]'")
    words = command(mine, runs, "--launcher", "ray")
    done = subprocess.run(words, capture_output=True, text=True, cwd=shadow(tmp_path / "here"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {cell.status for cell in read_grid(runs / "mine-backcopy_tiny").cells} == {"complete"}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["the dashboard's server", "a measurement's process"])
def test_no_other_process_takes_a_module_from_the_current_folder(
    kind: str, runs: Path, tmp_path: Path, closed_port: int
) -> None:
    Tracker(default_uri(runs), runs, "x").start_run("x", {"kind": "run"}, {}, {})
    script = tmp_path / "measures.py"  # its folder is on the path, the current one is not: as with a console script
    script.write_text(MEASURES)
    served = [Path(sys.executable).with_name("lit-lazy"), "dashboard", "--runs", runs, "--port", str(closed_port)]
    process = subprocess.Popen(
        served if kind.startswith("the dashboard") else [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=shadow(tmp_path / "here"),
    )
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if "Ctrl-C stops the server" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait() == 0, "".join(said)


def test_a_file_that_is_hidden_by_another_module_is_named(mine: Path, tmp_path: Path) -> None:
    (mine.parent / "queue.py").write_text("MINE = 1\n")
    mine.write_text("import queue\n")
    with pytest.raises(
        ValueError, match=r"mine\.py: imports 'queue', which is .* and not queue\.py next to it; rename"
    ):
        load_module(mine)
    other = tmp_path / "other"
    shutil.copytree(mine.parent, other)
    for folder in (mine.parent, other):
        (folder / "twin.py").write_text("X = 1\n")
        (folder / "uses.py").write_text("import twin\n")
    deep = mine.with_name("deep.py")
    deep.write_text("import through\n")
    deep.with_name("through.py").write_text("import queue\n")
    with pytest.raises(ValueError, match=r"deep\.py: imports 'queue', which is .* and not queue\.py next to it"):
        load_module(deep)
    load_module(mine.with_name("uses.py"))
    with pytest.raises(ValueError, match=r"imports 'twin', which is .*mine.twin\.py and not twin\.py next to it"):
        load_module(other / "uses.py")
    del sys.modules["twin"], sys.modules["through"]


def test_a_file_runs_as_it_is_however_alike_its_former_version_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
