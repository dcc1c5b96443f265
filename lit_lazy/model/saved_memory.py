"""What a computation keeps for its backward pass, measured."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def measure_saved_bytes(call: Callable[[], object], own: Iterable[Tensor]) -> int:
    """Bytes of the storages that a call keeps for its backward pass; `own`, such as parameters, do not count."""
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(storage.nbytes() for storage in storages.values())
