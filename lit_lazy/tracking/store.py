"""The address of the MLflow store, and its error; without MLflow, which takes seconds to import."""

import os
from pathlib import Path

from lit_lazy.support.errors import UnfinishedError
from lit_lazy.tracking.databases import sqlite_url

URI_VARIABLE = "MLFLOW_TRACKING_URI"


class TrackingError(UnfinishedError):
    """MLflow rejected or did not receive a call; the call can be repeated later."""

    def __init__(self, message: str, reachable: bool) -> None:
        super().__init__(message)
        self.reachable = reachable
        """Whether MLflow answered, so that a retry is likely to fail too."""


def default_uri(runs: Path) -> str:
    """The tracking store: `MLFLOW_TRACKING_URI` if set, else sqlite in the runs folder."""
    return os.environ.get(URI_VARIABLE) or sqlite_url(runs / "mlflow.db")
