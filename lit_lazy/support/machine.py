"""Resources of this machine, and rejection of sizes that exceed its memory, before anything is allocated."""

import os
from collections.abc import Mapping


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
