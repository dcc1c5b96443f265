"""The MLflow store: its address, its client, its errors, and whether it can be used."""

import functools
import logging
import os
import socket
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

from lit_lazy.support.disk import check_writable_folder, describe_failed_write
from lit_lazy.support.errors import UnfinishedError, iter_causes, one_line
from lit_lazy.support.locks import make_file_lock
from lit_lazy.support.secrets import redact_url, strip_user
from lit_lazy.support.timeout import call_with_timeout
from lit_lazy.tracking.databases import (
    check_sqlite,
    create_sqlite_file,
    has_content,
    query_database,
    quote_path,
    sqlite_file,
    sqlite_url,
)

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
CONNECT_SECONDS = 5.0
GATEWAY_STATUSES = (408, 429, 502, 503, 504)
"""Statuses by which a gateway or an overloaded server asks for a retry."""
ANSWER_SECONDS = 10.0

URI_VARIABLE = "MLFLOW_TRACKING_URI"
DATABASES = ("sqlite", "postgresql", "postgresql+psycopg")


class TrackingError(UnfinishedError):
    """MLflow rejected or did not receive a call; the call can be repeated later."""

    def __init__(self, message: str, reachable: bool) -> None:
        super().__init__(message)
        self.reachable = reachable
        """Whether MLflow answered, so that a retry is likely to fail too."""


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


def default_uri(runs: Path) -> str:
    """The tracking store: `MLFLOW_TRACKING_URI` if set, else sqlite in the runs folder."""
    return os.environ.get(URI_VARIABLE) or sqlite_url(runs / "mlflow.db")


def check_store(uri: str) -> None:
    """Check that a tracking store can be used; creates nothing. Raises a one-line ValueError if it cannot."""
    named = f"{URI_VARIABLE}={redact_url(uri)}"
    if why := _find_connection_error(uri):
        raise ValueError(f"{named}: does not answer ({why}); start the server, or unset the variable")
    scheme, _, rest = uri.partition("://")
    if scheme in ("http", "https"):
        if why := _find_server_error(uri):
            raise ValueError(
                f"{named}: is not an MLflow server, or rejects requests ({why}); name another, or unset it"
            )
        return
    if scheme not in DATABASES or rest in ("", "/", "/:memory:"):
        raise ValueError(
            f"{named}: must be http://HOST:PORT, sqlite:///FILE or postgresql://...; or unset the variable"
        )
    check_sqlite(named, uri)
    query_database(
        URI_VARIABLE if os.environ.get(URI_VARIABLE) else "MLflow's database", uri, "experiments", lambda _: None
    )
    if (file := sqlite_file(uri)) is not None:
        option = URI_VARIABLE if os.environ.get(URI_VARIABLE) else "--runs"
        if quote_path(file) != str(file):  # MLflow would create a folder with the quoted name
            raise ValueError(
                f"{option} {str(file.parent)!r}: MLflow supports no database whose path contains ? or %; name another "
                f"folder, or set {URI_VARIABLE} to a server"
            )
        check_writable_folder(option, file.parent)


def _find_connection_error(uri: str) -> str | None:
    """Why a server's address accepts no connection; None if it does or if `uri` is not an HTTP address."""
    address = urlsplit(uri)
    if address.scheme not in ("http", "https"):
        return None
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
    except OSError as error:
        return str(error)
    except ValueError:
        return "its port is not a number"  # Python's own message may contain part of a password
    return None


def _find_server_error(uri: str) -> str | None:
    """Why a server does not answer as MLflow within the timeout; None if it does."""

    def search() -> None:
        # MLflow always has an experiment, if only a deleted one; other servers may answer {} to every request.
        if not make_client(uri).search_experiments(ViewType.ALL, max_results=1):
            raise MlflowException("it has no experiments, not even MLflow's own")

    try:
        call_with_timeout(ANSWER_SECONDS, search)
    except Exception as error:  # MLflow's client raises many types for unexpected answers
        return one_line(error)
    return None


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
