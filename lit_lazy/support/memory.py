"""Rejection of sizes that exceed this machine's memory, before anything is allocated."""

from collections.abc import Mapping

import psutil
import torch


def measure_total_memory() -> int:
    """Bytes of memory, swap and GPU memory of this machine, used or free: an upper bound for any process."""
    gpus = sum(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return psutil.virtual_memory().total + psutil.swap_memory().total + gpus


def require_memory(sizes: Mapping[str, int], needed: int) -> None:
    """Raise a one-line ValueError that names the fields in `sizes` if `needed` bytes exceed this machine's memory."""
    most = measure_total_memory()
    if needed > most:
        named = ", ".join(f"{field}={value}" for field, value in sizes.items())
        raise ValueError(
            f"{named}: would take at least {needed // 10**9:,} GB of memory, of which this machine has "
            f"{most // 10**9:,}; choose smaller ones"
        )
