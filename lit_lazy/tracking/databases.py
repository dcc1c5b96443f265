"""Databases that a user names by URL: reached before anything is created, and never shown with their passwords."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

T = TypeVar("T")
CONNECT_SECONDS = 10
GONE_SECONDS = 60
"""A connection whose other end is silent for so long is given up; by default that takes two hours."""
KEEPALIVES = {"idle": 30, "interval": 10, "count": 3}
"""Seconds of silence before the other end is asked whether it is there, seconds between questions, and how many."""


class StorageError(ValueError):
    """A database that cannot be used, in one line."""


def redacted(url: str) -> str:
    """A URL without its password, also one that is no proper URL: then what looks like a password is left out."""
    without = re.sub(r"(?<=:)(?!//).*@", "***@", url)
    return re.sub(r"(?<=password=)[^&]*", "***", without)


def reach(option: str, url: str, table: str, ask: Callable[[sqlalchemy.Connection], T]) -> T | None:
    """The answer of a database; None from one that is still empty, or from an sqlite file that is not there yet.

    table: one that the database holds if it is what it should be. Creates nothing. Raises StorageError, which names the
    option, for a database that cannot be reached, is damaged, or is another program's.
    """
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return None
    named = f"{option} {redacted(url)!r}"
    fix = "move that file away, or name another" if file else "are server, user, password and database right?"
    try:
        engine = sqlalchemy.create_engine(
            url.replace("postgresql://", "postgresql+psycopg://", 1), **engine_options(url)
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
        raise StorageError(f"{named}: cannot be used ({first_line(error)}); {fix}") from None
    finally:
        engine.dispose()
    if "alembic_version" in tables:  # the record of a program that changes its tables as it needs, and so would ours
        raise StorageError(f"{named}: is another program's database; name another")
    return None


def sqlite_file(url: str) -> Path | None:
    """The file of an sqlite URL; None for another database's."""
    return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:") else None


@contextmanager
def new_sqlite_file(file: Path) -> Iterator[Path]:
    """A file to make tables in, which becomes `file` when that is done: one half-made could never be opened again."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    for left in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):
        left.unlink(missing_ok=True)
    yield unfinished
    unfinished.replace(file)


def engine_options(url: str) -> dict[str, Any]:
    """How to connect: sqlite waits for other writers, a server has to answer soon and may vanish without a word."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": 60}}
    silence = {f"keepalives_{name}": number for name, number in KEEPALIVES.items()}
    user_timeout = 1000 * GONE_SECONDS
    connecting = {"connect_timeout": CONNECT_SECONDS, **silence, "tcp_user_timeout": user_timeout}
    return {"connect_args": connecting, "pool_pre_ping": True}


def first_line(error: Exception) -> str:
    """What a database says of an error, in one line."""
    cause = getattr(error, "orig", None) or error
    return str(cause).strip().partition("\n")[0][:200]
