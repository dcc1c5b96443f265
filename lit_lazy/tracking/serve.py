"""`lit-lazy dashboard`: MLflow's server on the project's store, with links to the training runs."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from lit_lazy.support.console import open_page
from lit_lazy.support.disk import open_private
from lit_lazy.support.error_messages import did_you_mean
from lit_lazy.support.secrets import strip_user
from lit_lazy.tracking.check_databases import LOCKED_SECONDS, check_store
from lit_lazy.tracking.store_address import ARTIFACTS, default_uri, run_link, sqlite_file, sqlite_url
from lit_lazy.tracking.tracker import list_artifacts, list_experiment_names, make_client
from lit_lazy.tracking.views import LINKED_VIEWS, TAG_PREFIX, runs_link, view_id

HOST = "127.0.0.1"
READY_SECONDS = 120
WATCH_SECONDS = 1.0
"""Time between looks at whether the server and its database are still there."""
Links = dict[str, dict[str, str]]
"""Addresses by label, by the name of the experiment to whose pages they lead."""
PARENT_PAGES = {"its table": "table.html", "its report": "report.html"}
"""Artifacts of a parent run by the label of their link."""


def find_experiment_links(uri: str, ui_url: str) -> Links:
    """Links to every experiment with runs in a store, the most recently used first."""
    client, links = make_client(uri), Links()
    for experiment in client.search_experiments(order_by=["last_update_time DESC"]):
        number = experiment.experiment_id
        if not client.search_runs([number], max_results=1):
            continue
        pages = {
            label: runs_link(ui_url, number, view)
            for label, view in LINKED_VIEWS.items()
            if TAG_PREFIX + view_id(view) in experiment.tags
        }
        query = "tags.ablation LIKE '%' AND tags.kind != 'cell'"  # the parent run of an ablation or a search
        for parent in client.search_runs([number], query, order_by=["start_time DESC"], max_results=1):
            stored = list_artifacts(client, parent)
            pages |= {
                label: run_link(ui_url, number, parent.info.run_id, artifact)
                for label, artifact in PARENT_PAGES.items()
                if artifact in stored
            }
        links[experiment.name] = pages | {"runs": runs_link(ui_url, number)}
    return links


def serve(runs: Path, port: int, name: str | None = None, opens: bool = False) -> int:
    """Serve until interrupted; returns the server's exit status.

    name: prints only links to this experiment or ablation. opens: opens a browser on the first of them, without a name
    on MLflow's first page. Raises ValueError without a store, without an experiment of that name, or if the port is in
    use.
    """
    check_store(uri := default_uri(runs))
    if not list_experiment_names(uri):
        raise ValueError(f"--runs {runs}: holds no runs yet; `make table2` or `lit-lazy train EXPERIMENT` creates some")
    url = strip_user(uri) if uri.startswith("http") else f"http://{HOST}:{port}"
    links = find_experiment_links(uri, url)
    if name is not None:
        links = select_links(links, name)
    first = None if not opens else url if name is None else next(iter(next(iter(links.values())).values()))
    if uri.startswith("http"):
        show_links(links, first)
        return 0
    return _run_server(uri, port, links, runs / "mlflow-server.log", first)


def make_addresses_relative(database: Path) -> None:
    """Replace the addresses of artifacts by ones relative to the database's folder, which may have been moved.

    They are for MLflow's server, which runs in that folder. Raises a one-line ValueError.
    """
    try:
        with closing(sqlite3.connect(database, timeout=LOCKED_SECONDS)) as connection, connection:
            known = connection.execute("SELECT experiment_id, name, artifact_location FROM experiments").fetchall()
            for number, name, address in known:
                here = f"{ARTIFACTS}/{quote(name)}"
                if address.endswith(f"/{here}"):
                    change = "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?"
                    connection.execute(change, (f"file:{here}", number))
                    change = "UPDATE runs SET artifact_uri = ? || run_uuid || '/artifacts' WHERE experiment_id = ?"
                    connection.execute(change, (f"file:{here}/", number))
    except sqlite3.Error as error:
        raise ValueError(f"{str(database)!r}: cannot be used ({error})") from None


def _run_server(uri: str, port: int, links: Links, log: Path, first: str | None) -> int:
    """MLflow's server, until it is interrupted; returns its exit status.

    It is started again when another database is put in the place of its own, as from a backup: it would go on with the
    old one, whose file is still open.
    """
    url = f"http://{HOST}:{port}"
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise ValueError(f"--port {port}: is in use; choose another port")
    file = sqlite_file(uri)
    folder = file.resolve().parent if file else None
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    env = os.environ | {
        # Not an argument, which other users could read: it may contain a password.
        "MLFLOW_BACKEND_STORE_URI": sqlite_url(file) if file else uri,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # nothing here submits jobs to the server
    }
    status, shown = None, False
    while status is None:
        if file is not None:
            make_addresses_relative(file)
        begun = identify_file(file)
        with open(log, "w", encoding="utf-8", opener=open_private) as output:
            # A new session, so that the server's subprocesses end with it.
            server = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True
            )
        try:
            print(f"starting MLflow on {url} ...", flush=True)
            wait_until_ready(server, url, log)
            if not shown:
                show_links(links, first)
                shown = True
            print("Ctrl-C stops the server.", flush=True)
            while (status := server.poll()) is None and identify_file(file) in (begun, None):
                time.sleep(WATCH_SECONDS)
        except KeyboardInterrupt:
            status = 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            server.wait()
        if status is None:
            print(f"{file} was replaced: MLflow is started again; run this command again for links to it", flush=True)
    return status


def identify_file(file: Path | None) -> tuple[int, int] | None:
    """What stays the same while a file is written, and changes when another takes its place; None without a file."""
    found = file.stat() if file is not None and file.exists() else None
    return None if found is None else (found.st_dev, found.st_ino)


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Return when the server answers. Raises ValueError with path and last line of its log if it does not."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    raise ValueError(f"MLflow's server did not start on {url}; its log {log} ends in {last!r}")


def select_links(links: Links, name: str) -> Links:
    """The links of an experiment, or of all experiments of an ablation or a search. Raises ValueError if none."""
    below = f"{name}-", f"search-{name}-"
    found = [name] if name in links else [experiment for experiment in links if experiment.startswith(below)]
    if not found:
        raise ValueError(
            f"dashboard {name!r}: MLflow has no experiment or ablation of this name{did_you_mean(name, links)}; "
            f"it has: {', '.join(links) or 'none'}"
        )
    return {experiment: links[experiment] for experiment in found}


def show_links(links: Links, first: str | None) -> None:
    """Print the links of each experiment, and open the page `first`, if any."""
    for experiment, pages in links.items():
        print("\n".join(["", experiment, *(f"  {label:21} {url}" for label, url in pages.items())]))
    print(flush=True)
    if first is not None:
        open_page(first)
