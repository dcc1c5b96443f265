"""A training with its metric file and further Lightning loggers, which receive the same metrics."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import flatten, to_dict
from lit_lazy.support.errors import describe_exception
from lit_lazy.support.inside import delete
from lit_lazy.tracking.spool import METRICS, MetricFile, read_lines
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.result import RunResult
from lit_lazy.training.run import read_finished, run


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
        if is_new:
            for line in read_lines(folder / METRICS):
                logger.log_metrics(dict(line.metrics), line.step)
    except Exception as error:  # a third-party package with its own account or server
        raise ValueError(
            f"--logger {kind}: cannot start ({describe_exception(error)}); leave it out, or set it up"
        ) from error
    return logger


def _make_logger(kind: str, folder: Path, project: str, name: str) -> Logger:
    if kind == "csv":
        return CSVLogger(folder, name="", version=kind, flush_logs_every_n_steps=1)
    if kind == "tensorboard":
        return TensorBoardLogger(folder, name="", version=kind, default_hp_metric=False)
    (folder / kind).mkdir(parents=True, exist_ok=True)  # without it, wandb writes to a folder for all runs
    return WandbLogger(name=name, save_dir=folder / kind, project=project, id=folder.name, resume="allow")


def train_logged(
    cfg: RunConfig,
    folder: Path,
    project: str,
    name: str,
    loggers: Sequence[str] = (),
    *,
    interrupts: Interrupts,
    **options: Any,
) -> RunResult:
    """Train in a run folder, with its metric file and `loggers`, and return the result; an earlier one if it has one.

    A run that has a result already is only logged to loggers that lack it. project, name: for loggers that send the run
    to a server. interrupts: allowed within the training. options: of `run`.
    """
    known = read_finished(folder)
    missing = [kind for kind in loggers if known is None or not (folder / kind).exists()]
    with open_loggers(missing, folder, project, name, to_dict(cfg)) as others, interrupts.allow():
        file = MetricFile(folder, others)
        result = known or run(cfg, folder, logger=file, interrupts=interrupts, **options)
        for other in others:
            other.log_metrics(result.metrics, cfg.train.steps)
    return result
