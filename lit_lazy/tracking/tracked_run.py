"""A run tracked in MLflow: a cell of a grid, or the training of `lit-lazy train`."""

import logging
import shlex
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from filelock import AcquireReturnProxy, BaseFileLock, Timeout

from lit_lazy.attention import NoBias
from lit_lazy.config.key import cell_key, require_unedited_code
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.support.console import get_program_name
from lit_lazy.support.disk import check_writable_folder
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.locks import describe_leases
from lit_lazy.support.provenance import git_sha
from lit_lazy.tracking.logger_kinds import check_logger_kinds
from lit_lazy.tracking.loggers import train_logged
from lit_lazy.tracking.owner import OWNER, is_own, read_owner
from lit_lazy.tracking.run_address import read_run_id, write_run_address
from lit_lazy.tracking.spool import METRICS, read_lines
from lit_lazy.tracking.store import TrackingError, check_store, default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.cost_estimate import estimate_cost, require_fit
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.init_from import check_init_from
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.prepare import prepare
from lit_lazy.training.result import DIAGNOSTICS, FINAL_CHECKPOINT, RunResult
from lit_lazy.training.run import read_finished
from lit_lazy.training.run_folder import make_lock
from lit_lazy.training.trainer import AtStart

SEND_SECONDS = 5.0

log = logging.getLogger("lit_lazy.tracking.tracked_run")


class ActiveRun:
    """A run of MLflow that shows a run folder: its metrics while it is trained, and its result.

    Training never waits for MLflow, and an outage loses nothing: whoever sends next, now or later, sends what is
    missing.
    """

    def __init__(
        self,
        tracker: Tracker,
        folder: Path,
        name: str,
        tags: Mapping[str, str],
        params: Mapping[str, str],
        config: Mapping[str, Any],
        parent_id: str | None = None,
    ) -> None:
        """tags: include `cell` and `kind`. params: logged in addition to the config's fields by dotted path."""
        self.tracker, self.folder, self.name = tracker, folder, name
        self.tags, self.params, self.config, self.parent_id = tags, params, config, parent_id
        self._run_id: str | None = None
        self._sent = 0
        self._set_running = False

    def get_run_id(self) -> str:
        """The id of the MLflow run: that of the folder, or of the same cell, or of a new one. Raises TrackingError."""
        if self._run_id is None:
            begun = read_run_id(self.folder)
            run_id = begun if begun and self.tracker.has_run(begun) else self._find_or_create_run()
            self.tracker.log_config(run_id, self.params, self.config)
            self._run_id = run_id
        return self._run_id

    def _find_or_create_run(self) -> str:
        """Take over the run of the same cell, or create one; retires one's own others, which would hold its curves.

        Of a training, a run that was begun from another folder is retired too: its metrics have other times.
        """
        same = {"cell": self.tags["cell"], "kind": self.tags["kind"]}
        if self.parent_id:
            mark = {"mlflow.parentRunId": self.parent_id}
            begun, *others = self.tracker.find({**same, **mark}) or [None]
        else:
            mark = {OWNER: read_owner(self.tracker.runs)}
            begun, others = None, [run for run in self.tracker.find(same) if is_own(run, mark[OWNER], self.tracker)]
        for other in others:
            assert other is not None
            self.tracker.retire(other.run_id)
        run_id = begun.run_id if begun else self.tracker.create_run(self.name, {**self.tags, **mark})
        self.folder.mkdir(parents=True, exist_ok=True)  # a run may fail before it creates its folder
        write_run_address(self.folder, run_id, self.tracker.experiment_id)
        return run_id

    def send(self) -> None:
        """Send the metrics that were not sent yet. Raises TrackingError."""
        run_id = self.get_run_id()
        if not self._set_running:
            self.tracker.set_running(run_id)
            self._set_running = True
        lines = read_lines(self.folder / METRICS)
        self.tracker.log(run_id, lines[self._sent :])
        self._sent = len(lines)

    @contextmanager
    def send_in_background(self, on_begin: Callable[[], None]) -> Iterator[None]:
        """Send every few seconds from a thread, which logs an outage once. on_begin: called once the run exists."""
        stop = threading.Event()

        def loop() -> None:
            warned = begun = False
            while True:
                try:
                    self.send()
                    if not begun:
                        on_begin()
                    warned, begun = False, True
                except (UnfinishedError, OSError) as error:
                    if not warned:
                        log.warning("metrics are kept in %s, MLflow lacks them: %s", self.folder / METRICS, error)
                    warned = True
                if stop.wait(SEND_SECONDS):
                    return

        thread = threading.Thread(target=loop, name="spool", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def finish(self, result: RunResult) -> None:
        """Send everything and mark the MLflow run complete; idempotent. Raises TrackingError."""
        self._set_running = True  # a run that is complete already must not be set to running again
        self.send()
        if (kept := self.folder / DIAGNOSTICS).exists():
            self.tracker.log_files(self.get_run_id(), [kept])
        timings = {f"time/{name}": value for name, value in result.timings.items()}
        tags = {**result.labels, "git_sha": result.environment["git_sha"]}
        tags["environment"] = result.made_in
        if result.taken_from:
            tags["taken_from"] = result.taken_from
        if result.execution:
            tags["execution"] = ", ".join(f"{name} {value}" for name, value in sorted(result.execution.items()))
        self.tracker.finish(
            self.get_run_id(), {**result.metrics, **timings}, tags, step=result.config["train"]["steps"]
        )

    def fail(self, reason: str, status: Literal["FAILED", "KILLED"]) -> None:
        """Mark the MLflow run as failed, or as interrupted (KILLED). Raises TrackingError."""
        self.send()
        self.tracker.fail(self.get_run_id(), reason, status)
        self._set_running = False


@dataclass(frozen=True)
class FinishedTraining:
    """A finished training and the location of its files."""

    name: str
    """Name of the MLflow experiment."""
    result: RunResult
    folder: Path
    """The run folder, inside the runs folder."""
    runs: Path
    first_step: int
    """Steps trained before this call: 0 for a new run, more for a resumed one, all for a finished one."""

    @property
    def metrics(self) -> dict[str, float]:
        """Final metrics on the full validation set by name; those before it have the prefix `init/`."""
        return self.result.metrics

    @property
    def steps(self) -> int:
        """Optimiser steps of the complete training."""
        return self.result.config["train"]["steps"]

    @property
    def checkpoint(self) -> Path:
        """The trained model's file. Raises a one-line ValueError if it was not kept."""
        require_checkpoint(self.folder)
        return self.folder / FINAL_CHECKPOINT

    @property
    def state(self) -> str:
        """The number of steps, and from which step they were trained now."""
        if self.first_step == self.steps:
            return f"all {self.steps} steps were trained before; nothing was done"
        begun = f"resumed at step {self.first_step}" if self.first_step else "from the beginning"
        return f"{self.steps} steps, {begun}"

    def __repr__(self) -> str:
        """One line instead of thousands of characters of metrics and settings."""
        loss, kept = self.metrics["loss/val"], self.folder / FINAL_CHECKPOINT
        return f"<{self.name}: {self.state}; loss/val {loss:.4f}; {kept if kept.exists() else self.folder}>"

    @property
    def dashboard(self) -> str:
        """The command that shows the curves."""
        return shlex.join([get_program_name(), "dashboard", self.name, "--runs", str(self.runs)])


def require_checkpoint(folder: Path) -> None:
    """Raise a one-line ValueError if a finished run has no saved model, or one that is cut off."""
    file = folder / FINAL_CHECKPOINT
    if not zipfile.is_zipfile(file):
        problem = "is damaged" if file.exists() else "was not kept"
        raise ValueError(f"the model of the run in {folder} {problem}; remove that folder to train it again")


class _Begin(AtStart):
    """Records the step at which training starts."""

    step = 0

    def on_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:  # noqa: ARG002
        self.step = trainer.global_step


def train_tracked(
    cfg: RunConfig,
    name: str,
    runs: Path,
    threads: int | None = None,
    keep_checkpoint: bool | None = None,
    execution: Execution = ONE_DEVICE,
    loggers: Sequence[str] = (),
) -> FinishedTraining:
    """Train in `runs/train-<name>/<key>` under the MLflow experiment `train-<name>`, or return the finished run.

    Resumes an interrupted run from its checkpoint, in the same MLflow run; waits for a run that another process trains.
    While MLflow is away, metrics are kept in the run folder; calling again sends them. keep_checkpoint: whether to save
    the trained model in `final.ckpt`; True (not None) raises ValueError if the run was finished without it. loggers:
    csv, tensorboard or wandb, in addition to MLflow.
    """
    check_logger_kinds(loggers)
    if threads is not None:
        torch.set_num_threads(threads)
    source = prepare(cfg, execution)
    require_fit(estimate_cost(cfg, source.outline, execution), execution)
    check_init_from(cfg, source.outline)
    key = cell_key(cfg, source.fingerprint)
    require_unedited_code(cfg)
    check_writable_folder("--runs", runs)
    uri = default_uri(runs)
    check_store(uri)
    experiment = f"train-{name}"
    tags = {"kind": "run", "cell": key, "seed": str(cfg.seed), "git_sha": git_sha()}
    tracker = Tracker(uri, runs, experiment)
    folder = tracker.folder / key
    active = ActiveRun(tracker, folder, format_run_name(name, cfg), tags, {}, to_dict(cfg))
    folder.mkdir(parents=True, exist_ok=True)
    if line := describe_leases(folder):
        log.warning("%s", line)
    lock, begin = make_lock(folder), _Begin()
    with _acquire(lock):
        known = read_finished(folder)
        if known and keep_checkpoint:
            require_checkpoint(folder)
        try:
            watched = nullcontext() if known else active.send_in_background(tracker.save_run_views)
            with Interrupts() as interrupts, watched:
                result = train_logged(
                    cfg,
                    folder,
                    experiment,
                    active.name,
                    loggers,
                    interrupts=interrupts,
                    callbacks=[begin],
                    show_progress=True,
                    keep_checkpoint=keep_checkpoint is not False,
                    execution=execution,
                    lock=lock,
                )
        except BaseException as error:
            try:
                active.fail(repr(error)[:500], "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            except TrackingError as away:
                log.warning("MLflow is away (%s); it will not show that this run has failed: %r", away, error)
            raise
        try:
            active.finish(result)
            tracker.save_run_views()
        except TrackingError as error:
            raise UnfinishedError(
                f"trained, but MLflow did not accept the result ({error}); it is kept in {folder}; the same command "
                "sends it"
            ) from error
    return FinishedTraining(experiment, result, folder, runs, cfg.train.steps if known else begin.step)


def format_run_name(name: str, cfg: RunConfig) -> str:
    """A run's name within its experiment, from its mixer or normaliser, its bias and its seed."""
    attention, mixer = cfg.model.attention, cfg.model.mixer
    parts = [attention.normaliser, attention.bias] if mixer.attends else [mixer]
    label = " + ".join(type(part).__name__ for part in parts if part != NoBias())
    return f"{name} {label} seed {cfg.seed}"


def _acquire(lock: BaseFileLock) -> AcquireReturnProxy:
    """Acquire the lock of a run folder; logs a warning before waiting."""
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        folder = Path(lock.lock_file).parent
        log.warning("another process trains this run, in %s; waiting for it (Ctrl-C ends the wait)", folder)
        return lock.acquire()
