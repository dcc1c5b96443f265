"""Lightning loggers in addition to MLflow; they receive the same metrics as a run's metric file."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from lit_lazy.config.serialisation import flatten
from lit_lazy.support.errors import describe_exception
from lit_lazy.tracking.spool import METRICS, read_lines

KINDS = {"csv": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""The optional package that each logger needs."""


def check_logger_kinds(kinds: Sequence[str], option: str = "--logger") -> None:
    """Raise a one-line ValueError for a logger that is unknown, given twice, or whose package is missing.

    option: the option's name in the message.
    """
    for i, kind in enumerate(kinds):
        if kind not in list(KINDS):  # a list, because a kind may be unhashable
            raise ValueError(f"{option} {kind}: unknown; there are {', '.join(KINDS)}")
        if kind in kinds[:i]:
            raise ValueError(f"{option} {kind}: is given twice; leave one out")
        package = KINDS[kind]
        if package is not None and find_spec(package) is None:
            raise ValueError(f"{option} {kind}: needs the package {package}; pip install 'lit-lazy[{kind}]'")


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
        shutil.rmtree(folder / kind, ignore_errors=True)  # Lightning's logger starts over, and would warn
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
