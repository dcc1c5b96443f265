"""Whether the MLflow store can be used; MLflow is imported for a server alone, since that takes seconds."""

import os
import socket
from urllib.parse import urlsplit

from lit_lazy.support.disk import check_writable_folder, is_read_only
from lit_lazy.support.errors import one_line
from lit_lazy.support.process import call_with_timeout
from lit_lazy.support.secrets import redact_url
from lit_lazy.tracking.store import URI_VARIABLE, check_database, check_sqlite, quote_path, sqlite_file

CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 10.0
DATABASES = ("sqlite", "postgresql", "postgresql+psycopg")


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
    check_sqlite(named, uri)
    named_by = os.environ.get(URI_VARIABLE)
    check_database(URI_VARIABLE if named_by else "MLflow's database", uri, "experiments")
    if (file := sqlite_file(uri)) is not None:
        option = URI_VARIABLE if named_by else "--runs"
        if quote_path(file) != str(file):  # MLflow would create a folder with the quoted name
            raise ValueError(
                f"{option} {str(file.parent)!r}: MLflow supports no database whose path contains ? or %; name another "
                f"folder, or set {URI_VARIABLE} to a server"
            )
        if is_read_only(file) or (file.exists() and is_read_only(file.parent)):
            raise ValueError(
                f"{option} {str(file.parent)!r}: is read-only, and MLflow writes in its database; copy the folder, and "
                "name the copy"
            )
        check_writable_folder(option, file.parent)


def _check_server(named: str, uri: str) -> None:
    """Raise a one-line ValueError unless an MLflow server answers."""
    try:
        address = urlsplit(uri)
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        # Python's own message of a ValueError may contain part of a password.
        why = str(error) if isinstance(error, OSError) else "its port is not a number"
        fix = "start the server, or unset the variable"
        raise ValueError(f"{named}: does not answer ({why}); {fix}") from None
    from lit_lazy.tracking.tracker import search_any_experiment

    try:
        call_with_timeout(ANSWER_SECONDS, lambda: search_any_experiment(uri))
    except Exception as error:
        why = f"is not an MLflow server, or rejects requests ({one_line(error)})"
        raise ValueError(f"{named}: {why}; name another, or unset it") from None
