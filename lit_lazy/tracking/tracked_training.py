"""The training of `lit-lazy train`, tracked in MLflow."""

import logging
import shlex
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch.callbacks import LambdaCallback

from lit_lazy.attention import NoBias
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.config.user_classes import require_unedited_code
from lit_lazy.support.background import repeat_in_background
from lit_lazy.support.console import get_program_name
from lit_lazy.support.disk import check_writable_folder
from lit_lazy.support.error_messages import UnfinishedError
from lit_lazy.support.locks import describe_leases
from lit_lazy.support.names_to_paths import join_name
from lit_lazy.support.provenance import git_sha
from lit_lazy.tracking.check_databases import check_store
from lit_lazy.tracking.store_address import INTERRUPTED, End, default_uri
from lit_lazy.tracking.tracker import MirroredRun, Tracker
from lit_lazy.tracking.views import build_run_views
from lit_lazy.training.callbacks_and_loggers import StepProgress
from lit_lazy.training.check_before_run import prepare
from lit_lazy.training.cost_estimate import estimate_cost, require_fit
from lit_lazy.training.execution_settings import ONE_DEVICE, Execution
from lit_lazy.training.ineffective_settings import check_init_from
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.run import read_finished, train_logged
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, RESULT, RunResult, is_locked, make_lock, read_grid_id

SEND_SECONDS = 5.0

log = logging.getLogger("lit_lazy.tracking.tracked_training")


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
    if threads is not None:
        torch.set_num_threads(threads)
    source = prepare(cfg, execution)
    require_fit(estimate_cost(cfg, source.outline, execution), execution)
    check_init_from(cfg, source.outline)
    key = cell_key(cfg, source.fingerprint)
    require_unedited_code(cfg)
    check_writable_folder("--runs", runs)
    check_store(uri := default_uri(runs))
    experiment = f"train-{name}"
    folder, tracker = join_name(runs, experiment) / key, Tracker(uri, experiment)
    folder.mkdir(parents=True, exist_ok=True)
    grid = read_grid_id(folder.parent)
    tags = {"kind": "run", "cell": key, "seed": str(cfg.seed), "git_sha": git_sha(), "grid": grid}
    run = MirroredRun(tracker, folder, format_run_name(name, cfg), tags, {}, to_dict(cfg))
    if line := describe_leases(folder):
        log.warning("%s", line)
    if is_locked(folder):
        log.warning("another process trains this run, in %s; waiting for it (Ctrl-C ends the wait)", folder)
    begun: list[int] = []
    begin = LambdaCallback(on_train_start=lambda trainer, _: begun.append(trainer.global_step))
    with (lock := make_lock(folder)):
        if known := read_finished(folder):
            known.require_settings(to_dict(cfg))
            if keep_checkpoint:
                require_checkpoint(folder)
        with _follow(run), Interrupts() as interrupts:
            result = train_logged(
                cfg,
                folder,
                experiment,
                run.name,
                loggers,
                interrupts=interrupts,
                callbacks=[StepProgress(), begin],
                keep_checkpoint=keep_checkpoint is not False,
                execution=execution,
                lock=lock,
            )
    dashboard = shlex.join([get_program_name(), "dashboard", experiment, "--runs", str(runs)])
    return FinishedTraining(experiment, result, folder, begun[0] if begun else cfg.train.steps, dashboard)


@contextmanager
def _follow(run: MirroredRun) -> Iterator[None]:
    """Show a training in MLflow from a thread, and at the end its result or why it has none.

    Raises UnfinishedError if MLflow does not take a result.
    """
    end: End | RunResult = INTERRUPTED
    is_listed, errors = False, list[str]()

    def send(final: bool) -> None:
        nonlocal is_listed
        if final or not (run.folder / RESULT).exists():
            run.sync(end if final else None)
        if final or not is_listed:
            run.tracker.save_views("run", build_run_views)
            is_listed = True

    lost = f"results are kept in {run.folder}, MLflow lacks them"
    try:
        with repeat_in_background(send, SEND_SECONDS, log, lost) as errors:
            try:
                yield
                end = RunResult.load(run.folder / RESULT)
            except Exception as error:
                end = End("failed", repr(error)[:500])
                raise
    except BaseException:
        for why in errors:
            log.warning("%s: %s", lost, why)
        raise
    if errors:
        raise UnfinishedError(f"trained, but {lost} ({errors[0]}); the same command sends them")


def format_run_name(name: str, cfg: RunConfig) -> str:
    """A run's name within its experiment, from its mixer or normaliser, its bias and its seed."""
    attention, mixer = cfg.model.attention, cfg.model.mixer
    parts = [attention.normaliser, attention.bias] if mixer.attends else [mixer]
    label = " + ".join(type(part).__name__ for part in parts if part != NoBias())
    return f"{name} {label} seed {cfg.seed}"
