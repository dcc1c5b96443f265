"""A runs folder of commit 82aa2800, killed in its second cell, ends in that commit's results; newer files are refused.

Made there by `lit-lazy ablate run table2` with the options of `COMMAND`. The archive holds both databases, the plan, a
finished cell, and a cell with a checkpoint; `results-82aa2800.json` holds the metrics that 82aa2800 itself ended with.
"""

import json
import lzma
import platform
import tarfile
from pathlib import Path

import pytest
import torch

from lit_lazy import results
from lit_lazy.command.main import main
from lit_lazy.table.build import read_table
from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker

HERE = Path(__file__).parent
ID = "table2-backcopy_tiny-5b1867"
FINISHED, INTERRUPTED = "97ddc175291a", "c1f153737e11"
COMMAND = (
    *("ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", "lazy,softmax", "--seeds", "0"),
    *("--workers", "1", "--threads", "1"),
    *("--train.steps=60", "--train.checkpoint_every=7", "--train.val_every=20", "--train.log_every=20"),
)


def machine() -> str:
    """What determines the rounding of a matrix product: processor family and instruction set of torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in found.items()}
    family = f"{fields.get('vendor_id', platform.machine())} family {fields.get('cpu family', '?')}"
    return f"{family} {torch.backends.cpu.get_cpu_capability()}"


def unpack(runs: Path) -> None:
    """The runs folder of 82aa2800, at `runs`."""
    with tarfile.open(HERE / "runs-82aa2800.tar.xz") as archive:
        archive.extractall(runs.parent, filter="data")


def find_run_ids(runs: Path) -> dict[str, str]:
    """Ids in MLflow by the run's name: those of the cells, and of the grid."""
    tracker = Tracker(default_uri(runs), ID)
    found = [run.info for run in tracker.find({})]
    assert len(found) == 3
    return {info.run_name: info.run_id for info in found}


def test_a_grid_of_an_earlier_version_is_read(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its plan is an artifact, and its keys are in the queue."""
    unpack(runs)
    where = ["--runs", str(runs), "--out"]
    before = {path for path in runs.rglob("*") if path.is_file()}
    assert main(["ablate", "table", ID, *where, str(tmp_path / "table")]) == 0
    assert main(["report", ID, *where, str(tmp_path / "report.html")]) == 0
    assert main(["ablate", "pack", ID, *where, str(tmp_path / "cells.xz")]) == 0
    assert capsys.readouterr().out.endswith(f"/cells.xz: 1 of 2 cells of {ID}; 1 is missing\n")
    rows = read_table(tmp_path / "table" / "table.json").rows
    assert {row.variant: row.n for row in rows} == {"softmax": 1, "lazy": 0}
    cells = results(ID, runs).cells
    states = {"softmax": "complete", "lazy": "waiting"}
    assert dict(zip(cells["variant"], cells["status"], strict=True)) == states
    assert {path for path in runs.rglob("*") if path.is_file()} == before
    assert main([*COMMAND, "--fresh", "--rows", "lazy", "--runs", str(runs)]) == 0
    assert [row.variant for row in read_table(runs / ID / "table.json").rows] == ["lazy"], "another grid"


def test_a_grid_of_an_earlier_version_resumes_to_its_results(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unpack(runs)
    begun = find_run_ids(runs)
    cells = runs / ID / "cells"
    finished = (cells / FINISHED / "result.json").read_bytes()
    assert (cells / INTERRUPTED / "checkpoints" / "last.ckpt").exists()

    assert main([*COMMAND, "--runs", str(runs)]) == 0
    assert "2 cells, 1 already finished" in capsys.readouterr().out
    assert (cells / FINISHED / "result.json").read_bytes() == finished
    assert {path.name for path in cells.iterdir()} == {FINISHED, INTERRUPTED}  # unchanged keys
    log = "".join(path.read_text() for path in (runs / ID).glob("worker-*.log"))
    assert "resumes at step" in log
    assert "quarantine" not in log
    assert not list(cells.rglob("*.damaged"))

    assert find_run_ids(runs) == begun
    expected = json.loads((HERE / "results-82aa2800.json").read_text())
    found = json.loads((cells / INTERRUPTED / "result.json").read_text())["metrics"]
    metrics = {name: found[name] for name in expected["cells"][INTERRUPTED]}  # and metrics that are newer
    if machine() == expected["machine"]:
        assert metrics == expected["cells"][INTERRUPTED]
    else:  # other processors round differently
        assert metrics == pytest.approx(expected["cells"][INTERRUPTED], rel=1e-3, abs=1e-4)


NEWER = {"format": 99, "a_field_of_tomorrow": 1}


@pytest.mark.parametrize("name", ["result", "plan", pytest.param("checkpoint", marks=pytest.mark.long)])
def test_a_newer_file_is_refused_and_kept(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line; it is not taken for damaged."""
    unpack(runs)
    cells = runs / ID / "cells"
    if name == "checkpoint":
        path = cells / INTERRUPTED / "checkpoints" / "last.ckpt"
        torch.save(torch.load(path, weights_only=True) | NEWER, path)
    else:
        path = cells / FINISHED / "result.json" if name == "result" else next(runs.glob("mlartifacts/**/plan.json"))
        path.write_text(json.dumps(json.loads(path.read_text()) | NEWER))
    kept = path.read_bytes()
    assert main([*COMMAND, "--runs", str(runs)]) == 1
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "was written by a newer version of lit-lazy (format 99, this version reads up to" in printed
    assert "Traceback" not in printed
    assert path.read_bytes() == kept
    assert not list(runs.rglob("*.damaged"))


def test_a_newer_packed_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = tmp_path / "cells.jsonl.xz"
    newer.write_bytes(lzma.compress(b'{"format": "lit-lazy cells 3", "cells": {}, "grid": "g"}\n'))
    assert main(["ablate", "run", *COMMAND[2:], "--runs", str(tmp_path / "runs"), "--results", str(newer)]) == 1
    assert "--results" in (said := capsys.readouterr().err)
    assert "was written by a newer version of lit-lazy (format 3" in said
    assert not (tmp_path / "runs").exists()
