"""A grid keeps the CPU backend that it began with; the library and its labels are pretended, and `chunked` computes."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from two_rows import two_rows

from flash_lazy.cpu import library
from lit_lazy.attention import Attention
from lit_lazy.command.main import main
from lit_lazy.grid.jobs import backend
from lit_lazy.grid.jobs.job import Job
from lit_lazy.grid.jobs.worker import prepare_process
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.report import publish
from lit_lazy.training import devices

KEEPS = "began without the compiled backend and keeps doing without it; --fresh starts again with it, another --runs"
Machine = Callable[[bool], None]
"""Makes this machine one with or without the library."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.setattr(Attention, "backend_name", lambda *_: "chunked" if library.find_obstacle() else "cpu")

    def pretend(compiled: bool) -> None:
        for module in (library, devices):
            monkeypatch.setattr(module, "get_instruction_set", lambda: "avx2" if compiled else None)

    return pretend


@pytest.fixture
def run(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a small grid without figures; returns its exit status and what it printed."""
    monkeypatch.setattr(publish, "draw_table_figures", lambda _: {})
    monkeypatch.setattr(publish, "write_report", lambda *_: [])
    path = tmp_path / "pair.py"
    path.write_text(two_rows("pair"))

    def run(seeds: str, *more: str) -> tuple[int, str]:
        options = ("--rows", "lazy", "--seeds", seeds, "--workers", "1", "--model.backend=chunked", *more)
        status = main(["ablate", "run", str(path), "--runs", str(runs), *options])
        return status, "".join(capsys.readouterr())

    return run


def read_labels(runs: Path) -> list[str]:
    results = runs.glob("pair-backcopy_tiny-??????/cells/*/result.json")
    return [json.loads(path.read_text())["labels"]["backend"] for path in results]


@pytest.mark.long
def test_a_portable_grid_stays_portable_until_it_starts_again(
    runs: Path, machine: Machine, run: Callable[..., tuple[int, str]]
) -> None:
    machine(False)
    status, out = run("0")
    assert status == 0
    assert out.count("attention runs slower than it could: no compiled backend is installed") == 1
    machine(True)
    status, out = run("0,1")
    assert status == 0
    assert out.count(KEEPS) == 1
    assert read_labels(runs) == ["chunked", "chunked"]
    assert library.SWITCH not in os.environ  # only the workers do without
    status, out = run("0,1", "--fresh")
    assert status == 0
    assert "backend" not in out.partition("| ")[0]
    assert read_labels(runs) == ["cpu", "cpu"]


@pytest.mark.long
def test_a_compiled_grid_is_refused_without_the_library_unless_it_is_finished(
    runs: Path, machine: Machine, run: Callable[..., tuple[int, str]]
) -> None:
    machine(True)
    assert run("0")[0] == 0
    machine(False)
    status, out = run("0,1")
    (grid,) = (path.name for path in runs.glob("pair-backcopy_tiny-??????"))
    assert (status, out) == (
        2,
        f"lit-lazy: {grid}: began with the compiled backend and keeps it, but {library.find_obstacle()}, or name "
        "another --runs folder\n",
    )
    assert len(Queue(f"sqlite:///{runs / 'queue.db'}", grid).states()) == 1  # nothing was enqueued
    status, out = run("0")
    assert status == 0
    assert "all finished: nothing to do" in out
    (runs / "queue.db").unlink()
    assert run("0,1")[0] == 2  # the parent run knows
    machine(True)
    assert run("0,1")[0] == 0
    assert read_labels(runs) == ["cpu", "cpu"]


@pytest.mark.long
def test_a_portable_grid_takes_no_cell_of_the_compiled_backend_by_itself(
    runs: Path, tmp_path: Path, machine: Machine, run: Callable[..., tuple[int, str]]
) -> None:
    """Neither from another grid nor from a file, whatever this machine has; nor the other way around."""
    machine(False)
    assert run("0")[0] == 0
    machine(True)
    (tmp_path / "other.py").write_text(two_rows("other"))
    options = ("--runs", str(runs), "--base", "backcopy_tiny", "--rows", "lazy", "--workers", "1", "--brief")
    other = ["ablate", "run", str(tmp_path / "other.py"), *options, "--seeds", "0,1", "--model.backend=chunked"]
    assert main(other) == 0
    (grid,) = (path.name for path in runs.glob("other-backcopy_tiny-??????"))
    results = [json.loads(path.read_text()) for path in runs.glob(f"{grid}/cells/*/result.json")]
    assert [(result["labels"]["backend"], result["taken_from"]) for result in results] == [("cpu", "")] * 2
    assert main(["ablate", "pack", grid, "--runs", str(runs), "--out", str(tmp_path / "cells.xz")]) == 0
    packed = ("--results", str(tmp_path / "cells.xz"))
    status, out = run("1", *packed)
    assert (status, "--results: pair-backcopy_tiny-" in out, KEEPS in out) == (2, True, True)
    assert run("0,1")[0] == 0
    assert read_labels(runs) == ["chunked", "chunked"]


@pytest.mark.long
def test_a_grid_of_an_earlier_version_is_portable(
    runs: Path, machine: Machine, run: Callable[..., tuple[int, str]]
) -> None:
    machine(False)
    run("0")
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    (parent,) = client.search_runs(
        [experiment.experiment_id for experiment in client.search_experiments()], "tags.kind = 'ablation'"
    )
    assert parent.data.tags[backend.TAG] == "portable"
    client.delete_tag(parent.info.run_id, backend.TAG)
    machine(True)
    assert KEEPS in run("0,1")[1]
    assert read_labels(runs) == ["chunked", "chunked"]


def test_a_worker_on_another_machine_needs_the_library_too(tmp_path: Path, machine: Machine) -> None:
    machine(False)
    job = Job("", "grid", tmp_path, "", "parent", None, 1, False, None, (), compiled=True)
    with pytest.raises(
        ValueError, match=r"^grid: began with the compiled backend and keeps it, but no compiled backend"
    ):
        prepare_process(job)


def test_a_gpu_needs_no_library(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(False)
    for module in (backend, devices):
        monkeypatch.setattr(module, "select_training_device", lambda: torch.device("cuda"))
    backend.require_compiled_backend("grid")
    assert backend.describe_portable_backend("grid") is None
