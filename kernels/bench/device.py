"""The GPU as the benchmark uses it: all that it asks of torch.cuda."""

from collections.abc import Callable
from typing import Any

import torch

DEVICE = torch.device("cuda")
ROUND_TRIP = 3
"""A round over all copies of the inputs reads this many times the L2 cache, so that none is found there again."""


def record_event() -> torch.cuda.Event:
    """A moment in the device's queue."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end)


def wait() -> None:
    """Until the queue is done; raises what failed in it."""
    torch.cuda.synchronize()


def measure_peak_bytes(step: Callable[[], Any]) -> int:
    """Bytes by which a call raises the peak of what is allocated, its results included."""
    wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    wait()
    return torch.cuda.max_memory_allocated() - before


def capture_graph(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as a CUDA graph: a decoding step is shorter than its launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def count_copies(size: int) -> int:
    """How many inputs of `size` bytes leave the L2 cache behind; at most what half the free memory holds."""
    cache, (free, _) = torch.cuda.get_device_properties(DEVICE).L2_cache_size, torch.cuda.mem_get_info()
    return max(1, min(-(-ROUND_TRIP * cache // size), free // 2 // size))


def release() -> None:
    """Gives the memory of what was dropped back to the device."""
    torch.cuda.empty_cache()


def is_broken() -> bool:
    """Whether an earlier error has made this process's CUDA context useless: then the least operation fails."""
    try:
        torch.zeros(1, device=DEVICE).item()
    except RuntimeError:
        return True
    return False
