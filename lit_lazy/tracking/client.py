"""MLflow's client of a store, and its errors."""

import functools
import logging
import os
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

import mlflow
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from requests.exceptions import HTTPError, RequestException, RetryError
from sqlalchemy.exc import OperationalError

from lit_lazy.support.disk import describe_failed_write
from lit_lazy.support.errors import iter_causes, one_line
from lit_lazy.support.locks import make_file_lock
from lit_lazy.support.secrets import strip_user
from lit_lazy.tracking.databases import create_sqlite_file, has_content, sqlite_file, sqlite_url
from lit_lazy.tracking.store import URI_VARIABLE, TrackingError

# MLflow logs every database that it creates, prints the traceback of an error that it also raises, and triggers a
# deprecation warning.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").addFilter(lambda record: record.exc_info is None)
warnings.filterwarnings("ignore", message=".*``noload`` loader strategy is deprecated.*")

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Calls should fail soon: `lit_lazy.tracking.active_run` retries them later.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

P = ParamSpec("P")
T = TypeVar("T")
GATEWAY_STATUSES = (408, 429, 502, 503, 504)
"""Statuses by which a gateway or an overloaded server asks for a retry."""


def translate_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method to raise TrackingError for every kind of MLflow failure."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (MlflowException, RequestException, OSError) as error:
            raise TrackingError(describe_failed_write(error) or one_line(error), _is_refusal(error)) from error

    return call


def _is_refusal(error: BaseException) -> bool:
    """Whether the store itself rejected the call.

    An open connection does not prove that: a tunnel or a gateway accepts connections while the server is away, and an
    overloaded one accepts them for a long time.
    """
    for cause in iter_causes(error):
        if isinstance(cause, HTTPError):
            return cause.response.status_code not in GATEWAY_STATUSES
        if isinstance(cause, RetryError):
            return not any(f"too many {status} error" in str(cause) for status in GATEWAY_STATUSES)
        if isinstance(cause, RequestException):
            return False
        if isinstance(cause, OperationalError):
            return isinstance(cause.orig, sqlite3.Error)
    return True


def open_store(uri: str) -> MlflowClient:
    """A client of the store; creates a local database that is missing or empty."""
    file = sqlite_file(uri)
    # Two processes must not create the database at once.
    with make_file_lock(file.with_name(f"{file.name}.lock")) if file else nullcontext():
        if file is not None and not has_content(file):
            _create_database(file)
        return make_client(uri)


def _create_database(file: Path) -> None:
    """Create MLflow's database atomically: it cannot reopen one whose creation was killed half-way."""
    with create_sqlite_file(file) as unfinished:
        store = SqlAlchemyStore(sqlite_url(unfinished), DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
        store.engine.dispose()


def make_client(uri: str) -> MlflowClient:
    """A client of an existing store, which becomes the store of this process.

    Moves a server's password into environment variables: MLflow shows the address in errors and stores it.
    """
    address = urlsplit(uri)
    if address.scheme in ("http", "https") and address.password:
        os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(address.username or "")
        os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(address.password)
        uri = strip_user(uri)
    _set_tracking_uri(uri)
    return MlflowClient(uri)


def _set_tracking_uri(uri: str) -> None:
    """Set MLflow's store without exporting it: `default_uri` would take it for the user's setting."""
    before = os.environ.get(URI_VARIABLE)
    mlflow.set_tracking_uri(uri)
    if before is None:
        os.environ.pop(URI_VARIABLE, None)
    else:
        os.environ[URI_VARIABLE] = before


def search_any_experiment(uri: str) -> None:
    """Raise an exception unless an MLflow server answers; its client raises many types for unexpected answers."""
    # MLflow always has an experiment, if only a deleted one; other servers may answer {} to every request.
    if not make_client(uri).search_experiments(ViewType.ALL, max_results=1):
        raise MlflowException("it has no experiments, not even MLflow's own")
