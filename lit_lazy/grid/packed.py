"""Finished cells in one file, and results that a grid takes from such files or from other grids by the cell's key."""

import json
import lzma
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import flatten, from_dict
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.cells import put, read_files
from lit_lazy.grid.grid_folder import ASIDE, GridFolder
from lit_lazy.support.checks import Bounds, check_value, require
from lit_lazy.support.disk import open_file, write_atomically
from lit_lazy.support.errors import describe_exception
from lit_lazy.support.stored_records import parse_json, require_known_format
from lit_lazy.table.records import check_row_name
from lit_lazy.training.prepare import load_data
from lit_lazy.training.result import DIAGNOSTICS, METRICS, RESULT, RunResult
from lit_lazy.training.run_folder import locate_cell

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


class PackedCell(NamedTuple):
    """A line of a packed file."""

    row: str
    """In the grid that was packed; one that asks for the result may name its rows otherwise."""
    ended: float
    """As of `read_end`."""
    result: RunResult

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> "PackedCell":
        """Parse a line's JSON. Raises ValueError, TypeError or LookupError if it is none of a packed file."""
        row, ended = line.pop("variant"), line.pop("ended", 0)  # format 1 has no end
        check_row_name(row)
        check_value("ended", ended, Annotated[float, Bounds(ge=0, le=LATEST)])
        del line["seed"]  # the config has it
        return cls(row, ended, RunResult.from_dict(line))


@dataclass(frozen=True)
class Pack:
    """The content of a packed file."""

    path: Path
    grid: str
    """The id of the grid that was packed."""
    cells: Mapping[str, PackedCell]
    """By key."""

    @classmethod
    def read(cls, path: Path, what: str = "--results") -> "Pack":
        """Read a packed file. what: the option that names it, for messages.

        Raises a one-line ValueError if it is truncated or none, NewerFormatError if a newer version wrote it.
        """
        option, fix = f"{what} {str(path)!r}", "give a file that `lit-lazy ablate pack` wrote"
        try:
            with open_file(path) as file:
                stream = lzma.LZMADecompressor(memlimit=MOST_BYTES)
                content = stream.decompress(file.read(), MOST_BYTES)
            if not stream.eof:
                raise lzma.LZMAError(f"it ends early, or expands to more than {MOST_BYTES >> 20} MiB")
            header, *lines = map(parse_json, content.splitlines())
            kind, _, number = header["format"].rpartition(" ")
            require_known_format(option, {"format": int(number)}, FORMAT)
            cells = {cell.result.key: cell for cell in map(PackedCell.from_line, lines)}
            if kind != KIND or header["cells"] != len(cells):
                raise ValueError(f"{header['format']!r} with {len(cells)} of {header['cells']} cells")
            return cls(path, str(header["grid"]), cells)
        except OSError as error:
            raise ValueError(f"{option}: cannot be read ({error.strerror}); {fix}") from None
        except (lzma.LZMAError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f"{option}: is truncated, or no packed file ({describe_exception(error)}); {fix}"
            ) from None


def read_row_settings(folder: Path) -> dict[str, dict[str, str]] | None:
    """The settings of a grid's rows as text, by row and dotted path, without the seed; None if they are unknown.

    They are those of the grid of this folder, without rows of before a change, or else of the packed file there.
    """
    grid = GridFolder.read(folder)
    cells = [] if grid is None else [cell for cell in grid.cells if cell.variant not in grid.plan.replaced]
    found = {cell.variant: cell.settings for cell in cells if cell.settings}
    if not found and (file := folder / CELLS).exists():
        packed = Pack.read(file, "packed cells").cells.values()
        found = {cell.row: flatten(cell.result.config) for cell in packed}
    return {
        row: {path: str(value) for path, value in settings.items() if path != "seed"} for row, settings in found.items()
    } or None


@dataclass(frozen=True)
class TakenResult:
    """A result that serves a cell without training it."""

    result: RunResult
    """As the cell's own, marked with where it comes from."""
    ended: float
    """When its training ended, in seconds since the epoch; 0 if that is unknown."""
    folder: Path | None = None
    """The run folder that it comes from; None for a packed file."""

    @classmethod
    def mark(cls, result: RunResult, where: str, ended: float, folder: Path | None = None) -> "TakenResult":
        """A result as taken from `where`, such as the name of a grid."""
        made = result.environment
        origin = f"{where} (commit {made['git_sha']}, {made.get('machine', 'unknown machine')})"
        return cls(replace(result, taken_from=origin), ended, folder)

    def write(self, folder: Path) -> bool:
        """Write a cell's run folder, unless it is done or being trained; whether it did."""
        files = {} if self.folder is None else read_files(self.folder, (METRICS, DIAGNOSTICS))
        if not put(folder, files | {RESULT: self.result.to_json().encode()}):
            return False
        os.utime(folder / RESULT, (self.ended, self.ended))  # so that a grid which takes it from here knows too
        return True


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
    packs = [Pack.read(file) for file in files]
    for pack in packs:
        if pack.cells.keys().isdisjoint(cell.key for cell in cells):
            raise ValueError(
                f"--results {str(pack.path)!r}: none of its {len(pack.cells)} cells, of {pack.grid}, is asked for "
                "here; leave it out"
            )
    taken: dict[str, TakenResult] = {}
    for cell in cells if packs else ():
        serving = [(pack, pack.cells[cell.key]) for pack in packs if cell.key in pack.cells]
        for pack, found in serving:
            if not is_described_by(cell, found.result):
                raise ValueError(
                    f"--results {str(pack.path)!r}: the settings of {cell.variant} seed {cell.seed} do not give its "
                    f"key {cell.key}; leave the file out"
                )
        places = [(str(pack.path), found.result) for pack, found in serving]
        if folder and (kept := RunResult.peek(locate_cell(folder, cell.key))):
            places.insert(0, (str(folder), kept))
        elif serving:
            pack, found = serving[0]
            taken[cell.key] = TakenResult.mark(found.result, f"{pack.path.name} of {pack.grid}", found.ended)
        _require_agreement(cell, places)
    return taken


def _require_agreement(cell: Cell, places: Sequence[tuple[str, RunResult]]) -> None:
    """Raise a one-line ValueError if the results of a cell in two places have different metrics."""
    for (first, one), (second, other) in combinations(places, 2):
        for name in sorted(one.metrics.keys() & other.metrics.keys()):
            a, b = one.metrics[name], other.metrics[name]
            if not name.startswith(TIMED) and a != b:
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
            marked = TakenResult.mark(result, owner, read_end(folder), folder)
            shared[cell.key] = replace(marked, result=result) if result.taken_from else marked
    return shared
