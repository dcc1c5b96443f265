"""The database of a queue, checked before anything is created."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import optuna
import sqlalchemy
from sqlalchemy import text

from lit_lazy.support.disk import check_writable_folder
from lit_lazy.support.secrets import redact_url
from lit_lazy.tracking.databases import (
    StorageError,
    check_sqlite,
    create_sqlite_file,
    make_engine_options,
    query_database,
    sqlite_file,
    sqlite_url,
)

T = TypeVar("T")
SIGNATURE = "lit-lazy ablate run, queue "
"""How every version signs its studies; a number follows."""
MADE_BY = f"{SIGNATURE}3"
READABLE = (MADE_BY, f"{SIGNATURE}2")
"""Versions whose cells have today's attributes, so that their states can be read."""


def normalise_url(storage: str) -> str:
    """A storage URL with the driver that this project installs.

    Raises StorageError unless it is a PostgreSQL URL or names an sqlite file.
    """
    scheme, _, rest = storage.partition("://")
    known = scheme in ("sqlite", "postgresql", "postgresql+psycopg")
    if not known or rest in ("", "/", "/:memory:") or (scheme == "sqlite" and not rest.startswith("/")):
        raise StorageError(
            f"--storage {redact_url(storage)!r}: must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    if rest.count("@") > 1:
        raise StorageError(f"--storage {redact_url(storage)!r}: has more than one @; write %40 for one in a password")
    check_sqlite(f"--storage {storage!r}", storage)
    return storage.replace("postgresql://", "postgresql+psycopg://", 1)


def default_storage(runs: Path) -> str:
    """URL of the default database, a file in the runs folder."""
    return sqlite_url(runs / "queue.db")


def create_tables(file: Path) -> None:
    """Create Optuna's tables in a new file atomically: Optuna cannot open a partial database."""
    with create_sqlite_file(file) as unfinished:
        url = sqlite_url(unfinished)
        optuna.storages.RDBStorage(escape_braces(url), engine_kwargs=make_engine_options(url)).engine.dispose()


def escape_braces(url: str) -> str:
    """A URL with its braces escaped: Optuna uses it as a format string."""
    return url.replace("{", "{{").replace("}", "}}")


def check_storage(storage: str, grid: str) -> None:
    """Raise a one-line StorageError if a storage cannot hold a grid's queue; creates nothing."""
    url = normalise_url(storage)
    if (file := sqlite_file(url)) is not None:
        if not file.parent.is_dir():
            raise StorageError(
                f"--storage {storage!r}: folder {str(file.parent)!r} does not exist; create it, or name another file"
            )
        check_writable_folder("--storage", file.parent)

    def check(connection: sqlalchemy.Connection) -> None:
        query = (
            "SELECT a.value_json, EXISTS (SELECT 1 FROM trials t WHERE t.study_id = s.study_id) FROM studies s "
            "LEFT JOIN study_user_attributes a ON a.study_id = s.study_id AND a.key = 'made_by' "
            "WHERE s.study_name = :grid"
        )
        for made_by, has_trials in connection.execute(text(query), {"grid": grid}):
            if is_foreign(version := json.loads(made_by or "null"), has_trials):
                raise make_foreign_error(storage, grid, version)

    query_storage(storage, check)


def is_foreign(made_by: str | None, has_trials: bool, accepted: Sequence[str] = (MADE_BY,)) -> bool:
    """Whether a study is not a queue of the `accepted` versions; an unsigned one without trials is being created."""
    return made_by not in accepted and (made_by is not None or has_trials)


def make_foreign_error(storage: str, name: str, made_by: str | None) -> StorageError:
    """The error of a study that `is_foreign`."""
    named = f"--storage {redact_url(storage)!r}: its study {name!r}"
    if (made_by or "").startswith(SIGNATURE):
        return StorageError(
            f"{named} was made by another version of lit-lazy, which alone can continue it; name another storage, or "
            "another --runs folder; `lit-lazy ablate table` shows its results"
        )
    return StorageError(
        f"{named} was not made by `lit-lazy ablate run`; name another storage, or another --runs folder"
    )


def list_grid_names(storage: str) -> list[str]:
    """Names of the grids in a storage, also of other versions; creates nothing.

    Raises StorageError if it cannot be reached.
    """

    def read_names(connection: sqlalchemy.Connection) -> list[str]:
        query = (
            "SELECT s.study_name FROM studies s JOIN study_user_attributes a ON a.study_id = s.study_id "
            "AND a.key = 'made_by' WHERE a.value_json LIKE :signed ORDER BY s.study_id"
        )
        return [name for (name,) in connection.execute(text(query), {"signed": f'"{SIGNATURE}%'})]

    return query_storage(storage, read_names) or []


def query_storage(storage: str, query: Callable[[sqlalchemy.Connection], T]) -> T | None:
    """The result of a query; None for an empty storage. Raises StorageError if it cannot be reached."""
    normalise_url(storage)
    return query_database("--storage", storage, "studies", query)
