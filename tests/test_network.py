"""No process of ours resolves the name of, or contacts, a machine that its user has not named."""

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from two_rows import two_rows

from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker

STRACE = shutil.which("strace")
CALLS = "connect,sendto,sendmsg,sendmmsg"
HUSHING = (
    *("PYTEST_CURRENT_TEST", "CI", "GITHUB_ACTIONS", "CIRCLECI", "GITLAB_CI", "JENKINS_URL", "TRAVIS", "TF_BUILD"),
    *("BITBUCKET_BUILD_NUMBER", "CODEBUILD_BUILD_ARN", "BUILDKITE", "TEAMCITY_VERSION", "CLOUD_RUN_EXECUTION"),
    *("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED"),
)
"""Variables that are removed: with them, libraries would report nothing anyway, as in a test."""
ASKS = """
import os, socket
import lit_lazy
try:
    socket.getaddrinfo("example.invalid", 80)
except OSError:
    print(os.environ["MLFLOW_DISABLE_TELEMETRY"], os.environ["RAY_USAGE_STATS_ENABLED"])
"""
LOGS_A_RUN = """
import sys
from pathlib import Path
from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker

runs = Path(sys.argv[1])
Tracker(default_uri(runs), "x").create_run("x", {})
"""
SERVES = """
import signal, subprocess, sys, urllib.request
from subprocess import PIPE

runs, port = sys.argv[1:]
command = [sys.executable, "-P", "-m", "lit_lazy", "dashboard", "--runs", runs, "--port", port]
server = subprocess.Popen(command, stdout=PIPE, text=True)
assert any("Ctrl-C stops the server" in line for line in iter(server.stdout.readline, ""))
with urllib.request.urlopen(f"http://127.0.0.1:{port}/ajax-api/3.0/mlflow/ui-telemetry") as answer:
    print(answer.read().decode())
server.send_signal(signal.SIGINT)
sys.exit(server.wait())
"""


def watch(folder: Path, *command: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a command in real processes; how it ended, and the system's calls by which one asks or contacts another."""
    if STRACE is None:
        assert not os.environ.get("LIT_LAZY_REQUIRE_STRACE"), "strace is missing, and must not be here"
        pytest.skip("needs strace (Debian: apt-get install strace)")
    strace = [STRACE, "-f", "--seccomp-bpf", "-qq", "-e", f"trace={CALLS}", "-o", str(folder / "traced")]
    given = {name: value for name, value in os.environ.items() if name not in HUSHING}
    env = given | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([*strace, *command], capture_output=True, text=True, env=env)
    return done, [line for line in (folder / "traced").read_text().splitlines() if leaves_machine(line)]


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def leaves_machine(call: str) -> bool:
    """Whether a line of strace resolves a name or contacts another machine."""
    addresses = re.findall(r'inet_(?:addr\(|pton\(AF_INET6, )"([^"]+)"', call)
    asks = "htons(53)" in call or re.search(r'sun_path="[^"]*(nscd|resolve|avahi)', call)
    return bool(asks) or not all(is_loopback(address) for address in addresses)


def check(done: subprocess.CompletedProcess[str], traced: list[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert traced == []


def test_a_name_that_is_resolved_is_noticed(tmp_path: Path) -> None:
    """The other tests rely on this; a user may turn telemetry on."""
    done, traced = watch(tmp_path, sys.executable, "-c", ASKS, MLFLOW_DISABLE_TELEMETRY="false")
    assert done.stdout == "false 0\n"
    assert traced


def test_logging_a_run_stays_on_this_machine(tmp_path: Path, runs: Path) -> None:
    check(*watch(tmp_path, sys.executable, "-P", "-c", LOGS_A_RUN, str(runs)))


@pytest.mark.long
def test_the_dashboard_stays_on_this_machine(tmp_path: Path, runs: Path, closed_port: int) -> None:
    """Also when a page asks the server what to report to MLflow's makers."""
    Tracker(default_uri(runs), "x").create_run("x", {"kind": "run"})
    done, traced = watch(tmp_path, sys.executable, "-c", SERVES, str(runs), str(closed_port))
    assert json.loads(done.stdout)["disable_ui_telemetry"] is True, done
    check(done, traced)


@pytest.mark.long
def test_a_grid_stays_on_this_machine(tmp_path: Path, runs: Path) -> None:
    ablation = tmp_path / "quiet.py"
    ablation.write_text(two_rows("quiet"))
    command = ("-P", "-m", "lit_lazy", "ablate", "run", str(ablation), "--seeds", "0", "--workers", "1")
    check(*watch(tmp_path, sys.executable, *command, "--runs", str(runs)))
