"""A process that runs functions for this one, and is replaced when a function ends it, hangs or ruins its CUDA context.

Processes come from a server that has imported torch and touches no GPU, so a new one costs no import.
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

from bench import device

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["bench.timing"])
_parent: Connection | None = None
_patience = 0.0


class TaskOutcome(NamedTuple):
    """What came of a function."""

    value: Any = None
    failed: str | None = None
    """Why there is no value, in one line."""
    doing: str | None = None
    """What the function last said that it does (`doing`)."""
    ended: bool = False
    """Whether the process is gone: it died, was killed for taking too long, or its CUDA context was useless."""
    late: bool = False
    """Whether it was killed for taking too long."""


class GpuWorker:
    """Starts its process at the first call of `run`, and a new one where the last is gone.

    setup is called first in every process. What a process prints is appended to the file `log`, or is dropped.
    """

    def __init__(self, setup: Callable[[], None], log: Path | None = None) -> None:
        self._setup, self._log = setup, log
        self._live: tuple[Any, Connection] | None = None

    def __enter__(self) -> "GpuWorker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def run(self, task: Callable[[], Any], seconds: float, silent: float = float("inf")) -> TaskOutcome:
        """task: picklable, as its result.

        The process is killed after `seconds`, its start included, or after `silent` seconds without a word of `doing`.
        """
        until, patience = time.monotonic() + seconds, min(seconds, silent)
        process, connection = self._live = self._live or self._start()
        with suppress(BrokenPipeError):  # the process died since its last task: the loop says so
            connection.send((task, patience))
        doing = None
        while ready := wait([connection, process.sentinel], min(silent, max(0.0, until - time.monotonic()))):
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
            failed = f"took longer than {patience:.0f} s and was killed"
        self.end()
        return TaskOutcome(None, failed, doing, ended=True, late=not ready)

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(theirs, self._setup, self._log))
        process.start()
        theirs.close()
        return process, ours

    def end(self) -> None:
        """Ends the process, if there is one, and the CUDA context with it."""
        if self._live is not None:
            process, connection = self._live
            process.kill()
            process.join()
            connection.close()
            self._live = None


def announce(what: str) -> None:
    """Lets the process that asked know what is done now, so that it knows what was when this one ends."""
    if _parent is not None:
        _parent.send(what)
        _trace_hang()


def _trace_hang() -> None:
    """A while before the other process loses patience, the log is to show where this one is."""
    faulthandler.dump_traceback_later(0.9 * _patience)


def format_reason(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'without a message'}"


def run_in_parallel(
    tasks: Mapping[Any, Callable[[], Any]],
    count: int,
    seconds: Callable[[], float],
    setup: Callable[[], None],
    log: Path | None = None,
) -> Iterator[tuple[Any, TaskOutcome]]:
    """The outcomes of tasks by their keys, as they come, from at most `count` workers.

    seconds: asked when a task starts, as all of them start late where there are many.
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
    finally:  # an interrupt waits for none of them
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()


def _serve(connection: Connection, setup: Callable[[], None], log: Path | None) -> None:
    """The worker's side: it runs what it is sent until its CUDA context is broken or it is killed."""
    global _parent, _patience
    _parent = connection
    threading.Thread(target=_end_with_parent, daemon=True).start()
    output = os.open(os.devnull if log is None else log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    faulthandler.enable()
    setup()
    while True:
        task, _patience = connection.recv()
        _trace_hang()
        try:
            outcome = TaskOutcome(task())
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            outcome = TaskOutcome(failed=format_reason(error))
        faulthandler.cancel_dump_traceback_later()
        connection.send(outcome._replace(ended=device.is_broken()))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
