"""Where results are stored: MLflow's address, and databases given by URL. MLflow, slow to import, is not needed.

A database is checked before anything is created, and never shown with its password.
"""

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from lit_lazy.support.disk import is_read_only, write_text
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.secrets import redact_text, redact_url

URI_VARIABLE = "MLFLOW_TRACKING_URI"


class TrackingError(UnfinishedError):
    """MLflow rejected or did not receive a call; the call can be repeated later."""


def default_uri(runs: Path) -> str:
    """The tracking store: `MLFLOW_TRACKING_URI` if set, else sqlite in the runs folder."""
    return os.environ.get(URI_VARIABLE) or sqlite_url(runs / "mlflow.db")


ARTIFACTS = "mlartifacts"
"""Folder beside a local store's database."""
CONNECT_SECONDS = 10
LOCKED_SECONDS = 60
"""Timeout for other sqlite writers."""
GONE_SECONDS = 60
"""Timeout of a silent connection; the system's default is two hours."""
KEEPALIVES = {"idle": 30, "interval": 10, "count": 3}
"""TCP keepalive: seconds of silence before the first probe, seconds between probes, and their number."""


class StorageError(ValueError):
    """A database cannot be used; the message has one line."""


def check_database(option: str, url: str, table: str) -> None:
    """Raise a one-line StorageError, which names the option, if a database cannot be used. Creates nothing.

    It is empty or missing, or has the table by which it is recognised; otherwise it belongs to another program.
    """
    file = sqlite_file(url)
    named = f"{option} {redact_url(url)!r}"
    if file is not None:
        try:
            kind = file.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as error:  # a name that is too long, circular links
            raise StorageError(f"{named}: cannot be used ({format_database_error(error)}); name another") from None
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # sqlite's error describes a folder
            raise StorageError(f"{named}: is a pipe or a device, not a file; name another")
    fix = "move that file away, or name another" if file else "are server, user, password and database right?"
    try:
        engine = sqlalchemy.create_engine(
            url.replace("postgresql://", "postgresql+psycopg://", 1), **make_engine_options(url)
        )
    except (SQLAlchemyError, ImportError, ValueError):  # ValueError for a port that is not a number
        raise StorageError(f"{named}: is not a database URL; give SCHEME://USER:PASSWORD@HOST:PORT/DATABASE") from None
    try:
        with engine.connect() as connection:
            tables = sqlalchemy.inspect(connection).get_table_names()
    except SQLAlchemyError as error:
        raise StorageError(f"{named}: cannot be used ({format_database_error(error)}); {fix}") from None
    finally:
        engine.dispose()
    if table not in tables and "alembic_version" in tables:  # another's migrations, which could change our tables too
        raise StorageError(f"{named}: is another program's database; name another")


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


def has_content(file: Path) -> bool:
    """Whether an sqlite file exists and is not empty, which sqlite treats like a missing file."""
    return file.exists() and file.stat().st_size > 0


def check_sqlite(named: str, url: str) -> None:
    """Raise StorageError if an sqlite URL has a query, most likely from a question mark in a path."""
    if url.startswith("sqlite:") and "?" in url:
        raise StorageError(f"{named}: has a ?, which starts a query; write %3F for one in a path")


@contextmanager
def create_sqlite_file(file: Path) -> Iterator[Path]:
    """A temporary file to create tables in, atomically renamed to `file` on success: partial databases are unusable."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    for left in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):
        left.unlink(missing_ok=True)
    unfinished.touch()  # sqlite's own mode would not let a group write, whatever the umask
    yield unfinished
    unfinished.replace(file)


def make_engine_options(url: str) -> dict[str, Any]:
    """Engine options with timeouts for other sqlite writers, slow servers and servers that disappear."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": LOCKED_SECONDS}}
    silence = {f"keepalives_{name}": number for name, number in KEEPALIVES.items()}
    user_timeout = 1000 * GONE_SECONDS
    connecting = {"connect_timeout": CONNECT_SECONDS, **silence, "tcp_user_timeout": user_timeout}
    return {"connect_args": connecting, "pool_pre_ping": True}


def format_database_error(error: Exception) -> str:
    """A database's error message in one line."""
    cause = getattr(error, "orig", None) or error
    return redact_text(str(cause).strip().partition("\n")[0])[:200]


@contextmanager
def open_readable(url: str) -> Iterator[str]:
    """The URL of a database, or of a temporary copy of an sqlite file that this process cannot write.

    MLflow and Optuna write to a database when they open it, and both need locks. Folders beside the file, as MLflow's
    artifacts, are linked beside the copy. Raises StorageError if the file cannot be read.
    """
    file = sqlite_file(url)
    if file is None or not has_content(file) or not (is_read_only(file) or is_read_only(file.parent)):
        yield url
        return
    with TemporaryDirectory(prefix="lit-lazy-") as scratch:
        copy = Path(scratch, file.name)
        try:  # a consistent state, although its owner may write meanwhile
            source = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)
            with closing(source), closing(sqlite3.connect(copy)) as target:
                source.backup(target)
        except sqlite3.Error as error:
            raise StorageError(
                f"{str(file)!r}: cannot be read in a read-only folder ({error}); copy the folder to a disk that can be "
                "written, and name the copy"
            ) from None
        for folder in (entry for entry in file.parent.iterdir() if entry.is_dir()):
            copy.with_name(folder.name).symlink_to(folder.resolve())
        yield sqlite_url(copy)


RUN_ID = "mlflow_run_id"
"""The file, with the run's id and that of its experiment; the second is missing in files of former versions."""


def write_run_address(folder: Path, run_id: str, experiment_id: str) -> None:
    """Name the run of a run folder."""
    write_text(folder / RUN_ID, f"{run_id} {experiment_id}")


def read_run_id(folder: Path) -> str:
    """The id of a run folder's run; "" if it is not known."""
    return (_read(folder) or [""])[0]


def read_run_address(folder: Path) -> tuple[str, str] | None:
    """The ids of a run folder's experiment and run; None if one is not known."""
    known = _read(folder)
    return (known[1], known[0]) if len(known) == 2 else None


def _read(folder: Path) -> list[str]:
    file = folder / RUN_ID
    return file.read_text(encoding="utf-8", errors="replace").split() if file.exists() else []
