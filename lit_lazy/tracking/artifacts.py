"""Artifacts of runs. A local store has them in a folder beside its database, by whatever path that is reached."""

import functools
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient
from mlflow.utils.file_utils import local_file_uri_to_path

from lit_lazy.support.inside import is_entry_name, join_name
from lit_lazy.tracking.databases import ARTIFACTS, LOCKED_SECONDS, StorageError, sqlite_file


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
                if beside and address != here.as_uri() and here.exists():
                    _replace_prefix(connection, address, f"file:{ARTIFACTS}/{name}")
    except sqlite3.Error as error:
        raise StorageError(f"{str(database)!r}: cannot be used ({error})") from None


def _replace_prefix(connection: sqlite3.Connection, old: str, new: str) -> None:
    for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
        connection.execute(
            f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?",
            (new, len(old) + 1, len(old) + 1, f"{old}/"),
        )
