"""Grids with network partitions, suspended workers and restarted servers."""

import http.server
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import forked
import postgres
import pytest
from mlflow.entities import ViewType
from mlflow.tracking import MlflowClient
from mlflow_server import MlflowServer
from proxy import Proxy, proxy
from sqlalchemy import text
from test_interrupts import STUDY, two_cells
from two_rows import two_rows

from lit_lazy.command.main import main
from lit_lazy.grid.jobs import worker
from lit_lazy.grid.jobs.worker import Worker
from lit_lazy.grid.queue.liveness import Heartbeat, Membership
from lit_lazy.grid.queue.queue import Queue
from lit_lazy.grid.queue.storage import default_storage
from lit_lazy.tracking.store import TrackingError, default_uri
from lit_lazy.tracking.tracker import Tracker

pytestmark = pytest.mark.xdist_group("faults")

Results = dict[str, dict[str, float]]


def through(storage: str, between: Proxy) -> str:
    """A PostgreSQL URL through a proxy."""
    before, _, after = storage.rpartition(":")
    return f"{before}:{between.port}/{after.partition('/')[2]}"


@pytest.mark.long
@pytest.mark.parametrize("how", ["cut", "stall"])
def test_a_worker_that_is_separated_from_the_queue_goes_on_when_it_is_back(
    how: str, runs: Path, postgres_server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several heartbeats, starting in its first training."""
    storage = postgres.create_database(postgres_server, "partition")
    monkeypatch.setattr(worker, "BEAT_SECONDS", 0.1)
    train, separated = Worker._train, []
    with proxy(postgres_server.port) as between:

        def separate(self: Worker, *args: Any) -> Any:
            if not separated:
                separated.append(threading.Timer(1.0, between.heal))
                getattr(between, how)()
                separated[0].start()
            return train(self, *args)

        monkeypatch.setattr(Worker, "_train", separate)
        queue = two_cells("local", through(storage, between))
        Worker(queue, Tracker(default_uri(runs), runs, STUDY), "parent", runs / STUDY).work()
        separated[0].join()
        trials = queue._storage.get_all_trials(queue._study_id)
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2
    tracked = Tracker(default_uri(runs), runs, STUDY).find({"kind": "cell"})
    assert [run.state for run in tracked] == ["complete"] * 2


def test_the_connection_of_a_lock_notices_that_the_other_end_is_gone(postgres_storage: str) -> None:
    """By default a server keeps the lock of a lost machine for two hours, and all others wait."""
    connection = Queue(postgres_storage, STUDY)._open_locked_connection()
    names = ("idle", "interval", "count")
    with connection:
        servers = [connection.execute(text(f"SHOW tcp_keepalives_{name}")).scalar() for name in names]
        with socket.socket(fileno=os.dup(connection.connection.driver_connection.fileno())) as ours:
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            mine = [ours.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    assert servers == ["30", "10", "3"]
    assert mine == [30, 10, 3, 60_000]


def test_who_has_lost_a_cell_leaves_the_run_of_who_has_it(runs: Path) -> None:
    """It had not started a run yet."""
    queue, tracker = two_cells("local", default_storage(runs)), Tracker(default_uri(runs), runs, STUDY)
    with Membership(runs / "workers") as member, Heartbeat(queue, 60) as heart:
        lost = Worker(queue, tracker, "parent", runs / "one")._claim(member, heart)
        queue.release(queue.entries("running")[0], "", most=3)
        held = Worker(queue, tracker, "parent", runs / "two")._claim(member, heart)
        assert lost
        assert held
        assert lost[0].cell == held[0].cell
        begun = held[1].get_run_id()
        with pytest.raises(TrackingError, match="given to another worker"):
            lost[1].send()
    assert tracker.has_run(begun)


class Answering(http.server.BaseHTTPRequestHandler):
    """A server with a fixed answer."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b'{"error_code": "INVALID_STATE", "message": "no"}' if self.status == 400 else b"no")

    def log_message(self, *_: object) -> None:
        """No log."""


@pytest.mark.parametrize("what", ["cut", "stall", 400, 404, 500, 502, 503])
def test_a_server_that_cannot_be_reached_is_told_from_one_that_refuses(
    what: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tunnel or a gateway accepts connections in either case. Repeated rejections fail the cell."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    handler = type("Handler", (Answering,), {"status": what})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, proxy(server.server_port) as between:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        if isinstance(what, str):
            getattr(between, what)()
        with pytest.raises(TrackingError) as raised:
            Tracker(f"http://127.0.0.1:{between.port}", tmp_path, "x").has_run("run")
        server.shutdown()
    assert raised.value.reachable == (what in (400, 404, 500))


NAME = "partition"
GRID = f"{NAME}-backcopy_tiny"
SEEDS = ("--seeds", "0,1,2")
MACHINE = """
import os
import signal
import socket
import time

import __main__

from lit_lazy.grid.jobs import launch
from lit_lazy.training.module import LitLM

HERE = Path(__file__).parent
NAME = os.environ["MACHINE"]
socket.gethostname = lambda: NAME
launch.STALE_SECONDS, launch.LOOK_SECONDS = 4.0, 0.5


def wait_for(pattern):
    while not list(HERE.glob(pattern)):
        time.sleep(0.05)


def before(owner, name, do):
    method = getattr(owner, name)

    def do_first(*args, **kwargs):
        setattr(owner, name, method)
        do()
        return method(*args, **kwargs)

    setattr(owner, name, do_first)


if Path(sys.argv[0]).stem == "worker":
    __main__.BEAT_SECONDS, __main__.BUSY_SECONDS = 0.5, 0.3
    {in_workers}
"""
TRAINS = """
    def train():
        (HERE / f"{NAME} trains").touch()
        wait_for("separated")

    before(LitLM, "training_step", train)
"""
STOPS = """
    def stop():
        if {begun}:
            wait_for("runs-one/*/cells/*/mlflow_run_id")
        (HERE / "unfinished").write_text(str(os.getpid()))
        (HERE / "unfinished").rename(HERE / "stopped")
        os.kill(os.getpid(), signal.SIGSTOP)

    def take_over():
        wait_for("runs-two/*/cells/*/mlflow_run_id")
        (HERE / "taken").touch()
        wait_for("go")

    if NAME == "one":
        before(LitLM if {begun} else __main__.Worker, "training_step" if {begun} else "_train", stop)
    else:
        before(LitLM, "training_step", take_over)
"""


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Results:
    """Results of the same grid, undisturbed."""
    folder = tmp_path_factory.mktemp("peace")
    shutil.copy(empty_store, folder / "mlflow.db")
    (folder / f"{NAME}.py").write_text(two_rows(NAME))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert main(["ablate", "run", str(folder / f"{NAME}.py"), *SEEDS, "--runs", str(folder), "--workers", "1"]) == 0
    return results(folder)


def results(runs: Path) -> Results:
    """Metrics of each cell that was trained in a runs folder."""
    found = {path.parent.name: json.loads(path.read_text()) for path in runs.glob(f"{GRID}/cells/*/result.json")}
    return {key: result["metrics"] for key, result in found.items()}


class Machines:
    """Two machines that share only the queue and MLflow's server, under different addresses."""

    def __init__(self, folder: Path, in_workers: str) -> None:
        self.folder = folder
        self.file = folder / f"{NAME}.py"
        self.file.write_text(two_rows(NAME, code=MACHINE.replace("{in_workers}", in_workers.strip())))

    def runs(self, name: str) -> Path:
        return self.folder / f"runs-{name}"

    def start(self, name: str, storage: str, tracking: str, *more: str) -> "forked.Popen":
        quick = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "2", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "OMP_NUM_THREADS": "1"}
        addresses = {"MACHINE": name, "LIT_LAZY_STORAGE": storage, "MLFLOW_TRACKING_URI": tracking}
        options = ("--runs", str(self.runs(name)), "--workers", "1", *more)
        with (self.folder / f"{name}.log").open("ab") as log:
            return forked.Popen(
                [sys.executable, "-m", "lit_lazy.command", "ablate", "run", str(self.file), *options],
                stdout=log,
                stderr=log,
                env=os.environ | quick | addresses,
                start_new_session=True,
            )

    def wait_for(self, name: str) -> None:
        end = time.monotonic() + 120
        while not (self.folder / name).exists():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        """Output of commands and workers."""
        return "\n".join(path.read_text() for path in [*self.folder.glob("*.log"), *self.folder.glob("runs-*/*/*.log")])

    def check(self, storage: str, tracking: str, expected: Results) -> None:
        """Every cell and its curves complete exactly once, nothing running, results as undisturbed."""
        queue = Queue(storage, GRID)
        trials = [trial.state.name for trial in queue._storage.get_all_trials(queue._study_id)]
        assert trials == ["COMPLETE"] * len(expected)
        both = [results(self.runs(name)) for name in ("one", "two")]
        assert both[0] | both[1] == both[1] | both[0] == expected
        client = MlflowClient(tracking)
        experiments = [client.get_experiment_by_name(GRID).experiment_id]
        assert not client.search_runs(experiments, "attributes.status = 'RUNNING'")
        assert [run.info.status for run in client.search_runs(experiments, "tags.kind = 'ablation'")] == ["FINISHED"]
        runs = client.search_runs(experiments, "tags.kind = 'cell'")
        assert sorted(run.data.tags["cell"] for run in runs) == sorted(expected)
        for run in runs:
            assert run.data.tags["state"] == "complete"
            assert expected[run.data.tags["cell"]].items() <= run.data.metrics.items()
            assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 3, 5]
        for name in ("one", "two"):
            assert not list(self.runs(name).glob(f"{GRID}/workers/*.lock"))


@pytest.mark.long
@pytest.mark.parametrize("what", ["cut", "stall", "MLflow cut", "MLflow stall", "restart"])
def test_a_grid_outlives_the_loss_of_its_servers(
    what: str, mlflow_server: MlflowServer, postgres_server: postgres.Server, tmp_path: Path, peace: Results
) -> None:
    """One of two machines, or both, lose them in training for longer than heartbeats remain valid."""
    storage = postgres.create_database(postgres_server, "partition")
    machines = Machines(tmp_path, TRAINS)
    with proxy(postgres_server.port) as to_queue, proxy(mlflow_server.port) as to_mlflow:
        far = machines.start("one", through(storage, to_queue), f"http://127.0.0.1:{to_mlflow.port}", *SEEDS)
        machines.wait_for("one trains")
        near = machines.start("two", storage, mlflow_server.url, *SEEDS)
        machines.wait_for("two trains")
        ways = [to_mlflow] if "MLflow" in what else [to_queue, to_mlflow]
        if what == "restart":
            postgres_server.stop()
            mlflow_server.stop()
        for way in ways if what != "restart" else ():
            getattr(way, what.split()[-1])()
        (tmp_path / "separated").touch()
        time.sleep(8)
        if what == "restart":
            postgres_server.start()
            mlflow_server.start()
        for way in ways:
            way.heal()
        assert [far.wait(timeout=200), near.wait(timeout=200)] == [0, 0], machines.logs()
    machines.check(storage, mlflow_server.url, peace)
    forget(mlflow_server)


@pytest.mark.long
@pytest.mark.parametrize("begun", [False, True], ids=["before its run is begun", "in training"])
def test_a_worker_that_is_stopped_and_wakes_has_lost_its_cell(
    begun: bool, mlflow_server: MlflowServer, postgres_server: postgres.Server, tmp_path: Path, peace: Results
) -> None:
    """It resumes while the other machine trains the cell."""
    storage = postgres.create_database(postgres_server, "partition")
    machines = Machines(tmp_path, STOPS.replace("{begun}", str(begun)))
    one_cell = ("--rows", "softmax", "--seeds", "0")
    first = machines.start("one", storage, mlflow_server.url, *one_cell)
    machines.wait_for("stopped")
    second = machines.start("two", storage, mlflow_server.url, *one_cell)
    machines.wait_for("taken")
    os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)
    end = time.monotonic() + 60
    while "was given to another worker meanwhile" not in (said := machines.logs()) or "start" not in said:
        assert time.monotonic() < end, said
        time.sleep(0.1)
    (tmp_path / "go").touch()
    assert [first.wait(timeout=100), second.wait(timeout=100)] == [0, 0], machines.logs()
    expected = results(machines.runs("two"))
    assert expected.items() <= peace.items()
    assert len(expected) == 1
    machines.check(storage, mlflow_server.url, expected)
    client = MlflowClient(mlflow_server.url)
    experiments = [client.get_experiment_by_name(GRID).experiment_id]
    assert len(client.search_runs(experiments, "tags.kind = 'cell'", ViewType.DELETED_ONLY)) == begun
    forget(mlflow_server)


def forget(mlflow_server: MlflowServer) -> None:
    """Rename the experiment, so that the next test starts with a new one."""
    client = MlflowClient(mlflow_server.url)
    number = client.get_experiment_by_name(GRID).experiment_id
    client.rename_experiment(number, f"{GRID} {number}")
