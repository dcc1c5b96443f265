"""Measurements on a shared machine: calls that take turns, and memory kept for a backward pass."""

import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


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


def measure_saved_bytes(call: Callable[[], object], excluded: Iterable[Tensor]) -> int:
    """Bytes of the storages that a call saves for its backward pass, without those of `excluded`, e.g. parameters."""
    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    storages: dict[int, torch.UntypedStorage] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        call()
    return sum(storage.nbytes() for storage in storages.values())
