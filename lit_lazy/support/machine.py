"""Resources of this machine."""

import os


def count_cores() -> int:
    """CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only; elsewhere a process may use every core
    return len(affinity(0)) if affinity else os.cpu_count() or 1
