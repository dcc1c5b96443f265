"""The processes that share a run's batches: rank 0, which was asked to train, and the others, which it starts.

Rank 0 owns the folder, its lock, the metrics and every evaluation. The others have no folder: they are told what to
train by rank 0, take their share of each batch, and end with it, whatever it ends by.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from torch import distributed

from lit_lazy.support.errors import UnfinishedError, describe_exception

MODULE = "lit_lazy.training.distributed.rank_process"
"""What the other ranks run."""
LOCAL = "127.0.0.1"
PATIENCE = timedelta(hours=2)
"""For rank 0 while it evaluates: a rank that dies is noticed otherwise."""
GRACE_SECONDS = 10.0
"""In which an operation between the ranks ends that one of them has left; with NCCL it may hang for ever."""
LOOK_SECONDS = 0.2
ORDERS, FAILURE, HERE = "orders", "failure", "here"
"""Keys in the store of a group: what to train, why a rank could not, and which are about to join."""

log = logging.getLogger("lit_lazy.training.distributed.process_group")


class RankLostError(UnfinishedError):
    """A process of the run died."""


class RankFailedError(UnfinishedError):
    """An exception in another process of the run."""


@dataclass(frozen=True)
class RunSpec:
    """What the ranks of a run train, and how."""

    config: dict[str, Any]
    execution: dict[str, Any]
    files: list[Path]
    """Python files that define classes of the config."""
    fingerprint: str
    """Of the data that rank 0 has."""
    folder: Path
    checkpoint: Path | None
    """To resume from."""
    final: Path | None
    """Where the trained model is kept."""


@dataclass(frozen=True)
class RankGroup:
    """A process's place among those of a run, and the store that they share."""

    store: distributed.Store
    rank: int
    size: int
    local_rank: int
    local_size: int
    lost: Callable[[bool], str] = lambda _killed: ""
    """How another rank ended that should not have, as far as this one can know; "" for not at all. Or was killed."""

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.size // self.local_size

    @contextmanager
    def join(self) -> Iterator[None]:
        """Within, tensors can be exchanged; it begins when all ranks are there.

        Raises, in rank 0, RankLostError where another rank died and RankFailedError where one raised.
        """
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = distributed.PrefixStore("group", self.store)
        self._wait_for_ranks()
        distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=PATIENCE)
        try:
            yield
        except Exception as error:  # before the group ends, which would be the others' error
            self.report_failure(error) if self.rank else self._raise_rank_error(error)
            raise
        finally:
            distributed.destroy_process_group()

    def _wait_for_ranks(self) -> None:
        """Wait for all ranks, or for the first that cannot come: the group itself would wait for it for hours."""
        self.store.set(f"{HERE}{self.rank}", "")
        there = [f"{HERE}{rank}" for rank in range(self.size)]
        while not self.store.check(there):
            self._check_ranks()
            time.sleep(LOOK_SECONDS)

    def send_spec(self, orders: RunSpec) -> None:
        """Have the others train."""
        self.store.set(ORDERS, json.dumps(asdict(orders), default=str))

    def receive_spec(self) -> RunSpec:
        """What rank 0 wants to be trained; waits for it."""
        given = json.loads(self.store.get(ORDERS))
        paths = {name: given[name] and Path(given[name]) for name in ("folder", "checkpoint", "final")}
        return RunSpec(**given | paths | {"files": [Path(file) for file in given["files"]]})

    def report_failure(self, error: Exception) -> None:
        """Say why this rank cannot continue. The first that does is heard."""
        with suppress(RuntimeError):  # rank 0 may be the reason
            self.store.compare_set(FAILURE, "", f"rank {self.rank}: {describe_exception(error)}")

    def _raise_rank_error(self, error: Exception) -> None:
        """Raise what another rank's end has to do with an error of rank 0, if anything."""
        if isinstance(error, UnfinishedError) or not isinstance(error, RuntimeError):
            return
        time.sleep(2 * LOOK_SECONDS)
        self._check_ranks(error)

    def _check_ranks(self, error: Exception | None = None) -> None:
        if killed := self.lost(True):  # of which the others may have said that they lost it
            raise RankLostError(killed) from error
        if self.store.check([FAILURE]):
            raise RankFailedError(self.store.get(FAILURE).decode()) from error
        if lost := self.lost(False):
            raise RankLostError(lost) from error


class GroupEnvironment(ClusterEnvironment):
    """Lightning's view of a group that exists already."""

    creates_processes_externally = True
    main_address, main_port = LOCAL, 0

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.group.size

    def set_world_size(self, size: int) -> None:
        """It is what it is."""

    def global_rank(self) -> int:
        return self.group.rank

    def set_global_rank(self, rank: int) -> None:
        """It is what it is."""

    def local_rank(self) -> int:
        return self.group.local_rank

    def node_rank(self) -> int:
        return self.group.rank // self.group.local_size


def make_environment(group: RankGroup | None) -> ClusterEnvironment:
    """Where Lightning is to believe itself: not in a batch system's job, whatever the variables say."""
    return LightningEnvironment() if group is None else GroupEnvironment(group)


def read_torchrun_size() -> int | None:
    """How many processes torchrun started, on one machine or several; None where this one was started otherwise."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


@cache
def join_torchrun() -> RankGroup | None:
    """The place that torchrun gave this process."""
    if read_torchrun_size() is None:
        return None
    store, rank, size = next(distributed.rendezvous("env://", timeout=PATIENCE))
    return RankGroup(store, rank, size, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))


@contextmanager
def start_ranks(devices: int) -> Iterator[RankGroup | None]:
    """The group of a run on this many devices, whose other processes live as long as this. None for one device."""
    if devices == 1 or read_torchrun_size():
        yield join_torchrun()
        return
    _use_loopback()
    with socket.create_server((LOCAL, 0)) as server, _ChildRanks(port := server.getsockname()[1], devices) as others:
        store = distributed.TCPStore(
            LOCAL, port, is_master=True, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=server.detach()
        )
        yield RankGroup(store, rank=0, size=devices, local_rank=0, local_size=devices, lost=others.find_lost)


class _ChildRanks:
    """The ranks that rank 0 started. They hold nothing, so they may be killed at any time."""

    def __init__(self, port: int, size: int) -> None:
        self._ended = threading.Event()
        self._processes = [_start_rank(port, rank, size) for rank in range(1, size)]
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_ChildRanks":
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        for process in self._processes:
            if kind is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
        self._watcher.join()

    def find_lost(self, killed: bool) -> str:
        """Which of them ended, or was killed, and how; "" for none. To be asked while none should end."""
        for rank, process in enumerate(self._processes, 1):
            code = process.poll() or 0
            if code < 0 or (code and not killed):
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
                return f"rank {rank} of {len(self._processes) + 1} {how}; the same command resumes"
        return ""

    def _watch(self) -> None:
        """End this process, as the other one ended, where it does not notice by itself."""
        while not self._ended.wait(LOOK_SECONDS):
            if (lost := self.find_lost(False)) and not self._ended.wait(GRACE_SECONDS):
                log.error("%s", lost)
                os._exit(1)


def _start_rank(port: int, rank: int, size: int) -> "subprocess.Popen[bytes]":
    """A rank that waits for its task, and ends when its input does: with rank 0, whatever ends that."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE],
        stdin=subprocess.PIPE,
        env=os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(torch.get_num_threads())),
        start_new_session=True,
    )
    assert process.stdin
    process.stdin.write(json.dumps({"port": port, "rank": rank, "size": size}).encode() + b"\n")
    process.stdin.flush()
    return process


def connect_to_group(line: str) -> RankGroup:
    """The place of a process that was started by `started`."""
    _use_loopback()
    given = json.loads(line)
    store = distributed.TCPStore(LOCAL, given["port"], is_master=False, timeout=PATIENCE)
    return RankGroup(store, given["rank"], given["size"], given["rank"], given["size"])


def _use_loopback() -> None:
    """gloo would listen at the address that the machine's name stands for."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def exit_on_eof(pipe: int) -> None:
    """End this process when a pipe does."""

    def wait() -> None:
        while os.read(pipe, 1):
            continue
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
