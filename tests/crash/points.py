"""Ends a tiny grid at every one of its disk effects, repeats the command, and checks the outcome.

`python tests/crash/points.py --out FOLDER` tries all of them and resumes an earlier call. Needs Linux and a C compiler.
"""

import argparse
import ctypes
import itertools
import json
import math
import mmap
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from lit_lazy.support.disk import write_text
from lit_lazy.support.provenance import git_sha

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "effects.c"
CONTROL, TRACE = "EFFECTS_CONTROL", "EFFECTS_TRACE"
HEADER = struct.Struct("8I1024s")
"""`struct control` of effects.c."""
MOST_SECONDS = 120.0
"""Timeout of a command."""


def prepare_preload(folder: Path) -> dict[str, str]:
    """Environment of a process whose disk effects are counted; compiles the counter."""
    library = folder / "effects.so"
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    (folder / "control").write_bytes(bytes(HEADER.size))
    for name in ("trace", "record"):
        (folder / name).touch()
    return {"LD_PRELOAD": str(library), CONTROL: str(folder / "control"), TRACE: str(folder / "trace")}


class Effects:
    """Counter of disk effects, shared by this process and its forks."""

    def __init__(self) -> None:
        with open(os.environ[CONTROL], "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), HEADER.size)
        self._trace = Path(os.environ[TRACE])

    def count(self, root: Path, at: int = 0, again: int = 0, number: int = signal.SIGKILL, whole: bool = False) -> None:
        """Start counting effects below `root`; the effects `at` and `again` trigger a signal.

        whole: so does every later one.
        """
        os.truncate(self._trace, 0)
        path = os.fsencode(root)
        self._shared[:] = HEADER.pack(1, 0, at, again, number, whole, False, len(path), path)

    def stop(self) -> list[str]:
        """Stop counting; returns the effects so far, each as `kind path`."""
        self._shared[:4] = bytes(4)
        lines = [line.split("\t") for line in self._trace.read_text().splitlines()]
        return [f"{kind} {path}" for _, _, kind, path in sorted(lines, key=lambda line: int(line[0]))]


@dataclass(frozen=True)
class Scenario:
    """A command on a runs folder and the folder's initial state."""

    name: str
    argv: tuple[str, ...]
    before: tuple[str, ...] = ()
    """A command that has run in the folder before."""
    packed: tuple[str, ...] = ()
    """A command that has run in another folder, whose cells are in `PACK`."""
    grid: str = "pair-backcopy_tiny"


PACK = "pair.xz"
ONE = ("ablate", "run", "pair.py", "--rows", "softmax", "--seeds", "0", "--workers", "1")
ONE_CELL = Scenario("one cell", ONE)
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        ONE_CELL,
        Scenario("two cells by two workers", (*ONE[:3], "--seeds", "0", "--workers", "2")),
        Scenario("--fresh", (*ONE, "--fresh"), before=ONE),
        Scenario(
            "a search",
            ("ablate", "search", "tiny.py", "--trials", "2", "--workers", "1"),
            grid="search-tiny-backcopy_tiny",
        ),
        Scenario("a training", ("train", "backcopy_tiny"), grid="train-backcopy_tiny"),
        Scenario("a packed cell and one more", (*ONE[:6], "0,1", "--workers", "1", "--results", PACK), packed=ONE),
        Scenario(
            "two looks of a question",
            ("ablate", "run", "q_two.py", "--looks", "2", "--workers", "1"),
            grid="q_two-backcopy_tiny",
        ),
    )
}
SEARCH = '''
"""One axis on the tiny probe."""
from lit_lazy.grid.search.definition import Real, Search

search = Search("tiny", {"train.lr": Real(1e-4, 1e-2, log=True)}, "backcopy_tiny", startup=2)
'''
QUESTION = '''
"""Two looks, of which the first decides nothing."""
from lit_lazy.attention import Softmax, SSMax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

RULE = "model.attention.normaliser"
question = Question(
    ablation=Ablation(
        name="q_two",
        base="backcopy_tiny",
        baseline="softmax",
        seeds=(0, 1, 2),
        columns=COLUMNS[2:],
        rows=(Row("softmax", {RULE: Softmax()}, "ours"), Row("ssmax", {RULE: SSMax()}, "ours")),
    ),
    claim="SSMax has less mass.",
    primary="mass/non_trigger",
    contrasts=(Contrast("ssmax - softmax", {"ssmax": 1, "softmax": -1}),),
    rule="lower",
    margin=0.1,
    source="R4",
    looks=(2, 3),
    few_seeds_because="a test",
)
'''


@dataclass(frozen=True)
class Interruption:
    """How a grid is ended at an effect."""

    name: str
    number: int
    whole: bool = False
    twice: bool = False


WAYS = {
    way.name: way
    for way in (
        Interruption("SIGKILL of the process", signal.SIGKILL),
        Interruption("SIGKILL of all", signal.SIGKILL, whole=True),
        Interruption("SIGTERM", signal.SIGTERM),
        Interruption("SIGTERM twice", signal.SIGTERM, twice=True),
    )
}


class Workspace:
    """A folder whose runs folder can be reset to its initial state."""

    def __init__(self, folder: Path, scenario: Scenario, store: Path) -> None:
        from two_rows import two_rows

        self.folder, self.scenario, self.runs = folder, scenario, folder / "runs"
        self.effects = Effects()
        self.runs.mkdir(parents=True)
        shutil.copy(store, self.runs / "mlflow.db")
        (folder / "pair.py").write_text(two_rows("pair"))
        (folder / "tiny.py").write_text(SEARCH)
        (folder / "q_two.py").write_text(QUESTION)
        if scenario.packed:
            assert self.command((*scenario.packed, "--brief")) == 0
            assert self.command(("ablate", "pack", "pair.py", "--out", PACK)) == 0
            shutil.rmtree(self.runs)
            self.runs.mkdir()
            shutil.copy(store, self.runs / "mlflow.db")
        if scenario.before:
            assert self.command(scenario.before) == 0
        shutil.copytree(self.runs, folder / "before")

    def restore(self) -> None:
        shutil.rmtree(self.runs)
        shutil.copytree(self.folder / "before", self.runs)

    def start(self, argv: Sequence[str]) -> "subprocess.Popen[Any]":
        import forked

        with (self.folder / "commands.log").open("ab") as log:
            return forked.Popen(
                [sys.executable, "-P", "-m", "lit_lazy.command", *argv, "--runs", str(self.runs)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def command(self, argv: Sequence[str]) -> int:
        """Exit status of a command, with a timeout."""
        process = self.start(argv)
        try:
            return process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return -1

    def run_undisturbed(self) -> tuple[list[str], "Snapshot"]:
        """The effects of the command and its results."""
        self.restore()
        self.effects.count(self.runs)
        assert self.command(self.scenario.argv) == 0
        return self.effects.stop(), Snapshot.of(self.runs, self.scenario.grid)

    def attempt(self, at: int, way: Interruption, wanted: "Snapshot") -> "AttemptOutcome":
        """End the grid at effect number `at`, repeat the command, compare."""
        self.restore()
        started = time.monotonic()
        self.effects.count(self.runs, at, at + 1 if way.twice else 0, way.number, way.whole)
        first = self.command(self.scenario.argv)
        if way.whole:
            end_all()
        effects = self.effects.stop()
        where = effects[at - 1] if at <= len(effects) else ""
        violations = [] if first != -1 else [f"the command took more than {MOST_SECONDS:.0f} s"]
        if where:
            status = self.command(self.scenario.argv)
            violations += [] if status == 0 else [f"the command given again ended with {status}: {self.last_line()}"]
            violations += [f"{n} processes left" for n in [end_all()] if n]
        violations += wanted.find_differences(self.runs, self.scenario.grid)
        seconds = round(time.monotonic() - started, 2)
        return AttemptOutcome(self.scenario.name, way.name, at, where, git_sha(), seconds, violations)

    def last_line(self) -> str:
        return (self.folder / "commands.log").read_text().strip().splitlines()[-1][:200]


@dataclass(frozen=True)
class AttemptOutcome:
    """Outcome of one attempt."""

    scenario: str
    way: str
    at: int
    where: str
    """The effect at which it was ended; "" if the grid had ended before."""
    commit: str
    seconds: float
    """Duration of the attempt and its checks."""
    violations: list[str]


def adopt_orphans() -> None:
    """Workers whose command is killed become children of this process."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


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
FOLDERS = ("grid", "owner")
"""Tags that differ between two runs folders."""
PUBLISHED = ("table.csv", "table.json", "plan.json", "search.json", "config.yaml")


@dataclass(frozen=True)
class Snapshot:
    """State that must be equal after every interruption."""

    results: dict[str, Any]
    """Metrics of each cell."""
    points: list[Any]
    """Points of a search: state, value, settings and reports."""
    runs: list[Any]
    """MLflow runs: kind, cell, status, state, params, metric names, and curves without timestamps."""
    files: list[str]
    """File names without volatile numbers and without folders that `--fresh` moved away."""
    moved_away: list[str]
    """Cells with a result in the folders that were moved away."""
    published: dict[str, Any]

    @classmethod
    def of(cls, runs: Path, grid: str) -> "Snapshot":
        """The state of the runs folder."""
        from forked import run_in_fork

        return run_in_fork(lambda: cls._read(runs, grid))

    @classmethod
    def _read(cls, runs: Path, grid: str) -> "Snapshot":
        from mlflow.tracking import MlflowClient

        from lit_lazy.grid.study import open_study

        folder, points = runs / grid, []
        if (folder / "search.json").exists():
            trials = [trial for trial in open_study(None, folder).trials if "number" in trial.user_attrs]
            points = [[t.user_attrs, t.state.name, t.value, t.params, [*t.intermediate_values.items()]] for t in trials]
        client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
        number = client.get_experiment_by_name(grid).experiment_id
        tracked = [_read_tracked_run(client, run, folder) for run in client.search_runs([number], max_results=1000)]
        results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("**/result.json")}
        return cls(
            {key: result["metrics"] for key, result in results.items()},
            points,
            sorted(tracked, key=lambda run: json.dumps(run, sort_keys=True)),
            sorted(VOLATILE.sub("*", path) for path in _list_files(runs) if MOVED_AWAY not in path),
            sorted({path.parent.name for path in runs.glob(f"{grid}{MOVED_AWAY}*/cells/*/result.json")}),
            {name: _read_published(folder / name) for name in PUBLISHED if (folder / name).exists()},
        )

    def find_differences(self, runs: Path, grid: str) -> list[str]:
        """How the state of the runs folder differs."""
        try:
            found = Snapshot.of(runs, grid)
        except RuntimeError as error:
            return [f"cannot be read: {error}"]
        return [
            f"{name}: {_find_first_difference(wanted, is_)}"
            for name, wanted, is_ in zip(asdict(self), asdict(self).values(), asdict(found).values(), strict=True)
            if wanted != is_
        ]


def _read_published(file: Path) -> Any:
    """A published file without the durations in it."""
    text = TIMED.sub("", file.read_text())
    return json.loads(text) if file.suffix == ".json" else text


def _list_files(runs: Path) -> list[str]:
    """Files in the runs folder except logs and artifacts, because artifacts of retired runs remain."""
    every = [str(path.relative_to(runs)) for path in runs.rglob("*") if path.suffix != ".log"]
    return [path for path in every if not path.startswith("mlartifacts")]


def _read_tracked_run(client: Any, run: Any, folder: Path) -> dict[str, Any]:
    tags = {
        name: value for name, value in run.data.tags.items() if not name.startswith("mlflow.") and name not in FOLDERS
    }
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


def _find_first_difference(wanted: Any, found: Any, at: str = "") -> str:
    """First difference of two plain values."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted(wanted.keys() | found.keys()):
            if wanted.get(key) != found.get(key):
                return _find_first_difference(wanted.get(key), found.get(key), f"{at}/{key}")
    if isinstance(wanted, list) and isinstance(found, list):
        if len(wanted) != len(found):
            extra = [x for x in found if x not in wanted] or [x for x in wanted if x not in found]
            return f"{at}: {len(found)} instead of {len(wanted)}, such as {str(extra[:1])[:300]}"
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            if one != other:
                return _find_first_difference(one, other, f"{at}/{number}")
    return f"{at}: {str(found)[:150]} instead of {str(wanted)[:150]}"


Points = Callable[[list[str]], Iterable[int]]


def try_all(folder: Path, scenario: Scenario, way: Interruption, points: Points) -> Iterable[AttemptOutcome]:
    """Yields the outcomes of a scenario. points: selects the effects to try from all effects."""
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    place = Workspace(scratch, scenario, folder / "store.db")
    effects, wanted = place.run_undisturbed()
    if differences := wanted.find_differences(place.runs, scenario.grid):
        raise SystemExit(f"{scenario.name}: the undisturbed grid does not equal itself: {differences}")
    for at in points(effects):
        outcome = place.attempt(at, way, wanted)
        yield outcome
        if not outcome.where:
            return


def main() -> int:
    """Try the selected effects that were not tried yet; exit status 1 if any check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the outcomes, which are resumed there")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only this one; may be given again")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one; may be given again")
    parser.add_argument(
        "--report", type=Path, metavar="FILE.md", help="page in which to fill what came of all that was tried"
    )
    parser.add_argument("--match", metavar="REGEX", action="append", help="only the first effect that matches")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="only every N-th effect, each way from another one on (default 1)",
    )
    options = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        options.out.mkdir(parents=True, exist_ok=True)
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | prepare_preload(options.out))
    from forked import make_cheap

    make_cheap()
    adopt_orphans()
    make_store(options.out / "store.db")
    wanted = [
        (SCENARIOS[scenario], WAYS[way]) for way in options.way or WAYS for scenario in options.scenario or SCENARIOS
    ]
    path = options.out / "outcomes.jsonl"
    for scenario, way in wanted:
        known = [o for o in read_outcomes(path) if (o.scenario, o.way) == (scenario.name, way.name)]
        points = (
            select_matching(options.match)
            if options.match
            else select_untried(known, options.every, list(WAYS).index(way.name))
        )
        for outcome in try_all(options.out, scenario, way, points):
            append_outcome(path, outcome)
    if options.report:
        fill_report(options.report, read_outcomes(path))
    return int(any(outcome.violations for outcome in read_outcomes(path)))


_MARKED = re.compile(r"(<!-- attempts -->\n)(?:.*\n)*?(<!-- end -->)")


def fill_report(page: Path, every: Sequence[AttemptOutcome]) -> None:
    """Write what came of all attempts between a page's markers. Raises SystemExit if it has none."""
    filled, n = _MARKED.subn(lambda match: f"{match[1]}{report(every)}{match[2]}", page.read_text())
    if not n:
        raise SystemExit(f"--report {page}: lacks <!-- attempts -->, and <!-- end --> after it")
    write_text(page, filled)


def report(every: Sequence[AttemptOutcome]) -> str:
    """The attempts and their outcomes in Markdown."""
    met = [outcome for outcome in every if outcome.where]
    rows = Counter((outcome.scenario, outcome.way) for outcome in met)
    effects = {(outcome.scenario, outcome.way): outcome.at - 1 for outcome in every if not outcome.where}
    wrong = Counter((outcome.scenario, outcome.way) for outcome in met if outcome.violations)
    kinds = Counter(outcome.where.partition(" ")[0] for outcome in met)
    commits = Counter(outcome.commit for outcome in every)
    lines = [
        "| grid | ended by | tried | of about | violations |",
        "| --- | --- | --: | --: | --: |",
        *(
            f"| {scenario} | {way} | {n} | {effects.get((scenario, way), '')} | {wrong[scenario, way]} |"
            for (scenario, way), n in rows.items()
        ),
        f"| all | | {len(met)} | | {sum(wrong.values())} |",
        "",
        "By kind: " + ", ".join(f"{kind} {n}" for kind, n in kinds.most_common()) + ".",
        "",
        *(f"- {o.scenario}, {o.way}, {o.at}, {o.where}: {'; '.join(o.violations)}" for o in every if o.violations),
        f"That took {sum(outcome.seconds for outcome in every) / 3600:.1f} hours of one process, with others at work "
        "beside it.",
        "",
        "Made by `tests/crash/points.py` and `power.py` (`make crash-points` runs all) at "
        f"{', '.join(f'{commit} ({n})' for commit, n in commits.items())}, last on "
        f"{time.strftime('%Y-%m-%d')}: Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} CPU cores.",
    ]
    return "\n".join(lines) + "\n"


def append_outcome(path: Path, outcome: AttemptOutcome) -> None:
    """Append an outcome to a file; print failures, and others occasionally."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")
    if outcome.violations or outcome.at % 25 == 0:
        print(f"{outcome.scenario}, {outcome.way}, {outcome.at}, {outcome.where}: {outcome.violations}", flush=True)


def read_outcomes(path: Path) -> list[AttemptOutcome]:
    """The outcomes in a file."""
    return [AttemptOutcome(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def select_matching(patterns: Sequence[str]) -> Points:
    """The first effect that matches each pattern."""
    return lambda effects: [find_first(effects, pattern) for pattern in patterns]


def select_untried(known: Sequence[AttemptOutcome], every: int, start: int) -> Points:
    """Every `every`-th effect that is not known, to the end of the grid."""
    done = {outcome.at for outcome in known}
    end = min((outcome.at for outcome in known if not outcome.where), default=math.inf)
    every_one = itertools.takewhile(lambda at: at < end, itertools.count(1 + start % every, every))
    return lambda _: (at for at in every_one if at not in done)


def find_first(effects: Sequence[str], pattern: str) -> int:
    """Number of the first effect that matches."""
    found = (number for number, effect in enumerate(effects, start=1) if re.search(pattern, effect))
    if not (number := next(found, 0)):
        raise ValueError(f"--match {pattern!r}: no effect matches; there are, for example, {', '.join(effects[:3])}")
    return number


def make_store(path: Path) -> None:
    """An empty MLflow database to copy."""
    from forked import run_in_fork
    from mlflow.tracking import MlflowClient

    if not path.exists():
        run_in_fork(lambda: len(MlflowClient(f"sqlite:///{path}").search_experiments()))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    sys.exit(main())
