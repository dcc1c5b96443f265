"""Leaves a tiny grid of real trainings at every state that its disk can be left in, repeats the command, and checks.

`python tests/crash/points.py --out FOLDER` tries all states and resumes an earlier call. It needs Linux and a C
compiler. The states come from a record of what an undisturbed command does, played on three disks. After a kill of all
processes, everything written is there. After a loss of power, data that were not fsynced are gone; names (of files
made, renamed, removed) are kept at once, so that a file may be there and empty, or with the next fsync of anything, as
a journaling file system does. Mixtures of the two are not tried.
"""

import argparse
import ctypes
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from lit_lazy.support.provenance import git_sha

HERE = Path(__file__).resolve().parent
RECORD, ROOT = "EFFECTS_RECORD", "EFFECTS_ROOT"
OPERATION = struct.Struct("=3I4x2Q")
"""Before each operation of the record: its kind, and the sizes of what follows."""
KINDS = {"c": "create", "d": "mkdir", "r": "rename", "s": "fsync", "t": "truncate", "u": "unlink", "w": "write"}
KILLED = "kill of all processes"
DISKS = (KILLED, "loss of power, names at once", "loss of power, names with the next fsync")
MOST_SECONDS = 120.0
"""Timeout of a command."""


@dataclass(frozen=True)
class Scenario:
    """A command on a runs folder and the folder's initial state."""

    argv: tuple[str, ...]
    before: tuple[str, ...] = ()
    """A command that has run in the folder before."""
    packed: tuple[str, ...] = ()
    """A command that has run in another folder, whose cells are in `PACK`."""
    grid: str = "pair-backcopy_tiny"


PACK = "pair.xz"
ONE = ("ablate", "run", "pair.py", "--rows", "softmax", "--seeds", "0", "--workers", "1")
SCENARIOS = {
    "one cell": Scenario(ONE),
    "two cells by two workers": Scenario((*ONE[:3], "--seeds", "0", "--workers", "2")),
    "--fresh": Scenario((*ONE, "--fresh"), before=ONE),
    "a search": Scenario(
        ("ablate", "search", "tiny.py", "--trials", "2", "--workers", "1"), grid="search-tiny-backcopy_tiny"
    ),
    "a training": Scenario(("train", "backcopy_tiny"), grid="train-backcopy_tiny"),
    "a packed cell and one more": Scenario((*ONE[:6], "0,1", "--workers", "1", "--results", PACK), packed=ONE),
}
SEARCH = '''
"""One axis on the tiny probe."""
from lit_lazy.grid.search.definition import Real, Search

search = Search("tiny", {"train.lr": Real(1e-4, 1e-2, log=True)}, "backcopy_tiny", startup=2)
'''


@dataclass(frozen=True)
class Outcome:
    scenario: str
    disk: str
    at: int
    """Number of the operation after which the disk was left."""
    where: str
    commit: str
    seconds: float
    """Duration of the attempt and its checks."""
    violations: list[str]


class Workspace:
    """A folder whose runs folder can be reset to its initial state."""

    def __init__(self, folder: Path, name: str, store: Path) -> None:
        from two_rows import two_rows

        self.folder, self.name, self.scenario, self.runs = folder, name, SCENARIOS[name], folder / "runs"
        folder.mkdir(parents=True)
        (folder / "pair.py").write_text(two_rows("pair"))
        (folder / "tiny.py").write_text(SEARCH)
        self.begin(store)
        if self.scenario.packed:
            assert self.command((*self.scenario.packed, "--brief")) == 0
            assert self.command(("ablate", "pack", "pair.py", "--out", PACK)) == 0
            shutil.rmtree(self.runs)
            self.begin(store)
        if self.scenario.before:
            assert self.command(self.scenario.before) == 0
        shutil.copytree(self.runs, folder / "before")

    def begin(self, store: Path) -> None:
        self.runs.mkdir()
        shutil.copy(store, self.runs / "mlflow.db")

    def restore(self) -> None:
        shutil.rmtree(self.runs)
        shutil.copytree(self.folder / "before", self.runs)

    def command(self, argv: Sequence[str], **environment: str) -> int:
        """Exit status of a command, with a timeout."""
        import forked

        with (self.folder / "commands.log").open("ab") as log:
            process = forked.Popen(
                [sys.executable, "-P", "-m", "lit_lazy", *argv, "--runs", str(self.runs)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder, start_new_session=True,
                env=os.environ | environment,
            )  # fmt: skip
        try:
            return process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return -1

    def run_undisturbed(self) -> tuple[list["Operation"], dict[str, list[str]]]:
        """What the command does to the disk, and its results."""
        self.restore()
        record = self.folder / "record"
        assert self.command(self.scenario.argv, **{RECORD: str(record), ROOT: str(self.runs)}) == 0
        return list(read_record(record)), take_snapshot(self.runs, self.scenario.grid)

    def try_all(self, disk: str, known: Sequence[Outcome], options: argparse.Namespace) -> Iterator[Outcome]:
        """Yields the outcomes of one disk's states that are not known yet."""
        operations, wanted = self.run_undisturbed()
        if differences := find_differences(wanted, self.runs, self.scenario.grid):
            raise SystemExit(f"{self.name}: the undisturbed grid does not equal itself: {differences}")
        done = {outcome.at for outcome in known}
        self.restore()  # the record starts with the initial state
        moments = iterate_moments(operations, self.runs, disk)
        if options.match:
            moments = [find_first(moments, pattern) for pattern in options.match]
        for at, where, left in moments:
            if at in done:
                continue
            started = time.monotonic()
            build(left, self.runs)
            status = self.command(self.scenario.argv)
            said = (self.folder / "commands.log").read_text().strip().splitlines()[-1][:200]
            problems = [] if status == 0 else [f"the same command ended with {status}: {said}"]
            problems += [f"{n} processes left" for n in [end_all()] if n]
            if disk != KILLED:
                for aside in self.runs.rglob("*.damaged"):
                    aside.unlink()  # quarantined as expected
            problems += find_differences(wanted, self.runs, self.scenario.grid)
            yield Outcome(self.name, disk, at, where, git_sha(), round(time.monotonic() - started, 2), problems)


def end_all() -> int:
    """Kill the remaining processes of a grid; returns their number. The server of workers is none of them."""
    import forked
    import psutil

    spared = {forked.start_fork_server(), resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    every = [child for child in psutil.Process().children(recursive=True) if child.pid not in spared]
    left = [child for child in every if child.status() != psutil.STATUS_ZOMBIE]
    for child in left:
        child.kill()
    psutil.wait_procs(every)
    return len(left)


VOLATILE = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}|\d{8}-\d{6}|\d+")
TIMED = re.compile(r'"seconds": \d+,')
MOVED_AWAY = ".until-"
PUBLISHED = ("table.csv", "table.json", "plan.json", "search.json", "config.yaml")


def take_snapshot(runs: Path, grid: str) -> dict[str, list[str]]:
    """What must be equal after every interruption, as lines of JSON."""
    from forked import run_in_fork

    dump = json.JSONEncoder(indent=0, sort_keys=True).encode
    return {name: dump(part).splitlines() for name, part in run_in_fork(lambda: read_state(runs, grid)).items()}


def read_state(runs: Path, grid: str) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    folder, client = runs / grid, MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    number = client.get_experiment_by_name(grid).experiment_id
    tracked = [_read_tracked_run(client, run, folder) for run in client.search_runs([number], max_results=1000)]
    # Artifacts of deleted runs remain.
    files = [str(path.relative_to(runs)) for path in runs.rglob("*") if path.suffix != ".log"]
    files = [path for path in files if not path.startswith("mlartifacts") and MOVED_AWAY not in path]
    published = {path.name: path.read_text() for path in map(folder.joinpath, PUBLISHED) if path.exists()}
    return {
        "metrics of each cell": {
            path.parent.name: json.loads(path.read_text())["metrics"] for path in folder.glob("**/result.json")
        },
        "runs in MLflow, without times": sorted(tracked, key=lambda run: json.dumps(run, sort_keys=True)),
        "names of files, without numbers": sorted(VOLATILE.sub("*", path) for path in files),
        "cells with a result that were moved away": sorted(  # some twice, if the same --fresh is given again
            {path.parent.name for path in runs.glob(f"{grid}{MOVED_AWAY}*/cells/*/result.json")}
        ),
        "what is published": {name: TIMED.sub("", text).splitlines() for name, text in published.items()},
    }


def find_differences(wanted: dict[str, list[str]], runs: Path, grid: str) -> list[str]:
    try:
        found = take_snapshot(runs, grid)
    except RuntimeError as error:
        return [f"cannot be read: {error}"]
    return [
        f"{name}: {next(pair for pair in itertools.zip_longest(lines, found[name]) if pair[0] != pair[1])}"
        for name, lines in wanted.items()
        if lines != found[name]
    ]


def _read_tracked_run(client: Any, run: Any, folder: Path) -> dict[str, Any]:
    tags = {name: value for name, value in run.data.tags.items() if not name.startswith("mlflow.") and name != "grid"}
    curves = {}
    for name in sorted(run.data.metrics):
        points = client.get_metric_history(run.info.run_id, name)
        curves[name] = len(points) if name.startswith("time/") else sorted([p.step, p.value] for p in points)
    artifacts = {artifact.path: artifact.file_size for artifact in client.list_artifacts(run.info.run_id)}
    sizes = {path: size for path, size in artifacts.items() if path in PUBLISHED}
    if "table.json" in sizes:  # contains durations of cells
        sizes["table.json"] -= (folder / "table.json").stat().st_size
    return {
        "status": run.info.status,
        "tags": tags,
        "params": run.data.params,
        "curves": curves,
        "artifacts": sorted(artifacts),
        "sizes": sizes,
    }


@dataclass(frozen=True)
class Operation:
    kind: str
    """A letter of KINDS."""
    path: str
    to: str
    at: int
    data: bytes


def read_record(path: Path) -> Iterator[Operation]:
    content, at = path.read_bytes(), 0
    while at < len(content):
        kind, path_size, to_size, offset, size = OPERATION.unpack_from(content, at)
        at += OPERATION.size
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
                if file := self.names.get(path):  # without its name, nothing of it can survive a power cut
                    if operation.kind == "t":
                        del file.content[operation.at :]
                    file.content.extend(bytes(max(0, operation.at - len(file.content))))
                    file.content[operation.at : operation.at + len(operation.data)] = operation.data
            case other:
                raise ValueError(f"{other!r} of {path}: this record cannot be replayed")

    def list_left(self, disk: str) -> dict[str, bytes | None]:
        """Content by path that such a disk is left with."""
        if disk == KILLED:
            return {name: None if file is None else bytes(file.content) for name, file in self.names.items()}
        names = self.names if disk == DISKS[1] else self.kept_names
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


def iterate_moments(
    operations: list[Operation], before: Path, disk: str
) -> Iterator[tuple[int, str, dict[str, bytes | None]]]:
    """Number, description and disk of every moment at which the state that is left changes.

    Moments within a row of writes to one file, or to the pages of a database, whose engine sees to them, are left out
    after a kill.
    """
    state, last, written = Disk(before), None, ""
    for number, operation in enumerate(operations, start=1):
        state.do(operation)
        name = Path(operation.path).name
        repeated = operation.kind == "w" and (operation.path == written or ".db" in name)
        written = operation.path if operation.kind == "w" else ""
        if disk == KILLED and repeated:
            continue
        left = state.list_left(disk)
        if left != last:
            last = left
            yield number, f"{KINDS[operation.kind]} {operation.path.removeprefix(str(before))}", left


def find_first(moments: Iterator[tuple[int, str, Any]], pattern: str) -> tuple[int, str, Any]:
    """The first of the moments that are left whose description matches."""
    for moment in moments:
        if re.search(pattern, moment[1]):
            return moment
    raise ValueError(f"--match {pattern!r}: no state matches after those before it")


def main() -> int:
    """Try what was not tried yet; exit status 1 if any check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the outcomes, which are resumed there")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only this one; may be given again")
    parser.add_argument("--disk", choices=DISKS, action="append", help="only this one; may be given again")
    parser.add_argument(
        "--match",
        metavar="REGEX",
        action="append",
        help="only the first state that matches, after that of the option before",
    )
    options = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        options.out.mkdir(parents=True, exist_ok=True)
        library = options.out / "record.so"
        compile_ = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, HERE / "record.c", "-ldl"]
        subprocess.run(compile_, check=True)
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(library)})
    from forked import make_cheap

    from lit_lazy.grid.search import run  # noqa: F401  imported for the forks
    from lit_lazy.training import trainer  # noqa: F401

    make_cheap()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: the workers of a killed command become its children
    make_store(options.out / "store.db")
    path = options.out / "outcomes.jsonl"
    for disk, name in itertools.product(options.disk or DISKS, options.scenario or SCENARIOS):
        known = [outcome for outcome in read_outcomes(path) if (outcome.scenario, outcome.disk) == (name, disk)]
        scratch = options.out / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        for n, outcome in enumerate(Workspace(scratch, name, options.out / "store.db").try_all(disk, known, options)):
            with path.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            if outcome.violations or n % 25 == 0:
                print(f"{name}, {disk}, {outcome.at}, {outcome.where}: {outcome.violations}", flush=True)
    print(report(read_outcomes(path)))
    return int(any(outcome.violations for outcome in read_outcomes(path)))


def report(every: Sequence[Outcome]) -> str:
    """The attempts and their outcomes in Markdown, for docs/results/reliability.md."""
    tried = Counter((outcome.scenario, outcome.disk) for outcome in every)
    wrong = Counter((outcome.scenario, outcome.disk) for outcome in every if outcome.violations)
    lines = [
        "| grid | disk after | tried | violations |",
        "| --- | --- | --: | --: |",
        *(f"| {scenario} | {disk} | {n} | {wrong[scenario, disk]} |" for (scenario, disk), n in tried.items()),
        f"| all | | {len(every)} | {sum(wrong.values())} |",
        "",
        *(f"- {o.scenario}, {o.disk}, {o.at}, {o.where}: {'; '.join(o.violations)}" for o in every if o.violations),
        f"The attempts took {sum(outcome.seconds for outcome in every) / 3600:.1f} hours, at "
        f"{', '.join(Counter(outcome.commit for outcome in every))}, on {os.cpu_count()} CPU cores.",
    ]
    return "\n".join(lines)


def read_outcomes(path: Path) -> list[Outcome]:
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def make_store(path: Path) -> None:
    """An empty MLflow database to copy."""
    from forked import run_in_fork
    from mlflow.tracking import MlflowClient

    if not path.exists():
        run_in_fork(lambda: len(MlflowClient(f"sqlite:///{path}").search_experiments()))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    sys.exit(main())
