"""Lightning's callbacks: what a run that resumes repeats, its backend, its time, its progress. Lightning's loggers: the
metric file, and further ones, which receive the same metrics.
"""

import json
import logging
import os
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lit_lazy.config.serialisation import flatten
from lit_lazy.data import DataSource
from lit_lazy.measure.evaluation import iter_validation
from lit_lazy.support.console import format_duration, plain_console
from lit_lazy.support.disk import require_held, write_atomically
from lit_lazy.support.error_messages import describe_exception
from lit_lazy.support.names_to_paths import delete
from lit_lazy.training.module import LitLM
from lit_lazy.training.run_folder import METRICS, parse_line, read_lines

log = logging.getLogger("lit_lazy.training.callbacks_and_loggers")


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


class MetricFile(Logger):
    """Lightning logger that appends one JSON line per step and call to a file in the run folder.

    A resumed run repeats the steps since its checkpoint; metrics that the file already contains are skipped.
    """

    def __init__(self, folder: Path, others: Sequence[Logger] = ()) -> None:
        """others: loggers that receive each new metric too."""
        super().__init__()
        self.others = others
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        _repair(self.path)
        self._known = {(line.step, name) for line in read_lines(self.path) for name in line.metrics}

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def version(self) -> None:
        """None: a run folder is named by the run's key and has no versions."""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_args: Any, **_kwargs: Any) -> None:
        """No-op: the config is logged when the MLflow run starts."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append the metrics that the file lacks at this step, except Lightning's `epoch`."""
        step = step or 0
        new = {
            name: float(value) for name, value in metrics.items() if name != "epoch" and (step, name) not in self._known
        }
        if new:
            self._known |= {(step, name) for name in new}
            line = {"step": step, "milliseconds": int(1000 * time.time()), "metrics": new}
            require_held(self.path)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint that survives a power cut must not be ahead of its curves
            for other in self.others:
                other.log_metrics(new, step)


def _repair(path: Path) -> None:
    """Remove the lines that a kill, a full disk or a power cut damaged; the damaged file is quarantined."""
    if not path.exists():
        return
    content = path.read_bytes()
    *lines, torn = content.split(b"\n")
    valid = [line for line in lines if parse_line(line)]
    if damaged := len(lines) - len(valid):
        copy = path.with_name(f"{path.name}.damaged")
        write_atomically(copy, lambda file: file.write(content))
        log.warning("%s: %d of its lines are damaged; kept as %s, resumed without them", path, damaged, copy.name)
    if damaged or torn:
        write_atomically(path, lambda file: file.write(b"".join(line + b"\n" for line in valid)))


@contextmanager
def open_loggers(
    kinds: Sequence[str], folder: Path, project: str, name: str, config: Mapping[str, Any]
) -> Iterator[list[Logger]]:
    """Loggers that write to folders of their name in a run folder, with the metrics that the run has logged so far.

    project, name: for loggers that send the run to a server. Raises ValueError if a logger cannot start.
    """
    opened: list[Logger] = []
    status = "failed"
    try:
        for kind in kinds:
            opened.append(_start_logger(kind, folder, project, name, config))
        yield opened
        status = "success"
    finally:
        for logger in opened:
            logger.finalize(status)
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()  # otherwise the process's next run would continue this one


def _start_logger(kind: str, folder: Path, project: str, name: str, config: Mapping[str, Any]) -> Logger:
    if kind == "csv":
        delete(folder / kind)  # Lightning's logger starts over, and would warn
    is_new = not (folder / kind).exists()
    try:
        logger = _make_logger(kind, folder, project, name)
        logger.log_hyperparams(flatten(config))
        for line in read_lines(folder / METRICS) if is_new else ():
            logger.log_metrics(dict(line.metrics), line.step)
    except Exception as error:  # a third-party package with its own account or server
        why = f"cannot start ({describe_exception(error)}); leave it out, or set it up"
        raise ValueError(f"--logger {kind}: {why}") from error
    return logger


def _make_logger(kind: str, folder: Path, project: str, name: str) -> Logger:
    if kind == "csv":
        return CSVLogger(folder, name="", version=kind, flush_logs_every_n_steps=1)
    if kind == "tensorboard":
        return TensorBoardLogger(folder, name="", version=kind, default_hp_metric=False)
    (folder / kind).mkdir(parents=True, exist_ok=True)  # without it, wandb writes to a folder for all runs
    return WandbLogger(name=name, save_dir=folder / kind, project=project, id=folder.name, resume="allow")
