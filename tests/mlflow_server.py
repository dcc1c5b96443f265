"""MLflow's server for tests, on a free port of 127.0.0.1; it can be stopped for a while."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

READY_SECONDS = 120


class MlflowServer:
    """A server on a copy of a store that runs between `start` and `stop`."""

    def __init__(self, folder: Path, store: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.store = folder, folder / "mlflow.db"
        shutil.copy(store, self.store)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *(sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.store}"),
            *("--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1"),
            *("--port", str(self.port), "--workers", "1"),
        ]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return
            time.sleep(0.1)
        raise RuntimeError(f"MLflow did not start: {(self.folder / 'server.log').read_text()}")

    def stop(self) -> None:
        """Kill it, as if its machine failed."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"), empty_store)
    server.start()
    yield server
    server.stop()
