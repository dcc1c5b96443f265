"""Sizes that this machine cannot hold, refused before anything is made of them."""

from collections.abc import Mapping

import psutil
import torch


def measure_total_memory() -> int:
    """All memory and swap of this machine, used or free, and that of its GPUs: nothing that runs here can take more."""
    gpus = sum(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return psutil.virtual_memory().total + psutil.swap_memory().total + gpus


def require_memory(sizes: Mapping[str, int], needed: int) -> None:
    """Raise a one-line ValueError, which names the fields in question, where `needed` bytes exceed this machine's."""
    most = measure_total_memory()
    if needed > most:
        named = ", ".join(f"{field}={value}" for field, value in sizes.items())
        raise ValueError(
            f"{named}: would take at least {needed // 10**9:,} GB of memory, of which this machine has "
            f"{most // 10**9:,}; choose smaller ones"
        )
