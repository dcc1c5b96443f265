"""Finished cells in one file, and results that a grid takes from such files or from other grids instead of training.

A result serves a cell with the same key. It also serves one with the same training key, if it has all of its
evaluations: they were measured on the same model.
"""

import json
import lzma
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from lit_lazy.config.key import cell_key, evaluation_key, training_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import flatten, from_dict
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.cells import put, read_files
from lit_lazy.grid.plan import ASIDE, GridFolder
from lit_lazy.support.checks import Bounds, check_value, require
from lit_lazy.support.disk import open_file, write_atomically
from lit_lazy.support.errors import describe_exception
from lit_lazy.support.provenance import collect_environment
from lit_lazy.support.stored_records import parse_json, require_known_format
from lit_lazy.table.records import check_row_name
from lit_lazy.training.prepare import find_backend, load_data
from lit_lazy.training.result import DECIDING, DIAGNOSTICS, METRICS, RESULT, RunResult
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
STORED_KEY = re.compile(rb'"training_key": "(\w+)"')


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
class Pack:
    """The content of a packed file."""

    path: Path
    grid: str
    """The id of the grid that was packed."""
    results: Sequence[RunResult]
    rows: Sequence[str]
    """The row of each result in that grid; one that asks for the result may name its rows otherwise."""
    ended: Mapping[str, float]
    """When each training ended, by the result's key, in seconds since the epoch; 0 if that is unknown."""

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
            if kind != KIND or header["cells"] != len(lines):
                raise ValueError(f"{header['format']!r} with {len(lines)} of {header['cells']} cells")
            rows = [line.pop("variant") for line in lines]
            for row in rows:
                check_row_name(row)
            for line in lines:
                del line["seed"]  # the config has it
            ended = {line["key"]: line.pop("ended", 0) for line in lines}  # format 1 has none
            for key, time in ended.items():
                check_value(f"ended of {key}", time, Annotated[float, Bounds(ge=0, le=LATEST)])
            return cls(path, str(header["grid"]), [RunResult.from_dict(line) for line in lines], rows, ended)
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
        pack = Pack.read(file, "packed cells")
        found = dict(zip(pack.rows, (flatten(result.config) for result in pack.results), strict=True))
    return {row: describe_settings(settings) for row, settings in found.items()} or None


def describe_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings by dotted path as text, without the seed."""
    return {path: str(value) for path, value in settings.items() if path != "seed"}


@dataclass(frozen=True)
class TakenResult:
    """A result that serves a cell without training it."""

    result: RunResult
    """As the cell's own."""
    ended: float
    """When its training ended, in seconds since the epoch; 0 if that is unknown."""
    folder: Path | None = None
    """The run folder that it comes from; None for a packed file."""

    def write(self, folder: Path) -> bool:
        """Write a cell's run folder, unless it is done or being trained; whether it did."""
        files = {} if self.folder is None else read_files(self.folder, (METRICS, DIAGNOSTICS))
        if not put(folder, files | {RESULT: self.result.to_json().encode()}):
            return False
        os.utime(folder / RESULT, (self.ended, self.ended))  # so that a grid which takes it from here knows too
        return True


@dataclass(frozen=True)
class AskedCell:
    """What a result must be to serve a cell."""

    cell: Cell

    @cached_property
    def config(self) -> RunConfig:
        return from_dict(RunConfig, self.cell.config)

    @cached_property
    def fingerprint(self) -> str:
        return load_data(self.config.data).fingerprint

    @cached_property
    def training_key(self) -> str:
        return training_key(self.config, self.fingerprint)

    @cached_property
    def evaluations(self) -> frozenset[str]:
        """Keys of the evaluations that the cell asks for."""
        return frozenset(map(evaluation_key, self.config.evaluations))

    def adapt(self, result: RunResult, where: str) -> RunResult | None:
        """A result as the cell's own, marked with where it comes from; None if it is another training or measured less.

        Metrics of evaluations that the cell does not ask for are left out; a name that two evaluations gave has an
        unknown value, so such a result serves only its own key.
        """
        made = result.environment
        origin = f"{where} (commit {made['git_sha']}, {made.get('machine', 'unknown machine')})"
        if result.key == self.cell.key:
            return replace(result, taken_from=origin)
        kept = result.keep_evaluations(self.evaluations)
        if kept is None or not (self.is_trained_in(result) and self.evaluations <= kept.evaluations.keys()):
            return None
        own = {"key": self.cell.key, "config": self.cell.config, "training_key": self.training_key}
        return replace(kept, **own, taken_from=origin)

    def is_trained_in(self, result: RunResult) -> bool:
        """Whether a result is of the cell's training, whatever was measured on its model."""
        return result.training_key == self.training_key

    def is_described_by(self, result: RunResult) -> bool:
        """Whether the settings of a result, which says to be of this training, give its key."""
        own = self.cell.config
        config = result.config | ({"init_from": own["init_from"]} if result.config.get("init_from") else {})
        try:
            if result.key == self.cell.key:
                return cell_key(from_dict(RunConfig, config), self.fingerprint) == result.key
            return (
                training_key(from_dict(RunConfig, config | {"evaluations": ()}), self.fingerprint) == self.training_key
            )
        except (ValueError, TypeError, LookupError):
            return False

    def find_differences(self, result: RunResult) -> list[str]:
        """What a result was made with that a training here would not be, as `torch 2.12.0 (here 2.13.0)`."""
        here = collect_environment()
        pairs = {name: (result.environment.get(name), here[name]) for name in DECIDING}
        backend = find_backend(self.config, load_data(self.config.data).outline)
        pairs["backend"] = result.labels.get("backend"), backend
        return [f"{name} {made} (here {now})" for name, (made, now) in pairs.items() if made != now]


def take_from_files(
    cells: Iterable[Cell], files: Sequence[Path], folder: Path | None, mixed: bool
) -> dict[str, TakenResult]:
    """The results by key of the cells that packed files hold. Creates nothing.

    folder: the grid's, whose own results come first; None if they do not count. mixed: also take results of another
    backend, torch or Python. Raises a one-line ValueError for a file that cannot be used, and for a cell that has
    different metrics in two places: all count but those of `Costs`, and timings do not.
    """
    packs = [Pack.read(file) for file in files]
    serving: defaultdict[str, list[tuple[Pack, RunResult]]] = defaultdict(list)
    for pack in packs:
        for result in pack.results:
            for key in {result.key, result.training_key}:
                serving[key].append((pack, result))
    taken: dict[str, TakenResult] = {}
    asked: defaultdict[Path, list[tuple[AskedCell, RunResult]]] = defaultdict(list)
    for request in map(AskedCell, cells if packs else ()):
        key = request.cell.key
        kept = RunResult.peek(locate_cell(folder, key)) if folder else None
        found = [(str(folder), kept)] if kept else []
        candidates = [*serving[key], *serving[request.training_key]]
        for pack, result in {id(result): (pack, result) for pack, result in candidates}.values():
            if not request.is_described_by(result):
                raise ValueError(
                    f"--results {str(pack.path)!r}: the settings of {request.cell.variant} seed {request.cell.seed} do "
                    f"not give its key {result.key}; leave the file out"
                )
            if adapted := request.adapt(result, f"{pack.path.name} of {pack.grid}"):
                found.append((str(pack.path), adapted))
                asked[pack.path] += [] if kept else [(request, adapted)]
                if not kept:
                    taken.setdefault(key, TakenResult(adapted, pack.ended[result.key]))
        for (first, one), (second, other) in combinations(found, 2):
            for name in sorted(one.metrics.keys() & other.metrics.keys()):
                a, b = one.metrics[name], other.metrics[name]
                if not name.startswith(TIMED) and a != b:
                    raise ValueError(
                        f"--results: {request.cell.variant} seed {request.cell.seed} has {name} {a!r} in {first!r} and "
                        f"{b!r} in {second!r}; leave out the file that is wrong, or name another --runs folder"
                    )
    for pack in packs:
        if pack.path not in asked:
            raise ValueError(
                f"--results {str(pack.path)!r}: none of its {len(pack.results)} cells, of {pack.grid}, is asked for "
                "here; leave it out"
            )
        made = [] if mixed else [request.find_differences(result) for request, result in asked[pack.path]]
        if differences := [*filter(None, made)]:
            kinds = sorted({kind for found in differences for kind in found})
            raise ValueError(
                f"--results {str(pack.path)!r}: {len(differences)} of its cells were made with {', '.join(kinds)}; "
                "leave the file out, or give --mixed to take them all the same"
            )
    return taken


def find_shared(cells: Sequence[Cell], grid: Path, mixed: bool) -> dict[str, TakenResult]:
    """The results by key of cells that other grids in the same runs folder have finished.

    grid: the folder of the cells' own grid. mixed: as in `take_from_files`; other results are not shared without it.
    """
    requests = {request.cell.key: request for request in map(AskedCell, cells)}
    asking: defaultdict[str, list[AskedCell]] = defaultdict(list)
    for key, request in requests.items():
        for name in {key, request.training_key}:
            asking[name].append(request)
    shared: dict[str, TakenResult] = {}
    for path in sorted(grid.parent.glob(f"*/cells/*/{RESULT}")) if requests else ():
        owner = path.parents[2]
        if owner.name == grid.name or ASIDE in owner.name:
            continue
        # Parsed only if it may serve: a thousand results are then read in a tenth of a second.
        keys = {path.parent.name, *(key.decode() for key in STORED_KEY.findall(path.read_bytes()))}
        serves = [request for key in keys for request in asking.get(key, ()) if request.cell.key not in shared]
        if not serves or (result := RunResult.peek(path.parent)) is None:
            continue
        for request in serves:
            adapted = request.adapt(result, owner.name) if request.is_described_by(result) else None
            if adapted and (mixed or not request.find_differences(adapted)):
                first = result.taken_from or adapted.taken_from  # name the grid that trained it
                taken = replace(adapted, taken_from=first)
                shared[request.cell.key] = TakenResult(taken, read_end(path.parent), path.parent)
    return shared
