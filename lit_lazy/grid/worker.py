"""A worker executes the cells that it is given, one after the other."""

import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.config.user_files import load_module
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.cell_state import claim, give_back
from lit_lazy.grid.work_records import Ending, Job
from lit_lazy.support.disk import describe_failed_write, is_disk_full, open_private
from lit_lazy.support.error_messages import BusyError, UnfinishedError, describe_exception, one_line
from lit_lazy.support.provenance import git_sha
from lit_lazy.support.secrets import RedactingFormatter
from lit_lazy.training.callbacks_and_loggers import AtStart, MissedValidation
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.module import DivergedError
from lit_lazy.training.ranks import RankLostError
from lit_lazy.training.run import train_logged
from lit_lazy.training.run_folder import locate_cell, write_failure

Judge = Callable[[int, float], str]
"""Why a training is not worth its remaining steps, by its metric at a step; "" if it is."""

log = logging.getLogger("lit_lazy.worker")


class PrunedError(Exception):
    """The training is not worth its remaining steps."""


class Pruning(AtStart):
    """Ends a hopeless training with PrunedError after a validation."""

    def __init__(self, metric: str, judge: Judge) -> None:
        self.metric, self.judge = metric, judge

    def on_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:  # noqa: ARG002
        for part in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(part, MissedValidation) and part.repeated:
                self._judge(trainer, part.repeated[self.metric])

    def on_validation_end(self, trainer: L.Trainer, _module: L.LightningModule) -> None:  # pyrefly: ignore
        self._judge(trainer, float(trainer.callback_metrics[self.metric]))

    def _judge(self, trainer: L.Trainer, value: float) -> None:
        if reason := self.judge(trainer.global_step, value):
            raise PrunedError(reason)


def prepare_process(job: Job) -> None:
    """Prepare a process, once, to execute cells."""
    git_sha()
    torch.set_num_threads(job.threads)
    for file in job.files:
        load_module(file)
    if not gc.get_freeze_count():  # scanning all imported objects would take half a second per cell
        gc.freeze()
    gc.enable()


def execute(cell: Cell, job: Job, interrupts: Interrupts, judge: Judge) -> Ending:
    """Train a waiting cell in its folder. A failure is written there, whatever the error.

    Raises KeyboardInterrupt at an interrupt, with a checkpoint of the training.
    """
    try:
        return _execute(cell, job, interrupts, judge)
    except BusyError as error:  # also of a lease that was lost, where nothing may be written, not even a failure
        log.info("%s", error)
        return Ending(cell.key, "busy")


def _execute(cell: Cell, job: Job, interrupts: Interrupts, judge: Judge) -> Ending:
    folder, name = locate_cell(job.folder, cell.key), f"{cell.variant} seed {cell.seed}"
    callbacks: list[Callback] = [] if job.monitored is None else [Pruning(job.monitored, judge)]
    lock = None
    try:
        lock = claim(folder)
        if lock is None:
            return Ending(cell.key, "busy")
        log.info("start %s (%s)", name, cell.key)
        train_logged(
            from_dict(RunConfig, cell.config),
            folder,
            job.folder.name,
            name,
            job.loggers,
            interrupts=interrupts,
            callbacks=callbacks,
            keep_checkpoint=job.keep_checkpoints,
            expected_key=cell.key,
            execution=job.execution,
            lock=lock,
        )
        log.info("done %s", name)
        return Ending(cell.key, "done")
    except BusyError:
        raise
    except PrunedError as error:
        log.info("pruned %s: %s", name, error)
        write_failure(folder, str(error), final=True)  # another command may have given it to a worker too
        return Ending(cell.key, "pruned", str(error), final=True)
    except RankLostError as error:  # end like a killed worker, so that the death is counted and the cell resumes
        log.error("%s", error)
        os._exit(1)
    except Exception as error:
        if is_disk_full(error):
            log.exception("no space left")
            return Ending(cell.key, "disk_full", describe_exception(error))
        log.error("%s failed\n%s", name, traceback.format_exc())
        reason, final = format_reason(error), isinstance(error, DivergedError)
        write_failure(folder, reason, final)
        return Ending(cell.key, "failed", reason, final)
    finally:
        if lock is not None:
            give_back(folder, lock)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def format_reason(error: BaseException) -> str:
    """Why a cell failed; every out-of-memory error starts with the same words."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {one_line(error)}"
    return describe_failed_write(error) or describe_exception(error)


def serve(connection: Connection, job: Job, log_file: Path, environment: Mapping[str, str]) -> None:
    """Main function of a worker process: executes the cells that arrive, until the other end is closed.

    The process is in a session of its own, so that Ctrl-C reaches only the command.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while full := _log_to(log_file):
            connection.send(Ending(connection.recv().key, "disk_full", full))
        prepare_process(job)
        with Interrupts(patient=True) as interrupts:
            _serve(connection, job, interrupts)
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        return
    except UnfinishedError as error:
        log.error("%s", error)
        sys.exit(1)


def _log_to(file: Path) -> str:
    """Send to a file what this process says; returns why there is no room for it, "" if there is."""
    try:
        with open(file, "ab", opener=open_private) as opened:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(opened.fileno(), stream.fileno())
    except OSError as error:
        if not is_disk_full(error):
            raise
        return describe_exception(error)
    log_by(logging.StreamHandler(sys.stdout))
    return ""


def log_by(handler: logging.Handler) -> None:
    """Let a handler write what this process logs, without secrets."""
    handler.setFormatter(RedactingFormatter("%(asctime)s %(process)d %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _serve(connection: Connection, job: Job, interrupts: Interrupts) -> None:
    def judge(step: int, value: float) -> str:
        try:
            connection.send((step, value))
            return connection.recv()
        except (EOFError, OSError):  # the command died: another one judges, from the last checkpoint on
            raise KeyboardInterrupt from None

    while True:
        with interrupts.allow():
            cell = connection.recv()
        try:
            interrupts.check()
            ending = execute(cell, job, interrupts, judge)
        except KeyboardInterrupt:
            connection.send(Ending(cell.key, "interrupted"))
            raise
        connection.send(ending)
