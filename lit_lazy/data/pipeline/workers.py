"""Worker processes that tokenise files in parallel, one file per process.

A worker is a new Python process, not a fork: the threads of `tokenizers` do not survive a fork, and user scripts need
no `__main__` guard. It reads jobs from stdin and exits at its end, so that no worker outlives the command.
"""

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lit_lazy.data.pipeline.shards import Count, FileJob, Shard, find_or_make_shard, remove_shard
from lit_lazy.support.error_messages import UnfinishedError, describe_exception
from lit_lazy.support.machine import count_cores

WORTH_PROCESSES = 64 * 2**20
"""Total file size in bytes above which several processes are worth the seconds that each takes to start."""
THREADS = "RAYON_NUM_THREADS"
"""Environment variable that limits the threads of `tokenizers`."""


def choose_process_count(jobs: Sequence[FileJob], processes: int | None) -> int:
    """Number of processes for these files, at most one per file; 1 is this process.

    If `processes` is None: 1 for files so small that starting workers would take longer, otherwise one per core.
    """
    small = sum(job.source.size for job in jobs) < WORTH_PROCESSES
    return max(1, min(processes or (1 if small else count_cores()), len(jobs)))


def make_shards(jobs: Sequence[FileJob], folder: Path, processes: int, count: Count) -> Generator[Shard]:
    """Yields the shards of the jobs in order, each as soon as it and those before it are done.

    Closing the iterator cancels the remaining jobs. Raises the errors of `find_or_make_shard`, and UnfinishedError if
    a worker dies.
    """
    if processes == 1:
        for job in jobs:
            yield find_or_make_shard(job, folder, count)
        return
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    workers = [_Worker(processes) for _ in range(processes)]
    for worker in workers:
        idle.put(worker)

    def run(job: FileJob) -> Shard:
        if (found := Shard.find(folder, job.name)) is not None:
            return found
        worker = idle.get()
        try:
            return worker.run(job, folder, count)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(processes) as threads:
        try:
            futures = [threads.submit(run, job) for job in jobs]
            for future in futures:
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.process.kill()
            threads.shutdown()  # a thread may have taken its next job before the jobs were cancelled
            for worker in workers:
                worker.clean_up()


class _Worker:
    """Handle of a worker process in the parent."""

    def __init__(self, processes: int) -> None:
        threads = os.environ.get(THREADS) or str(max(1, count_cores() // processes))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lit_lazy.data.pipeline.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {THREADS: threads, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # the parent handles Ctrl-C
        )
        self.unfinished: set[tuple[Path, str]] = set()

    def run(self, job: FileJob, folder: Path, count: Count) -> Shard:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.unfinished.add((folder, job.name))
        try:
            _send(self.process.stdin, (job, folder))
            while isinstance(answer := pickle.load(self.process.stdout), tuple):
                count(*answer)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise UnfinishedError(
                f"a process that tokenised {job.source.given!r} died (status {self.process.wait()}), probably out of "
                "memory; give `lit-lazy tokenise` the same data and fewer --processes, finished files are kept"
            ) from None
        self.unfinished.remove((folder, job.name))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def clean_up(self) -> None:
        """Reap the killed process and remove its unfinished files."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unsent data
                pipe.close()
        for folder, name in self.unfinished:
            remove_shard(folder, name, keep_finished=True)


def _send(file: BinaryIO | Any, message: object) -> None:
    pickle.dump(message, file)
    file.flush()


def main() -> None:
    """Run as a worker until stdin ends."""
    # Anything a library prints goes to stderr, not between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    jobs: queue.SimpleQueue[tuple[FileJob, Path]] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                jobs.put(pickle.load(sys.stdin.buffer))
        except (EOFError, OSError, pickle.UnpicklingError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        job, folder = jobs.get()
        try:
            answer: Any = find_or_make_shard(job, folder, lambda size, tokens: _send(answers, (size, tokens)))
        except (ValueError, OSError) as error:
            answer = error
        except Exception as error:  # others may not survive pickling
            answer = RuntimeError(describe_exception(error))
        _send(answers, answer)


if __name__ == "__main__":
    main()
