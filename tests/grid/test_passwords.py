"""Passwords in the addresses of Optuna's storage and of MLflow are visible nowhere, during a grid and afterwards."""

import http.client
import os
import stat
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import postgres
import psutil
import pytest
from instant import Lab
from mlflow_server import MlflowServer
from two_rows import two_rows

from lit_lazy.grid.study import JOURNAL, open_study
from lit_lazy.tracking.store_address import TrackingError, default_uri
from lit_lazy.tracking.tracker import Tracker

PASSWORD = "hunter2:é"
TYPED = "hunter2%3A%C3%A9"
"""The password as quoted in a URL."""
TRACES = [PASSWORD.encode(), TYPED.encode(), b64encode(f"me:{PASSWORD}".encode()).rstrip(b"="), b"hunter2"]


class Guard(BaseHTTPRequestHandler):
    """Forwards authorised requests to MLflow's server, except a few batches of metrics."""

    protocol_version = "HTTP/1.1"
    behind = 0
    batches: int

    def log_message(self, *_: object) -> None:
        """No log."""

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):
            super().handle_one_request()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Basic {b64encode(f'me:{PASSWORD}'.encode()).decode()}":
            self._answer(401, b"who are you?", "text/plain")
            return
        if self.path.endswith("log-batch"):
            type(self).batches += 1
            if type(self).batches in (2, 3):  # the first is the parent run's
                self._answer(400, b"not now", "text/plain")
                return
        connection = http.client.HTTPConnection("127.0.0.1", self.behind)
        headers = {name: value for name, value in self.headers.items() if name not in ("Host", "Authorization")}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        self._answer(answer.status, answer.read(), answer.headers.get("Content-Type", "text/plain"))

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on


@pytest.fixture
def guarded(tmp_path: Path, empty_store: Path) -> Iterator[str]:
    """The address, with password, of an MLflow server that requires one."""
    server = MlflowServer(tmp_path / "server", empty_store)
    server.start()
    handler = type("GuardOfOne", (Guard,), {"behind": server.port, "batches": 0})
    guard = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=guard.serve_forever, daemon=True).start()
    yield f"http://me:{TYPED}@127.0.0.1:{guard.server_port}"
    guard.shutdown()
    guard.server_close()
    server.stop()


def process_list(root: psutil.Process) -> set[bytes]:
    """What every user of this machine can read about a process and its children."""
    shown = set()
    for process in [root, *root.children(recursive=True)]:
        with suppress(OSError):
            shown.add(Path(f"/proc/{process.pid}/cmdline").read_bytes())
    return shown


def assert_clean(name: str, shown: bytes) -> None:
    for trace in TRACES:
        at = shown.find(trace)
        assert at < 0, f"{name}: {shown[max(0, at - 100) : at + 50]!r}"


@pytest.mark.long
def test_a_grid_shows_no_password(guarded: str, postgres_server: postgres.Server, tmp_path: Path) -> None:
    """Real processes; MLflow rejects a few calls, so that errors are logged; then again without MLflow."""
    storage = postgres.create_database(postgres_server, "secret").replace("postgres@", f"postgres:{TYPED}@")
    ablation, runs = tmp_path / "secret.py", tmp_path / "runs"
    ablation.write_text(two_rows("secret"))
    words = [sys.executable, "-P", "-m", "lit_lazy", "ablate", "run", str(ablation), "--seeds", "0"]
    words += ["--runs", str(runs), "--workers", "1", "--storage", storage]
    given = os.environ | {"MLFLOW_TRACKING_URI": guarded, "OMP_NUM_THREADS": "1"}
    out = (tmp_path / "out").open("wb")
    grid = psutil.Popen(words, stdout=out, stderr=out, env=given)
    shown: set[bytes] = set()
    time.sleep(1)  # the user's arguments are visible until the command has started
    while grid.poll() is None:
        shown |= process_list(grid)
        time.sleep(0.2)
    assert grid.returncode == 0, (tmp_path / "out").read_text()
    assert any(b"lit_lazy.grid.worker" in line for line in shown)
    table = subprocess.run([*words[:4], "ablate", "table", "secret-backcopy_tiny", "--runs", str(runs)],
                           capture_output=True, env=given)  # fmt: skip
    away = subprocess.run(
        words, capture_output=True, env=given | {"MLFLOW_TRACKING_URI": guarded.replace("me:", "you:")}
    )
    assert away.returncode == 2, "before anything is done, as the address is a mistake"
    assert_clean("the process list", b"\n".join(shown))
    study = open_study(storage, runs / "secret-backcopy_tiny")
    assert_clean("the study", repr((study.study_name, study.user_attrs, study.trials)).encode())
    assert_clean("what is said", table.stdout + table.stderr + away.stdout + away.stderr)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name.startswith("worker-") for path in files)
    assert any(path.name == "plan.json" for path in files)
    for path in files:
        assert_clean(str(path), path.read_bytes())


def test_mlflow_is_told_no_address_with_a_password(closed_port, monkeypatch) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")
    tracker = Tracker(f"http://me:{TYPED}@127.0.0.1:{closed_port}", "x")
    assert tracker.client.tracking_uri == f"http://127.0.0.1:{closed_port}"
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("me", PASSWORD)
    with pytest.raises(TrackingError) as error:
        tracker.find({"kind": "cell"})
    assert "hunter2" not in str(error.value)


def test_what_was_typed_leaves_the_list_of_processes() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom lit_lazy.support.secrets import hide_passwords\nhide_passwords()\n"
        "print(Path('/proc/self/cmdline').read_text().split(chr(0))[-3:-1], sys.argv[1:])"
    )
    url = f"postgresql://me:{TYPED}@host/x"
    done = subprocess.run([sys.executable, "-c", code, "--storage", url], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"['--storage', 'postgresql://me:{'*' * len(TYPED)}@host/x'] ['--storage', '{url}']"


def test_logs_are_their_user_s_alone_and_other_files_follow_the_umask(lab: Lab) -> None:
    former = os.umask(0o002)
    try:
        lab.run()
        Tracker(default_uri(lab.runs), "x").find({"kind": "cell"})
    finally:
        os.umask(former)
    (log,) = lab.folder.glob("worker-*.log")
    files = lab.runs / "mlflow.db", lab.folder / JOURNAL, lab.folder / "plan.json", log
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o664] * 3 + [0o600]
