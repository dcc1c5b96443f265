"""Pools of workers: the interface, and the pool of processes on this machine, forked from one prepared process."""

import multiprocessing
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.work_records import Ending, Job

PRELOADED = ["lit_lazy.grid.worker", "lit_lazy.grid.pool"]


def start_fork_server() -> None:
    """Start the process from which workers are forked; it imports what they need while this one goes on."""
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


class Pool(ABC):
    """Workers that execute the cells they are given, at most `size` at a time."""

    def __init__(self, job: Job, size: int) -> None:
        self.job, self.size = job, size

    @abstractmethod
    def __len__(self) -> int:
        """Number of cells that are being executed."""

    @property
    def free(self) -> int:
        """Number of cells that can be started now."""
        return self.size - len(self)

    @abstractmethod
    def start(self, cell: Cell) -> None:
        """Let a free worker execute a cell."""

    @abstractmethod
    def poll(self) -> list[Ending]:
        """The attempts that have ended since the last call."""

    @abstractmethod
    def stop(self) -> list[Ending]:
        """Let the workers write a checkpoint, and wait for them. A second Ctrl-C kills them."""

    def close(self) -> None:  # noqa: B027 (tasks need none)
        """End the idle workers, if they live on."""

    def describe_last_failure(self) -> str:
        """The last line of the most recent worker log in the grid's folder, and the log's path."""
        logs = sorted(self.job.folder.glob("worker-*.log"), key=lambda path: path.stat().st_mtime)
        if not logs:
            return "no worker wrote a log"
        lines = logs[-1].read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'nothing'} ({logs[-1]})"


class LocalWorker:
    """A worker process and the cell that it executes."""

    def __init__(self, job: Job, slot: int) -> None:
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        log_file = (job.folder / f"worker-{socket.gethostname()}-{slot}.log").resolve()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads))
        environment = {**os.environ, **threads, **_assign_gpus(slot, job.execution.devices)}
        self.connection: Connection
        self.connection, other = context.Pipe()
        arguments = other, job, log_file, environment
        self.process: ForkServerProcess = context.Process(target=_serve, args=arguments, name=f"worker {slot}")
        self.process.start()
        other.close()
        self.key: str | None = None
        self._question: tuple[int, float] | None = None
        """Of its training, as long as it is not answered, since that may fail for lack of space."""

    def poll(self, judge: Callable[[str, int, float], str]) -> Ending | None:
        """How the attempt at the cell ended; None if it goes on. Answers the questions of the training."""
        assert self.key is not None
        is_alive = self.process.is_alive()  # asked first: a process may end after its last message
        while True:
            try:
                if self._question is None and not self.connection.poll():
                    break
                message: Ending | tuple[int, float] = self._question or self.connection.recv()
            except (EOFError, OSError):
                self.process.join()
                is_alive = False
                break
            if isinstance(message, Ending):
                return message
            self._question = step, value = message
            answer = judge(self.key, step, value)
            self._question = None
            with suppress(OSError):  # it died: the next look finds that
                self.connection.send(answer)
        return None if is_alive else Ending(self.key, "died", f"exit status {self.process.exitcode}")


def _serve(*arguments: Any) -> None:
    """`lit_lazy.grid.worker.serve`, imported in the worker: the command itself needs no Lightning."""
    from lit_lazy.grid.worker import serve

    serve(*arguments)


class LocalPool(Pool):
    """Worker processes in slots."""

    def __init__(self, job: Job, size: int, judge: Callable[[str, int, float], str]) -> None:
        """judge: as `Driver.judge`."""
        super().__init__(job, size)
        self.judge = judge
        self._workers: dict[int, LocalWorker] = {}
        self._ended: list[Ending] = []

    def __len__(self) -> int:
        return len(self._busy)

    @property
    def _busy(self) -> list[LocalWorker]:
        return [worker for worker in self._workers.values() if worker.key is not None]

    def start(self, cell: Cell) -> None:
        slot = next(slot for slot in range(self.size) if slot not in self._workers or self._workers[slot].key is None)
        if slot not in self._workers:
            self._workers[slot] = LocalWorker(self.job, slot)
        self._workers[slot].key = cell.key
        with suppress(OSError):  # it died: `poll` finds that
            self._workers[slot].connection.send(cell)

    def poll(self) -> list[Ending]:
        for slot, worker in list(self._workers.items()):
            if worker.key is not None and (ending := worker.poll(self.judge)) is not None:
                self._ended.append(ending)  # kept if the judgement of the next one fails
                worker.key = None
            if worker.key is None and not worker.process.is_alive():  # else the next call finds how its cell ended
                del self._workers[slot]
        endings, self._ended = self._ended, []
        return endings

    def stop(self) -> list[Ending]:
        busy = self._busy
        for worker in busy:
            worker.process.terminate()
        try:
            for worker in busy:
                worker.process.join()
        except KeyboardInterrupt:
            for worker in busy:
                worker.process.kill()
                worker.process.join()
            raise
        return self.poll()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.connection.close()
        for worker in self._workers.values():
            worker.process.join()
        self._workers.clear()


def _assign_gpus(slot: int, devices: int) -> Mapping[str, str]:
    """Environment variables that assign GPUs to a worker; empty without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if not gpus or not torch.cuda.is_available():
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[(slot * devices + i) % len(gpus)] for i in range(devices))}
