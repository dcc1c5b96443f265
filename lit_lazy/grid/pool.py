"""Worker processes on this machine, one per slot."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_lazy.grid.worker import DISK_FULL, STORAGE_VARIABLE


@dataclass(frozen=True)
class Job:
    """What every worker of a grid has to know."""

    storage: str
    study: str
    runs: Path
    tracking_uri: str
    parent_id: str
    threads: int
    keep_checkpoints: bool
    keys: Path | None
    """File with the keys of the cells to take, one a line; None for all."""
    files: Sequence[Path]
    """Python files that define classes of the cells' configs."""
    module: str = "lit_lazy.grid.worker"
    """What a worker process runs."""

    @property
    def folder(self) -> Path:
        """The grid's folder."""
        return self.runs / self.study


@dataclass(frozen=True)
class Ended:
    """How many workers have ended since last asked, and how."""

    crashed: int = 0
    disk_full: int = 0


class LocalPool:
    """Subprocesses, each in a session of its own, so that Ctrl-C reaches them through their parent alone."""

    def __init__(self, job: Job, size: int) -> None:
        self.job, self.size = job, size
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def reap(self) -> Ended:
        """Forget the workers that have ended."""
        codes = {slot: worker.poll() for slot, worker in self._workers.items()}
        self._workers = {slot: worker for slot, worker in self._workers.items() if codes[slot] is None}
        full = sum(code == DISK_FULL for code in codes.values())
        return Ended(crashed=sum(code not in (None, 0) for code in codes.values()) - full, disk_full=full)

    def start(self, most: int) -> None:
        """Start up to `most` workers in free slots."""
        for slot in [slot for slot in range(self.size) if slot not in self._workers][:most]:
            self._workers[slot] = self._start(slot)

    def stop(self) -> None:
        """Have the workers finish their bookkeeping, and wait for them. A second Ctrl-C kills them."""
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

    def last_words(self) -> str:
        """The last line of the log that was written to last, and which log that is."""
        logs = sorted(self.job.folder.glob("worker-*.log"), key=lambda path: path.stat().st_mtime)
        if not logs:
            return "no worker wrote a log"
        lines = logs[-1].read_text(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'nothing'} ({logs[-1]})"

    def _start(self, slot: int) -> subprocess.Popen[bytes]:
        job = self.job
        command = [
            *(sys.executable, "-m", job.module),
            *("--study", job.study),
            *("--runs", str(job.runs.resolve())),
            *("--threads", str(job.threads)),
            *("--tracking-uri", job.tracking_uri),
            *("--parent", job.parent_id),
            *(["--keep-checkpoints"] if job.keep_checkpoints else []),
            *(["--keys", str(job.keys.resolve())] if job.keys else []),
            *("--import", *(str(file) for file in job.files)),
        ]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads))
        with (job.folder / f"worker-{socket.gethostname()}-{slot}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | threads | {STORAGE_VARIABLE: job.storage} | _one_gpu(slot),
                start_new_session=True,
            )


def _one_gpu(slot: int) -> dict[str, str]:
    """The environment that gives a worker a GPU of its own, where there are any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus and torch.cuda.is_available() else {}
