"""Lightning loggers of a training: its metric file, and further ones, which receive the same metrics."""

import json
import logging
import os
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from lit_lazy.config.serialisation import flatten
from lit_lazy.support.disk import require_held, write_atomically
from lit_lazy.support.errors import describe_exception
from lit_lazy.support.named_files import delete
from lit_lazy.training.run_folder import METRICS, parse_line, read_lines

log = logging.getLogger("lit_lazy.training.loggers")


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
