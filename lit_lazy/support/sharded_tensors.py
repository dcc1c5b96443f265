"""Tensors sharded over devices."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one. A collective: all devices must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
