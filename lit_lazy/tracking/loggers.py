"""Loggers beside MLflow, by Lightning's interface. They hear what a run's metric file hears."""

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
"""By the package that each needs beside what this project requires."""


def check_logger_kinds(kinds: Sequence[str], option: str = "--logger") -> None:
    """Raise ValueError, in one line, for a logger that is unknown, given twice, or whose package is missing.

    option: by which they were given.
    """
    for i, kind in enumerate(kinds):
        if kind not in list(KINDS):  # a kind may be what no dict takes
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
    """Loggers that write below a run's folder, each in one of its name, and know what the run has logged so far.

    project, name: how the run is called where a logger sends it elsewhere. Raises ValueError where one cannot begin.
    """
    made: list[Logger] = []
    status = "failed"
    try:
        for kind in kinds:
            made.append(_start_logger(kind, folder, project, name, config))
        yield made
        status = "success"
    finally:
        for logger in made:
            logger.finalize(status)
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()  # else the process's next run is taken for the same


def _start_logger(kind: str, folder: Path, project: str, name: str, config: Mapping[str, Any]) -> Logger:
    if kind == "csv":
        shutil.rmtree(folder / kind, ignore_errors=True)  # Lightning's begins anew, and would warn
    is_new = not (folder / kind).exists()
    try:
        logger = _make_logger(kind, folder, project, name)
        logger.log_hyperparams(flatten(config))
        if is_new:
            for line in read_lines(folder / METRICS):
                logger.log_metrics(dict(line.metrics), line.step)
    except Exception as error:  # a package of others', on its own account or server
        raise ValueError(
            f"--logger {kind}: cannot begin ({describe_exception(error)}); leave it out, or set it up"
        ) from error
    return logger


def _make_logger(kind: str, folder: Path, project: str, name: str) -> Logger:
    if kind == "csv":
        return CSVLogger(folder, name="", version=kind, flush_logs_every_n_steps=1)
    if kind == "tensorboard":
        return TensorBoardLogger(folder, name="", version=kind, default_hp_metric=False)
    (folder / kind).mkdir(parents=True, exist_ok=True)  # where there is none it writes to a folder for all runs
    return WandbLogger(name=name, save_dir=folder / kind, project=project, id=folder.name, resume="allow")
