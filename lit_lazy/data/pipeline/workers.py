"""Processes that tokenise files side by side, each file in one of them.

A worker is a new Python, no fork: the threads of `tokenizers` do not survive one, and a user's script need not guard
its own lines. It reads jobs from its input, and ends with it, so that none outlives its command, however that ends.
"""

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from lit_lazy.data.pipeline.shards import Count, FileJob, Shard, find_or_make_shard, remove_leftovers
from lit_lazy.support.errors import UnfinishedError, describe_exception
from lit_lazy.support.machine import count_cores

WORTH_PROCESSES = 64 * 2**20
"""Bytes of files from which on several processes are worth the seconds that each takes to start."""
THREADS = "RAYON_NUM_THREADS"
"""Limits the threads of `tokenizers`."""


def choose_process_count(jobs: Sequence[FileJob], asked: int | None) -> int:
    """How many processes tokenise these files: as many as are asked for, or there are cores; never more than files.

    1 is this process itself: also where the files are so small that starting others would take longer, unless asked.
    """
    small = sum(job.source.size for job in jobs) < WORTH_PROCESSES
    wished = asked or (1 if small else count_cores())
    return max(1, min(wished, len(jobs)))


def make_shards(jobs: Sequence[FileJob], folder: Path, processes: int, count: Count) -> Generator[Shard]:
    """The shards of jobs, in their order, each as soon as it and those before it are there.

    The jobs that are not needed any more when the iterator is closed are dropped. Errors are those of `made`.
    Raises UnfinishedError where a worker dies.
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
                worker.end()


class _Worker:
    """The parent's end of a process."""

    def __init__(self, processes: int) -> None:
        threads = os.environ.get(THREADS) or str(max(1, count_cores() // processes))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lit_lazy.data.pipeline.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {THREADS: threads, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is the parent's affair
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
                f"a process that tokenised {job.source.given!r} ended (status {self.process.wait()}); out of memory, "
                "most likely: give the same command again with fewer --processes, finished files are kept"
            ) from None
        self.unfinished.remove((folder, job.name))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        """At once; what it leaves half done is removed."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not sent any more
                continue
        for folder, name in self.unfinished:
            remove_leftovers(folder, name)


def _send(file: BinaryIO | Any, message: object) -> None:
    pickle.dump(message, file)
    file.flush()


def main() -> None:
    """Be a worker, until the input ends."""
    # Whatever a library prints is not to get among the answers.
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
        except Exception as error:  # any other may not survive the way
            answer = RuntimeError(describe_exception(error))
        _send(answers, answer)


if __name__ == "__main__":
    main()
