"""Training progress: steps, tokens per second, time left, loss."""

import time

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lit_lazy.support.console import format_duration, plain_console
from lit_lazy.training.module import LitLM

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
