"""No process of ours resolves the name of, or contacts, a machine that its user has not named."""

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from two_rows import two_rows

from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker

STRACE = shutil.which("strace")
CALLS = "connect,sendto,sendmsg,sendmmsg"
AUDIT = """
import os, sys

WATCHED = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg")

def note(event, arguments, log=os.environ["NETWORK_LOG"]):
    if event in WATCHED:
        place = arguments[0] if event.startswith("socket.get") else arguments[1]
        place = place[0] if isinstance(place, tuple) else place
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {event} {place!r}\\n")

sys.addaudithook(note)
with open(os.environ["NETWORK_LOG"], "a") as file:
    file.write(f"{os.getpid()} begins\\n")
"""
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


class Watched(NamedTuple):
    """A finished command and its network activity."""

    done: subprocess.CompletedProcess[str]
    processes: int
    """Number of Python processes."""
    audited: list[str]
    """Resolved names and contacted addresses of other machines, by Python's audit hook."""
    traced: list[str] | None
    """The same by strace; None without it."""


def watch(folder: Path, *command: str, **environment: str) -> Watched:
    """Run a command in real processes and record its network activity."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(AUDIT)
    log, trace = folder / "audited", folder / "traced"
    given = {name: value for name, value in os.environ.items() if name not in HUSHING}
    path = os.pathsep.join([str(site), *filter(None, [given.get("PYTHONPATH")])])
    strace = [STRACE, "-f", "--seccomp-bpf", "-qq", "-e", f"trace={CALLS}", "-o", str(trace)] if STRACE else []
    done = subprocess.run(
        [*strace, *command],
        capture_output=True,
        text=True,
        env=given | {"PYTHONPATH": path, "NETWORK_LOG": str(log), "OMP_NUM_THREADS": "1"} | environment,
    )
    lines = log.read_text().splitlines()
    audited = [line for line in lines if not line.endswith(" begins") and not is_here(line.split("'")[1::2])]
    traced = [line for line in trace.read_text().splitlines() if leaves_machine(line)] if STRACE else None
    return Watched(done, sum(line.endswith(" begins") for line in lines), audited, traced)


def is_here(places: list[str]) -> bool:
    """Whether all places are addresses of this machine or socket files."""
    return all(place.startswith("/") or place == "localhost" or is_loopback(place) for place in places)


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


def check(watched: Watched) -> None:
    assert watched.done.returncode == 0, watched.done.stdout + watched.done.stderr
    assert watched.audited == []
    assert not watched.traced
    if watched.traced is None:
        assert not os.environ.get("LIT_LAZY_REQUIRE_STRACE"), "strace is missing, and must not be here"
        pytest.skip("Python's own calls are clean; the system's need strace (Debian: apt-get install strace)")


def test_a_name_that_is_resolved_is_noticed(tmp_path: Path) -> None:
    """The other tests rely on this; a user may turn telemetry on."""
    watched = watch(tmp_path, sys.executable, "-c", ASKS, MLFLOW_DISABLE_TELEMETRY="false")
    assert (watched.done.stdout, watched.processes, len(watched.audited)) == ("false 0\n", 1, 1)
    assert "example.invalid" in watched.audited[0]
    assert watched.traced is None or watched.traced


def test_logging_a_run_stays_on_this_machine(tmp_path: Path, runs: Path) -> None:
    check(watch(tmp_path, sys.executable, "-P", "-c", LOGS_A_RUN, str(runs)))


@pytest.mark.long
def test_the_dashboard_stays_on_this_machine(tmp_path: Path, runs: Path, closed_port: int) -> None:
    """Also when a page asks the server what to report to MLflow's makers."""
    Tracker(default_uri(runs), "x").create_run("x", {"kind": "run"})
    watched = watch(tmp_path, sys.executable, "-c", SERVES, str(runs), str(closed_port))
    assert json.loads(watched.done.stdout)["disable_ui_telemetry"] is True, watched.done
    check(watched)


@pytest.mark.long
def test_a_grid_stays_on_this_machine(tmp_path: Path, runs: Path) -> None:
    ablation = tmp_path / "quiet.py"
    ablation.write_text(two_rows("quiet"))
    command = ("-P", "-m", "lit_lazy", "ablate", "run", str(ablation), "--seeds", "0", "--workers", "1")
    watched = watch(tmp_path, sys.executable, *command, "--runs", str(runs))
    assert watched.processes == 3, "the command, and multiprocessing's two, whose forks are the workers"
    check(watched)
