"""Callbacks of a training: what a run that resumes repeats, its backend, its time, and its progress."""

import logging
import time
from abc import ABC, abstractmethod
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lit_lazy.data import DataSource
from lit_lazy.measure.evaluation import iter_validation
from lit_lazy.support.console import format_duration, plain_console
from lit_lazy.training.module import LitLM

log = logging.getLogger("lit_lazy.training.callbacks")


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
        with module.average.swap_in():
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
