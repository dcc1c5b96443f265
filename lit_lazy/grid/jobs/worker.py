"""A worker process: takes cells from the queue, trains them and records them, until none is left."""

import argparse
import gc
import json
import logging
import os
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

from lit_lazy.config.files import load_module
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.jobs.interrupts import EndIfInterrupted, Interrupts
from lit_lazy.grid.jobs.job import Job
from lit_lazy.grid.queue.liveness import Heartbeat, Membership, find_living
from lit_lazy.grid.queue.queue import CellLostError, Queue, Task
from lit_lazy.support.disk import is_disk_full
from lit_lazy.support.errors import UnfinishedError, describe_exception, one_line
from lit_lazy.support.provenance import git_sha
from lit_lazy.support.secrets import RedactingFormatter
from lit_lazy.tracking.loggers import open_loggers
from lit_lazy.tracking.spool import RunCard, Spool
from lit_lazy.tracking.store import TrackingError
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.distributed.process_group import RankLostError
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.module import DivergedError
from lit_lazy.training.result import RunResult
from lit_lazy.training.run import CellBusyError, read_finished, run

STORAGE_VARIABLE, TRACKING_VARIABLE = "LIT_LAZY_STORAGE", "LIT_LAZY_TRACKING"
"""Addresses that may hold passwords, and so are no arguments, which every user of a machine can read."""
DISK_FULL = 28
"""Exit status of a worker that could not write: errno's ENOSPC."""
INTERRUPTED = 130
"""Exit status of a worker that has requeued its cells."""
BEAT_SECONDS = 15.0
BUSY_SECONDS = 5.0
MOST_REFUSALS = 5
"""How often MLflow, answering, may refuse a result before its cell counts as failed."""

log = logging.getLogger("lit_lazy.worker")


@dataclass
class HeldCell:
    """A cell that this worker has claimed, and that the queue does not know the end of yet."""

    task: Task
    spool: Spool
    result: RunResult | None = None
    """Once it is trained."""
    refusals: int = 0


@dataclass
class Worker:
    """Executes cells of one ablation."""

    queue: Queue
    tracker: Tracker
    parent_id: str
    folder: Path
    """The ablation's folder; a cell's run folder is `cells/<key>` below it."""
    keep_checkpoints: bool = False
    keys: Set[str] | None = None
    """Take only these cells."""
    command: str | None = None
    """Token of the command that started it, without which it does not begin."""
    slot: int = 0
    """Its place among the workers of that command."""
    execution: Execution = ONE_DEVICE
    """How each cell is trained."""
    loggers: Sequence[str] = ()
    """Kinds of loggers beside MLflow, each below a cell's run folder."""
    _held: list[HeldCell] = field(default_factory=list)
    _interrupts: Interrupts = field(default_factory=Interrupts)

    def work(self, most: int | None = None) -> None:
        """Execute waiting cells until there is none, or `most` of them.

        A cell that fails is recorded, and the others are executed; while MLflow is away, trained cells wait for it.
        An interrupt is raised in training and in pauses alone, and requeues every cell that is held. A full disk
        ends the process (SystemExit): its cell is released when it is seen to be dead.
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
                    return  # it died before its successor could know of this worker
                while (most is None or done < most) and (held := self._claim(membership, heart)):
                    self._execute(held, heart)
                    self._record(heart)
                    done += 1
                while self._held:
                    self._pause()
                    self._record(heart)
            except KeyboardInterrupt:
                self._requeue_held(heart)
                raise
            except Exception as error:
                if is_disk_full(error):
                    log.error("no space left\n%s", traceback.format_exc())
                    raise SystemExit(DISK_FULL) from error
                raise

    def _claim(self, membership: Membership, heart: Heartbeat) -> HeldCell | None:
        self._interrupts.check()
        task = self.queue.claim(membership.identity, self.keys)
        if task is None:
            return None
        heart.hold(task)
        folder = self.folder / "cells" / task.cell.key
        held = HeldCell(task, Spool(self.tracker, folder, self.make_card(task.cell), lambda: self.queue.is_held(task)))
        self._held.append(held)
        return held

    def _drop(self, held: HeldCell, heart: Heartbeat) -> None:
        self._held.remove(held)
        heart.drop(held.task)

    def _execute(self, held: HeldCell, heart: Heartbeat) -> None:
        """Train a cell, which is held until its result is recorded."""
        task, spool = held.task, held.spool
        log.info("start %s seed %d (%s)", task.cell.variant, task.cell.seed, task.cell.key)
        try:
            # A finished cell only lacks its record.
            held.result = read_finished(spool.folder) or self._train(task, spool)
        except RankLostError as error:  # as if this process had died: so it is counted, and the cell resumes
            log.error("%s", error)
            raise SystemExit(1) from error
        except CellBusyError as error:
            self._requeue(task, str(error))
            self._drop(held, heart)
            self._pause()
        except Exception as error:
            if is_disk_full(error):
                raise
            self._handle_failure(task, spool, error)
            self._drop(held, heart)
        finally:
            _free_memory()

    def _pause(self) -> None:
        with self._interrupts.allow():
            time.sleep(BUSY_SECONDS)

    def _requeue_held(self, heart: Heartbeat) -> None:
        """What an interrupt leaves to others. The queue comes first: MLflow may take long to answer."""
        untrained = [held for held in self._held if held.result is None]
        for held in list(self._held):
            self._requeue(held.task, "interrupted" if held in untrained else "trained, and not logged yet")
            self._drop(held, heart)
        for held in untrained:
            self._report_failure(held.spool, "interrupted", "KILLED")

    def _handle_failure(self, task: Task, spool: Spool, error: Exception) -> None:
        """A cell may fail in any way: its reason is kept, and the rest of the grid is executed."""
        log.error("%s seed %d failed\n%s", task.cell.variant, task.cell.seed, traceback.format_exc())
        self._report_failure(spool, format_reason(error), "FAILED")
        self._fail(task, format_reason(error), final=isinstance(error, DivergedError))

    def _report_failure(self, spool: Spool, reason: str, status: Literal["FAILED", "KILLED"]) -> None:
        """Whatever goes wrong with it: the queue knows of the end, and the command has MLflow show it later."""
        try:
            spool.fail(reason, status)
        except Exception:
            log.exception("MLflow does not show yet that a run ended: %s", reason)

    def _train(self, task: Task, spool: Spool) -> RunResult:
        card = spool.card
        with (
            open_loggers(self.loggers, spool.folder, self.queue.name, card.name, card.config) as others,
            spool.send_in_background(),
            self._interrupts.allow(),
        ):
            result = run(
                from_dict(RunConfig, task.cell.config),
                spool.folder,
                logger=spool.make_logger(others),
                callbacks=[EndIfInterrupted(self._interrupts), *self._make_callbacks(task)],
                keep_checkpoint=self.keep_checkpoints,
                expected_key=task.cell.key,
                execution=self.execution,
            )
            for other in others:
                other.log_metrics(result.metrics, result.config["train"]["steps"])
            return result

    def _make_callbacks(self, task: Task) -> list[Callback]:  # noqa: ARG002
        """Lightning callbacks of a cell's training."""
        return []

    def _get_objective(self, result: RunResult) -> float:
        """What the queue keeps of a result."""
        return result.metrics["loss/val"]

    def _record(self, heart: Heartbeat) -> None:
        """Finish what was trained, in this order: result.json (there already), MLflow, the queue."""
        for held, result in [(held, held.result) for held in self._held if held.result]:
            task = held.task
            try:
                self.queue.check_held(task)
                held.spool.finish(result)
                self.queue.complete(task, self._get_objective(result))
                log.info("done %s seed %d", task.cell.variant, task.cell.seed)
            except TrackingError as error:
                if is_disk_full(error):
                    raise
                held.refusals += error.reachable
                log.warning("%s seed %d is not recorded yet: %s", task.cell.variant, task.cell.seed, error)
                if held.refusals < MOST_REFUSALS:
                    continue
                self._fail(task, format_reason(error))
            except CellLostError as error:
                log.warning("%s", error)
            self._drop(held, heart)

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

    def make_card(self, cell: Cell) -> RunCard:
        """How a cell presents itself in MLflow."""
        tags = {
            "kind": "cell",
            "ablation": self.queue.name,
            "variant": cell.variant,
            "source": cell.source,
            "seed": str(cell.seed),
            "cell": cell.key,
            "git_sha": git_sha(),
        }
        return RunCard(f"{cell.variant} seed {cell.seed}", tags, cell.axes, cell.config, self.parent_id)


def format_reason(error: BaseException) -> str:
    """Why a cell failed; running out of memory by one name, whatever raised it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {one_line(error)}"
    return describe_exception(error)


def _free_memory() -> None:
    """What a cell left behind must not count against the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prepare_process(job: Job) -> None:
    """What a process has to do once before it executes cells."""
    git_sha()
    torch.set_num_threads(job.threads)
    for file in job.files:
        load_module(file)
    if not gc.get_freeze_count():  # what is imported stays; to look through it would take half a second per cell
        gc.freeze()


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
    )


def main(queue_type: type[Queue] = Queue, worker_type: "type[Worker]" = Worker) -> int:
    """Entry point of a worker process, which `LocalPool` starts. Both addresses are in the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--parent", required=True)
    parser.add_argument("--command", help="token of the command's membership")
    parser.add_argument("--slot", type=int, default=0)
    parser.add_argument("--execution", type=json.loads, default={})
    parser.add_argument("--keep-checkpoints", action="store_true")
    parser.add_argument("--logger", dest="loggers", action="append", default=[])
    parser.add_argument("--keys", type=Path, help="file with the keys of the cells to take, one a line")
    parser.add_argument("--import", dest="files", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(RedactingFormatter("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    job = Job(
        storage=os.environ[STORAGE_VARIABLE],
        study=options.study,
        runs=options.runs,
        tracking_uri=os.environ[TRACKING_VARIABLE],
        parent_id=options.parent,
        command=options.command,
        threads=options.threads,
        keep_checkpoints=options.keep_checkpoints,
        keys=frozenset(options.keys.read_text().splitlines()) if options.keys else None,
        files=options.files,
        execution=Execution(**options.execution),
        loggers=tuple(options.loggers),
    )
    try:
        prepare_process(job)
        make_worker(job, queue_type, worker_type, options.slot).work()
    except KeyboardInterrupt:
        return INTERRUPTED
    except UnfinishedError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
