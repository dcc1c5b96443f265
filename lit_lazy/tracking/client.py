"""MLflow's client of a store, its errors, and the artifacts of runs.

A local store has artifacts in a folder beside its database, by whatever path that is reached.
"""

import functools
import inspect
import logging
import os
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

import mlflow
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from mlflow.utils.file_utils import local_file_uri_to_path
from requests.exceptions import RequestException

from lit_lazy.support.disk import describe_failed_write
from lit_lazy.support.errors import one_line
from lit_lazy.support.inside import is_entry_name, join_name
from lit_lazy.support.locks import make_file_lock
from lit_lazy.support.secrets import strip_user
from lit_lazy.tracking.store import (
    ARTIFACTS,
    LOCKED_SECONDS,
    URI_VARIABLE,
    StorageError,
    TrackingError,
    create_sqlite_file,
    has_content,
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


def translate_errors(cls: type[T]) -> type[T]:
    """Decorate a class whose public methods raise TrackingError for every kind of MLflow failure."""

    def translate(method: Callable[P, Any]) -> Callable[P, Any]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            try:
                return method(*args, **kwargs)
            except (MlflowException, RequestException, OSError) as error:
                raise TrackingError(describe_failed_write(error) or one_line(error)) from error

        return call

    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_"):
            setattr(cls, name, translate(method))
    return cls


def open_store(uri: str) -> MlflowClient:
    """A client of the store; creates a local database that is missing or empty."""
    file = sqlite_file(uri)
    # Two processes must not create the database at once.
    with make_file_lock(file.with_name(f"{file.name}.lock")) if file else nullcontext():
        if file is not None and not has_content(file):
            # Atomically: MLflow cannot reopen a database whose creation was killed half-way.
            with create_sqlite_file(file) as unfinished:
                SqlAlchemyStore(sqlite_url(unfinished), DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()
        return make_client(uri)


def make_client(uri: str) -> MlflowClient:
    """A client of an existing store, which becomes the store of this process.

    Moves a server's password into environment variables: MLflow shows the address in errors and stores it.
    """
    address = urlsplit(uri)
    if address.scheme in ("http", "https") and address.password:
        os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(address.username or "")
        os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(address.password)
        uri = strip_user(uri)
    before = os.environ.get(URI_VARIABLE)
    mlflow.set_tracking_uri(uri)
    if before is None:  # it exports the address, which `default_uri` would take for the user's setting
        os.environ.pop(URI_VARIABLE, None)
    else:
        os.environ[URI_VARIABLE] = before
    return MlflowClient(uri)


def search_any_experiment(uri: str) -> None:
    """Raise an exception unless an MLflow server answers; its client raises many types for unexpected answers."""
    # MLflow always has an experiment, if only a deleted one; other servers may answer {} to every request.
    if not make_client(uri).search_experiments(ViewType.ALL, max_results=1):
        raise MlflowException("it has no experiments, not even MLflow's own")


def create_artifact_folder(database: Path, experiment: str) -> str:
    """Create the folder of an experiment's artifacts; returns its address. `locate` needs the folder to exist."""
    folder = join_name(database.resolve().parent / ARTIFACTS, experiment)
    folder.mkdir(parents=True, exist_ok=True)
    return folder.as_uri()


def open_artifacts(client: MlflowClient, address: str) -> ArtifactRepository:
    """The artifacts of a run, given the address that MLflow stores. Raises MlflowException."""
    database = sqlite_file(client.tracking_uri)
    if database is not None and address.startswith("file:"):
        address = locate(Path(local_file_uri_to_path(address)), database).as_uri()
    return get_artifact_repository(address, tracking_uri=client.tracking_uri)


def locate(stored: Path, database: Path) -> Path:
    """Where a run's artifacts lie, given the folder that a database names.

    The database names the path by which it was reached when the run began. In another container, or after a move, that
    is another folder or none. Artifacts that were not stored beside the database stay where they are.
    """
    if stored.parts[-4:-3] != (ARTIFACTS,):
        return stored
    here = functools.reduce(join_name, stored.parts[-3:], database.resolve().parent / ARTIFACTS)
    return here if here.parents[1].exists() else stored  # EXPERIMENT/RUN/artifacts


def make_addresses_relative(database: Path) -> None:
    """Replace the addresses that a database has from another path to its folder by ones relative to that folder.

    They are for MLflow's server, which reads addresses itself and runs in that folder: `locate` gives the same folder
    for either. A relative address is right by every path, so servers at two paths do not change each other's. Raises
    StorageError.
    """
    folder = database.resolve().parent / ARTIFACTS
    try:
        with closing(sqlite3.connect(database, timeout=LOCKED_SECONDS)) as connection, connection:
            for (address,) in connection.execute("SELECT artifact_location FROM experiments").fetchall():
                _, beside, name = address.rpartition(f"/{ARTIFACTS}/")
                if not is_entry_name(unquote(name)):
                    continue
                here = join_name(folder, unquote(name))
                if not beside or address == here.as_uri() or not here.exists():
                    continue
                new, end = f"file:{ARTIFACTS}/{name}", len(address) + 1
                for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                    change = f"UPDATE {table} SET {column} = ? || substr({column}, ?)"
                    where = f"WHERE substr({column} || '/', 1, ?) = ?"
                    connection.execute(f"{change} {where}", (new, end, end, f"{address}/"))
    except sqlite3.Error as error:
        raise StorageError(f"{str(database)!r}: cannot be used ({error})") from None


def list_experiment_names(uri: str) -> list[str]:
    """Names of all experiments of a store; none if a local store does not exist, which is not created."""
    if (file := sqlite_file(uri)) is not None and not has_content(file):
        return []
    try:
        return [experiment.name for experiment in make_client(uri).search_experiments()]
    except MlflowException as error:
        raise TrackingError(one_line(error)) from error
