"""Worker process: claims cells from the queue, trains and records them until none is left."""

import gc
import logging
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch.callbacks import Callback

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.config.user_files import load_module
from lit_lazy.grid.jobs.backend import hide_compiled_backend, require_compiled_backend
from lit_lazy.grid.jobs.job import DISK_FULL, FILE_TOO_LONG, INTERRUPTED, Job, is_over
from lit_lazy.grid.queue.liveness import Heartbeat, Membership, find_living
from lit_lazy.grid.queue.queue import CellLostError, Queue, Task
from lit_lazy.support.disk import describe_failed_write, is_disk_full, is_file_too_long
from lit_lazy.support.errors import UnfinishedError, describe_exception, one_line
from lit_lazy.support.provenance import git_sha
from lit_lazy.support.secrets import RedactingFormatter
from lit_lazy.tracking.store import TrackingError
from lit_lazy.tracking.tracked_run import ActiveRun
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.distributed.process_group import RankLostError
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.module import DivergedError
from lit_lazy.training.result import RunResult
from lit_lazy.training.run import CellBusyError, read_finished
from lit_lazy.training.run_folder import locate_cell

BEAT_SECONDS = 15.0
BUSY_SECONDS = 5.0
MOST_REFUSALS = 5
"""Rejections of a result by a reachable MLflow after which its cell has failed."""

log = logging.getLogger("lit_lazy.worker")


@dataclass
class Worker:
    """Executes cells of one ablation."""

    queue: Queue
    tracker: Tracker
    parent_id: str
    folder: Path
    """The ablation's folder; run folders are `cells/<key>` inside it."""
    keep_checkpoints: bool = False
    keys: Set[str] | None = None
    """Claim only these cells; None for all."""
    command: str | None = None
    """Token of the command that started it; the worker exits if that command has died."""
    slot: int = 0
    """Index among the workers of that command."""
    execution: Execution = ONE_DEVICE
    """How each cell is trained."""
    loggers: Sequence[str] = ()
    """Kinds of loggers in addition to MLflow, each in a cell's run folder."""
    until: float | None = None
    """Time after which it claims no cell; None for no limit."""
    _held: list[tuple[Task, ActiveRun]] = field(default_factory=list)
    """Claimed cells whose end is not recorded in the queue yet."""
    _interrupts: Interrupts = field(default_factory=lambda: Interrupts(patient=True))

    def work(self, most: int | None = None) -> None:
        """Execute waiting cells until none is left or the time limit has passed, or up to `most` of them.

        A failed cell is recorded and the others are executed; while MLflow is away, trained cells wait for it. An
        interrupt takes effect only in training and in pauses, and requeues every held cell. A full disk, or a limit on
        the size of files, raises the error that reports it; another process releases the cell.
        """
        with (
            self._interrupts,
            Membership(self.folder / "workers", self.command, self.slot) as membership,
            Heartbeat(self.queue, BEAT_SECONDS) as heart,
        ):
            try:
                done = 0
                if self.command and self.command not in {
                    member.token for member in find_living(self.folder / "workers")
                }:
                    return  # the command died before its successor could see this worker
                while (most is None or done < most) and (held := self._claim(membership, heart)):
                    self._execute(*held, heart)
                    self._record(heart)
                    done += 1
                while self._held:
                    self._pause()
                    self._record(heart)
            except KeyboardInterrupt:
                self._requeue_held(heart)
                raise

    def _claim(self, membership: Membership, heart: Heartbeat) -> tuple[Task, ActiveRun] | None:
        self._interrupts.check()
        task = None if is_over(self.until) else self.queue.claim(membership.identity, self.keys)
        if task is None:
            return None
        heart.hold(task)
        self._held.append((task, self.make_run(task)))
        return self._held[-1]

    def _drop(self, task: Task, run: ActiveRun, heart: Heartbeat) -> None:
        self._held.remove((task, run))
        heart.drop(task)

    def _execute(self, task: Task, run: ActiveRun, heart: Heartbeat) -> None:
        """Train a cell, which stays held until its result is recorded."""
        log.info("start %s seed %d (%s)", task.cell.variant, task.cell.seed, task.cell.key)
        try:
            run.result = read_finished(run.folder)
            if run.result is None:  # otherwise only its record is missing
                self._train(task, run)
        except RankLostError as error:  # end like a killed worker, so that the death is counted and the cell resumes
            log.error("%s", error)
            raise SystemExit(1) from error
        except CellBusyError as error:
            self._requeue(task, str(error))
            self._drop(task, run, heart)
            self._pause()
        except Exception as error:
            if find_write_status(error) is not None:
                raise
            self._handle_failure(task, run, error)
            self._drop(task, run, heart)
        finally:
            _free_memory()

    def _pause(self) -> None:
        with self._interrupts.allow():
            time.sleep(BUSY_SECONDS)

    def _requeue_held(self, heart: Heartbeat) -> None:
        """Requeue all held cells after an interrupt; the queue goes first, because MLflow may be slow to answer."""
        untrained = [(task, run) for task, run in self._held if run.result is None]
        for task, run in list(self._held):
            self._requeue(task, "interrupted" if run.result is None else "trained, and not logged yet")
            self._drop(task, run, heart)
        for _, run in untrained:
            self._report_failure(run, "interrupted", "KILLED")

    def _handle_failure(self, task: Task, run: ActiveRun, error: Exception) -> None:
        """Record why a cell failed, whatever the error, so that the rest of the grid is executed."""
        log.error("%s seed %d failed\n%s", task.cell.variant, task.cell.seed, traceback.format_exc())
        self._report_failure(run, format_reason(error), "FAILED")
        self._fail(task, format_reason(error), final=isinstance(error, DivergedError))

    def _report_failure(self, run: ActiveRun, reason: str, status: Literal["FAILED", "KILLED"]) -> None:
        """Report to MLflow and ignore all errors: the queue holds the state, and the command updates MLflow later."""
        try:
            run.fail(reason, status)
        except Exception:
            log.exception("MLflow does not show yet that a run ended: %s", reason)

    def _train(self, task: Task, run: ActiveRun) -> None:
        run.train(
            from_dict(RunConfig, task.cell.config),
            self.loggers,
            interrupts=self._interrupts,
            callbacks=self._make_callbacks(task),
            keep_checkpoint=self.keep_checkpoints,
            expected_key=task.cell.key,
            execution=self.execution,
        )

    def _make_callbacks(self, task: Task) -> list[Callback]:  # noqa: ARG002
        return []

    def _get_objective(self, result: RunResult) -> float:
        """The value that the queue stores for a result."""
        return result.metrics["loss/val"]

    def _record(self, heart: Heartbeat) -> None:
        """Record trained cells in this order: result.json (exists already), MLflow, the queue."""
        for task, run, result in [(task, run, run.result) for task, run in self._held if run.result]:
            try:
                self.queue.check_held(task)
                run.finish(result)
                self.queue.complete(task, self._get_objective(result))
                log.info("done %s seed %d", task.cell.variant, task.cell.seed)
            except TrackingError as error:
                if find_write_status(error) is not None:
                    raise
                run.refusals += error.reachable
                log.warning("%s seed %d is not recorded yet: %s", task.cell.variant, task.cell.seed, error)
                if run.refusals < MOST_REFUSALS:
                    continue
                self._fail(task, format_reason(error))
            except CellLostError as error:
                log.warning("%s", error)
            self._drop(task, run, heart)

    def _requeue(self, task: Task, reason: str) -> None:
        try:
            self.queue.requeue(task, reason)
        except CellLostError as error:
            log.warning("%s", error)

    def _fail(self, task: Task, reason: str, final: bool = False) -> None:
        try:
            self.queue.fail(task, reason, final)
        except CellLostError as error:
            log.warning("%s", error)

    def make_run(self, task: Task) -> ActiveRun:
        """The run of a claimed cell."""
        cell = task.cell
        tags = {
            "kind": "cell",
            "ablation": self.queue.name,
            "variant": cell.variant,
            "source": cell.source,
            "seed": str(cell.seed),
            "cell": cell.key,
            "git_sha": git_sha(),
        }
        return ActiveRun(
            self.tracker,
            locate_cell(self.folder, cell.key),
            f"{cell.variant} seed {cell.seed}",
            tags,
            cell.axes,
            cell.config,
            self.parent_id,
            lambda: self.queue.is_held(task),
        )


def find_write_status(error: BaseException) -> int | None:
    """The exit status of a worker that cannot write for a cause that every cell shares; None for other exceptions."""
    if is_disk_full(error):
        return DISK_FULL
    return FILE_TOO_LONG if is_file_too_long(error) else None


def format_reason(error: BaseException) -> str:
    """Why a cell failed; every out-of-memory error starts with the same words."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {one_line(error)}"
    return describe_exception(error)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prepare_process(job: Job) -> None:
    """Prepare a process, once, to execute cells. Raises ValueError if it lacks the grid's backend."""
    if job.compiled:
        require_compiled_backend(job.study)
    elif job.compiled is False:
        hide_compiled_backend()
    git_sha()
    torch.set_num_threads(job.threads)
    for file in job.files:
        load_module(file)
    if not gc.get_freeze_count():  # scanning all imported objects would take half a second per cell
        gc.freeze()
    gc.enable()


def make_worker(
    job: Job, queue_type: type[Queue] = Queue, worker_type: "type[Worker]" = Worker, slot: int = 0
) -> Worker:
    """A worker of a grid."""
    return worker_type(
        queue_type(job.storage, job.study),
        Tracker(job.tracking_uri, job.runs, job.study),
        job.parent_id,
        job.folder,
        job.keep_checkpoints,
        job.keys,
        job.command,
        slot,
        job.execution,
        job.loggers,
        job.until,
    )


def main(queue_type: type[Queue] = Queue, worker_type: "type[Worker]" = Worker) -> int:
    """Entry point of a worker process started by `LocalPool`, with its job and slot on standard input."""
    job, slot = pickle.load(sys.stdin.buffer)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare_process(job)
        make_worker(job, queue_type, worker_type, slot).work(most=1 if job.one_each else None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if (status := find_write_status(error)) is not None:  # first: MLflow's errors are UnfinishedErrors too
            log.exception("%s", describe_failed_write(error))
            return status
        if not isinstance(error, UnfinishedError):
            raise
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
