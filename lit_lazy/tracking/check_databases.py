"""Whether databases given by URL, and MLflow's store, can be used; and how they are opened.

A store is checked before anything is created, and never shown with its password. MLflow is imported for a server alone,
since that takes seconds.
"""

import os
import socket
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from lit_lazy.support.background import call_with_timeout
from lit_lazy.support.disk import check_writable_folder, is_read_only, open_file
from lit_lazy.support.error_messages import explain, one_line
from lit_lazy.support.secrets import redact_text, redact_url
from lit_lazy.tracking.store_address import URI_VARIABLE, quote_path, sqlite_file

DATABASES = ("sqlite", "postgresql", "postgresql+psycopg")
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 10.0
LOCKED_SECONDS = 60
"""Timeout for other sqlite writers."""
GONE_SECONDS = 60
"""Timeout of a silent connection; the system's default is two hours."""
POSTGRES = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""Seconds; those of TCP keepalive: silence before the first probe, and time between probes, of which some are sent."""


def check_store(uri: str) -> None:
    """Check that a tracking store can be used; creates nothing. Raises a one-line ValueError if it cannot."""
    named = f"{URI_VARIABLE}={redact_url(uri)}"
    scheme, _, rest = uri.partition("://")
    if scheme in ("http", "https"):
        _check_server(named, uri)
        return
    if scheme not in DATABASES or rest in ("", "/", "/:memory:"):
        raise ValueError(
            f"{named}: must be http://HOST:PORT, sqlite:///FILE or postgresql://...; or unset the variable"
        )
    named_by = os.environ.get(URI_VARIABLE)
    check_database(URI_VARIABLE if named_by else "MLflow's database", uri, "experiments")
    if (file := sqlite_file(uri)) is None:
        return
    option = URI_VARIABLE if named_by else "--runs"
    place = f"{option} {str(file.parent)!r}"
    if quote_path(file) != str(file):  # MLflow would create a folder with the quoted name
        what = "MLflow supports no database whose path contains ? or %"
        raise ValueError(f"{place}: {what}; name another folder, or set {URI_VARIABLE} to a server")
    if is_read_only(file) or (file.exists() and is_read_only(file.parent)):
        what = "is read-only, and MLflow writes in its database"
        raise ValueError(f"{place}: {what}; copy the folder, and name the copy")
    check_writable_folder(option, file.parent)


def _check_server(named: str, uri: str) -> None:
    try:
        address = urlsplit(uri)
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        # Python's own message of a ValueError may contain part of a password.
        why = str(error) if isinstance(error, OSError) else "its port is not a number"
        fix = "start the server, or unset the variable"
        raise ValueError(f"{named}: does not answer ({why}); {fix}") from None
    from mlflow.entities import ViewType

    from lit_lazy.tracking.tracker import make_client

    try:
        # MLflow always has an experiment, if only a deleted one; other servers may answer {} to every request.
        if not call_with_timeout(ANSWER_SECONDS, lambda: make_client(uri).search_experiments(ViewType.ALL, 1)):
            raise ValueError("it has no experiments, not even MLflow's own")
    except Exception as error:
        why = f"is not an MLflow server, or rejects requests ({one_line(error)})"
        raise ValueError(f"{named}: {why}; name another, or unset it") from None


def check_database(option: str, url: str, table: str) -> None:
    """Raise a one-line ValueError, which names the option, if a database cannot be used. Creates nothing.

    It is empty or missing, or has the table by which it is recognised; otherwise it belongs to another program.
    """
    file = sqlite_file(url)
    named = f"{option} {redact_url(url)!r}"
    if file is not None:
        if "?" in url:  # most likely from a path
            raise ValueError(f"{named}: has a ?, which starts a query; write %3F for one in a path")
        with explain(f"{named}: cannot be used", "name another", OSError, ValueError):
            try:
                open_file(file).close()
            except (FileNotFoundError, NotADirectoryError):
                return
    fix = "move that file away, or name another" if file else "are server, user, password and database right?"
    driver = url.replace("postgresql://", "postgresql+psycopg://", 1)
    try:
        engine = sqlalchemy.create_engine(driver, poolclass=sqlalchemy.NullPool, **make_engine_options(url))
        with engine.connect() as connection:
            tables = sqlalchemy.inspect(connection).get_table_names()
    except (ArgumentError, ImportError, ValueError):  # ValueError for a port that is not a number
        raise ValueError(f"{named}: is not a database URL; give SCHEME://USER:PASSWORD@HOST:PORT/DATABASE") from None
    except SQLAlchemyError as error:
        why = redact_text(str(getattr(error, "orig", None) or error).strip().partition("\n")[0])[:200]
        raise ValueError(f"{named}: cannot be used ({why}); {fix}") from None
    if table not in tables and "alembic_version" in tables:  # another's migrations, which could change our tables too
        raise ValueError(f"{named}: is another program's database; name another")


def make_engine_options(url: str) -> dict[str, Any]:
    """Engine options with timeouts for other sqlite writers, slow servers and servers that disappear."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": LOCKED_SECONDS}}
    return {"connect_args": POSTGRES | {"tcp_user_timeout": 1000 * GONE_SECONDS}, "pool_pre_ping": True}
