"""Finished cells in one file, and results that a grid takes from such files or from other grids by the cell's key."""

import json
import lzma
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import flatten, from_dict
from lit_lazy.data.source_interface import load_data
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.cell_state import put, read_files
from lit_lazy.grid.grid_folder import ASIDE, GridFolder
from lit_lazy.support.checked_fields import Bounds, check_value, require
from lit_lazy.support.disk import open_file, write_atomically
from lit_lazy.support.error_messages import explain
from lit_lazy.support.stored_records import parse_json, require_known_format
from lit_lazy.table.records import check_row_name
from lit_lazy.training.run_folder import DIAGNOSTICS, METRICS, RESULT, RunResult, locate_cell

KIND, FORMAT = "lit-lazy cells", 2
"""Kind and format of a packed file; the format is raised when a line gets, loses or changes a field."""
CELLS = "cells.jsonl.xz"
"""Default name of a packed file."""
TIMED = "cost/"
"""Prefix of the metrics that differ between two trainings of one key, because they are times."""
MOST_BYTES = 2**28
"""Largest content of a packed file: cells by the ten thousand; also what decompressing it may take."""
LATEST = 1e11
"""Largest time of a file, in seconds since the epoch."""


def pack_grid(grid: GridFolder, out: Path) -> tuple[int, int]:
    """Pack the finished cells of a grid; returns how many, and how many its plan asks for.

    The file has a header and a line of JSON per cell, compressed by xz; equal cells give equal bytes. Raises ValueError
    if no cell is finished.
    """
    lines = [
        asdict(cell.result) | {"variant": cell.variant, "seed": cell.seed, "ended": int(read_end(cell.folder))}
        for cell in grid.cells
        if cell.result
    ]
    name = grid.path.name
    require(bool(lines), "ablation", name, f"has no finished cell in {str(grid.path)!r}; run it there first")
    header = {"format": f"{KIND} {FORMAT}", "grid": name, "cells": len(lines)}
    text = "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in (header, *lines))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda file: file.write(lzma.compress(text.encode())))
    return len(lines), sum(len(row.seeds) for row in grid.plan.rows)


def read_end(folder: Path) -> float:
    """When the training in a run folder ended, in seconds since the epoch; 0 if that is unknown."""
    return (folder / RESULT).stat().st_mtime


@dataclass(frozen=True)
class TakenResult:
    """A result that serves a cell without training it."""

    result: RunResult
    """As the cell's own, marked with where it comes from."""
    ended: float
    """As of `read_end`."""
    folder: Path | None = None
    """The run folder that it comes from; None for a packed file."""
    row: str = ""
    """In the grid that was packed; one that asks for the result may name its rows otherwise."""

    def write(self, folder: Path) -> bool:
        """Write a cell's run folder, unless it is done or being trained; whether it did."""
        files = {} if self.folder is None else read_files(self.folder, (METRICS, DIAGNOSTICS))
        if not put(folder, files | {RESULT: self.result.to_json().encode()}):
            return False
        os.utime(folder / RESULT, (self.ended, self.ended))  # so that a grid which takes it from here knows too
        return True


def _mark(result: RunResult, where: str) -> RunResult:
    """A result as taken from `where`, such as the name of a grid."""
    made = result.environment
    return replace(result, taken_from=f"{where} (commit {made['git_sha']}, {made.get('machine', 'unknown machine')})")


def read_pack(path: Path, what: str = "--results") -> dict[str, TakenResult]:
    """The cells of a packed file by key. what: the option that names the file, for messages.

    Raises a one-line ValueError if it is truncated or none, NewerFormatError if a newer version wrote it.
    """
    option, fix = f"{what} {str(path)!r}", "give a file that `lit-lazy ablate pack` wrote"
    with explain(f"{option}: cannot be read", fix, OSError), open_file(path) as file:
        packed = file.read()
    mistakes = lzma.LZMAError, ValueError, TypeError, LookupError, AttributeError
    with explain(f"{option}: is truncated, or no packed file", fix, *mistakes):
        stream = lzma.LZMADecompressor(memlimit=MOST_BYTES)
        content = stream.decompress(packed, MOST_BYTES)
        require(stream.eof, "size", len(content), f"it ends early, or expands to more than {MOST_BYTES >> 20} MiB")
        header, *lines = map(parse_json, content.splitlines())
        kind, _, number = header["format"].rpartition(" ")
        require_known_format(option, {"format": int(number)}, FORMAT)
        require(kind == KIND, "format", header["format"], f"must be {KIND} {FORMAT}")
        cells = [_parse_line(line, f"{path.name} of {header['grid']}") for line in lines]
        found = {cell.result.key: cell for cell in cells}
        require(header["cells"] == len(found), "cells", header["cells"], f"it has {len(found)}")
        return found


def _parse_line(line: dict[str, Any], where: str) -> TakenResult:
    row, ended = line.pop("variant"), line.pop("ended", 0)  # format 1 has no end
    check_row_name(row)
    check_value("ended", ended, Annotated[float, Bounds(ge=0, le=LATEST)])
    del line["seed"]  # the config has it
    return TakenResult(_mark(RunResult.from_dict(line), where), ended, row=row)


def read_row_settings(folder: Path) -> dict[str, dict[str, str]] | None:
    """The settings of a grid's rows as text, by row and dotted path, without the seed; None if they are unknown.

    They are those of the grid of this folder, without rows of before a change, or else of the packed file there.
    """
    grid = GridFolder.read(folder)
    cells = [] if grid is None else [cell for cell in grid.cells if cell.variant not in grid.plan.replaced]
    found = {cell.variant: cell.settings for cell in cells if cell.settings}
    if not found and (file := folder / CELLS).exists():
        found = {cell.row: flatten(cell.result.config) for cell in read_pack(file, "packed cells").values()}
    return {
        row: {path: str(value) for path, value in settings.items() if path != "seed"} for row, settings in found.items()
    } or None


def is_described_by(cell: Cell, result: RunResult) -> bool:
    """Whether the settings of a result give the cell's key."""
    own = from_dict(RunConfig, cell.config)
    start = {"init_from": own.init_from} if result.config.get("init_from") else {}
    try:  # where its first weights lie does not matter
        settings = from_dict(RunConfig, result.config | start)
        return cell_key(settings, load_data(own.data).fingerprint) == result.key == cell.key
    except (ValueError, TypeError, LookupError):
        return False


def take_from_files(cells: Sequence[Cell], files: Sequence[Path], folder: Path | None) -> dict[str, TakenResult]:
    """The results by key of the cells that packed files hold. Creates nothing.

    folder: the grid's, whose own results come first; None if they do not count. Raises a one-line ValueError for a file
    that cannot be used, and for a cell that has different metrics in two places: all count but those of `Costs`, and
    timings do not.
    """
    packs = {str(file): read_pack(file) for file in files}
    for path, pack in packs.items():
        if pack.keys().isdisjoint(cell.key for cell in cells):
            grids = {cell.result.taken_from.partition(" (")[0] for cell in pack.values()}
            problem = f"none of its {len(pack)} cells, {', '.join(grids)}, is asked for here"
            raise ValueError(f"--results {path!r}: {problem}; leave it out")
    taken: dict[str, TakenResult] = {}
    for cell in cells:
        serving = {path: pack[cell.key] for path, pack in packs.items() if cell.key in pack}
        for path, found in serving.items():
            if not is_described_by(cell, found.result):
                problem = f"the settings of {cell.variant} seed {cell.seed} do not give its key {cell.key}"
                raise ValueError(f"--results {path!r}: {problem}; leave the file out")
        results = {path: found.result for path, found in serving.items()}
        if serving and folder and (kept := RunResult.peek(locate_cell(folder, cell.key))):
            results = {str(folder): kept} | results
        elif serving:
            taken[cell.key] = next(iter(serving.values()))
        _require_agreement(cell, results)
    return taken


def _require_agreement(cell: Cell, results: Mapping[str, RunResult]) -> None:
    """Raise a one-line ValueError if the results of a cell in several places have different metrics."""
    names = {name for result in results.values() for name in result.metrics if not name.startswith(TIMED)}
    for name in sorted(names):
        (first, a), *others = [(where, one.metrics[name]) for where, one in results.items() if name in one.metrics]
        for second, b in others:
            if a != b:
                raise ValueError(
                    f"--results: {cell.variant} seed {cell.seed} has {name} {a!r} in {first!r} and {b!r} in "
                    f"{second!r}; leave out the file that is wrong, or name another --runs folder"
                )


def find_shared(cells: Sequence[Cell], grid: Path) -> dict[str, TakenResult]:
    """The results by key of cells that other grids in the same runs folder have finished.

    grid: the folder of the cells' own grid. A result that was taken itself keeps the mark of where it was trained.
    """
    asked, shared = {cell.key: cell for cell in cells}, dict[str, TakenResult]()
    for path in sorted(grid.parent.glob(f"*/cells/*/{RESULT}")) if asked else ():
        folder, owner = path.parent, path.parents[2].name
        cell = asked.get(folder.name)
        if cell is None or folder.name in shared or owner == grid.name or ASIDE in owner:
            continue
        if (result := RunResult.peek(folder)) and is_described_by(cell, result):
            marked = result if result.taken_from else _mark(result, owner)
            shared[cell.key] = TakenResult(marked, read_end(folder), folder)
    return shared
