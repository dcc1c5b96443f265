"""A PostgreSQL server for tests, on a free port of 127.0.0.1, in a temporary folder.

`create_database(server, name)` gives a test a new database; `Server.stop` and `Server.start` interrupt the server.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


def _find_programs() -> Path | None:
    """The folder of PostgreSQL's programs, which Debian does not put on the PATH; None without a server."""
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    installed = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    return max(installed, key=lambda path: int(path.parent.name), default=None)


def _user_options() -> dict[str, Any]:
    """Options of `subprocess` that run a program as the package's user if we are root, which PostgreSQL rejects."""
    return {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}


@dataclass
class Server:
    """A cluster in `folder` that answers on `port` between `start` and `stop`, for anyone on 127.0.0.1."""

    programs: Path
    folder: Path
    port: int
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def _log(self) -> Path:
        return self.folder / "server.log"

    def url(self, name: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def initialise(self) -> None:
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        command = [self.programs / "initdb", "--pgdata", self.folder / "data", *options]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, **_user_options())
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stderr}")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        server = [self.programs / "postgres", "-D", "data", "-p", str(self.port), *settings]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", UNTIL_TOLD, "sh", *server],
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests, which stop the server at their end.
                **_user_options(),
            )
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if time.monotonic() > until:
                    raise RuntimeError(f"PostgreSQL did not start: {self._log.read_text()}") from error
                time.sleep(0.02)

    def stop(self) -> None:
        """Disconnect everyone and stop; the databases remain for the next `start`."""
        if self._process is not None:
            self._process.communicate(b"\n")
            self._process = None


@contextmanager
def run_server(programs: Path) -> Generator[Server]:
    """Run a server with an empty cluster, and remove both afterwards."""
    # Not below pytest's folders: the server's user cannot access them.
    folder = Path(tempfile.mkdtemp(prefix="lit-lazy-postgres-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres", "postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(programs, folder, port)
    try:
        server.initialise()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """One running server per test process."""
    programs = _find_programs()
    if programs is None:
        assert not os.environ.get("LIT_LAZY_REQUIRE_POSTGRES"), "PostgreSQL is missing, and must not be here"
        pytest.skip("needs PostgreSQL's server (Debian: apt-get install postgresql)")
    with run_server(programs) as server:
        yield server


def create_database(server: Server, name: str) -> str:
    """Create an empty database, replacing one with that name, and return its URL."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return server.url(name)
