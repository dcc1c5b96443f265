"""Tensors of which each device holds a part."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """A tensor as it is without devices that share it; they all have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
