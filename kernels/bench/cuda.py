"""GPU helpers of the benchmark: events, peak memory, CUDA graphs, L2 cache, broken contexts."""

from collections.abc import Callable
from typing import Any

import torch

DEVICE = torch.device("cuda")
ROUND_TRIP = 3
"""One round over all copies of the inputs reads this many L2 caches, so that no input is still cached."""


def record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measure_peak_bytes(step: Callable[[], Any]) -> int:
    """Rise of the peak of allocated bytes during a call, including its results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def capture_graph(step: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a step as a CUDA graph, because a decoding step is shorter than its launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def count_copies(size: int) -> int:
    """Copies of `size` bytes that exceed the L2 cache, limited to half the free memory."""
    cache, (free, _) = torch.cuda.get_device_properties(DEVICE).L2_cache_size, torch.cuda.mem_get_info()
    return max(1, min(-(-ROUND_TRIP * cache // size), free // 2 // size))


def is_broken() -> bool:
    """Whether an earlier error has broken this process's CUDA context, so that every operation fails."""
    try:
        torch.zeros(1, device=DEVICE).item()
    except RuntimeError:
        return True
    return False
