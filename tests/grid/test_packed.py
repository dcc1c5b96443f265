"""Cells that a grid takes from a packed file or from another grid instead of training them."""

import json
import lzma
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asked_grid import ask_for_grid
from mlflow.tracking import MlflowClient
from stores import make_runs
from two_rows import two_rows

from lit_lazy.command.main import main
from lit_lazy.grid import reused_results
from lit_lazy.grid.reused_results import TakenResult, find_shared
from lit_lazy.training.run_folder import DIAGNOSTICS, METRICS, RESULT, RunResult

ID = "pair-backcopy_tiny"
pytestmark = pytest.mark.xdist_group("packed")
Line = dict[str, Any]


class Trained:
    """A finished grid of two rows and two seeds, and its packed file."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.runs, self.pack, self.file = make_runs(folder, store), folder / "pair.xz", folder / "pair.py"
        self.file.write_text(two_rows("pair"))
        assert self.run(self.runs) == 0
        assert main(["ablate", "pack", str(self.file), "--runs", str(self.runs), "--out", str(self.pack)]) == 0

    def command(self, runs: Path, *more: str) -> list[str]:
        return ["ablate", "run", str(self.file), "--runs", str(runs), "--workers", "2", "--brief", *more]

    def run(self, runs: Path, *more: str) -> int:
        return main(self.command(runs, *more))

    def take(self, runs: Path, *more: str) -> Mapping[str, TakenResult]:
        """What a command would take from packed files."""
        return ask_for_grid(self.command(runs, *more)).taken

    def edit(self, path: Path, edit: Callable[[Line], Line | None], header: Mapping[str, Any] | None = None) -> Path:
        """Write another packed file: `edit` returns each cell as it is to be, or None to leave it out."""
        first, *lines = map(json.loads, lzma.decompress(self.pack.read_bytes()).splitlines())
        lines = [line for given in lines if (line := edit(given))]
        first |= {"cells": len(lines)} | (header or {})
        path.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in (first, *lines)).encode()))
        return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Trained:
    return Trained(tmp_path_factory.mktemp("packed"), empty_store)


def read_table(runs: Path, grid: str = ID) -> tuple[dict[str, Any], list[str]]:
    """A grid's table without what may differ, and its notes on cells that were taken."""
    table = json.loads((runs / grid / "table.json").read_text())
    notes = [note for note in table["notes"] if "taken from" in note]
    kept = {name: value for name, value in table.items() if name not in ("command", "seconds", "seconds_elsewhere")}
    return kept | {"notes": [note for note in table["notes"] if note not in notes]}, notes


def read_results(runs: Path, grid: str = ID) -> dict[str, Line]:
    return {path.parent.name: json.loads(path.read_text()) for path in (runs / grid / "cells").glob(f"*/{RESULT}")}


def list_files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.name.endswith(".lock")}


def test_a_grid_continued_from_a_packed_file_equals_one_that_never_moved(trained, runs, tmp_path, capsys) -> None:
    half = trained.edit(tmp_path / "half.xz", lambda line: line if line["seed"] == 0 else None)
    for also in (["--dry-run"], []):
        assert trained.run(runs, "--results", str(half), *also) == 0
        out = capsys.readouterr().out
        assert f"2 of 4 cells are taken from half.xz of {ID} (commit " in out
    assert "4 cells, 0 already finished, 2 taken, 2 to train" in out
    assert "4/4 cells done" in out
    table, (note,) = read_table(runs)
    assert table == read_table(trained.runs)[0]
    assert re.fullmatch(rf"2 of 4 cells were taken from half\.xz of {ID} \(commit [\w-]+, Linux .*\)\.", note)
    results = read_results(runs)
    for key, result in read_results(trained.runs).items():
        found, taken = results[key], result["config"]["seed"] == 0
        assert found["metrics"] == result["metrics"]
        assert found["taken_from"].startswith(f"half.xz of {ID}") == taken
        assert (found["timings"] == result["timings"]) == taken
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    number = client.get_experiment_by_name(ID).experiment_id
    for run in client.search_runs([number], "tags.kind = 'cell'"):
        assert run.info.status == "FINISHED"
        assert run.data.tags.get("taken_from", "") == results[run.data.tags["cell"]]["taken_from"]


def test_packing_again_gives_the_same_bytes_and_what_is_missing_is_counted(trained, tmp_path, capsys) -> None:
    pack = ["ablate", "pack", ID, "--runs", str(trained.runs), "--out", str(tmp_path / "new" / "cells.xz")]
    assert main(pack) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'cells.xz'}: 4 of 4 cells of {ID}\n"
    assert (tmp_path / "new" / "cells.xz").read_bytes() == trained.pack.read_bytes()
    kept = trained.runs / ID / "cells", tmp_path / "cells"
    kept[0].rename(kept[1])
    try:
        assert main(pack) == 2
        assert f"has no finished cell in '{trained.runs / ID}'; run it there first" in capsys.readouterr().err
        for cell in [*kept[1].iterdir()][:2]:
            shutil.copytree(cell, kept[0] / cell.name)
        (kept[0] / cell.name / RESULT).write_text("{")
        assert main(pack) == 0
        assert f"1 of 4 cells of {ID}; 3 are missing" in capsys.readouterr().out
        shutil.rmtree(kept[0])
    finally:
        kept[1].rename(kept[0])


def set_at(where: str, name: str, value: Any) -> Callable[[Line], Line]:
    return lambda line: line | {where: line[where] | {name: value}}


def edit(change: Callable[[Line], Line], **header: Any) -> Callable[[Trained, Path], object]:
    return lambda trained, path: trained.edit(path, change, header)


def set_field(name: str, value: Any) -> Callable[[Trained, Path], object]:
    return edit(lambda line: line | {name: value})


def write(content: bytes) -> Callable[[Trained, Path], object]:
    return lambda _, path: path.write_bytes(content)


TRUNCATED = "is truncated, or no packed file ("
REFUSED: dict[str, tuple[Callable[[Trained, Path], object], str]] = {
    "truncated": (lambda trained, path: path.write_bytes(trained.pack.read_bytes()[:-40]), TRUNCATED),
    "fewer lines": (edit(lambda line: line, cells=5), f"{TRUNCATED}cells=5: it has 4)"),
    "an xz that expands": (
        write(lzma.compress(bytes(2**25 + 1), preset=0)),
        f"{TRUNCATED}size=33554432: it ends early, or expands to more than 32 MiB)",
    ),
    "another xz": (write(lzma.compress(b"[1]\n")), TRUNCATED),
    "no result": (set_field("metrics", 1), f"{TRUNCATED}RunResult: metrics=1"),
    "no time": (set_field("ended", math.nan), TRUNCATED),
    "a path": (set_field("variant", "a/../b"), TRUNCATED),
    "no settings": (set_field("config", {"train": 3}), TRUNCATED),
    "no machine": (set_field("environment", {}), TRUNCATED),
    "other settings": (edit(set_at("config", "seed", 99)), "the settings of "),
    "nothing": (lambda _, path: path, "cannot be read (No such file or directory); give a file that `lit-lazy ablate"),
    "another grid": (
        edit(lambda line: line | {"key": line["key"][::-1]}, grid="other-stdlib"),
        "none of its 4 cells, cells.xz of other-stdlib, is asked for here; leave it out",
    ),
    "one key twice": (edit(lambda line: line | {"key": "0" * 12}), f"{TRUNCATED}cells=4: it has 1)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_is_one_line_and_creates_nothing(case, trained, runs, tmp_path, monkeypatch, capsys):
    make, message = REFUSED[case]
    monkeypatch.setattr(reused_results, "MOST_BYTES", 2**25)
    path, before = tmp_path / "cells.xz", list_files(runs)
    make(trained, path)
    assert trained.run(runs, "--results", str(path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lit-lazy: --results '{path}': {message}")
    assert list_files(runs) == before


def test_two_sources_of_a_cell_must_agree(trained, runs, tmp_path, capsys) -> None:
    """Timings may differ, and what they were made with."""
    slower = trained.edit(tmp_path / "slower.xz", set_at("timings", "train_seconds", 1e3))
    older = trained.edit(tmp_path / "older.xz", set_at("environment", "torch", "1.0"))
    other = trained.edit(tmp_path / "other.xz", set_at("metrics", "loss/val", 7.5))
    before = list_files(runs)
    for asked, source in ((runs, trained.pack), (trained.runs, trained.runs / ID)):
        more = ["--results", str(source)] if asked == runs else []
        assert trained.run(asked, *more, "--results", str(slower), "--results", str(other)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("lit-lazy: --results: softmax seed 0 has loss/val ")
        assert f"in '{source}' and 7.5 in '{other}'; leave out the file that is wrong" in line
    assert list_files(runs) == before
    agreeing = ("--results", str(older), "--results", str(slower), "--results", str(trained.pack))
    assert trained.take(trained.runs, *agreeing) == {}
    taken = [found.result for found in trained.take(runs, *agreeing).values()]
    assert [result.environment["torch"] for result in taken] == ["1.0"] * 4
    assert {result.taken_from.partition(" (")[0] for result in taken} == {f"older.xz of {ID}"}


def test_a_training_is_shared_with_another_grid(trained, tmp_path, capsys) -> None:
    """With its curves, so that its report lacks nothing."""
    second = tmp_path / "another.py"
    second.write_text(two_rows("another", lazy="ours"))
    command = ["ablate", "run", str(second), "--runs", str(trained.runs), "--workers", "1", "--brief"]
    for also in (["--dry-run"], []):
        assert main([*command, "--rows", "ours", *also]) == 0
        assert f"2 of 2 cells are taken from {ID} (commit " in capsys.readouterr().out
    shared = read_results(trained.runs, "another-backcopy_tiny")
    for key, result in shared.items():
        folder, origin = (trained.runs / grid / "cells" / key for grid in ("another-backcopy_tiny", ID))
        assert result["metrics"] == read_results(trained.runs)[key]["metrics"]
        for name in (METRICS, DIAGNOSTICS):
            assert (folder / name).read_bytes() == (origin / name).read_bytes()
    _, (note,) = read_table(trained.runs, "another-backcopy_tiny")
    assert note.startswith(f"2 of 2 cells were taken from {ID} (commit ")
    # A third grid finds the other's cells first, and names that, which trained them.
    cells = ask_for_grid(command).cells
    found = find_shared(cells, trained.runs / "zero")
    assert {one.result.taken_from.partition(" ")[0] for one in found.values()} == {ID}
    shutil.rmtree(trained.runs / "another-backcopy_tiny")


def test_only_a_result_that_is_the_cells_own_is_shared(trained: Trained, tmp_path: Path) -> None:
    """One that cannot be read, was moved aside, or whose settings give another key is left as it is."""
    cell = ask_for_grid(trained.command(trained.runs)).cells[0]
    result = RunResult.peek(trained.runs / ID / "cells" / cell.key)
    for grid in ("a-damaged", "b-other", "c.until-20260101-000000", "own"):
        folder = tmp_path / grid / "cells" / cell.key
        folder.mkdir(parents=True)
        replace(result, config=result.config | {"seed": 99 if grid == "b-other" else cell.seed}).write(folder)
    (tmp_path / "a-damaged" / "cells" / cell.key / RESULT).write_text("{")
    before = list_files(tmp_path)
    assert find_shared([cell], tmp_path / "own") == {}
    (taken,) = find_shared([cell], tmp_path / "another").values()
    assert taken.result.taken_from.startswith("own (commit")
    assert list_files(tmp_path) == before
