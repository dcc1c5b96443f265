"""Cells as tasks on a Ray cluster: a running one, or one on this machine that ends with the command.

Ray places the tasks by their share of CPUs and GPUs; it retries nothing.
"""

import dataclasses
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.cell_state import read_files
from lit_lazy.grid.pool import Pool
from lit_lazy.grid.work_records import Ending, Job
from lit_lazy.grid.worker import execute, log_by, prepare_process
from lit_lazy.support.disk import PRIVATE
from lit_lazy.support.error_messages import describe_exception
from lit_lazy.support.machine import count_cores
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.run_folder import (
    DIAGNOSTICS,
    FAILURE,
    FINAL_CHECKPOINT,
    GRID_ID,
    METRICS,
    RESULT,
    SETTINGS,
    clear_failure,
    locate_cell,
)

CONNECT_SECONDS, JOIN_SECONDS = 5.0, 30.0
ORDERLY_SECONDS = 60.0
"""Timeout for interrupted tasks to write a checkpoint."""
AGAIN_SECONDS = 5.0
"""Interval of repeated interrupts: a task that is just starting may miss the first."""
FORCED_SECONDS = 10.0
OBJECT_STORE_BYTES = 100 * 2**20
"""Near Ray's minimum: a cell's files are small."""


Machine = tuple[float, float]
"""The CPUs and GPUs of a machine."""


def count_cells(machines: Sequence[Machine], cpus: int, gpus: float) -> int:
    """How many cells, each with so many CPUs and GPUs, or a fraction of one GPU, run at once on a cluster's machines.

    Raises ValueError if none fits: they would wait forever.
    """
    times = 0
    for has_cpus, has_gpus in machines:
        of_gpus = has_gpus // gpus if gpus >= 1 else int(has_gpus) * int(1 / gpus) if gpus else math.inf
        times += int(min(has_cpus // cpus, of_gpus))
    if not times:
        sizes = ", ".join(dict.fromkeys(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in machines))
        share = f"{cpus} CPU{'s' * (cpus != 1)} and {gpus:g} GPU{'s' * (gpus != 1)}"
        raise ValueError(
            f"--threads {cpus}, --gpus {gpus:g}: each cell asks for {share}, which no machine of the Ray cluster has "
            f"(they have {sizes}); ask for less"
        )
    return times


@contextmanager
def join_cluster(address: str) -> Iterator[list[Machine]]:
    """Join the cluster at `HOST:PORT` or `auto`, whose machines it gives; for `local`, start one for the context.

    Raises a one-line ValueError if that fails.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        if address == "local":
            size = {"num_cpus": count_cores(), "object_store_memory": OBJECT_STORE_BYTES}
            ray.init("local", include_dashboard=False, **size, **quiet)
        else:
            _check_address(address)
            ray.init(address, **quiet)
        if in_main_thread:
            signal.signal(signal.SIGTERM, on_terminate)  # Ray's own handler aborts while workers give cells back
        machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
        yield [(resources.get("CPU", 0.0), resources.get("GPU", 0.0)) for resources in machines]
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise a one-line ValueError if no cluster can be joined.

    Ray itself would retry a closed port for a quarter of an hour, and a port of another service forever.
    """
    named = f"--ray-address {address!r}"
    host, _, port = address.rpartition(":")
    if address != "auto":
        if "/" in address or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"{named}: must be HOST:PORT of the cluster's head, auto, or local")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise ValueError(
                f"{named}: does not answer ({error}); give the HOST:PORT that `ray start` printed"
            ) from None
    attempt = [sys.executable, "-c", f"import ray; ray.init({address!r}, log_to_driver=False, logging_level='error')"]
    try:
        joining = subprocess.run(attempt, capture_output=True, text=True, timeout=JOIN_SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{named}: answers, but not as a Ray cluster; give the HOST:PORT that `ray start` printed"
        ) from None
    if joining.returncode:
        why = (joining.stderr.strip().splitlines() or ["no reason given"])[-1][:300]
        raise ValueError(f"{named}: cannot be joined ({why}); run this on a machine of the cluster, with its Ray")


class RayPool(Pool):
    """Tasks on the Ray cluster that this process has joined; each executes one cell."""

    def __init__(self, job: Job, size: int, gpus: float) -> None:
        super().__init__(job, size)
        # A share without GPUs must not see the machine's GPUs.
        environment = {"env_vars": {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}}
        self._task = ray.remote(
            num_cpus=job.threads * job.execution.devices, num_gpus=gpus, max_retries=0, runtime_env=environment
        )(execute_task)
        self._tasks: dict[Any, str] = {}
        self._died = ""

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, cell: Cell) -> None:
        self._tasks[self._task.remote(cell, self.job, os.getcwd())] = cell.key

    def poll(self) -> list[Ending]:
        return self._collect(0.0)

    def stop(self) -> list[Ending]:
        """Let the tasks write a checkpoint; kill those that do not. A second Ctrl-C kills all.

        A task receives KeyboardInterrupt, which takes effect between Python instructions, not within a blocking call.
        """
        endings = []
        try:
            give_up = time.monotonic() + ORDERLY_SECONDS
            while self._tasks and time.monotonic() < give_up:
                # The last first: otherwise a pending task would start in place of a cancelled one.
                for task in reversed(self._tasks):
                    ray.cancel(task)
                endings += self._collect(AGAIN_SECONDS)
        finally:
            for task in self._tasks:
                ray.cancel(task, force=True)
            endings += self._collect(FORCED_SECONDS)
        return endings

    def describe_last_failure(self) -> str:
        """How the last task died, and the last line of this machine's log."""
        return f"{self._died}; {super().describe_last_failure()}"

    def _collect(self, timeout: float) -> list[Ending]:
        if not self._tasks:
            return []
        ended, _ = ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=timeout)
        endings: list[Ending] = []
        for task in ended:
            key = self._tasks.pop(task)
            try:
                endings.append(ray.get(task))
            except RayError as error:
                self._died = describe_exception(error.cause if isinstance(error, RayTaskError) else error)
                endings.append(Ending(key, "died", self._died))
        return endings


def execute_task(cell: Cell, job: Job, folder: str) -> Ending:
    """Ray task that executes one cell, and sends its files where it does not share the grid's folder."""
    os.chdir(folder)
    # Ray cancels by SIGINT, which all processes of a cluster started in the background ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mark = job.folder / GRID_ID
    shared = mark.exists() and mark.read_text(encoding="utf-8") == job.mark
    if not shared:  # a folder of this grid alone: after --fresh there is another, and the head decides who tries again
        job = dataclasses.replace(job, folder=job.folder.parent / f"ray-{job.mark[:8]}" / job.folder.name)
        clear_failure(locate_cell(job.folder, cell.key))
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / f"worker-{socket.gethostname()}-ray.log"  # of all tasks of the grid on this machine
    path.touch(mode=PRIVATE)
    log_by(logging.FileHandler(path))
    prepare_process(job)
    with Interrupts(patient=True) as interrupts:
        ending = execute(cell, job, interrupts, lambda *_: "")
    if shared:
        return ending
    names = SETTINGS, METRICS, DIAGNOSTICS, FINAL_CHECKPOINT, FAILURE, RESULT
    return dataclasses.replace(ending, files=read_files(locate_cell(job.folder, cell.key), names))
