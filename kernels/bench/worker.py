"""Worker process for GPU code, replaced when a function crashes it, hangs or breaks its CUDA context.

Processes are forked from a server that has imported torch and never touches the GPU, so that a new one imports nothing.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

from bench import cuda

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["bench.timing"])
_parent: Connection | None = None
_timeout = 0.0


class TaskOutcome(NamedTuple):
    """Result of a task."""

    value: Any = None
    failed: str | None = None
    """Why there is no value, on one line."""
    doing: str | None = None
    """The task's last call of `announce`."""
    ended: bool = False
    """Whether the process has ended: it died, exceeded its time, or broke its CUDA context."""
    late: bool = False
    """Whether it was killed because of a timeout."""


class GpuWorker:
    """Starts its process at the first `run`, and a new one if the last has ended.

    setup: called first in every process. Output is appended to the file `log`, or dropped.
    """

    def __init__(self, setup: Callable[[], None], log: Path | None = None) -> None:
        self._setup, self._log = setup, log
        self._live: tuple[Any, Connection] | None = None

    def __enter__(self) -> "GpuWorker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def run(self, task: Callable[[], Any], seconds: float, silent: float = float("inf")) -> TaskOutcome:
        """Run a task; it and its result must be picklable.

        The process is killed after `seconds`, including its start, or after `silent` seconds without `announce`.
        """
        deadline, timeout = time.monotonic() + seconds, min(seconds, silent)
        process, connection = self._live = self._live or self._start()
        with suppress(BrokenPipeError):  # the process died since its last task: the loop reports it
            connection.send((task, timeout))
        doing = None
        while ready := wait([connection, process.sentinel], min(silent, max(0.0, deadline - time.monotonic()))):
            if connection not in ready:
                break
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                break
            if isinstance(message, TaskOutcome):
                if message.ended:
                    self.end()
                return message._replace(doing=doing)
            doing = message
        if ready:
            process.join()
            failed = f"the process died with status {process.exitcode}"
        else:
            failed = f"took longer than {timeout:.0f} s and was killed"
        self.end()
        return TaskOutcome(None, failed, doing, ended=True, late=not ready)

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(theirs, self._setup, self._log))
        process.start()
        theirs.close()
        return process, ours

    def end(self) -> None:
        """Kill the process, if any, and with it its CUDA context."""
        if self._live is not None:
            process, connection = self._live
            process.kill()
            process.join()
            connection.close()
            self._live = None


def announce(activity: str) -> None:
    """Report the current activity to the parent, which names it if this process ends."""
    if _parent is not None:
        _parent.send(activity)
        _trace_hang()


def _trace_hang() -> None:
    """Log a traceback shortly before the parent's timeout."""
    faulthandler.dump_traceback_later(0.9 * _timeout)


def format_reason(error: Exception) -> str:
    """Format an exception as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'without a message'}"


def run_in_parallel(
    tasks: Mapping[Any, Callable[[], Any]],
    count: int,
    seconds: Callable[[], float],
    setup: Callable[[], None],
    log: Path | None = None,
) -> Iterator[tuple[Any, TaskOutcome]]:
    """Yields the outcomes of tasks with their keys, as they finish, from at most `count` workers.

    seconds: returns a task's timeout, and is called when the task starts.
    """
    workers = [GpuWorker(setup, log) for _ in range(min(count, len(tasks)))]
    idle: SimpleQueue[GpuWorker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(key: Any) -> tuple[Any, TaskOutcome]:
        worker = idle.get()
        try:
            return key, worker.run(tasks[key], seconds())
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(max(1, len(workers)))
    try:
        for done in as_completed([pool.submit(run, key) for key in tasks]):
            yield done.result()
    finally:  # do not wait for them after an interrupt
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()


def _serve(connection: Connection, setup: Callable[[], None], log: Path | None) -> None:
    """Main loop of a worker: run tasks until killed."""
    global _parent, _timeout
    _parent = connection
    threading.Thread(target=_end_with_parent, daemon=True).start()
    output = os.open(os.devnull if log is None else log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    faulthandler.enable()
    setup()
    while True:
        task, _timeout = connection.recv()
        _trace_hang()
        try:
            outcome = TaskOutcome(task())
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            outcome = TaskOutcome(failed=format_reason(error))
        faulthandler.cancel_dump_traceback_later()
        connection.send(outcome._replace(ended=cuda.is_broken()))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
