"""Databases that a user names by URL: reached before anything is created, and never shown with their passwords."""

import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from lit_lazy.support.disk import PRIVATE
from lit_lazy.support.errors import iter_causes
from lit_lazy.support.secrets import redact_text, redact_url

T = TypeVar("T")
CONNECT_SECONDS = 10
LOCKED_SECONDS = 60
"""How long sqlite waits for other writers."""
GONE_SECONDS = 60
"""A connection whose other end is silent for so long is given up; by default that takes two hours."""
KEEPALIVES = {"idle": 30, "interval": 10, "count": 3}
"""Seconds of silence before the other end is asked whether it is there, seconds between questions, and how many."""
PRIMARY_CODE = 0xFF
"""What sqlite's extended error codes leave of an error."""


class StorageError(ValueError):
    """A database that cannot be used, in one line."""


def query_database(option: str, url: str, table: str, ask: Callable[[sqlalchemy.Connection], T]) -> T | None:
    """The answer of a database; None from one that is still empty, or from an sqlite file that is not there yet.

    table: one that the database holds if it is what it should be. Creates nothing. Raises StorageError, which names the
    option, for a database that cannot be reached, is damaged, or is another program's.
    """
    file = sqlite_file(url)
    named = f"{option} {redact_url(url)!r}"
    if file is not None:
        try:
            kind = file.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:  # a name too long, links in a circle
            raise StorageError(f"{named}: cannot be used ({format_database_error(error)}); name another") from None
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # sqlite says of a folder what it is
            raise StorageError(f"{named}: is a pipe or a device, and no file; name another")
    fix = "move that file away, or name another" if file else "are server, user, password and database right?"
    try:
        engine = sqlalchemy.create_engine(
            url.replace("postgresql://", "postgresql+psycopg://", 1), **make_engine_options(url)
        )
    except (SQLAlchemyError, ImportError, ValueError):  # the last of a port that is no number
        raise StorageError(
            f"{named}: is no URL of a database; give SCHEME://USER:PASSWORD@HOST:PORT/DATABASE"
        ) from None
    try:
        with engine.connect() as connection:
            tables = sqlalchemy.inspect(connection).get_table_names()
            if table in tables:
                return ask(connection)
    except SQLAlchemyError as error:
        raise StorageError(f"{named}: cannot be used ({format_database_error(error)}); {fix}") from None
    finally:
        engine.dispose()
    if "alembic_version" in tables:  # the record of a program that changes its tables as it needs, and so would ours
        raise StorageError(f"{named}: is another program's database; name another")
    return None


def sqlite_url(file: Path) -> str:
    """The URL of an sqlite file, whatever characters its path has."""
    return f"sqlite:///{quote_path(file.resolve())}"


def quote_path(file: Path) -> str:
    """A path as it stands in an sqlite URL, in which ? begins a query and % a character by its number."""
    return str(file).replace("%", "%25").replace("?", "%3F")


def sqlite_file(url: str) -> Path | None:
    """The file of an sqlite URL; None for another database's."""
    database = sqlalchemy.make_url(url).database if url.startswith("sqlite:///") else None
    return Path(database) if database else None


def has_content(file: Path) -> bool:
    """Whether an sqlite file holds anything; to sqlite an empty one is as one that is not there yet."""
    return file.exists() and file.stat().st_size > 0


def check_sqlite(named: str, url: str) -> None:
    """Raise StorageError where an sqlite URL has a query: it is taken for a path that has a question mark."""
    if url.startswith("sqlite:") and "?" in url:
        raise StorageError(f"{named}: has a ?, which begins a query; write %3F for that of a path")


def relocate_artifacts(file: Path, artifacts: str) -> None:
    """Have the runs of an MLflow database that was moved or copied keep their artifacts in the folder beside it.

    MLflow stores the absolute place of each experiment's and each run's: a copy would write into the original. Raises
    StorageError.
    """
    try:
        with closing(sqlite3.connect(file, timeout=LOCKED_SECONDS)) as database, database:
            for name, place in database.execute("SELECT name, artifact_location FROM experiments").fetchall():
                here = file.resolve().parent / artifacts / name
                if place.endswith(f"/{artifacts}/{quote(name)}") and place != here.as_uri() and here.exists():
                    _replace_prefix(database, place, here.as_uri())
    except sqlite3.Error as error:
        raise StorageError(f"{str(file)!r}: cannot be used ({error})") from None


def _replace_prefix(database: sqlite3.Connection, old: str, new: str) -> None:
    for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
        database.execute(
            f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?",
            (new, len(old) + 1, len(old) + 1, f"{old}/"),
        )


@contextmanager
def create_sqlite_file(file: Path) -> Iterator[Path]:
    """A file to make tables in, which becomes `file` when that is done: one half-made could never be opened again."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    for left in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):
        left.unlink(missing_ok=True)
    unfinished.touch(mode=PRIVATE)
    yield unfinished
    unfinished.replace(file)


def make_engine_options(url: str) -> dict[str, Any]:
    """How to connect: sqlite waits for other writers, a server has to answer soon and may vanish without a word."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": LOCKED_SECONDS}}
    silence = {f"keepalives_{name}": number for name, number in KEEPALIVES.items()}
    user_timeout = 1000 * GONE_SECONDS
    connecting = {"connect_timeout": CONNECT_SECONDS, **silence, "tcp_user_timeout": user_timeout}
    return {"connect_args": connecting, "pool_pre_ping": True}


def find_corruption(error: BaseException) -> str:
    """What is wrong with an sqlite file for good, where an exception came from that; "" otherwise."""
    for cause in iter_causes(error):
        if getattr(cause, "sqlite_errorcode", 0) & PRIMARY_CODE in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return str(cause)
    return ""


def format_database_error(error: Exception) -> str:
    """What a database says of an error, in one line."""
    cause = getattr(error, "orig", None) or error
    return redact_text(str(cause).strip().partition("\n")[0])[:200]
