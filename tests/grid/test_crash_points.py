"""A grid or a search is killed before its effects on files; the same command then makes it whole.

Before every one: `make crash-points`, half an hour of these; the long tests take every twelfth.

`tests/crash` does the same with real trainings, MLflow and libraries written in C, and for losses of power.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked import forget_user_files
from instant import Lab, Training, make_lab, make_search_lab
from trap import WAYS, Trap
from two_rows import two_rows

from lit_lazy.grid.cell_state import HOLDER
from lit_lazy.grid.search.run import SearchDriver, SearchWork
from lit_lazy.training.run_folder import RESULT

FEW = 2
EVERY = int(os.environ.get("EVERY_EFFECT", "12"))


def read_outcome(lab: Lab) -> tuple[Any, list[str]]:
    """What must be as if nothing had happened: the table, or a search's points, and the names of files."""
    files = [str(path.relative_to(lab.folder)) for path in lab.folder.rglob("*") if path.suffix != ".log"]
    is_search = isinstance(lab.work, SearchWork)
    return SearchDriver(lab.work, None).points() if is_search else lab.table(), sorted(files)


def stat_results(lab: Lab) -> dict[Path, tuple[int, int]]:
    """The results' identities on the disk."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in lab.folder.glob(f"cells/*/{RESULT}")}


def try_all(lab: Lab, way: str, every: int) -> int:
    """Kill before every so-manieth effect, 0 for FEW, each time from what is in the runs folder.

    Returns how many were tried, for each way others.
    """

    def restore(name: str) -> Lab:
        shutil.copytree(lab.runs, here := lab.runs.with_name(name))
        return lab.move(here)

    lab.runs.mkdir(exist_ok=True)
    former = {path.parent.name for path in stat_results(lab)}
    peace = restore("peace")
    trap = Trap(peace.runs, way, 0)
    assert trap.start(peace).wait() == 0
    wanted, tried, n, number = read_outcome(peace), 0, trap.count, WAYS.index(way)
    chosen = range(1 + number % every, n + 1, every) if every else range(1 + 3 * number, n + 1, max(n // FEW, 1))
    for at in chosen:
        lab.training.log.unlink()
        here = restore(f"{way} {at}")
        trap = Trap(here.runs, way, at)
        command = trap.start(here)
        command.wait()
        if not trap.is_sprung:  # it had no more effects: how often it looks at a lock differs
            assert at > 0.95 * n
            break
        done = stat_results(here)
        if "SIGTERM" in way:
            assert not list(here.folder.rglob(HOLDER)), f"an interrupted command gives its cells back\n{command.said}"
        said = here.run()
        context = f"{way}, effect {at}\n{command.said}\n{said}"
        assert read_outcome(here) == wanted, context
        assert done.items() <= stat_results(here).items(), context
        counts = lab.count_steps()
        is_search = isinstance(here.work, SearchWork)
        # One step that had no checkpoint yet; but the worker of a killed command finishes, unless it has to be judged.
        assert sum(counts.values()) - len(counts) <= (is_search or way != "the command"), context
        if not is_search:
            here.check_done(steps_repeated=1, former=former)
        tried += 1
    return tried


def make_grid(folder: Path, training: Training) -> Lab:
    return make_lab(folder, training, "--rows", "softmax")


def make_changed_grid(folder: Path, training: Training) -> Lab:
    """A finished grid, one of whose rows has become another since: that row trains beside its former cells."""
    make_lab(folder, training).run()
    forget_user_files()
    lab = make_lab(folder, training, "--changed", source=two_rows("pair").replace("Elastic()", "Elastic(tau_init=0.5)"))
    former = {path.parent.name for path in stat_results(lab)}
    assert len(former) == len(lab.keys) == 4
    assert len(former & {*lab.keys}) == 2
    return lab


def make_search(folder: Path, training: Training) -> Lab:
    lab = make_search_lab(folder, training)
    lab.work = replace(lab.work, cells=lab.work.cells[:4])
    return lab


@pytest.mark.parametrize("every", [0, pytest.param(EVERY, marks=pytest.mark.long)], ids=["few", "more"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [make_grid, make_changed_grid, make_search])
def test_a_command_killed_anywhere_is_made_whole(make, way, every, tmp_path, training) -> None:
    """Its table, or a search's points, are those of an undisturbed one, and no result is lost or made twice."""
    assert try_all(make(tmp_path, training), way, every) >= FEW
