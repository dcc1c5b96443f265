"""Runs a grid: gives its missing cells to workers, shows progress, and writes the table."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from glob import escape
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console

from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.cell_state import Holder, State, clear_leftovers, find_dead, put, read_state
from lit_lazy.grid.grid_folder import ASIDE, DamagedPlanError, read_grid
from lit_lazy.grid.plan import PLAN
from lit_lazy.grid.plan_merging import describe_measurable, merge_plan
from lit_lazy.grid.pool import LocalPool, Pool
from lit_lazy.grid.progress import FINISHED, Progress, describe_training
from lit_lazy.grid.reused_results import TakenResult, find_shared, read_end
from lit_lazy.grid.study import GridStudy
from lit_lazy.grid.work_records import Ending, Grid, Job, LaunchOptions, Work, is_over
from lit_lazy.support.disk import is_disk_full, quarantine, write_text
from lit_lazy.support.error_messages import UnfinishedError, describe_exception, one_line
from lit_lazy.support.locks import describe_leases, hold_shared, is_shared, make_file_lock
from lit_lazy.support.provenance import git_sha, is_earlier
from lit_lazy.table.render import is_saved, save
from lit_lazy.table.results_table import Table
from lit_lazy.training.execution_settings import find_missing_backend
from lit_lazy.training.run_folder import CELLS, RunResult, clear_failure, is_locked, locate_cell, read_grid_id

POLL_SECONDS = 0.2
LOOK_SECONDS, LOOK_SHARE = 5.0, 20.0
"""Interval of looks at what other processes do: so many seconds, and at least so many times as long as a look takes."""
MOST_CRASHES = 3
"""Deaths per worker slot before a cell was begun, without one ending in between, after which the command gives up."""
LONGEST_PAUSE_SECONDS = 60.0
"""Upper bound on the pause before what failed for lack of space is tried again."""
IN_USE = "in_use.lock"
"""File in a grid's folder, which every command that trains its cells holds."""


class Outcome(NamedTuple):
    """The table of a grid, whether all its cells are complete, and whether any was executed for it."""

    table: Table
    finished: bool
    executed: bool


class Driver(Protocol):
    """Says which cells there are, in which state, and which comes next."""

    def states(self) -> Mapping[str, State | str]:
        """The state of each cell or point that is asked for, by key."""

    def choose(self) -> Cell | None:
        """A waiting cell to start now; None if none can be started."""

    def record(self, ending: Ending) -> None:
        """Record how an attempt ended."""

    def judge(self, key: str, step: int, value: float) -> str:
        """Why a training is not worth its remaining steps, by its monitored metric at a step; "" if it is."""


class GridDriver:
    """The cells of a grid: their folders say what is left, Optuna's study gives the order."""

    def __init__(self, work: Work, storage: str | None) -> None:
        self.work, self.study = work, GridStudy(storage, work.folder)
        self.cells = {cell.key: cell for cell in work.cells}
        for key, cell in self.cells.items():
            if known := RunResult.read(work.locate(key)):  # a damaged one is put aside, and its cell waits again
                known.require_settings(cell.config)
        self._states: dict[str, State] = {}
        self._next_look = 0.0
        self._held: set[str] = set()
        """Cells that this process has given to workers."""

    def states(self) -> dict[str, State]:
        """What other processes did is seen after LOOK_SECONDS, later where a look at all cells takes long."""
        begun = time.monotonic()
        if begun >= self._next_look:
            for key in self.cells:
                self._look(key)
            now = time.monotonic()
            self._next_look = now + max(LOOK_SECONDS, LOOK_SHARE * (now - begun))
        return dict(self._states)

    def _look(self, key: str) -> State:
        """The state of a cell now."""
        if self._states.get(key) != "complete":
            folder = self.work.locate(key)
            self._states[key] = "running" if key in self._held else read_state(folder)
            if self._states[key] == "complete":
                clear_leftovers(folder)
        return self._states[key]

    def choose(self) -> Cell | None:
        seen = self.states()
        waiting = next((key for key in seen if seen[key] == "waiting" and self._look(key) == "waiting"), None)
        if waiting is None:
            return None
        cell = self.cells[waiting]
        given = self.study.begin(cell.key, cell.variant, cell.seed)
        if given not in self.cells or self._look(given) != "waiting":  # of another command, or done meanwhile
            self.study.end(given, None)
            given = waiting
        self._held.add(given)
        self._states[given] = "running"
        return self.cells[given]

    def record(self, ending: Ending) -> None:
        self._held.discard(ending.key)
        folder = self.work.locate(ending.key)
        if ending.files:  # of another machine
            put(folder, ending.files)
        self._look(ending.key)
        result = RunResult.peek(folder) if ending.kind == "done" else None
        self.study.end(ending.key, None if result is None else result.metrics["loss/val"])

    def retry(self, key: str) -> None:
        """Let a failed cell wait again."""
        clear_failure(self.work.locate(key))
        self._look(key)

    def judge(self, key: str, step: int, value: float) -> str:  # noqa: ARG002
        return ""


def run_grid(grid: Grid, launch: LaunchOptions, console: Console) -> Outcome:
    """Execute the missing cells of a grid and write its table."""
    with open_folder(grid, launch, console):
        save_plan(grid, console)
        taken = _take_results(grid, launch, console)
        driver = GridDriver(grid, launch.storage)
        for key, state in driver.states().items():
            if state == "failed":
                driver.retry(key)
        executed = execute_cells(grid, launch, driver, console, taken=len(taken))
        table = read_grid(grid.folder).build_table()
        if not is_saved(table, grid.folder):
            save(table, grid.folder)
        return Outcome(table, is_finished(driver.states()), executed)


@contextmanager
def open_folder(work: Work, launch: LaunchOptions, console: Console) -> Iterator[None]:
    """Make a grid's folder, which counts as in use until the context exits.

    Other processes, on any machine that shares the folder, may execute the same work at the same time.
    """
    git_sha()
    if launch.fresh:
        reset_grid(work, console)
    work.folder.mkdir(parents=True, exist_ok=True)
    if line := describe_leases(work.folder):
        console.print(line, highlight=False, soft_wrap=True)
    read_grid_id(work.folder)
    with hold_shared(work.folder / IN_USE):
        yield


def reset_grid(work: Work, console: Console) -> None:
    """Start again without losing results: rename the folder."""
    if not work.folder.exists():
        return
    if users := find_users(work.folder):
        raise ValueError(f"--fresh: {work.id} is running ({', '.join(users)}); stop it first")
    aside = work.folder.with_name(f"{work.id}{ASIDE}{datetime.now():%Y%m%d-%H%M%S}")
    work.folder.rename(aside)
    console.print(f"the former results are in {aside}", highlight=False)


def find_users(folder: Path) -> list[str]:
    """The processes that train cells of a grid's folder; if there are none, `a command` if one works on it."""
    running = [path for path in (folder / CELLS).glob("*") if is_locked(path)]
    found = {f"process {holder.pid} on {holder.host}" for path in running if (holder := Holder.read(path))}
    return sorted(found) or ["a command"] * is_shared(folder / IN_USE)


def execute_cells(
    work: Work,
    launch: LaunchOptions,
    driver: Driver,
    console: Console,
    notes: Callable[[], list[str]] = list,
    *,
    taken: int = 0,
    monitored: str | None = None,
) -> bool:
    """Execute the missing cells; returns whether any was missing.

    notes: further lines of the progress display. monitored: as in `Job`. taken: how many of the finished cells were
    missing before.
    """
    states, n = driver.states(), len(work.cells)
    left = sum(state not in FINISHED for state in states.values())
    if not left and not taken:
        console.print(f"{n} {work.noun}, all finished: nothing to do", highlight=False)
        return False
    taken_part = [f"{taken} taken"] if taken else []
    counts = [f"{n - left - taken} already finished", *taken_part, f"{left} to train"]
    console.print(f"{n} {work.noun}, {', '.join(counts)}", highlight=False)
    if not left:
        return True
    if missing := find_missing_backend():
        console.print(f"attention runs slower than it could: {missing}", highlight=False, soft_wrap=True)
    job = Job(
        work.folder.resolve(),
        read_grid_id(work.folder),
        launch.threads,
        [file.resolve() for file in work.files],
        launch.keep_checkpoints,
        launch.execution,
        launch.loggers,
        monitored,
    )
    if launch.launcher == "ray":
        from lit_lazy.grid.ray_pool import RayPool

        pool: Pool = RayPool(job, launch.workers, launch.gpus)
    else:
        pool = LocalPool(job, launch.workers, driver.judge)
    Supervisor(work, launch, driver, console).work(pool, Progress(driver.states, console, notes))
    return True


def is_finished(states: Mapping[str, str]) -> bool:
    """Whether all cells are finished, none of them failed."""
    return all(state in FINISHED for state in states.values())


def save_plan(grid: Grid, console: Console) -> None:
    """Write the plan of a grid, merged with the former one in its folder."""
    with make_file_lock(grid.folder / f"{PLAN}.lock"):
        try:
            plan, measurable = merge_plan(grid)
        except DamagedPlanError as error:
            quarantine(error.file, one_line(error))
            plan, measurable = grid.plan, []
        write_text(grid.folder / PLAN, plan.to_json())
    if measurable:
        console.print(describe_measurable(measurable), highlight=False)


def find_results(grid: Grid, *, shares: bool) -> dict[str, TakenResult]:
    """The results by key that packed files have of missing cells, and other grids if it `shares`. Creates nothing."""
    untrained = [cell for cell in grid.cells if read_state(grid.locate(cell.key)) in ("waiting", "failed")]
    taken = {cell.key: grid.taken[cell.key] for cell in untrained if cell.key in grid.taken}
    return taken | (find_shared([cell for cell in untrained if cell.key not in taken], grid.folder) if shares else {})


def describe_taken(grid: Grid, taken: Iterable[TakenResult]) -> list[str]:
    """A line on the cells that each place has trained."""
    counts = Counter(one.result.taken_from for one in taken)
    return [f"{n} of {len(grid.cells)} cells are taken from {origin}, not trained" for origin, n in counts.items()]


def _take_results(grid: Grid, launch: LaunchOptions, console: Console) -> dict[str, TakenResult]:
    """Write the results that are there of missing cells; returns them by key."""
    taken = find_results(grid, shares=not (launch.fresh or launch.keep_checkpoints))  # both ask for a training
    _note_known_results(grid, taken.values())
    taken = {key: one for key, one in taken.items() if one.write(grid.locate(key))}
    for line in describe_taken(grid, taken.values()):
        console.print(line, highlight=False, soft_wrap=True)
    return taken


def _note_known_results(grid: Grid, taken: Iterable[TakenResult]) -> None:
    """Note in the plan's declaration if a result cannot be shown to be younger than its commit.

    Those are taken results, and those that --fresh moved aside, which the same trainings give again.
    """
    known, now = read_grid(grid.folder), grid.plan.declaration
    declared = known.plan.declaration
    if now is None or declared is None or not now.commit or declared.seen:
        return
    keys = {cell.key for cell in grid.cells}
    aside = [folder for folder in grid.runs.glob(f"{escape(grid.id)}{ASIDE}*/cells/*") if folder.name in keys]
    again = [(result, read_end(folder)) for folder in aside if (result := RunResult.peek(folder))]
    results = [*((one.result, one.ended) for one in taken), *again]
    made = {(result.environment.get("git_sha", ""), ended) for result, ended in results}
    if not all(is_earlier(declared.commit, Path(grid.files[0]), commit, seconds) for commit, seconds in made):
        write_text(known.path / PLAN, replace(known.plan, declaration=replace(declared, seen=True)).to_json())


class Supervisor:
    """Gives cells to workers until none waits or runs."""

    def __init__(self, work: Work, launch: LaunchOptions, driver: Driver, console: Console) -> None:
        self.folder, self.launch, self.driver, self.console = work.folder, launch, driver, console
        self.cells = {cell.key: cell for cell in work.cells}
        self._retries = Counter[str]()
        self._last_look = -LOOK_SECONDS
        self._crashes = self._started = 0
        self._reported_others = self._found_none = False
        self._pause = 0.0
        self._endings: list[Ending] = []
        """Attempts that ended and are not recorded yet, since that may fail for lack of space."""

    def work(self, pool: Pool, progress: Progress) -> None:
        """Return when every cell has ended, or this command's workers have after the time limit.

        Ctrl-C stops the workers after they have written a checkpoint.
        """
        with progress:
            try:
                while self._step(pool, progress):
                    time.sleep(POLL_SECONDS)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and len(pool):
                    self._say("stopping: the workers write a checkpoint; Ctrl-C again kills them")
                for ending in pool.stop():
                    self.driver.record(ending)
                raise
            finally:
                pool.close()

    def _step(self, pool: Pool, progress: Progress) -> bool:
        """Check workers and cells once; returns whether there is anything left to wait for."""
        try:
            self._endings += pool.poll()
            while self._endings:
                self.driver.record(self._endings[0])
                self._take(self._endings.pop(0), pool)
            states = self.driver.states()
            if time.monotonic() - self._last_look > LOOK_SECONDS:
                self._last_look = time.monotonic()
                progress.show_running([self._describe_running(key) for key, at in states.items() if at == "running"])
            progress.update(states)
            while not (over := self._is_over()) and pool.free and (cell := self.driver.choose()):
                try:
                    pool.start(cell)
                except Exception:
                    self.driver.record(Ending(cell.key, "interrupted"))
                    raise
                self._started += 1
            self._found_none |= not over and pool.free > 0 and is_over(self.launch.until)
        except Exception as error:
            if not is_disk_full(error):
                raise
            self._wait_for_space(describe_exception(error))
            return True
        if over or len(pool):
            return bool(len(pool))
        states = self.driver.states()
        if "running" in states.values() and not self._reported_others:
            self._reported_others = True
            held = [self._describe_running(key) for key, state in states.items() if state == "running"]
            self._say(
                f"waiting for workers that this process did not start: {'; '.join(held)}. If they die, their cells "
                "wait again; Ctrl-C ends the wait, not the workers"
            )
        return bool({"waiting", "running"} & set(states.values()))

    def _is_over(self) -> bool:
        """Whether the time limit keeps this command from starting cells."""
        return is_over(self.launch.until) and (self._started >= self.launch.workers or self._found_none)

    def _take(self, ending: Ending, pool: Pool) -> None:
        """Do what follows from the end of an attempt."""
        if ending.kind == "disk_full":
            self._wait_for_space(ending.reason)
            return
        self._pause = 0.0
        if ending.kind == "died":
            holder = find_dead(locate_cell(self.folder, ending.key))
            self._crashes += holder is None  # a cell itself counts the deaths of those that began it
            self._say(f"{self._name(ending.key)}: its worker ({holder or ending.reason}) died; it waits again")
        else:
            self._crashes = 0
        if ending.kind == "failed" and not ending.final and self._retries[ending.key] < self.launch.retry_failed:
            self._retries[ending.key] += 1
            count = f"{self._retries[ending.key]}/{self.launch.retry_failed}"
            self._say(f"{self._name(ending.key)} failed ({ending.reason}); retry {count}")
            assert isinstance(self.driver, GridDriver)
            self.driver.retry(ending.key)
        if self._crashes >= MOST_CRASHES * self.launch.workers:
            raise UnfinishedError(f"workers keep dying before they finish a cell: {pool.describe_last_failure()}")

    def _name(self, key: str) -> str:
        cell = self.cells.get(key)
        return key if cell is None else f"{cell.variant} seed {cell.seed}"

    def _describe_running(self, key: str) -> str:
        """A running cell with its worker, step, loss and the time left."""
        folder, cell = locate_cell(self.folder, key), self.cells.get(key)
        steps = cell.config["train"]["steps"] if cell is not None and cell.config else None  # a point has none
        by = f" by {holder}" if (holder := Holder.read(folder)) else ""
        training = describe_training(folder, steps)
        return f"{self._name(key)}{by}" + (f": {training}" if training else "")

    def _wait_for_space(self, why: str) -> None:
        """Pause with exponential backoff; disk statistics would not show a quota."""
        self._pause = min(max(2 * self._pause, POLL_SECONDS), LONGEST_PAUSE_SECONDS)
        where = f"in {self.folder} or a database"
        self._say(f"{why}, {where}: trying again in {self._pause:.1f} s; nothing is lost")
        time.sleep(self._pause)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False)
