"""Measurement of the memory that a computation saves for its backward pass."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


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
