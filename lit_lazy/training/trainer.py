"""Lightning's trainer, set up so that a resumed run ends in the same bits."""

import logging
import signal
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment

from lit_lazy.config.schema import RunConfig
from lit_lazy.data import DataSource
from lit_lazy.data.loader import train_loader, validation_loader
from lit_lazy.measure import RatioOfSums
from lit_lazy.model.loss import token_nll
from lit_lazy.training.checkpoints import AtomicCheckpointIO
from lit_lazy.training.module import LitLM


def fit(trainer: L.Trainer, module: LitLM, cfg: RunConfig, source: DataSource, checkpoint: Path | None) -> None:
    """Train, from a checkpoint where there is one. Lightning turns Ctrl-C into an exit; here it stays Ctrl-C."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    batch_size = cfg.train.batch_size
    # Read when a loader is asked for its first batch, which is after a checkpoint was restored.
    batches = train_loader(source, batch_size, cfg.seed, start_step=lambda: module.trainer.global_step)
    try:
        trainer.fit(module, batches, validation_loader(source, batch_size), ckpt_path=checkpoint, weights_only=True)
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, on_interrupt)


def make_trainer(
    cfg: RunConfig, folder: Path, logger: Logger | None, callbacks: Sequence[Callback], show_progress: bool
) -> L.Trainer:
    """Lightning's trainer with everything that decides a result set explicitly.

    Batch systems are the queue's affair: left to itself, Lightning would take over inside a SLURM job, requeue it at a
    signal, and resume from whatever `hpc_ckpt_*` lies in its default folder, which therefore does not exist.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # The data is in memory and indexed by batch: loader processes would only cost.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated.*")  # Lightning's own
    # A resumed run's loader starts at the global step by itself (StepBatchSampler).
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    checkpoint = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        save_last=True,
        save_top_k=0,
        every_n_train_steps=cfg.train.checkpoint_every,
    )
    return L.Trainer(
        max_steps=cfg.train.steps,
        max_epochs=-1,
        devices=1,
        precision="bf16-mixed" if cfg.train.precision == "bf16" else "32-true",
        gradient_clip_val=cfg.train.clip_norm,
        val_check_interval=cfg.train.val_every,
        check_val_every_n_epoch=None,
        log_every_n_steps=cfg.train.log_every,
        num_sanity_val_steps=0,
        deterministic=True,
        logger=logger or False,
        plugins=[AtomicCheckpointIO(), LightningEnvironment()],
        callbacks=[checkpoint, *callbacks],
        enable_progress_bar=show_progress,
        enable_model_summary=False,
        default_root_dir=folder / "lightning",
    )


class AtStart(Callback, ABC):
    """Does what is due at the step where a run starts, or resumes: a kill may have cut it off."""

    _started = False

    @abstractmethod
    def at_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """What is due; a logger may know it already."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = True
        self.at_start(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A run that resumes at its last step never starts to train."""
        if not self._started:
            self.at_start(trainer, pl_module)


class MissedValidation(AtStart):
    """Makes up for a validation that a kill cut off.

    The checkpoint of a step is written before the validation at that step, and Lightning resumes after both.
    """

    def __init__(self, source: DataSource) -> None:
        self.source = source

    @torch.inference_mode()
    def at_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Log it, if the run resumes at a step of validation."""
        step = trainer.global_step
        if not isinstance(module, LitLM) or trainer.logger is None or not step or step % module.cfg.train.val_every:
            return
        loss, excess = RatioOfSums().to(module.device), RatioOfSums().to(module.device)
        measured = {"val/loss": loss}
        module.eval()
        for batch in validation_loader(self.source, module.cfg.train.batch_size):
            batch = {name: value.to(module.device) for name, value in batch.items()}
            with trainer.precision_plugin.forward_context():
                nll = token_nll(module.model(batch["tokens"], place=batch.get("place")), batch["targets"])
            loss.update(nll, nll.numel())
            if "oracle_nll" in batch:
                excess.update(nll - batch["oracle_nll"], nll.numel())
                measured["val/excess"] = excess
        module.train()
        trainer.logger.log_metrics({name: metric.compute().item() for name, metric in measured.items()}, step - 1)
