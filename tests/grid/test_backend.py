"""A grid keeps the CPU backend that it began with, whatever this machine has when it goes on."""

import json
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from instant import Lab, make_lab

from flash_lazy.cpu import library
from lit_lazy.command.main import main
from lit_lazy.grid import job as grid_job
from lit_lazy.grid.job import Job
from lit_lazy.grid.worker import prepare_process
from lit_lazy.training import devices

KEEPS = "began without the compiled backend and keeps doing without it; --fresh starts again with it, another --runs"
Machine = Callable[[bool], None]
"""Makes this machine one with or without the library."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv(library.SWITCH, raising=False)

    def pretend(compiled: bool) -> None:
        for module in (library, devices):
            monkeypatch.setattr(module, "get_instruction_set", lambda: "avx2" if compiled else None)

    return pretend


def make(lab: Lab, seeds: str, *words: str) -> Lab:
    """The row `lazy` of the grid, as a machine makes it."""
    return make_lab(lab.runs.parent, lab.training, "--rows", "lazy", "--seeds", seeds, *words)


def read_labels(lab: Lab) -> list[str]:
    return [json.loads(path.read_text())["labels"]["backend"] for path in lab.folder.glob("cells/*/result.json")]


def test_a_portable_grid_stays_portable_until_it_starts_again(lab: Lab, machine: Machine) -> None:
    machine(False)
    assert make(lab, "0").run().count("attention runs slower than it could: no compiled backend is installed") == 1
    machine(True)
    both = make(lab, "0,1")
    assert both.run().count(KEEPS) == 1
    assert read_labels(both) == ["chunked", "chunked"]
    assert library.SWITCH not in os.environ  # only the workers do without
    assert "backend" not in both.run(fresh=True)
    assert read_labels(both) == ["cpu", "cpu"]


def test_a_compiled_grid_is_refused_without_the_library_unless_it_is_finished(lab: Lab, machine: Machine) -> None:
    machine(True)
    make(lab, "0").run()
    machine(False)
    both = make(lab, "0,1")
    keeps = (
        f"{both.work.id}: began with the compiled backend and keeps it, but {library.find_obstacle()}, or name another"
    )
    assert keeps in both.run(status=2)
    assert len(read_labels(both)) == 1
    assert "all finished: nothing to do" in make(lab, "0").run()
    machine(True)
    both.run()
    assert read_labels(both) == ["cpu", "cpu"]


def test_a_portable_grid_takes_no_cell_of_the_compiled_backend_by_itself(lab: Lab, machine: Machine) -> None:
    """Neither from another grid nor from a file, whatever this machine has."""
    machine(False)
    make(lab, "0").run()
    machine(True)
    first = make(lab, "0,1")
    other = Lab(
        lab.runs, lab.training, replace(first.work, id="other", plan=replace(first.work.plan, ablation="other"))
    )
    other.run()
    assert read_labels(other) == ["cpu", "cpu"]
    packed = lab.runs.parent / "cells.xz"
    assert main(["ablate", "pack", "other", "--runs", str(lab.runs), "--out", str(packed)]) == 0
    said = make(lab, "1", "--results", str(packed)).run(status=2)
    assert said.startswith(f"lit-lazy: --results: {first.work.id} {KEEPS}")
    first.run()
    assert read_labels(first) == ["chunked", "chunked"]


def test_a_worker_on_another_machine_needs_the_library_too(tmp_path, machine, monkeypatch) -> None:
    machine(False)
    job = Job(tmp_path / "grid", "", 1, (), compiled=True)
    with pytest.raises(
        ValueError, match=r"^grid: began with the compiled backend and keeps it, but no compiled backend"
    ):
        prepare_process(job)
    for module in (grid_job, devices):  # a GPU needs none
        monkeypatch.setattr(module, "select_training_device", lambda: torch.device("cuda"))
    grid_job.require_compiled_backend("grid")
    assert grid_job.describe_portable_backend("grid") is None
