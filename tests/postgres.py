"""A PostgreSQL server for tests, on a free port of 127.0.0.1, in a temporary folder."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

START_SECONDS = 30
# A line on its input, or the end of the process at the other end, makes the server disconnect everyone and stop.
UNTIL_TOLD = '"$@" & read -r _; kill -INT $!; wait $!'
# Nothing here has to survive a power failure. Without durability a commit is about as fast as in sqlite.
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
}


def find_programs() -> Path | None:
    """The folder of PostgreSQL's programs, which Debian does not put on the PATH; None without a server."""
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    installed = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    return max(installed, key=lambda path: int(path.parent.name), default=None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The address of a server for anyone on 127.0.0.1, one per test process."""
    programs = find_programs()
    if programs is None:
        assert not os.environ.get("LIT_LAZY_REQUIRE_POSTGRES"), "PostgreSQL is missing, and must not be here"
        pytest.skip("needs PostgreSQL's server (Debian: apt-get install postgresql)")
    # Not below pytest's folders: the server's user cannot access them.
    folder = Path(tempfile.mkdtemp(prefix="lit-lazy-postgres-"))
    options: dict[str, Any] = {"cwd": folder}
    if os.geteuid() == 0:  # which PostgreSQL rejects
        shutil.chown(folder, "postgres", "postgres")
        options |= {"user": "postgres", "group": "postgres", "extra_groups": []}
    given = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
    subprocess.run([programs / "initdb", "--pgdata=data", *given], check=True, capture_output=True, **options)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
    command = ["sh", "-c", UNTIL_TOLD, "sh", programs / "postgres", "-D", "data", "-p", str(port), *settings]
    with (folder / "server.log").open("wb") as log:
        # Ctrl-C is for the tests, which stop the server at their end.
        options |= {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "start_new_session": True}
        server = subprocess.Popen(command, **options)
    address = f"postgresql://postgres@127.0.0.1:{port}"
    wait_until_ready(address, folder)
    yield address
    server.communicate(b"\n")
    shutil.rmtree(folder)


def wait_until_ready(address: str, folder: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg.connect(f"{address}/postgres", connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < until, (folder / "server.log").read_text()
            time.sleep(0.02)


def create_database(server: str, name: str) -> str:
    """Create an empty database, replacing one with that name, and return its URL."""
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return f"{server}/{name}"
