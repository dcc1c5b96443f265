"""Servers other than MLflow at its address: rejected before a training, within a timeout, in one line."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import datasets
import huggingface_hub
import pytest
from mistakes import PASSWORD, expect_refusal

from lit_lazy.data.pipeline import hub
from lit_lazy.tracking import check_databases
from lit_lazy.tracking import serve as dashboard
from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker

COMMANDS = [
    ["train", "backcopy_tiny"],
    ["ablate", "run", "table2", "--base", "backcopy_tiny", "--rows", "softmax", "--seeds", "0"],
    ["dashboard"],
]


def says(content: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return head.encode() + content


ANSWERS = {
    "a page": says(b"<html>hello</html>"),
    "an error": says(b"oops\nbad", "500 Internal Server Error"),
    "nested JSON": says(b"[" * 200_000),
    "in a circle": says(b"", "302 Found\r\nLocation: /x"),
    "another protocol": b"SSH-2.0-OpenSSH_9\r\n",
}


def silent(connection: socket.socket) -> None:
    connection.recv(2**16)
    time.sleep(60)


def dripping(connection: socket.socket) -> None:
    """Single bytes, which never trigger a read timeout."""
    while True:
        connection.send(b"H")
        time.sleep(0.2)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[socket.socket], object]], str]]:
    """Starts a server with a given handler as MLflow's address, which it returns."""
    monkeypatch.setattr(check_databases, "ANSWER_SECONDS", 0.7)
    listener = socket.create_server(("127.0.0.1", 0))

    def start(treat: Callable[[socket.socket], object]) -> str:
        def one(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                treat(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        url = f"http://me:{PASSWORD}@127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        return url

    yield start
    listener.close()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("answer", ANSWERS)
def test_another_server(answer, serve, capsys) -> None:
    def treat(connection: socket.socket) -> None:
        connection.recv(2**16)
        connection.sendall(ANSWERS[answer])

    serve(treat)
    for command in COMMANDS if answer == "a page" else COMMANDS[:1]:
        said = expect_refusal(command, capsys)
        assert "is not an MLflow server, or rejects requests (" in said
        assert said.endswith("); name another, or unset it\n")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("treat", [silent, dripping], ids=lambda treat: treat.__name__)
def test_a_server_that_never_answers(treat, serve, capsys) -> None:
    serve(treat)
    started = time.monotonic()
    assert "rejects requests (no answer in 0.7 s)" in expect_refusal(COMMANDS[0], capsys)
    assert time.monotonic() - started < 20


@pytest.mark.usefixtures("place")
def test_a_hub_out_of_reach(serve, monkeypatch, capsys, closed_port) -> None:
    """It is tried once, not for half a minute, and the local cache is searched."""
    url = serve(silent)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    for address in (f"http://127.0.0.1:{closed_port}", url.replace(f"me:{PASSWORD}@", "")):
        monkeypatch.setattr(hub, "HUB_SECONDS", 0.5)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        started = time.monotonic()
        said = expect_refusal(["train", "backcopy_tiny", "--data=Text", "--data.hub=nobody/nothing"], capsys)
        assert "data.hub='nobody/nothing': cannot be read (" in said
        assert time.monotonic() - started < 20


def test_a_database_put_in_place_of_the_served_one_is_noticed(runs, monkeypatch, capsys) -> None:
    """The server would go on with the old one. It is started again, and ends when it ends by itself."""
    popen, database, started = subprocess.Popen, runs / "mlflow.db", []
    Tracker(default_uri(runs), "train-a").create_run("a", {"kind": "run"})

    def start(*_: object, **_options: Any) -> "subprocess.Popen[bytes]":
        started.append(database.stat().st_ino)
        if len(started) == 1:
            shutil.copy(database, runs / "backup")
            return popen(["sh", "-c", "sleep 1; mv backup mlflow.db; sleep 100"], cwd=runs, start_new_session=True)
        return popen(["sh", "-c", "exit 3"], start_new_session=True)

    monkeypatch.setattr(dashboard.subprocess, "Popen", start)
    monkeypatch.setattr(dashboard, "wait_until_ready", lambda *_: None)
    monkeypatch.setattr(dashboard, "WATCH_SECONDS", 0.1)
    assert dashboard.serve(runs, 1) == 3
    assert len({*started}) == 2
    assert "mlflow.db was replaced" in capsys.readouterr().out
