"""A worker process: takes cells from the queue, trains them, and does the bookkeeping, until none is left."""

import argparse
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from lightning.pytorch.callbacks import Callback

from lit_lazy.config.canonical import from_dict
from lit_lazy.config.files import load_module
from lit_lazy.config.schema import RunConfig
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.queue.membership import Heart, Membership
from lit_lazy.grid.queue.queue import LostError, Queue, Task
from lit_lazy.support.disk import is_disk_full
from lit_lazy.support.errors import named, one_line
from lit_lazy.support.provenance import git_sha
from lit_lazy.tracking.spool import Card, Spool
from lit_lazy.tracking.tracker import Tracker, TrackingError
from lit_lazy.training.module import DivergedError
from lit_lazy.training.result import RunResult
from lit_lazy.training.run import CellBusyError, run

STORAGE_VARIABLE = "LIT_LAZY_STORAGE"
DISK_FULL = 28
"""Exit status of a worker that could not write: errno's ENOSPC."""
BEAT_SECONDS = 15.0
BUSY_SECONDS = 5.0
MOST_REFUSALS = 5
"""How often MLflow, answering, may refuse a result before its cell counts as failed."""

log = logging.getLogger("lit_lazy.worker")


@dataclass(frozen=True)
class Job:
    """What every worker of a grid has to know."""

    storage: str
    study: str
    runs: Path
    tracking_uri: str
    parent_id: str
    threads: int
    keep_checkpoints: bool
    keys: frozenset[str] | None
    """Take only these cells; None for all."""
    files: Sequence[Path]
    """Python files that define classes of the cells' configs."""
    module: str = "lit_lazy.grid.work.worker"
    """What a worker process on this machine runs."""

    @property
    def folder(self) -> Path:
        """The grid's folder."""
        return self.runs / self.study


@dataclass
class Booking:
    """A trained cell that MLflow and the queue do not know of yet."""

    task: Task
    spool: Spool
    result: RunResult
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
    _bookings: list[Booking] = field(default_factory=list)

    def work(self, most: int | None = None) -> None:
        """Execute waiting cells until there is none, or `most` of them.

        A cell that fails is recorded, and the rest goes on; where MLflow is away, trained cells are booked when it is
        back. A full disk ends the process (SystemExit): its cell is released when it is seen to be dead.
        """
        with Membership(self.folder / "workers") as membership, Heart(self.queue, BEAT_SECONDS) as heart:
            try:
                done = 0
                while (most is None or done < most) and (task := self._claim(membership)):
                    heart.hold(task)
                    if not self._execute(task):
                        heart.drop(task)
                    self._book(heart)
                    done += 1
                while self._bookings:
                    time.sleep(BUSY_SECONDS)
                    self._book(heart)
            except KeyboardInterrupt:
                for booking in self._bookings:
                    self._return(booking.task, "trained, and not logged yet")
                raise
            except Exception as error:
                if is_disk_full(error):
                    log.error("no space left\n%s", traceback.format_exc())
                    raise SystemExit(DISK_FULL) from error
                raise

    def _claim(self, membership: Membership) -> Task | None:
        end_if_interrupted()
        return self.queue.claim(membership.identity, self.keys)

    def _execute(self, task: Task) -> bool:
        """Train a cell; whether it is still held, to be booked."""
        cell = task.cell
        log.info("start %s seed %d (%s)", cell.variant, cell.seed, cell.key)
        folder = self.folder / "cells" / cell.key
        spool = Spool(self.tracker, folder, self.card(cell))
        try:
            # A finished cell only lacks bookkeeping.
            result = RunResult.read(folder) or self._train(task, folder, spool)
            self._bookings.append(Booking(task, spool, result))
            return True
        except KeyboardInterrupt:
            spool.fail("interrupted", "KILLED")
            self._return(task, "interrupted")
            raise
        except CellBusyError as error:
            self._return(task, str(error))
            time.sleep(BUSY_SECONDS)
        except Exception as error:
            if is_disk_full(error):
                raise
            self._end_early(task, spool, error)
        finally:
            _free_memory()
        return False

    def _end_early(self, task: Task, spool: Spool, error: Exception) -> None:
        """A cell may fail in any way: its reason is kept, and the rest of the grid goes on."""
        log.error("%s seed %d failed\n%s", task.cell.variant, task.cell.seed, traceback.format_exc())
        spool.fail(reason_of(error), "FAILED")
        self._fail(task, reason_of(error), final=isinstance(error, DivergedError))

    def _train(self, task: Task, folder: Path, spool: Spool) -> RunResult:
        with spool.sending():
            return run(
                from_dict(RunConfig, task.cell.config),
                folder,
                logger=spool.logger(),
                callbacks=[EndIfInterrupted(), *self._callbacks(task)],
                keep_checkpoint=self.keep_checkpoints,
                expected_key=task.cell.key,
            )

    def _callbacks(self, task: Task) -> list[Callback]:  # noqa: ARG002
        """Lightning callbacks of a cell's training."""
        return []

    def _value(self, result: RunResult) -> float:
        """What the queue keeps of a result."""
        return result.metrics["loss/val"]

    def _book(self, heart: Heart) -> None:
        """Finish what was trained, in this order: result.json (there already), MLflow, the queue."""
        for booking in list(self._bookings):
            task = booking.task
            try:
                booking.spool.finish(booking.result)
                self.queue.complete(task, self._value(booking.result))
                log.info("done %s seed %d", task.cell.variant, task.cell.seed)
            except TrackingError as error:
                if is_disk_full(error):
                    raise
                booking.refusals += error.reachable
                log.warning("%s seed %d is not booked yet: %s", task.cell.variant, task.cell.seed, error)
                if booking.refusals < MOST_REFUSALS:
                    continue
                self._fail(task, reason_of(error))
            except LostError as error:
                log.warning("%s", error)
            self._bookings.remove(booking)
            heart.drop(task)

    def _return(self, task: Task, reason: str) -> None:
        try:
            self.queue.put_back(task, reason)
        except LostError as error:
            log.warning("%s", error)

    def _fail(self, task: Task, reason: str, final: bool = False) -> None:
        try:
            self.queue.fail(task, reason, final)
        except LostError as error:
            log.warning("%s", error)

    def card(self, cell: Cell) -> Card:
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
        return Card(f"{cell.variant} seed {cell.seed}", tags, cell.axes, cell.config, self.parent_id)


def reason_of(error: BaseException) -> str:
    """Why a cell failed; running out of memory by one name, whatever raised it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {one_line(error)}"
    return named(error)


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


def make_worker(job: Job, queue_type: type[Queue] = Queue, worker_type: "type[Worker]" = Worker) -> Worker:
    """A worker of a grid."""
    return worker_type(
        queue_type(job.storage, job.study),
        Tracker(job.tracking_uri, job.runs, job.study),
        job.parent_id,
        job.folder,
        job.keep_checkpoints,
        job.keys,
    )


_interrupted = threading.Event()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    _interrupted.set()
    raise KeyboardInterrupt


def end_if_interrupted() -> None:
    """Raise KeyboardInterrupt again if it was lost: Python drops what is raised in the callback of a weak reference."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


class EndIfInterrupted(Callback):
    """Looks for a lost interrupt before every step."""

    def on_train_batch_start(self, *_args: object, **_kwargs: object) -> None:
        end_if_interrupted()


def main(queue_type: type[Queue] = Queue, worker_type: "type[Worker]" = Worker) -> int:
    """Entry point of a worker process, which `LocalPool` starts. The storage's URL is in the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tracking-uri", required=True)
    parser.add_argument("--parent", required=True)
    parser.add_argument("--keep-checkpoints", action="store_true")
    parser.add_argument("--keys", type=Path, help="file with the keys of the cells to take, one a line")
    parser.add_argument("--import", dest="files", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, _interrupt)

    job = Job(
        storage=os.environ[STORAGE_VARIABLE],
        study=options.study,
        runs=options.runs,
        tracking_uri=options.tracking_uri,
        parent_id=options.parent,
        threads=options.threads,
        keep_checkpoints=options.keep_checkpoints,
        keys=frozenset(options.keys.read_text().splitlines()) if options.keys else None,
        files=options.files,
    )
    prepare_process(job)
    worker = make_worker(job, queue_type, worker_type)
    try:
        worker.work()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
