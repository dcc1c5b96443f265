"""One training, tracked in MLflow: what `lit-lazy train` does."""

import logging
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from filelock import AcquireReturnProxy, BaseFileLock, Timeout

from lit_lazy.attention import NoBias
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.support.console import get_program_name
from lit_lazy.support.disk import check_writable_folder
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.provenance import git_sha
from lit_lazy.tracking.loggers import check_logger_kinds, open_loggers
from lit_lazy.tracking.spool import RunCard, Spool
from lit_lazy.tracking.store import TrackingError, check_store, default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.checkpoints import check_init_from
from lit_lazy.training.cost import estimate_cost, require_fit
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.prepare import prepare
from lit_lazy.training.result import FINAL_CHECKPOINT, RunResult
from lit_lazy.training.run import make_lock, read_finished, run
from lit_lazy.training.trainer import AtStart

log = logging.getLogger("lit_lazy.tracking.tracked_run")


@dataclass(frozen=True)
class FinishedTraining:
    """A finished training, and where everything of it is."""

    name: str
    """Of its experiment in MLflow."""
    result: RunResult
    folder: Path
    """Of the run, in the runs folder."""
    runs: Path
    first_step: int
    """Finished before it began here: 0 from the beginning, more where it was resumed, all where it was done already."""

    @property
    def metrics(self) -> dict[str, float]:
        """Final metrics of the whole validation set by name; those of the untrained model begin with `init/`."""
        return self.result.metrics

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole training."""
        return self.result.config["train"]["steps"]

    @property
    def checkpoint(self) -> Path:
        """The trained model's file. Raises ValueError, in one line, where it was not kept."""
        require_checkpoint(self.folder)
        return self.folder / FINAL_CHECKPOINT

    @property
    def state(self) -> str:
        """How many steps, and which of them were trained now."""
        if self.first_step == self.steps:
            return f"all {self.steps} steps were trained before; nothing was done"
        begun = f"resumed at step {self.first_step}" if self.first_step else "from the beginning"
        return f"{self.steps} steps, {begun}"

    def __repr__(self) -> str:
        """A line: all metrics and settings would be thousands of characters."""
        loss, kept = self.metrics["loss/val"], self.folder / FINAL_CHECKPOINT
        return f"<{self.name}: {self.state}; loss/val {loss:.4f}; {kept if kept.exists() else self.folder}>"

    @property
    def dashboard(self) -> str:
        """The command that serves its curves."""
        return shlex.join([get_program_name(), "dashboard", self.name, "--runs", str(self.runs)])


def require_checkpoint(folder: Path) -> None:
    """Raise ValueError, in one line, where a finished run has left no model."""
    if not (folder / FINAL_CHECKPOINT).exists():
        raise ValueError(f"the model of the run in {folder} was not kept; remove that folder to train it again")


class _Begin(AtStart):
    """Notes the step from which a run is trained."""

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
    """Train in `runs/train-<name>/<key>` under the MLflow experiment `train-<name>`; a finished run is returned.

    A run that was cut off resumes from its checkpoint, in the MLflow run it was begun with; one that another process
    trains is waited for. While MLflow is away the metrics are kept in the run folder; the same command sends them
    later. keep_checkpoint: whether to leave the trained model in `final.ckpt`; True, and not None, raises ValueError
    where the run was finished without it. loggers: csv, tensorboard or wandb, beside MLflow.
    """
    check_logger_kinds(loggers)
    if threads is not None:
        torch.set_num_threads(threads)
    source = prepare(cfg, execution)
    require_fit(estimate_cost(cfg, source.outline, execution), execution)
    check_init_from(cfg, source.outline)
    key = cell_key(cfg, source.fingerprint)
    check_writable_folder("--runs", runs)
    uri = default_uri(runs)
    check_store(uri)
    experiment = f"train-{name}"
    folder = runs / experiment / key
    tags = {"kind": "run", "cell": key, "seed": str(cfg.seed), "git_sha": git_sha()}
    card = RunCard(format_run_name(name, cfg), tags, {}, to_dict(cfg))
    tracker = Tracker(uri, runs, experiment)
    spool = Spool(tracker, folder, card)
    folder.mkdir(parents=True, exist_ok=True)
    lock, begin = make_lock(folder), _Begin()
    with _acquire(lock):
        known = read_finished(folder)
        if known and keep_checkpoint:
            require_checkpoint(folder)
        wanted = [kind for kind in loggers if known is None or not (folder / kind).exists()]
        try:
            with (
                open_loggers(wanted, folder, experiment, card.name, card.config) as others,
                spool.send_in_background(tracker.save_run_views) if known is None else nullcontext(),
            ):
                result = known or run(
                    cfg,
                    folder,
                    logger=spool.make_logger(others),
                    callbacks=[begin],
                    show_progress=True,
                    keep_checkpoint=keep_checkpoint is not False,
                    execution=execution,
                    lock=lock,
                )
                for other in others:
                    other.log_metrics(result.metrics, cfg.train.steps)
        except BaseException as error:
            spool.fail(repr(error)[:500], "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        try:
            spool.finish(result)
            tracker.save_run_views()
        except TrackingError as error:
            raise UnfinishedError(
                f"trained, but MLflow did not take the result ({error}); it is kept in {folder}, and the same command "
                "sends it"
            ) from error
    return FinishedTraining(experiment, result, folder, runs, cfg.train.steps if known else begin.step)


def format_run_name(name: str, cfg: RunConfig) -> str:
    """A run's name among those of its experiment: what mixes its tokens, and its bias, tell two of one seed apart."""
    attention, mixer = cfg.model.attention, cfg.model.mixer
    parts = [attention.normaliser, attention.bias] if mixer.attends else [mixer]
    named = " + ".join(type(part).__name__ for part in parts if part != NoBias())
    return f"{name} {named} seed {cfg.seed}"


def _acquire(lock: BaseFileLock) -> AcquireReturnProxy:
    """The lock of a run's folder, held; whoever has to wait for it is told so."""
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        folder = Path(lock.lock_file).parent
        log.warning("another process trains this run, in %s; waiting for it (Ctrl-C ends the wait)", folder)
        return lock.acquire()
