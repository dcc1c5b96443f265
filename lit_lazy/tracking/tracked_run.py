"""The training of `lit-lazy train`, tracked in MLflow."""

import logging
import shlex
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

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
from lit_lazy.support.process import repeat_in_background
from lit_lazy.support.provenance import git_sha
from lit_lazy.tracking.active_run import ActiveRun
from lit_lazy.tracking.check_store import check_store
from lit_lazy.tracking.store import TrackingError, default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.callbacks import AtStart, StepProgress
from lit_lazy.training.cost_estimate import estimate_cost, require_fit
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.init_from import check_init_from
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.logger_kinds import check_logger_kinds
from lit_lazy.training.prepare import prepare
from lit_lazy.training.result import FINAL_CHECKPOINT, METRICS, RunResult
from lit_lazy.training.run import read_finished, train_logged
from lit_lazy.training.run_folder import make_lock

SEND_SECONDS = 5.0

log = logging.getLogger("lit_lazy.tracking.tracked_run")


@dataclass(frozen=True)
class FinishedTraining:
    """A finished training and the location of its files."""

    name: str
    """Name of the MLflow experiment."""
    result: RunResult
    folder: Path
    """The run folder, inside the runs folder."""
    first_step: int
    """Steps trained before this call: 0 for a new run, more for a resumed one, all for a finished one."""
    dashboard: str
    """The command that shows the curves."""

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
            return f"all {self.steps} steps were trained before"
        begun = f"resumed at step {self.first_step}" if self.first_step else "from the beginning"
        return f"{self.steps} steps, {begun}"

    def __repr__(self) -> str:
        """One line instead of thousands of characters of metrics and settings."""
        loss, kept = self.metrics["loss/val"], self.folder / FINAL_CHECKPOINT
        return f"<{self.name}: {self.state}; loss/val {loss:.4f}; {kept if kept.exists() else self.folder}>"


def require_checkpoint(folder: Path) -> None:
    """Raise a one-line ValueError if a finished run has no saved model, or one that is cut off."""
    file = folder / FINAL_CHECKPOINT
    if not zipfile.is_zipfile(file):
        problem = "is damaged" if file.exists() else "was not kept"
        raise ValueError(f"the model of the run in {folder} {problem}; remove that folder to train it again")


class _Begin(AtStart):
    """Records the step at which training starts; the last one if none does."""

    def __init__(self, steps: int) -> None:
        self.step = steps

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
    lock, begin = make_lock(folder), _Begin(cfg.train.steps)

    def send(ends: bool) -> None:
        """Send metrics, and at first the views; at the end `finish` or `fail` follows."""
        if not ends:
            begins = not active.is_running
            active.send()
            if begins:
                tracker.save_run_views()

    with _acquire(lock, folder):
        known = read_finished(folder)
        if known and keep_checkpoint:
            require_checkpoint(folder)
        lost = f"metrics are kept in {folder / METRICS}, MLflow lacks them"
        watched = nullcontext() if known else repeat_in_background(send, SEND_SECONDS, log, lost)
        try:
            with Interrupts() as interrupts, watched:
                result = train_logged(
                    cfg,
                    folder,
                    experiment,
                    active.name,
                    loggers,
                    interrupts=interrupts,
                    callbacks=[StepProgress(), begin],
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
    dashboard = shlex.join([get_program_name(), "dashboard", experiment, "--runs", str(runs)])
    return FinishedTraining(experiment, result, folder, begin.step, dashboard)


def _acquire(lock: BaseFileLock, folder: Path) -> AcquireReturnProxy:
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        log.warning("another process trains this run, in %s; waiting for it (Ctrl-C ends the wait)", folder)
        return lock.acquire()


def format_run_name(name: str, cfg: RunConfig) -> str:
    """A run's name within its experiment, from its mixer or normaliser, its bias and its seed."""
    attention, mixer = cfg.model.attention, cfg.model.mixer
    parts = [attention.normaliser, attention.bias] if mixer.attends else [mixer]
    label = " + ".join(type(part).__name__ for part in parts if part != NoBias())
    return f"{name} {label} seed {cfg.seed}"
