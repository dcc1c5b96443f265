"""A stub of torch.cuda on a CPU for the benchmark's workers and tests; its times are meaningless.

Faults are given by peer or by case of the gate: raise, exit, hang, hang in training, or break (the CUDA context).
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from bench import __main__ as command
from bench import benchmark, correctness, cuda, timing
from bench.benchmark import Benchmark
from bench.peers import Peer, peers
from bench.workloads import DECODE, FORWARD, TRAINING, Workload

WORKLOADS = (
    Workload(FORWARD, 1, 128, 2, 2, 64, 16, 0.0),
    Workload(TRAINING, 1, 128, 2, 1, 64, 16, 0.3),
    Workload(DECODE, 2, 256, 2, 2, 64, 16, 0.0),
)
MEASURED = ("flash_lazy", "flash_lazy, empty tiles skipped", "SDPA MATH")


def make_workload(operation=FORWARD, batch=1, length=128, heads=2, kv_heads=2, width=16, reach=512, share=0.0):
    return Workload(operation, batch, length, heads, kv_heads, width, reach, share)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Move the benchmark's device to the CPU, with an L2 cache of 100 kB, two or three inputs of WORKLOADS."""
    replace(cuda, "DEVICE", torch.device("cpu"))
    functions = {
        "Event": Event,
        "CUDAGraph": MagicMock,
        "graph": MagicMock(),
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 1000,
        "max_memory_allocated": lambda: 3000,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (2**30, 2**31),
        "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=100_000),
        "get_device_name": lambda: "no GPU",
        "is_available": lambda: True,
    }
    for name, function in functions.items():
        replace(torch.cuda, name, function)
    replace(timing.measure_ceilings, "__defaults__", (2**16, 2**16, (32, 48), 2))


def prepare(faults: Mapping[str, str]) -> None:
    """Setup of a worker: few peers, and the faults."""
    install()
    timing.prepare()
    timing.peers = partial(_make_faulty_peers, faults)  # type: ignore[assignment]
    correctness._check_case = partial(_check_with_faults, faults, correctness._check_case)  # type: ignore[assignment]


def _check_with_faults(faults: Mapping[str, str], check: Callable[..., Any], name: str, backend: str) -> Any:
    inject_fault(faults.get(name))
    return check(name, backend)


def _make_faulty_peers(faults: Mapping[str, str], backend: str, authors: Path | None) -> list[Peer]:
    found = [peer for peer in peers(backend, authors) if peer.name in (*MEASURED, *faults)]
    return [peer._replace(attend=partial(_attend, faults.get(peer.name), peer.attend)) for peer in found]


def _attend(fault: str | None, attend: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    if fault != "hang in training" or inputs[0].requires_grad:
        inject_fault(fault)
    return attend(*inputs)


def inject_fault(fault: str | None) -> None:
    if fault == "exit":
        os._exit(9)
    if fault and fault.startswith("hang"):
        print("hangs in", os.getpid(), flush=True)
        time.sleep(60)
    if fault == "break":
        cuda.DEVICE = torch.device("meta")  # on which `.item()` raises
    if fault:
        raise RuntimeError("no such thing\nand more")


def run(arguments: list[str], faults: Mapping[str, str], replace: Callable[[Any, str, Any], None] = setattr) -> int:
    """Run the command with WORKLOADS and without a gate; returns the exit status."""
    install(replace)
    replace(command, "FULL", WORKLOADS)
    replace(command, "BACKEND", "chunked")
    replace(command, "Benchmark", partial(Benchmark, setup=partial(prepare, faults)))
    replace(benchmark, "CASES", {})
    replace(benchmark, "GUARDS", {})
    return command.main(arguments)
