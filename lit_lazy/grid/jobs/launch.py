"""Runs an ablation: enqueues missing cells, starts workers, shows progress, publishes the table."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from rich.console import Console

from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.changed_rows import describe_changes
from lit_lazy.grid.jobs.backend import (
    COMPILED,
    TAG,
    describe_portable_backend,
    keeps_another_backend,
    require_compiled_backend,
)
from lit_lazy.grid.jobs.job import Job, LaunchOptions, Work, is_over
from lit_lazy.grid.jobs.parent_run import ASIDE, open_parent_run, reset_grid
from lit_lazy.grid.jobs.pool import LocalPool, Pool
from lit_lazy.grid.jobs.progress import Progress, describe_training
from lit_lazy.grid.packed import TakenResult, find_shared, read_end
from lit_lazy.grid.plan import PLAN, Plan, open_records, read_plan, save_views
from lit_lazy.grid.queue.liveness import Membership, StalenessDetector, is_dead, remove_dead_locks
from lit_lazy.grid.queue.queue import FINISHED, Entry, Queue, State
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.support.disk import WRITE_REFUSED, describe_shortage, is_disk_full
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.provenance import git_sha, is_earlier
from lit_lazy.table.records import Table
from lit_lazy.tracking.databases import sqlite_file
from lit_lazy.tracking.store import TrackingError, default_uri
from lit_lazy.tracking.tracker import NOTE, TrackedRun, Tracker, join_note
from lit_lazy.training.result import DIAGNOSTICS, RESULT, RunResult
from lit_lazy.training.run_folder import CELLS, CHECKPOINTS, LAST, locate_cell

Q = TypeVar("Q", bound=Queue)
POLL_SECONDS = 1.0
LOOK_SECONDS = 5.0
"""Interval of searches for dead workers while none of this command's workers has died."""
STALE_SECONDS = 120.0
"""Time without a heartbeat after which a worker on another machine is dead; the interval is 15 s."""
MOST_CRASHES = 3
"""Deaths per worker slot, without a cell ending in between, after which the command gives up."""
MOST_DEATHS = 3
"""Deaths of a cell's workers, without progress in between, after which the cell has failed."""
LEAST_FREE_BYTES, LEAST_FREE_BYTES_OF_DATABASE = 2**24, 2**20
LONGEST_PAUSE_SECONDS = 60.0
"""Upper bound on the pause between retries when writes fail although the disk reports free space."""

log = logging.getLogger("lit_lazy.grid.jobs.launch")


class GridError(UnfinishedError):
    """A grid cannot continue."""


@dataclass(frozen=True)
class Grid(Work):
    """An ablation on an experiment, ready to run."""

    plan: Plan
    row_order: Sequence[str]
    taken: Mapping[str, TakenResult] = field(default_factory=dict)
    """Results by cell key from packed files."""


Publish = Callable[[Tracker, str, Path, bool], Table]
"""Writes the table and report of a parent run (id) into a folder; the flag is whether cells were executed."""


@dataclass(frozen=True)
class OpenGrid(Generic[Q]):
    """The connections of a running command."""

    queue: Q
    tracker: Tracker
    command: Membership


class Outcome(NamedTuple):
    """The table of a grid, whether all its cells are complete, and whether any was executed for it."""

    table: Table
    finished: bool
    executed: bool


def run_grid(grid: Grid, launch: LaunchOptions, console: Console, publish: Publish) -> Outcome:
    """Execute the missing cells of a grid and `publish` its table."""
    with open_grid(grid, launch, Queue, console) as opened:
        queue, tracker = opened.queue, opened.tracker
        with queue.lock():
            parent_id = _ensure_parent(grid, queue, tracker, console)
        recorded = _compare_with_mlflow(grid, queue, tracker, parent_id, console)
        taken = _take_results(grid, launch, opened, parent_id, recorded, console)
        with execute_cells(grid, launch, opened, parent_id, console, recorded=recorded, taken=taken) as executed:
            _report_failures(queue, tracker, parent_id)
            table = publish(tracker, parent_id, grid.folder, executed)
        return Outcome(table, is_finished(grid, queue), executed)


@contextmanager
def open_grid(work: Work, launch: LaunchOptions, queue_type: type[Q], console: Console) -> Iterator[OpenGrid[Q]]:
    """Open the queue and the MLflow experiment; this process counts as alive until the context exits.

    Other processes, on any machine, may execute the same work at the same time: all claim cells from one queue.
    """
    git_sha()
    work.folder.mkdir(parents=True, exist_ok=True)
    queue = queue_type(launch.storage or default_storage(work.runs), work.id)
    tracker = Tracker(default_uri(work.runs), work.runs, work.id)
    if launch.fresh:
        reset_grid(work, queue, tracker, console)
    members = work.folder / "workers"
    with Membership(members) as command:  # makes another process's --fresh fail while this one is alive
        yield OpenGrid(queue, tracker, command)
        remove_dead_locks(members, [entry.worker for entry in queue.entries("running")])


@contextmanager
def execute_cells(
    work: Work,
    launch: LaunchOptions,
    opened: OpenGrid[Q],
    parent_id: str,
    console: Console,
    notes: Callable[[], list[str]] = list,
    recorded: Mapping[str, float] | None = None,
    taken: Set[str] = frozenset(),
) -> Iterator[bool]:
    """Execute the missing cells, then the context's body as part of the parent run.

    Yields whether there is something new to publish. notes: further lines of the progress display. recorded: passed to
    `Queue.add_missing`. taken: keys of missing cells whose results were taken and only have to be recorded.
    """
    queue, tracker = opened.queue, opened.tracker
    supervisor = Supervisor(work, launch, queue, console)
    supervisor.release_dead()
    states, n = queue.states(), len(work.cells)
    ended = {key for key, state in states.items() if state in FINISHED} | set(recorded or ())
    left = sum(cell.key not in ended for cell in work.cells)
    compiled = _is_compiled(tracker, parent_id)
    if left and compiled:
        require_compiled_backend(work.id)
    queue.add_missing(work.cells, recorded)
    if not left and not tracker.was_cut_off(parent_id):
        console.print(f"{n} {work.noun}, all finished: nothing to do", highlight=False)
        yield False
        return
    taken_part = [f"{len(taken)} taken"] if taken else []
    counts = [f"{n - left} already finished", *taken_part, f"{left - len(taken)} to train"]
    console.print(f"{n} {work.noun}, {', '.join(counts)}", highlight=False)
    if left and not compiled and (line := describe_portable_backend(work.id)):
        console.print(line, highlight=False, soft_wrap=True)
    with _mark_running(work, queue, tracker, parent_id):
        if left:
            supervisor.launch = launch = _ensure_progress(launch, console)
            job = make_job(work, launch, opened, parent_id, compiled)
            if taken:
                _record_taken(job, taken)
            progress = Progress(queue, [cell.key for cell in work.cells], console, notes)
            supervisor.work(make_pool(job, launch), progress)
        yield True


def _ensure_progress(launch: LaunchOptions, console: Console) -> LaunchOptions:
    """The options, and one cell for each worker if the time limit has passed before any could start.

    Every command repeats the preparation: without that a limit shorter than it would never train anything.
    """
    if not is_over(launch.until):
        return launch
    console.print(
        "--limit: the preparation took all of it; each worker starts one cell, so that the grid goes on",
        highlight=False,
        soft_wrap=True,
    )
    return replace(launch, until=None, one_each=True)


@contextmanager
def _mark_running(work: Work, queue: Queue, tracker: Tracker, parent_id: str) -> Iterator[None]:
    """Set a parent run to running, and at the end to FINISHED or FAILED by its cells.

    An exception, or a time limit that leaves cells waiting, sets it to KILLED.
    """
    tracker.set_running(parent_id)
    try:
        yield
    except BaseException:
        try:
            tracker.set_ended(parent_id, "KILLED")
        except TrackingError as away:
            log.warning("MLflow is away (%s); it will show the grid as running until the command is given again", away)
        raise
    ended = "FINISHED" if is_finished(work, queue) else "KILLED" if count_waiting(work, queue) else "FAILED"
    tracker.set_ended(parent_id, ended)


def is_finished(work: Work, queue: Queue) -> bool:
    """Whether all cells are finished, none of them failed."""
    states = queue.states()
    return all(states.get(cell.key) in FINISHED for cell in work.cells)


def count_waiting(work: Work, queue: Queue) -> int:
    """The number of cells that wait, as a time limit leaves them."""
    states = queue.states()
    return sum(states.get(cell.key) == "waiting" for cell in work.cells)


def _is_compiled(tracker: Tracker, parent_id: str) -> bool:
    """Whether a grid began with the compiled backend of CPUs."""
    return tracker.read_tags(parent_id).get(TAG) == COMPILED


def make_job(work: Work, launch: LaunchOptions, opened: OpenGrid[Q], parent_id: str, compiled: bool) -> Job:
    """The job description for the workers. compiled: as in `Job`."""
    return Job(
        storage=opened.queue.url,
        study=work.id,
        runs=work.runs,
        tracking_uri=opened.tracker.secret_uri,
        parent_id=parent_id,
        command=opened.command.token if launch.launcher == "local" else None,
        threads=launch.threads,
        keep_checkpoints=launch.keep_checkpoints,
        keys=frozenset(cell.key for cell in work.cells) if launch.only_these else None,
        files=work.files,
        module=work.module,
        execution=launch.execution,
        loggers=launch.loggers,
        until=launch.until,
        one_each=launch.one_each,
        compiled=compiled,
    )


def make_pool(job: Job, launch: LaunchOptions) -> Pool:
    """The pool for a grid's workers, without starting any."""
    if launch.launcher == "local":
        return LocalPool(job, launch.workers)
    from lit_lazy.grid.jobs.ray_pool import RayPool

    return RayPool(job, launch.workers, launch.gpus)


def _report_failures(queue: Queue, tracker: Tracker, parent_id: str) -> None:
    """Mark failed cells in MLflow whose workers could not: they were killed, or MLflow was away."""
    failed = {entry.key: entry.reason for entry in queue.entries("failed")}
    if failed:
        for run in tracker.find_children(parent_id):
            if run.tags["cell"] in failed and run.state == "running":
                tracker.fail(run.run_id, failed[run.tags["cell"]])


def _ensure_parent(grid: Grid, queue: Queue, tracker: Tracker, console: Console) -> str:
    """Start or resume the parent run of the grid and update its plan; returns the run's id."""
    plan = grid.plan
    tags = {"kind": "ablation", "ablation": grid.id, "git_sha": git_sha(), NOTE: join_note([plan.command], PLAN)}
    parent_id, former = open_parent_run(grid, queue, tracker, tags, {}, PLAN, Plan.from_json, console)
    if former is not None:
        plan = plan.merge(former, grid.row_order, partial(_find_changes, grid, tracker, parent_id))
    tracker.log_text(parent_id, plan.to_json(), PLAN)
    save_views(tracker, plan, plan.columns, ended=False)
    return parent_id


def check_unchanged(grid: Grid) -> None:
    """Raise ValueError, as `run_grid` does, if the trainings of rows changed since the grid began. Creates nothing."""
    with open_records(grid.folder) as records:
        if records:
            grid.plan.merge(read_plan(*records), grid.row_order, partial(_find_changes, grid, *records))


def _find_changes(grid: Grid, tracker: Tracker, parent_id: str, variant: str) -> str:
    """What changed in a row since its first cell."""
    begun = [run.params for run in tracker.find_children(parent_id) if run.tags["variant"] == variant]
    now = [cell.config for cell in grid.cells if cell.variant == variant]
    if not (begun and now):
        return "its settings, code or data changed"
    return describe_changes(begun[0], now[0]) or "its code or data changed"


def _compare_with_mlflow(
    grid: Grid, queue: Queue, tracker: Tracker, parent_id: str, console: Console
) -> dict[str, float]:
    """Losses of cells that are complete in MLflow but missing from the queue; enqueues again what MLflow has lost.

    Either database may have been lost, or be an older copy that was put back.
    """
    states = queue.states()  # before MLflow, where a cell is complete first
    losses = {
        run.tags["cell"]: run.metrics["loss/val"]
        for run in tracker.find_children(parent_id)
        if run.state == "complete" and not _lacks_diagnostics(grid.folder, tracker, run)
    }
    ended = [cell for cell in grid.cells if states.get(cell.key) == "complete"]
    if lost := [cell for cell in ended if cell.key not in losses]:
        queue.add_again(lost)  # a worker that finds a result only sends it
        sent = sum(RunResult.peek(locate_cell(grid.folder, cell.key)) is not None for cell in lost)
        console.print(
            f"MLflow lacks {len(lost)} of {len(ended)} complete cells (an older database?): {sent} sent again from "
            f"result.json, {len(lost) - sent} trained again",
            highlight=False,
            soft_wrap=True,
        )
    return {cell.key: losses[cell.key] for cell in grid.cells if cell.key in losses and cell.key not in states}


def _lacks_diagnostics(folder: Path, tracker: Tracker, run: TrackedRun) -> bool:
    """Whether MLflow lacks what a cell's folder has, because its artifacts were copied before its database."""
    return (locate_cell(folder, run.tags["cell"]) / DIAGNOSTICS).exists() and tracker.lacks_file(run, DIAGNOSTICS)


def _take_results(
    grid: Grid,
    launch: LaunchOptions,
    opened: OpenGrid[Queue],
    parent_id: str,
    recorded: Collection[str],
    console: Console,
) -> frozenset[str]:
    """Write the results that packed files and other grids have of missing cells.

    Returns the keys of missing cells with a taken result, also one that a command wrote that was then killed.
    """
    states = opened.queue.states()
    missing = [cell for cell in grid.cells if states.get(cell.key) not in FINISHED and cell.key not in recorded]
    place = {cell.key: locate_cell(grid.folder, cell.key) for cell in missing}
    untrained = [
        cell for cell in missing if states.get(cell.key) != "running" and not (place[cell.key] / RESULT).exists()
    ]
    taken = _find_results(grid, launch, untrained, opened.tracker, parent_id) if untrained else {}
    _note_known_results(grid, taken.values(), opened.tracker, parent_id)
    for key, one in taken.items():
        one.write(place[key])
    for origin, count in Counter(one.result.taken_from for one in taken.values()).items():
        line = f"{count} of {len(grid.cells)} cells are taken from {origin}, not trained"
        console.print(line, highlight=False, soft_wrap=True)
    found = {key: RunResult.peek(folder) for key, folder in place.items()}
    return frozenset(key for key, result in found.items() if result and result.taken_from)


def _note_known_results(grid: Grid, taken: Iterable[TakenResult], tracker: Tracker, parent_id: str) -> None:
    """Note in the plan's declaration if a result cannot be shown to be younger than its commit.

    Those are taken results, and those that --fresh moved aside, which the same trainings give again.
    """
    if grid.plan.declaration is None or not grid.plan.declaration.commit:
        return
    keys = {cell.key for cell in grid.cells}
    aside = [folder for folder in grid.runs.glob(f"{escape(grid.id)}{ASIDE}*/cells/*") if folder.name in keys]
    again = [(result, read_end(folder)) for folder in aside if (result := RunResult.peek(folder))]
    known = [*((one.result, one.ended) for one in taken), *again]
    made = {(result.environment.get("git_sha", ""), ended) for result, ended in known}
    plan = read_plan(tracker, parent_id) if made else grid.plan
    declared = plan.declaration
    if declared is None or declared.seen:
        return
    if not all(is_earlier(declared.commit, Path(grid.files[0]), commit, seconds) for commit, seconds in made):
        tracker.log_text(parent_id, replace(plan, declaration=replace(declared, seen=True)).to_json(), PLAN)


def _find_results(
    grid: Grid, launch: LaunchOptions, untrained: Sequence[Cell], tracker: Tracker, parent_id: str
) -> dict[str, TakenResult]:
    """The results by key. Raises a one-line ValueError for packed ones of another CPU backend than the grid keeps."""
    taken = {cell.key: grid.taken[cell.key] for cell in untrained if cell.key in grid.taken}
    compiled = _is_compiled(tracker, parent_id)
    if not launch.mixed and keeps_another_backend(compiled):
        if compiled:
            require_compiled_backend(grid.id)
        if taken:
            raise ValueError(f"--results: {describe_portable_backend(grid.id)}; --mixed takes the cells all the same")
        return {}
    if launch.fresh or launch.keep_checkpoints:  # both ask for a training
        return taken
    return taken | find_shared([cell for cell in untrained if cell.key not in taken], grid.folder, launch.mixed)


def _record_taken(job: Job, taken: Set[str]) -> None:
    """Record cells whose results were taken, here: workers on other machines do not see the run folders."""
    from lit_lazy.grid.jobs.worker import make_worker  # imports Lightning

    make_worker(replace(job, keys=taken, command=None, until=None, one_each=False)).work()


class Supervisor:
    """Runs workers until no cell waits or runs, and releases the cells of dead workers."""

    def __init__(self, work: Work, launch: LaunchOptions, queue: Queue, console: Console) -> None:
        self.folder, self.launch, self.queue, self.console = work.folder, launch, queue, console
        self.cells = {cell.key: cell for cell in work.cells}
        self._watch = StalenessDetector(STALE_SECONDS)
        self._retries = Counter[str]()
        self._last_search = -LOOK_SECONDS
        self._crashes = self._ended = 0
        self._reported_others = self._started = False
        self._pause = 0.0

    def work(self, pool: Pool, progress: Progress) -> None:
        """Return when every cell has ended, or this command's workers have after the time limit.

        Ctrl-C stops the workers after they have requeued their cells.
        """
        with progress:
            try:
                while self._step(pool, progress):
                    time.sleep(POLL_SECONDS)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and len(pool):
                    self._say("stopping: the workers requeue their cells; Ctrl-C again kills them")
                pool.stop()
                raise

    def _step(self, pool: Pool, progress: Progress) -> bool:
        """Check workers and cells once; returns whether there is anything left to wait for."""
        try:
            ended = pool.reap()
            if ended.file_too_long:
                raise GridError(f"{WRITE_REFUSED}, then run the same command again; nothing is lost")
            if ended.disk_full:
                self._wait_for_space()
            if ended.crashed or ended.disk_full or time.monotonic() - self._last_search > LOOK_SECONDS:
                self.release_dead(full=ended.disk_full > 0)
                progress.show_running([self._describe_running(entry) for entry in self.queue.entries("running")])
            states = self._read_states()
            over = is_over(self.launch.until) or (self.launch.one_each and self._started)
            while not over and "failed" in states.values() and self._retry_failed():
                states = self._read_states()  # otherwise the last cell would seem to have ended
            progress.update(states)
            counts = Counter[str](states.values())
            self._count_crashes(ended.crashed, counts, pool)
            pool.start(most=0 if over else counts["waiting"])
            self._started = True
        except Exception as error:
            if not is_disk_full(error):
                raise
            self._wait_for_space()
            return True
        if over:
            return bool(len(pool))
        if not len(pool) and counts["running"]:
            self._report_other_workers()
        return bool(len(pool) or counts["waiting"] or counts["running"])

    def release_dead(self, full: bool = False) -> None:
        """Release the cells of dead workers and print a line for each. full: whether they ended for lack of space."""
        self._last_search = time.monotonic()
        stale = self._watch.find_stale(self.queue.beats(), self._last_search)
        for entry in self.queue.entries("running"):
            dead = is_dead(entry.worker, self.folder / "workers")
            if dead or (dead is None and entry.trial_id in stale):
                waits = self.queue.release(entry, self._read_progress(entry), None if full else MOST_DEATHS)
                where = f"process {entry.worker['pid']} on {entry.worker['host']}"
                then = "it waits again" if waits else f"{MOST_DEATHS} times without progress, so it has failed"
                how = "ended" if full else "died"
                self._say(f"{entry.variant} seed {entry.seed}: its worker ({where}) {how}; {then}")

    def _describe_running(self, entry: Entry) -> str:
        """A running cell with its step, loss and the time left, if its folder is on this machine."""
        cell = self.cells.get(entry.key)
        steps = cell.config["train"]["steps"] if cell is not None and cell.config else None  # a point has none
        training = describe_training(locate_cell(self.folder, entry.run), steps)
        return f"{format_entry(entry)}: {training}" if training else format_entry(entry)

    def _read_progress(self, entry: Entry) -> str:
        """A value that changes whenever a cell makes progress; "" if its folder is on another machine."""
        try:
            return str((locate_cell(self.folder, entry.run) / CHECKPOINTS / LAST).stat().st_mtime_ns)
        except FileNotFoundError:
            return ""

    def _read_states(self) -> dict[str, State]:
        return {key: state for key, state in self.queue.states().items() if key in self.cells}

    def _retry_failed(self) -> bool:
        """Requeue failed cells up to `retry_failed` times each, except final failures; returns whether any was."""
        most, before = self.launch.retry_failed, self._retries.total()
        for entry in self.queue.entries("failed") if most else ():
            if entry.key in self.cells and not entry.final and self._retries[entry.key] < most:
                self._retries[entry.key] += 1
                self.queue.add_missing([self.cells[entry.key]])
                count = f"{self._retries[entry.key]}/{most}"
                self._say(f"{entry.variant} seed {entry.seed} failed ({entry.reason}); retry {count}")
        return self._retries.total() > before

    def _count_crashes(self, crashed: int, counts: Mapping[str, int], pool: Pool) -> None:
        ended = sum(counts[state] for state in (*FINISHED, "failed"))
        if ended > self._ended:
            self._pause = 0.0
        self._crashes = 0 if ended > self._ended else self._crashes + crashed
        self._ended = ended
        if self._crashes >= MOST_CRASHES * self.launch.workers:
            raise GridError(f"workers keep dying before they finish a cell: {pool.describe_last_failure()}")

    def _report_other_workers(self) -> None:
        if not self._reported_others:
            self._reported_others = True
            held = [format_entry(entry) for entry in self.queue.entries("running") if entry.key in self.cells]
            self._say(
                f"waiting for workers that this process did not start: {'; '.join(held)}. If they die, their cells are "
                "released; Ctrl-C ends the wait, not the workers"
            )

    def _wait_for_space(self) -> None:
        """Wait until results and databases have room; pause with exponential backoff if they seem to have it."""
        if missing := self._describe_missing_space():
            self._say(f"no space left: waiting until there is {missing}; nothing is lost")
            while self._describe_missing_space():
                time.sleep(POLL_SECONDS)
            self._say("there is space again: resuming")
            return
        repeated = self._pause > 0  # the first time, space may have been freed since
        self._pause = min(max(2 * self._pause, POLL_SECONDS), LONGEST_PAUSE_SECONDS)
        if repeated:
            places = " and ".join(
                map(str, {folder.stat().st_dev: folder for folder, _ in self._list_places()}.values())
            )
            self._say(
                f"a write failed for lack of space, but there is some in {places} (a quota? another disk?): retrying "
                f"in {self._pause:.0f} s; see {self.folder}/worker-*.log"
            )
        time.sleep(self._pause)

    def _list_places(self) -> list[tuple[Path, int]]:
        """The folders that this grid writes to, which may be on several disks, and the bytes that must be free."""
        files = [sqlite_file(url) for url in (self.queue.url, default_uri(self.folder.parent))]
        places = [(file.parent, LEAST_FREE_BYTES_OF_DATABASE) for file in files if file]
        sizes = [path.stat().st_size for path in self.folder.glob(f"{CELLS}/*/{CHECKPOINTS}/{LAST}")]
        needed = max(LEAST_FREE_BYTES, 3 * max(sizes, default=0))
        running = [locate_cell(self.folder, entry.run) for entry in self.queue.entries("running")]
        cells = [folder for folder in (*running, self.folder / CELLS) if folder.is_dir()]
        return [*places, *((folder, needed) for folder in (*cells, self.folder))]

    def _describe_missing_space(self) -> str:
        """The missing space of each disk, by folder; "" if there is enough.

        Every folder is tried, since a quota may be that of one.
        """
        lacks = {
            folder.stat().st_dev: f"room for {what} in {folder}"
            for folder, size in self._list_places()
            if (what := describe_shortage(folder, size))
        }
        return " and ".join(lacks.values())

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False)


def format_entry(entry: Entry) -> str:
    """A running cell with its process, host and start time."""
    since = f" since {entry.since:%a %H:%M:%S}" if entry.since else ""
    worker = entry.worker
    return f"{entry.variant} seed {entry.seed} by process {worker['pid']} on {worker['host']}{since}"
