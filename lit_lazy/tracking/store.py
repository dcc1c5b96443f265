"""Where results are stored: MLflow's address, and databases given by URL. MLflow, slow to import, is not needed.

A store is checked before anything is created, and never shown with its password.
"""

import os
import stat
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from lit_lazy.support.disk import write_text
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.secrets import redact_text, redact_url

URI_VARIABLE = "MLFLOW_TRACKING_URI"
NOTE, PARENT = "mlflow.note.content", "mlflow.parentRunId"
"""MLflow's tags: the description of a run or of an experiment, and the run that a run is nested in."""
ARTIFACTS = "mlartifacts"
"""Folder beside a local store's database."""
LOCKED_SECONDS = 60
"""Timeout for other sqlite writers."""
GONE_SECONDS = 60
"""Timeout of a silent connection; the system's default is two hours."""
KEEPALIVES = {"idle": 30, "interval": 10, "count": 3}
"""TCP keepalive: seconds of silence before the first probe, seconds between probes, and their number."""
RUN_ID = "mlflow_run_id"
"""The file in a run folder with the ids of its run and experiment; earlier versions wrote the first alone."""


class TrackingError(UnfinishedError):
    """MLflow rejected or did not receive a call; the call can be repeated later."""


class StorageError(ValueError):
    """A database cannot be used; the message has one line."""


def default_uri(runs: Path) -> str:
    """The tracking store: `MLFLOW_TRACKING_URI` if set, else sqlite in the runs folder."""
    return os.environ.get(URI_VARIABLE) or sqlite_url(runs / "mlflow.db")


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
            raise StorageError(f"{named}: cannot be used ({_describe(error)}); name another") from None
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
        raise StorageError(f"{named}: cannot be used ({_describe(error)}); {fix}") from None
    finally:
        engine.dispose()
    if table not in tables and "alembic_version" in tables:  # another's migrations, which could change our tables too
        raise StorageError(f"{named}: is another program's database; name another")


def _describe(error: Exception) -> str:
    """A database's error in one line."""
    return redact_text(str(getattr(error, "orig", None) or error).strip().partition("\n")[0])[:200]


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


def check_sqlite(named: str, url: str) -> None:
    """Raise StorageError if an sqlite URL has a query, most likely from a question mark in a path."""
    if url.startswith("sqlite:") and "?" in url:
        raise StorageError(f"{named}: has a ?, which starts a query; write %3F for one in a path")


def make_engine_options(url: str) -> dict[str, Any]:
    """Engine options with timeouts for other sqlite writers, slow servers and servers that disappear."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": LOCKED_SECONDS}}
    silence = {f"keepalives_{name}": number for name, number in KEEPALIVES.items()}
    connecting = {"connect_timeout": 10, **silence, "tcp_user_timeout": 1000 * GONE_SECONDS}
    return {"connect_args": connecting, "pool_pre_ping": True}


def write_run_address(folder: Path, run_id: str, experiment_id: str) -> None:
    """Name the run of a run folder."""
    write_text(folder / RUN_ID, f"{run_id} {experiment_id}")


def read_run_address(folder: Path) -> tuple[str, str]:
    """The ids of a run folder's run and of its experiment; "" for one that is not known."""
    file = folder / RUN_ID
    known = file.read_text(encoding="utf-8", errors="replace").split() if file.exists() else []
    run_id, experiment_id, *_ = [*known, "", ""]
    return run_id, experiment_id
