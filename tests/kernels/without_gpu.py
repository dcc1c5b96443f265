"""torch.cuda on a CPU, for the benchmark's workers and tests: its times are a CPU's and mean nothing.

What is planned to go wrong is named by peer or by case of the gate: raise, exit, hang, hang in training, or
break (the CUDA context).
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench import __main__ as command
from bench import course, device, gate, timing
from bench.course import Course
from bench.peers import Peer, peers
from bench.points import DECODE, FORWARD, TRAINING, BenchPoint

POINTS = (
    BenchPoint(FORWARD, 1, 128, 2, 2, 64, 16, 0.0),
    BenchPoint(TRAINING, 1, 128, 2, 1, 64, 16, 0.3),
    BenchPoint(DECODE, 2, 256, 2, 2, 64, 16, 0.0),
)
MEASURED = ("flash_lazy", "flash_lazy, nothing skipped", "SDPA MATH")


def make_point(operation=FORWARD, batch=1, length=128, heads=2, kv_heads=2, width=16, reach=512, share=0.0):
    return BenchPoint(operation, batch, length, heads, kv_heads, width, reach, share)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


class Graph:
    """Captures nothing, and replays nothing."""

    captured = False

    def replay(self) -> None:
        assert self.captured


@contextmanager
def capture(graph: Graph):
    yield
    graph.captured = True


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Puts the benchmark's device on the CPU: L2 of 100 kB, which two or three of POINTS' inputs fill."""
    replace(device, "DEVICE", torch.device("cpu"))
    functions = {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
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
    """The first thing in a worker: few peers, and what is to go wrong."""
    install()
    timing.prepare()
    timing.peers = partial(_make_faulty_peers, faults)  # type: ignore[assignment]
    gate._check_case = partial(_check_with_faults, faults, gate._check_case)  # type: ignore[assignment]


def _check_with_faults(faults: Mapping[str, str], checked: Callable[..., Any], name: str, backend: str) -> Any:
    go_wrong(faults.get(name))
    return checked(name, backend)


def _make_faulty_peers(faults: Mapping[str, str], backend: str, authors: Path | None) -> list[Peer]:
    found = [peer for peer in peers(backend, authors) if peer.name in (*MEASURED, *faults)]
    return [peer._replace(attend=partial(_attend, faults.get(peer.name), peer.attend)) for peer in found]


def _attend(fault: str | None, attend: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    if fault != "hang in training" or inputs[0].requires_grad:
        go_wrong(fault)
    return attend(*inputs)


def go_wrong(fault: str | None) -> None:
    if fault == "exit":
        os._exit(9)
    if fault and fault.startswith("hang"):
        print("hangs in", os.getpid(), flush=True)
        time.sleep(60)
    if fault == "break":
        device.DEVICE = torch.device("meta")  # on which no operation gives a value
    if fault:
        raise RuntimeError("no such thing\nand more")


def leave_a_child() -> None:
    """Ends the worker, while a child of it keeps its connection open."""
    if os.fork():
        os._exit(5)
    time.sleep(3)
    os._exit(0)


def run(arguments: list[str], faults: Mapping[str, str], replace: Callable[[Any, str, Any], None] = setattr) -> int:
    """The command with POINTS and without a gate; the exit status."""
    install(replace)
    replace(command, "FULL", POINTS)
    replace(command, "BACKEND", "chunked")
    replace(command, "Course", partial(Course, setup=partial(prepare, faults)))
    replace(course, "GATE", {})
    replace(course, "GUARDS", {})
    return command.main(arguments)
