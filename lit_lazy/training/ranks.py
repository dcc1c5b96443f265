"""The processes that share a run's batches: rank 0, and the other ranks, which it starts.

Rank 0 owns the folder, its lock, the metrics and every evaluation. The other ranks have no folder: rank 0 sends them
the run, they train on their share of each batch, and end when rank 0 ends.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import distributed

from lit_lazy.support.environment_variables import TORCHRUN, read_torchrun_size
from lit_lazy.support.error_messages import UnfinishedError, describe_exception

MODULE = "lit_lazy.training.trainer"
"""The module that the other ranks run."""
LOCAL = "127.0.0.1"
TIMEOUT = timedelta(hours=2)
"""Timeout of collectives; long because rank 0 evaluates meanwhile. A dead rank is detected separately."""
GRACE_SECONDS = 10.0
"""Time for a collective to fail after a rank has left it; with NCCL it may hang forever."""
POLL_SECONDS = 0.2
SPEC, FAILURE, HERE, STOP = "orders", "failure", "here", "stop"
"""Keys in a group's store: the run, why a rank failed, the ranks that are ready to join, and the last step."""

log = logging.getLogger("lit_lazy.training.ranks")


class RankLostError(UnfinishedError):
    """A process of the run died."""


class RankFailedError(UnfinishedError):
    """An exception in another process of the run."""


@dataclass(frozen=True)
class RankGroup:
    """A process's rank in a run, and the shared store."""

    store: distributed.Store
    rank: int
    size: int
    local_rank: int
    local_size: int
    lost: Callable[[bool], str] = lambda _killed: ""
    """Describes a rank that ended although it should not have, or only one that was killed (True); "" for none."""

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.size // self.local_size

    @contextmanager
    def join(self) -> Iterator[None]:
        """Join the group for collectives in the block, once all ranks are ready.

        On rank 0, raises RankLostError if another rank died and RankFailedError if one raised.
        """
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = distributed.PrefixStore("group", self.store)
        self.store.set(f"{HERE}{self.rank}", "")
        keys = [f"{HERE}{rank}" for rank in range(self.size)]
        while not self.store.check(keys):
            self._check_ranks()  # `init_process_group` would wait for one that ended for hours
            time.sleep(POLL_SECONDS)
        distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
        try:
            yield
        except Exception as error:  # before the group is destroyed, which would raise on the other ranks
            self.report_failure(error) if self.rank else self._raise_rank_error(error)
            raise
        finally:
            distributed.destroy_process_group()

    def send_spec(self, **spec: Any) -> None:
        """Start the other ranks' training (`MODULE`). spec: what JSON takes, and paths, which become texts."""
        self.store.set(SPEC, json.dumps(spec, default=str))

    def receive_spec(self) -> dict[str, Any]:
        """Wait for rank 0's spec."""
        return json.loads(self.store.get(SPEC))

    def agree_to_stop(self, step: int, wanted: bool) -> bool:
        """Whether all ranks stop after this step, their number of finished steps; called by each rank at each step.

        A rank that wants to, names the step after this one: no other can finish that one without it, and so without
        knowing.
        """
        if wanted:
            self.store.compare_set(STOP, "", str(step + 1))
        return self.store.check([STOP]) and step >= int(self.store.get(STOP))

    def report_failure(self, error: Exception) -> None:
        """Report why this rank stops. Only the first report is stored."""
        with suppress(RuntimeError):  # rank 0 may be the reason
            self.store.compare_set(FAILURE, "", f"rank {self.rank}: {describe_exception(error)}")

    def _raise_rank_error(self, error: Exception) -> None:
        """Raise another rank's end if it may be the cause of rank 0's error."""
        if isinstance(error, UnfinishedError) or not isinstance(error, RuntimeError):
            return
        time.sleep(2 * POLL_SECONDS)
        self._check_ranks(error)

    def _check_ranks(self, error: Exception | None = None) -> None:
        if killed := self.lost(True):  # first, as the other ranks may have reported its loss as their failure
            raise RankLostError(killed) from error
        if self.store.check([FAILURE]):
            raise RankFailedError(self.store.get(FAILURE).decode()) from error
        if lost := self.lost(False):
            raise RankLostError(lost) from error


class GroupEnvironment(LightningEnvironment):
    """Lightning's view of an existing group."""

    creates_processes_externally = True

    def __init__(self, group: RankGroup) -> None:
        super().__init__()
        self.group = group

    def world_size(self) -> int:
        return self.group.size

    def global_rank(self) -> int:
        return self.group.rank

    def local_rank(self) -> int:
        return self.group.local_rank

    def node_rank(self) -> int:
        return self.group.rank // self.group.local_size

    def teardown(self) -> None:
        """No-op: Lightning's own removes a variable by which later runs find the group."""


def join_torchrun() -> RankGroup | None:
    """The group that torchrun, or `start_ranks`, assigned to this process, if any."""
    return None if read_torchrun_size() is None else _meet()


@cache
def _meet() -> RankGroup:
    store, rank, size = next(distributed.rendezvous("env://", timeout=TIMEOUT))
    return RankGroup(store, rank, size, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))


@contextmanager
def start_ranks(devices: int) -> Iterator[RankGroup | None]:
    """Start the other ranks of a run; they end with the block. Yields the group, or None for one device.

    They own no files or locks, so they may be killed at any time.
    """
    if devices == 1 or read_torchrun_size():
        yield join_torchrun()
        return
    # gloo would use the address of the host name.
    for loopback in [name for _, name in socket.if_nameindex() if name.startswith("lo")][:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    with socket.create_server((LOCAL, 0)) as server:
        port, ended = server.getsockname()[1], threading.Event()
        processes = [_start_rank(port, rank, devices) for rank in range(1, devices)]
        watcher = threading.Thread(target=_end_with_ranks, args=(processes, ended), daemon=True)
        watcher.start()
        try:
            store = distributed.TCPStore(
                LOCAL, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=server.detach()
            )
            yield RankGroup(store, 0, devices, local_rank=0, local_size=devices, lost=partial(_find_lost, processes))
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
        finally:
            ended.set()
            for process in processes:
                with process:
                    process.kill()
            watcher.join()


def _start_rank(port: int, rank: int, size: int) -> "subprocess.Popen[bytes]":
    """Start a rank as torchrun would. It ends when its standard input closes, even if this process is killed."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), torch.get_num_threads())
    group = {"MASTER_ADDR": LOCAL, "MASTER_PORT": port, TORCHRUN: "lit-lazy"}
    group |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    env = os.environ | {name: str(value) for name, value in (threads | group).items()}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, env=env, start_new_session=True
    )


def _find_lost(processes: "Sequence[subprocess.Popen[bytes]]", killed: bool) -> str:
    """Describe a rank that failed or was killed, or with `killed` only one that was killed; "" for none."""
    for rank, process in enumerate(processes, 1):
        code = process.poll() or 0
        if code < 0 or (code and not killed):
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            return f"rank {rank} of {len(processes) + 1} {how}; the same command resumes"
    return ""


def _end_with_ranks(processes: "Sequence[subprocess.Popen[bytes]]", ended: threading.Event) -> None:
    """End this process if another rank is lost and the collectives do not fail within GRACE_SECONDS."""
    while not ended.wait(POLL_SECONDS):
        if (lost := _find_lost(processes, killed=False)) and not ended.wait(GRACE_SECONDS):
            log.error("%s", lost)
            os._exit(1)


def exit_on_eof(pipe: int) -> None:
    """End this process when the pipe closes."""

    def wait() -> None:
        while os.read(pipe, 1):
            continue
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
