"""Passwords in the addresses of Optuna's storage and of MLflow are visible nowhere, during a grid and afterwards."""

import os
import stat
import subprocess
import sys
import time
from base64 import b64encode
from contextlib import suppress
from pathlib import Path

import postgres
import psutil
import pytest
from instant import Lab
from two_rows import two_rows

from lit_lazy.grid.study import JOURNAL, open_study
from lit_lazy.tracking.store_address import TrackingError, default_uri
from lit_lazy.tracking.tracker import Tracker

PASSWORD = "hunter2:é"
TYPED = "hunter2%3A%C3%A9"
"""The password as quoted in a URL."""
TRACES = [PASSWORD.encode(), TYPED.encode(), b64encode(f"me:{PASSWORD}".encode()).rstrip(b"="), b"hunter2"]


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
def test_a_grid_shows_no_password(mlflow_server, postgres_server, tmp_path) -> None:
    """Real processes; MLflow dies when a worker trains, so that errors are logged; then again without MLflow."""
    storage = postgres.create_database(postgres_server, "secret").replace("postgres@", f"postgres:{TYPED}@")
    ablation, runs = tmp_path / "secret.py", tmp_path / "runs"
    ablation.write_text(two_rows("secret"))
    words = [sys.executable, "-P", "-m", "lit_lazy", "ablate", "run", str(ablation), "--seeds", "0"]
    words += ["--runs", str(runs), "--workers", "1", "--storage", storage]
    guarded = mlflow_server.url.replace("//", f"//me:{TYPED}@")
    given = os.environ | {"MLFLOW_TRACKING_URI": guarded, "OMP_NUM_THREADS": "1"}
    out = (tmp_path / "out").open("wb")
    grid = psutil.Popen(words, stdout=out, stderr=out, env=given)
    shown: set[bytes] = set()
    time.sleep(1)  # the user's arguments are visible until the command has started
    while grid.poll() is None:
        shown |= process_list(grid)
        if any(runs.glob("*/cells/*")):
            mlflow_server.stop()
        time.sleep(0.2)
    assert grid.returncode == 0, (tmp_path / "out").read_text()
    assert any(b"lit_lazy.grid.worker" in line for line in shown)
    assert "MLflow lacks results (" in (tmp_path / "out").read_text()
    table = subprocess.run([*words[:4], "ablate", "table", "secret-backcopy_tiny", "--runs", str(runs)],
                           capture_output=True, env=given)  # fmt: skip
    away = subprocess.run(words, capture_output=True, env=given)
    assert b"MLFLOW_TRACKING_URI" in away.stderr
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
