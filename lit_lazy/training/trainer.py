"""Lightning's trainer, set up so that a resumed run is bit-identical, and what it calls: progress, time, validation."""

import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lit_lazy.config.schema import RunConfig
from lit_lazy.data import DataSource
from lit_lazy.data.sampler import Portion, train_loader, validation_loader
from lit_lazy.measure.evaluation import iter_validation
from lit_lazy.support.console import format_duration, plain_console
from lit_lazy.training.checkpoints import AtomicCheckpointIO, load_matching_weights
from lit_lazy.training.distributed.fsdp import ShardedStrategy
from lit_lazy.training.distributed.process_group import GroupEnvironment, RankGroup
from lit_lazy.training.execution import Execution
from lit_lazy.training.interrupts import Interrupts, StopOnInterrupt
from lit_lazy.training.module import LitLM
from lit_lazy.training.run_folder import CHECKPOINTS, LAST

log = logging.getLogger("lit_lazy.training.trainer")


def build_module(cfg: RunConfig, source: DataSource, execution: Execution) -> LitLM:
    """The module to train, with its initial weights."""
    module = LitLM.create(cfg, source.vocab_size, source.context_length)
    if cfg.init_from is not None:
        log.info("%s", load_matching_weights(module, Path(cfg.init_from)))
        module.apply_schedules(0)
    module.set_execution(execution)
    return module


def fit(
    trainer: L.Trainer,
    module: LitLM,
    cfg: RunConfig,
    source: DataSource,
    checkpoint: Path | None,
    group: RankGroup | None = None,
    final: Path | None = None,
) -> LitLM:
    """Train, resuming from `checkpoint` and together with the other ranks of `group`, if given.

    Returns the trained module; with sharded parameters only rank 0's is complete. final: path to save it at. Raises
    KeyboardInterrupt if an interrupt ends it, which Lightning turns into SystemExit.
    """
    (interrupts,) = (part.interrupts for part in trainer.callbacks if isinstance(part, StopOnInterrupt))  # type: ignore[attr-defined]
    batch_size, share = cfg.train.batch_size, Portion(trainer.global_rank, trainer.world_size, module.parts)
    # The loader reads global_step at its first batch, after the checkpoint was restored.
    batches = train_loader(source, batch_size, cfg.seed, lambda: module.trainer.global_step, share)
    validation = validation_loader(source, module.execution.evaluation_batch_size(batch_size))
    try:
        with interrupts.defer(), nullcontext() if group is None else group.join():
            trainer.fit(module, batches, validation, ckpt_path=checkpoint, weights_only=True)
            module.apply_average()
            if final:
                trainer.save_checkpoint(final)
            if module.execution.strategy == "ddp":
                return module
            state = trainer.strategy.lightning_module_state_dict()
            gathered = LitLM.create(module.cfg, source.vocab_size, source.context_length)
            gathered.set_execution(module.execution)
            if trainer.is_global_zero:
                gathered.load_state_dict(state)
            return gathered
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        interrupts.set_handlers()


def make_trainer(
    cfg: RunConfig,
    folder: Path,
    logger: Logger | None,
    callbacks: Sequence[Callback],
    show_progress: bool,
    execution: Execution,
    group: RankGroup | None = None,
    interrupts: Interrupts | None = None,
) -> L.Trainer:
    """Lightning's trainer, with every option that affects results set explicitly. interrupts: as of `run`.

    The queue handles batch systems. By default, Lightning would take over inside a SLURM job, requeue it on a signal
    and resume from any `hpc_ckpt_*` in its default folder; that folder therefore does not exist.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Data is in memory and indexed by batch, so loader processes would only add overhead.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated.*")  # Lightning's own
    # A resumed run's loader starts at the global step (StepBatchSampler).
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    checkpoints = folder / CHECKPOINTS
    every = cfg.train.checkpoint_every
    checkpoint = ModelCheckpoint(checkpoints, save_last=True, save_top_k=0, every_n_train_steps=every)
    strategy: Strategy | str = "auto"
    if group:
        strategy = DDPStrategy() if execution.strategy == "ddp" else ShardedStrategy(execution.devices)
    parts = execution.accumulation_steps(cfg.train.batch_size)
    return L.Trainer(
        max_steps=cfg.train.steps,
        max_epochs=-1,
        devices=group.local_size if group else 1,
        num_nodes=group.nodes if group else 1,
        strategy=strategy,
        use_distributed_sampler=False,
        accumulate_grad_batches=parts,
        precision="bf16-mixed" if cfg.train.precision == "bf16" else "32-true",
        gradient_clip_val=cfg.train.clip_norm,
        val_check_interval=cfg.train.val_every * parts,  # in batches
        check_val_every_n_epoch=None,
        log_every_n_steps=cfg.train.log_every,
        num_sanity_val_steps=0,
        deterministic=True,
        logger=logger or False,
        # Never that of a batch system, even if its variables are set.
        plugins=[AtomicCheckpointIO(), GroupEnvironment(group) if group else LightningEnvironment()],
        callbacks=[
            *([StepProgress()] if show_progress else []),
            *callbacks,
            StopOnInterrupt(interrupts or Interrupts(), checkpoints / LAST, group),
            checkpoint,
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder / "lightning",
    )


class AtStart(Callback, ABC):
    """Acts at the step where a run starts or resumes, as a kill may have cut off that step's actions."""

    _started = False

    @abstractmethod
    def on_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Act. A logger may have this step's values already."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = True
        self.on_start(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Act now if the run resumed at its last step, which skips `on_train_start`."""
        if not self._started:
            self.on_start(trainer, pl_module)


class BackendMonitor(Callback):
    """Stores in checkpoints which backend computes the attention; a run that resumes on another logs a warning."""

    def __init__(self, backend: str) -> None:
        """backend: as by `describe_backend`."""
        self.backend = backend

    state_key = "Backend"  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"backend": self.backend}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not called for checkpoints of earlier versions, which have no such state."""
        if (former := state_dict["backend"]) != self.backend:
            where = f"ran on {former} until the checkpoint and runs on {self.backend} now"
            effect = "the result is not bit-identical to that of an uninterrupted run"
            log.warning("the attention %s: %s", where, effect)


class TimeMonitor(Callback):
    """Counts the seconds of a training, from now and before the checkpoint that it resumes from."""

    def __init__(self) -> None:
        self._earlier, self._begun = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Those of this process and of those before it."""
        return self._earlier + time.perf_counter() - self._begun

    state_key = "Time"  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not called for checkpoints of earlier versions, which have no such state."""
        self._earlier = state_dict["seconds"]


class MissedValidation(AtStart):
    """Repeats a validation that a kill cut off.

    A step's checkpoint is written before the validation at that step, and Lightning resumes after both.
    """

    def __init__(self, source: DataSource, losses: dict[int, float]) -> None:
        """losses: receives the loss by step."""
        self.source, self.losses = source, losses
        self.repeated: dict[str, float] = {}
        """Metrics of the repeated validation; empty without one."""

    @torch.no_grad()  # not inference_mode: Lightning updates the module's metrics again
    def on_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        step = trainer.global_step
        if not isinstance(module, LitLM) or not step or step % module.cfg.train.val_every:
            return
        metrics = {}
        batch_size = module.execution.evaluation_batch_size(module.cfg.train.batch_size)
        with module.use_average():
            for batch in iter_validation(module.model, self.source, batch_size):
                with trainer.precision_plugin.forward_context():
                    metrics = module.update_validation(batch)
        self.repeated = values = {name: metric.compute().item() for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()
        self.losses[step] = values["val/loss"]
        if trainer.logger is not None:
            trainer.logger.log_metrics(values, step - 1)


PLAIN_EVERY_SECONDS, NOTEBOOK_EVERY_SECONDS = 15.0, 0.5


class StepProgress(Callback):
    """Shows a bar on a terminal and a line that changes in a notebook, else prints a line now and then."""

    def __init__(self, console: Console | None = None) -> None:
        """console: output; standard error by default."""
        self.console = console or plain_console(stderr=True)
        self._live: Progress | None = None
        self._first, self._shown = 0, -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        self._first = self._shown = trainer.global_step
        self._started = self._last = time.monotonic()
        if self.console.is_terminal:
            columns = BarColumn(), TextColumn("{task.description}", markup=False)
            self._live = Progress(*columns, console=self.console, transient=True)
            self._task = self._live.add_task("starting", total=trainer.max_steps, completed=self._first)
            self._live.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_args: object, **_kwargs: object
    ) -> None:
        """Update after each step; a step may have several batches."""
        step, now = trainer.global_step, time.monotonic()
        if step == self._shown or not isinstance(pl_module, LitLM):
            return
        self._shown = step
        if self._live is not None:
            self._live.update(self._task, completed=step, description=self.format_line(trainer, pl_module, now))
        elif self.console.is_jupyter:
            if now - self._last >= NOTEBOOK_EVERY_SECONDS or step == trainer.max_steps:
                self._last, end = now, "\n" if step == trainer.max_steps else ""
                # A notebook's stream returns to the beginning of its line, as a terminal does.
                print(f"\r{self.format_line(trainer, pl_module, now):80}", end=end, flush=True)
        elif now - self._last >= PLAIN_EVERY_SECONDS:
            self._last = now
            self.console.print(self.format_line(trainer, pl_module, now))

    def format_line(self, trainer: L.Trainer, module: LitLM, now: float) -> str:
        """`step 300 of 1200, 45,000 tokens/s, 0:12 left, loss 2.345`."""
        step, seconds = trainer.global_step, now - self._started
        per_second = (step - self._first) / seconds
        tokens = per_second * module.cfg.train.batch_size * module.hparams["context_length"]
        rest = format_duration((module.cfg.train.steps - step) / per_second)
        loss = trainer.callback_metrics.get("train/loss")
        known = "" if loss is None else f", loss {loss.item():.4g}"
        return f"step {step} of {module.cfg.train.steps}, {tokens:,.0f} tokens/s, {rest} left{known}"

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Stop the bar, even after an error."""
        if self._live is not None:
            self._live.stop()
            self._live = None
