"""Where results are stored: MLflow's address, and databases given by URL.

Pages import this module, and MLflow takes seconds to import: it is not needed here.
"""

import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import sqlalchemy

from lit_lazy.support.disk import write_text
from lit_lazy.support.error_messages import UnfinishedError

URI_VARIABLE = "MLFLOW_TRACKING_URI"
NOTE, PARENT = "mlflow.note.content", "mlflow.parentRunId"
"""MLflow's tags: the description of a run or of an experiment, and the run that a run is nested in."""
ARTIFACTS = "mlartifacts"
"""Folder beside a local store's database."""
RUN_ID = "mlflow_run_id"
"""The file in a run folder with the ids of its run and experiment; earlier versions wrote the first alone."""


class TrackingError(UnfinishedError):
    """MLflow rejected or did not receive a call; the call can be repeated later."""


class End(NamedTuple):
    """How a training ended (complete, failed or pruned), and why: MLflow's tags `state` and `reason`."""

    state: str
    reason: str = ""


COMPLETE, INTERRUPTED = End("complete"), End("failed", "interrupted")


def default_uri(runs: Path) -> str:
    """The tracking store: `MLFLOW_TRACKING_URI` if set, else sqlite in the runs folder."""
    return os.environ.get(URI_VARIABLE) or sqlite_url(runs / "mlflow.db")


def sqlite_url(file: Path) -> str:
    """The URL of an sqlite file with any characters in its path."""
    return f"sqlite:///{quote_path(file.resolve())}"


def quote_path(file: Path) -> str:
    """A path escaped for an sqlite URL, where ? starts a query and % an escaped character."""
    return str(file).replace("%", "%25").replace("?", "%3F")


def sqlite_file(url: str) -> Path | None:
    """The file of an sqlite URL; None for other databases."""
    database = sqlalchemy.make_url(url).database if url.startswith("sqlite:///") else None
    return Path(database) if database else None


def write_run_address(folder: Path, run_id: str, experiment_id: str) -> None:
    """Name the run of a run folder."""
    write_text(folder / RUN_ID, f"{run_id} {experiment_id}")


def read_run_address(folder: Path) -> tuple[str, str]:
    """The ids of a run folder's run and of its experiment; "" for one that is not known."""
    file = folder / RUN_ID
    known = file.read_text(encoding="utf-8", errors="replace").split() if file.exists() else []
    run_id, experiment_id, *_ = [*known, "", ""]
    return run_id, experiment_id


def run_link(ui_url: str, experiment_id: str, run_id: str, artifact: str | None = None) -> str:
    """Link to a run or to one of its artifacts."""
    below = "" if artifact is None else f"/artifacts/{quote(artifact)}"
    return f"{ui_url}/#/experiments/{experiment_id}/runs/{run_id}{below}?workflowType=machine_learning"
