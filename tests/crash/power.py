"""Simulates a power cut of a tiny grid at every distinct state of the disk; the same command must finish it.

`python tests/crash/power.py --out FOLDER` records the operations of an undisturbed grid on the disk, and builds from
every beginning of that record what would be left. Data that were not fsynced are gone. For names (of files made,
renamed, removed) there are two disks: one that keeps them at once, so that a file may be there and empty, and one that
keeps them with the next fsync of anything, as a journaling file system does. Mixtures of the two are not tried.
"""

import argparse
import hashlib
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from points import (
    HERE,
    ONE_CELL,
    AttemptOutcome,
    Snapshot,
    Workspace,
    adopt_orphans,
    append_outcome,
    end_all,
    fill_report,
    make_store,
    prepare_preload,
    read_outcomes,
)

from lit_lazy.support.provenance import git_sha

RECORD = "EFFECTS_RECORD"
HEAD = struct.Struct("=3I4x2Q")
KINDS = {
    "c": "create",
    "d": "mkdir",
    "r": "rename",
    "s": "fsync",
    "t": "truncate",
    "u": "unlink",
    "w": "write",
}
DISKS = ("names at once", "names with the next fsync")


@dataclass(frozen=True)
class Operation:
    """One line of the record."""

    kind: str
    """A letter of KINDS."""
    path: str
    to: str
    at: int
    data: bytes


def read_record(path: Path) -> Iterator[Operation]:
    """The operations, in order."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        kind, path_size, to_size, offset, size = HEAD.unpack_from(content, at)
        at += HEAD.size
        parts = []
        for length in (path_size, to_size, size):
            parts.append(content[at : at + length])
            at += length
        yield Operation(chr(kind), os.fsdecode(parts[0]), os.fsdecode(parts[1]), offset, parts[2])


@dataclass
class File:
    """A file's content and the part of it that is on the disk."""

    content: bytearray = field(default_factory=bytearray)
    kept: bytes = b""


class Disk:
    """The state that processes see, and the state after a power cut. A folder is None."""

    def __init__(self, root: Path) -> None:
        self.names: dict[str, File | None] = {}
        for path in sorted(root.rglob("*")):
            content = None if path.is_dir() else path.read_bytes()
            self.names[str(path)] = None if content is None else File(bytearray(content), content)
        self.kept_names = dict(self.names)

    def do(self, operation: Operation) -> None:
        path = operation.path
        match operation.kind:
            case "c":
                self.names[path] = File()
            case "d":
                self.names[path] = None
            case "u":
                self.names.pop(path, None)
            case "r":
                moved = [name for name in self.names if name == path or name.startswith(f"{path}/")]
                for name in moved:
                    self.names[operation.to + name.removeprefix(path)] = self.names.pop(name)
            case "s":
                if file := self.names.get(path):
                    file.kept = bytes(file.content)
                self.kept_names = dict(self.names)
            case "t" | "w":
                self._change(self.names.get(path), operation)
            case other:
                raise ValueError(f"{other!r} of {path}: this record cannot be replayed")

    def _change(self, file: File | None, operation: Operation) -> None:
        if file is None:  # without its name, nothing of it can survive a power cut
            return
        if operation.kind == "t":
            del file.content[operation.at :]
            file.content.extend(bytes(operation.at - len(file.content)))
            return
        file.content.extend(bytes(max(0, operation.at - len(file.content))))
        file.content[operation.at : operation.at + len(operation.data)] = operation.data

    def contents_after_loss(self, disk: str) -> dict[str, bytes | None]:
        """Content by path after a power cut on such a disk."""
        names = self.names if disk == DISKS[0] else self.kept_names
        return {name: None if file is None else file.kept for name, file in names.items()}


def build(left: dict[str, bytes | None], root: Path) -> None:
    """Create a folder with exactly this content."""
    shutil.rmtree(root)
    root.mkdir()
    for name, content in sorted(left.items()):
        path = Path(name)
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def digest(left: dict[str, bytes | None]) -> str:
    """A digest that is equal for equal folders."""
    every = hashlib.sha256()
    for name, content in sorted(left.items()):
        every.update(repr((name, content)).encode())
    return every.hexdigest()


def iterate_moments(
    operations: list[Operation], before: Path, disk: str
) -> Iterator[tuple[int, str, dict[str, bytes | None]]]:
    """Number, description and disk of every moment at which the state after a power cut changes."""
    state, last = Disk(before), ""
    for number, operation in enumerate(operations, start=1):
        state.do(operation)
        left = state.contents_after_loss(disk)
        if (now := digest(left)) != last:
            last = now
            yield number, f"{KINDS[operation.kind]} {operation.path.removeprefix(str(before))}", left


def attempt(place: Workspace, left: dict[str, bytes | None], wanted: Snapshot) -> list[str]:
    """Problems after the command ran on the remaining state."""
    build(left, place.runs)
    status = place.command(place.scenario.argv)
    violations = [] if status == 0 else [f"the command ended with {status}: {place.last_line()}"]
    violations += [f"{n} processes left" for n in [end_all()] if n]
    for aside in place.runs.rglob("*.damaged"):
        aside.unlink()  # quarantined as expected
    return violations + wanted.find_differences(place.runs, place.scenario.grid)


def main() -> int:
    """Try the moments that were not tried yet; exit status 1 if any check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the outcomes, which are resumed there")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th moment (default 1)")
    parser.add_argument(
        "--report", type=Path, metavar="FILE.md", help="page in which to fill what came of all that was tried"
    )
    options = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        options.out.mkdir(parents=True, exist_ok=True)
        record = options.out / "record"
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            os.environ | prepare_preload(options.out) | {RECORD: str(record)},
        )
    from forked import make_cheap

    make_cheap()
    adopt_orphans()
    make_store(options.out / "store.db")
    path = options.out / "outcomes.jsonl"
    shutil.rmtree(options.out / "scratch", ignore_errors=True)
    place = Workspace(options.out / "scratch", ONE_CELL, options.out / "store.db")
    place.run_undisturbed()
    os.truncate(os.environ[RECORD], 0)
    _, wanted = place.run_undisturbed()
    operations = list(read_record(Path(os.environ[RECORD])))
    for disk in DISKS:
        place.restore()  # the record starts with the initial state
        done = {outcome.at for outcome in read_outcomes(path) if outcome.way == format_way(disk)}
        for number, where, left in list(iterate_moments(operations, place.runs, disk))[:: options.every]:
            if number in done:
                continue
            started = time.monotonic()
            violations = attempt(place, left, wanted)
            seconds = round(time.monotonic() - started, 2)
            append_outcome(
                path, AttemptOutcome(ONE_CELL.name, format_way(disk), number, where, git_sha(), seconds, violations)
            )
        if options.every == 1:
            append_outcome(
                path, AttemptOutcome(ONE_CELL.name, format_way(disk), len(operations) + 1, "", git_sha(), 0.0, [])
            )
    if options.report:
        fill_report(options.report, read_outcomes(path))
    return int(any(outcome.violations for outcome in read_outcomes(path)))


def format_way(disk: str) -> str:
    """The cause of a grid's end, as named in an outcome."""
    return f"loss of power, {disk}"


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    sys.exit(main())
