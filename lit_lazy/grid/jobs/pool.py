"""Pools of workers: the interface, and the pool of processes on this machine, one per slot."""

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

import torch

from lit_lazy.grid.jobs.job import DISK_FULL, FILE_TOO_LONG, INTERRUPTED, Job
from lit_lazy.grid.queue.liveness import find_orphaned_slots
from lit_lazy.support.disk import open_private


@dataclass(frozen=True)
class ReapResult:
    """Numbers of workers that have ended abnormally since the last call."""

    crashed: int = 0
    disk_full: int = 0
    file_too_long: int = 0


def count_ends(codes: Sequence[int]) -> ReapResult:
    """How workers ended, by their exit statuses."""
    counts = Counter(codes)
    crashed = sum(n for code, n in counts.items() if code not in (0, INTERRUPTED, DISK_FULL, FILE_TOO_LONG))
    return ReapResult(crashed, counts[DISK_FULL], counts[FILE_TOO_LONG])


class Pool(Protocol):
    """Workers that claim cells from the queue."""

    def __len__(self) -> int:
        """Number of running workers."""

    def reap(self) -> ReapResult:
        """Remove the workers that have ended."""

    def start(self, most: int) -> None:
        """Start up to `most` workers within the pool's size."""

    def stop(self) -> None:
        """Let the workers requeue or record their cells, and wait for them. A second Ctrl-C kills them."""

    def describe_last_failure(self) -> str:
        """The last line that a worker logged, and the log's path."""


class LocalPool:
    """Worker subprocesses in separate sessions, so that Ctrl-C reaches only their parent."""

    def __init__(self, job: Job, size: int) -> None:
        self.job, self.size = job, size
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def reap(self) -> ReapResult:
        codes = {slot: worker.poll() for slot, worker in self._workers.items()}
        self._workers = {slot: worker for slot, worker in self._workers.items() if codes[slot] is None}
        return count_ends([code for code in codes.values() if code is not None])

    def start(self, most: int) -> None:
        """Start up to `most` workers in free slots; running workers of a dead command still occupy theirs."""
        if most and len(self._workers) < self.size:
            left = find_orphaned_slots(self.job.folder / "workers")
            free = [slot for slot in range(self.size) if slot not in self._workers and slot not in left]
            for slot in free[: max(0, min(most, self.size - len(self._workers) - len(left)))]:
                self._workers[slot] = self._start_worker(slot)

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.send_signal(signal.SIGTERM)
        try:
            for worker in self._workers.values():
                worker.wait()
        except KeyboardInterrupt:
            for worker in self._workers.values():
                worker.kill()
                worker.wait()
            raise

    def describe_last_failure(self) -> str:
        """The last line of the most recent log, and the log's path."""
        return read_last_log_line(self.job.folder)

    def _start_worker(self, slot: int) -> subprocess.Popen[bytes]:
        job = replace(self.job, runs=self.job.runs.resolve())
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads))
        log_file = job.folder / f"worker-{socket.gethostname()}-{slot}.log"
        # Not in arguments, which other users can read: the addresses may contain passwords.
        with TemporaryFile() as stdin, open(log_file, "ab", opener=open_private) as log:
            pickle.dump((job, slot), stdin)
            stdin.seek(0)
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "lit_lazy.grid.jobs.start", job.module],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=stdin,
                env=os.environ | threads | _assign_gpus(slot, job.execution.devices),
                start_new_session=True,
            )


def read_last_log_line(folder: Path) -> str:
    """The last line of the most recent worker log in a grid's folder, and the log's path."""
    logs = sorted(folder.glob("worker-*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return "no worker wrote a log"
    lines = logs[-1].read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'nothing'} ({logs[-1]})"


def _assign_gpus(slot: int, devices: int) -> dict[str, str]:
    """Environment variables that assign GPUs to a worker; empty without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if not gpus or not torch.cuda.is_available():
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[(slot * devices + i) % len(gpus)] for i in range(devices))}
