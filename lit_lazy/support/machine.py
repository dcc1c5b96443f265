"""What this machine has, cores and memory, and what calls take of it, time and memory."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def count_cores() -> int:
    """CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only; elsewhere a process may use every core
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def measure_total_memory() -> int:
    """Bytes of memory, swap and GPU memory of this machine, used or free: an upper bound for any process."""
    import psutil  # late, as torch: who only counts cores needs neither
    import torch

    gpus = sum(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return psutil.virtual_memory().total + psutil.swap_memory().total + gpus


def require_memory(sizes: Mapping[str, int], needed: int) -> None:
    """Raise a one-line ValueError that names the fields in `sizes` if `needed` bytes exceed this machine's memory."""
    most = measure_total_memory()
    if needed > most:
        named = ", ".join(f"{field}={value}" for field, value in sizes.items())
        sizes_in_gb = f"at least {needed // 10**9:,} GB of memory, of which this machine has {most // 10**9:,}"
        raise ValueError(f"{named}: would take {sizes_in_gb}; choose smaller ones")


def time_in_turns(
    calls: Mapping[str, Callable[[], None]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per call by name and round. A round runs in both orders (A B C C B A), so that drift cancels.

    clock: `time.process_time` for CPU time, which other load on the machine hardly changes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        spent = dict.fromkeys(calls, 0.0)
        for name in [*calls, *reversed(list(calls))]:
            started = clock()
            calls[name]()
            spent[name] += clock() - started
        if index:  # the first round warms up
            for name, total in spent.items():
                seconds[name].append(total / 2)
    return seconds


def measure_saved_bytes(call: Callable[[], object], excluded: "Iterable[Tensor]") -> int:
    """Bytes of the storages that a call saves for its backward pass, without those of `excluded`, e.g. parameters."""
    import torch

    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    storages: dict[int, torch.UntypedStorage] = {}

    def record(tensor: "Tensor") -> "Tensor":
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        call()
    return sum(storage.nbytes() for storage in storages.values())
