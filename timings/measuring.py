"""Quartiles of measurements, and memory peaks in separate processes."""

import ctypes
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
M_MMAP_THRESHOLD = -3
"""mallopt's parameter (malloc.h): the allocation size from which memory is mapped."""


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles over the rounds."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)


def run_in_process(module: str, measure: Callable[..., T], *arguments: Any) -> T | None:
    """The result of a module's `measure(*arguments)` in a single-threaded process; None except on Linux (glibc).

    Each tensor has separate pages there, which are freed with it, so the peak is the memory in use. Memory cached by
    the allocator would otherwise change the peak by a third between runs.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return None
    # The server imports once, and its children start with little memory, unlike a fork of this process.
    context = get_context("forkserver")
    context.set_forkserver_preload([module])
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare) as pool:
        return pool.submit(measure, *arguments).result()


def _prepare() -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)


def measure_memory_rise(call: Callable[[], object]) -> int:
    """Bytes by which a call raises the resident memory of this process."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = _read_memory("VmRSS")
    call()
    return _read_memory("VmHWM") - before


def _read_memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
