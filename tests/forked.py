"""`subprocess` for this project's commands, with forks of the test process, which has already done their imports.

Imports cost a new interpreter at least five seconds, and a fork nothing. Arguments, environment, session, signals and
logs are those of a real process; `tests/crash` and `make test-all` show that real ones behave equally. With a GPU all
are real, as CUDA does not survive a fork. The workers of all these commands come from one server of forks.
"""

import gc
import inspect
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, TypeVar
from unittest.mock import patch

import sqlalchemy
import torch

from lit_lazy.config.user_files import USER
from lit_lazy.support import imported_code

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
TimeoutExpired = subprocess.TimeoutExpired
T = TypeVar("T")
INHERITED: list[object] = []
"""The parent's connections, kept alive: closing one takes a lock that a thread of the parent may have held."""


class Fork(subprocess.Popen[Any]):
    """Runs `python -m MODULE ...`, `python FILE ...` or `lit-lazy ...` in a fork."""

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*args).arguments  # type: ignore[misc]
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self.pid = os.fork()
        if not self.pid:
            _become(given, pipes)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


Process = subprocess.Popen[Any]
Popen = subprocess.Popen if torch.cuda.is_available() else Fork


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`, with its output captured as text."""
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True, **options) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def check(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Like `run`, of a command that has to succeed."""
    done = run(command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def make_cheap(fork: bool = False) -> None:
    """Start workers of this process and its forks from one server, poll them often, and draw no variant's figures."""
    from lit_lazy.grid import mlflow_mirror  # noqa: F401  imported for the forks
    from lit_lazy.grid import run as grid
    from lit_lazy.report import ablation_page

    torch.set_num_threads(1)
    start_fork_server(fork)
    grid.POLL_SECONDS = 0.1
    grid.LOOK_SECONDS = 0.5
    ablation_page.SHOWN_VARIANTS = 0


def start_fork_server(fork: bool = False) -> int:
    """Start the server from which the workers of this process and its forks come; returns its process id.

    fork: without a GPU, as a fork of this process, which has done its imports.
    """
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    server.set_forkserver_preload(["lit_lazy.grid.worker"])
    spawn = patch.object(multiprocessing.util, "spawnv_passfds", _fork_server)
    with spawn if fork and Popen is Fork else nullcontext():
        server.ensure_running()
    return server._forkserver_pid


def _fork_server(_program: str, arguments: list[str], kept: list[int]) -> int:
    """Run the code at the end of a Python command in a fork that has these files of its parent alone."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
            with suppress(OSError):  # of the listing itself
                os.close(number)
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[attr-defined, misc]  its lock is held
        _rebind_streams()
        _forget()
        gc.freeze()
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def _rebind_streams() -> None:
    """Read and write by the first three files, whatever the parent did by."""
    # Never closed: a fork of this fork would close its own streams when it drops the inherited objects.
    streams = [open(number, "rww"[number], closefd=False) for number in range(3)]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]


def run_in_fork(work: Callable[[], T]) -> T:
    """Return the result of `work` in a fork of this process. Raises RuntimeError for any of its exceptions.

    For work that opens a database: later forks would otherwise inherit sqlite's state of the file.
    """
    ours, theirs = multiprocessing.Pipe()

    def do() -> None:
        try:
            ours.send((work(), None))
        except Exception as error:
            ours.send((None, f"{type(error).__name__}: {error}"))

    process = multiprocessing.get_context("fork").Process(target=do)
    process.start()
    result, wrong = theirs.recv()
    process.join()
    if wrong:
        raise RuntimeError(wrong)
    return result


def _become(given: dict[str, Any], pipes: list[int]) -> None:
    """Run as the child until it exits."""
    gc.disable()
    status = 1
    try:
        for number, source in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"])):
            if source != -1:
                os.dup2(source, number)
        for pipe in {pipe for pipe in pipes if pipe > 2}:
            os.close(pipe)
        _rebind_streams()
        if given["start_new_session"]:
            os.setsid()
        if given["cwd"] is not None:
            os.chdir(given["cwd"])
        _forget()
        # Collecting the parent's garbage may wait for its threads, which do not exist here.
        gc.freeze()
        gc.enable()
        if given["env"] is not None:
            os.environ.clear()
            os.environ.update(given["env"])
        _execute([str(word) for word in given["args"]])
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            status = 120  # Python's status, for instance if the log's disk is full
        finally:
            os._exit(status)


def _forget() -> None:
    """Drop what a new process would not inherit: signal handlers, log handlers, users' modules, connections.

    The server of workers stays.
    """
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        # Only its parent can ask whether it runs.
        server.ensure_running = multiprocessing.forkserver.ensure_running = lambda: None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger().handlers.clear()
    forget_user_files()
    for engine in gc.get_objects():
        if type(engine) is sqlalchemy.Engine:
            INHERITED.append(engine.pool)
            engine.dispose(close=False)


def forget_user_files() -> None:
    for name, module in list(sys.modules.items()):
        if getattr(module, "__name__", "").startswith(USER):  # also registered under a file's plain name
            del sys.modules[name]
    imported_code._imported.clear()


def _execute(command: list[str]) -> None:
    words = [word for word in command if word != "-P"]
    if words[1] == "-m":
        sys.argv = words[2:]
        if "-P" not in command:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command[command[0] == sys.executable :]
        runpy.run_path(sys.argv[0], run_name="__main__")
