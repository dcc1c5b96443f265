"""This process: its streams, the telemetry of its libraries, its threads; its machine; time and memory of calls."""

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from lit_lazy.support.errors import UnfinishedError, describe_exception

if TYPE_CHECKING:
    from torch import Tensor

LOOK_SECONDS = 0.2
T = TypeVar("T")
OFF = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # of the client, the server and its pages
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "WANDB_ERROR_REPORTING": "false",
}
"""Environment variables, read on import and inherited by child processes."""


def turn_off_telemetry() -> None:
    """Set the variables that are unset. `DO_NOT_TRACK` is not set: it would override the user's choices."""
    for name, value in OFF.items():
        os.environ.setdefault(name, value)


class _Outlet(io.FileIO):
    """A stream whose reader may be gone: what is written then is lost, as in /dev/null."""

    is_read = True

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.is_read = False
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())  # child processes write to it too
            return super().write(data)


def prepare_streams() -> None:
    """Let no closed stream, no pipe without a reader and no character that an encoding lacks end the process."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: a file, such as a database, would get its number
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is the stream's
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # and no notebook's or test's
            stream.flush()
            buffer = io.BufferedWriter(_Outlet(stream.fileno(), "wb", closefd=False))
            by_line = stream.line_buffering or stream.write_through
            stream = io.TextIOWrapper(buffer, stream.encoding, line_buffering=by_line)
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            os.environ["PYTHONIOENCODING"] = f"{stream.encoding}:backslashreplace"  # of child processes


def is_stdout_read() -> bool:
    """Whether no write to standard output has found its reader gone."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not isinstance(raw, _Outlet) or raw.is_read


@contextmanager
def repeat_in_background(
    work: Callable[[bool], object],
    seconds: float,
    log: logging.Logger,
    lost: str,
    hangs: Callable[[], bool] = lambda: False,
) -> Iterator[list[str]]:
    """Call `work(False)` every few seconds from a thread until the context exits, then `work(True)`; no error ends it.

    lost: what an error means, logged with it once until `work` succeeds. hangs: whether to leave the thread alone.
    Gives a list that has, after the exit, the error of the last call, if any.
    """
    stop, last = threading.Event(), list[str]()

    def loop() -> None:
        ends = failed = False
        while not ends:
            ends = stop.wait(seconds)
            try:
                work(ends)
                failed = False
            except Exception as error:
                known = isinstance(error, UnfinishedError | OSError | ValueError)
                why = str(error) if known else describe_exception(error)
                if ends:
                    last.append(why)
                elif not failed:
                    log.warning("%s: %s", lost, why)
                failed = True

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield last
    finally:
        stop.set()
        thread.join(LOOK_SECONDS)  # meanwhile it begins its last call
        while thread.is_alive() and not hangs():
            thread.join(LOOK_SECONDS)
        if thread.is_alive():
            last.append("no answer")


def call_with_timeout(seconds: float, ask: Callable[[], T]) -> T:
    """The result or the exception of `ask`. Raises TimeoutError if it takes longer.

    A socket's timeout limits each read, so a server that sends a byte now and then never exceeds it. After a timeout,
    the call continues in a daemon thread.
    """
    answer = Future[T]()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    wait([answer], seconds)
    if not answer.done():
        raise TimeoutError(f"no answer in {seconds:g} s")
    return answer.result()


def count_cores() -> int:
    """CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only; elsewhere a process may use every core
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def measure_total_memory() -> int:
    """Bytes of memory, swap and GPU memory of this machine, used or free: an upper bound for any process."""
    import psutil  # late, as torch: who only counts cores needs neither
    import torch

    gpus = sum(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return psutil.virtual_memory().total + psutil.swap_memory().total + gpus


def require_memory(sizes: Mapping[str, int], needed: int) -> None:
    """Raise a one-line ValueError that names the fields in `sizes` if `needed` bytes exceed this machine's memory."""
    most = measure_total_memory()
    if needed > most:
        named = ", ".join(f"{field}={value}" for field, value in sizes.items())
        sizes_in_gb = f"at least {needed // 10**9:,} GB of memory, of which this machine has {most // 10**9:,}"
        raise ValueError(f"{named}: would take {sizes_in_gb}; choose smaller ones")


def time_in_turns(
    calls: Mapping[str, Callable[[], None]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per call by name and round. A round runs in both orders (A B C C B A), so that drift cancels.

    clock: `time.process_time` for CPU time, which other load on the machine hardly changes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        spent = dict.fromkeys(calls, 0.0)
        for name in [*calls, *reversed(list(calls))]:
            started = clock()
            calls[name]()
            spent[name] += clock() - started
        if index:  # the first round warms up
            for name, total in spent.items():
                seconds[name].append(total / 2)
    return seconds


def measure_saved_bytes(call: Callable[[], object], excluded: "Iterable[Tensor]") -> int:
    """Bytes of the storages that a call saves for its backward pass, without those of `excluded`, e.g. parameters."""
    import torch

    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    storages: dict[int, torch.UntypedStorage] = {}

    def record(tensor: "Tensor") -> "Tensor":
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        call()
    return sum(storage.nbytes() for storage in storages.values())
