"""Calls under torch.vmap: the mapped dimension becomes more heads, since heads are independent of one another."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call import LEAVES, TENSORS, Call

HEAD_AXES = (1, 1, 1, 0, 0, 0)
"""Axis of the heads in q, k, v, tau, bias and slopes."""


def is_transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is active. torch has no public name for this."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def fold_into_heads(call: Sequence[Any], dims: Sequence[int | None], size: int) -> Call:
    """The call with `size` times as many heads. dims: the mapped dimension of each field, None for a shared one.

    Raises ValueError for a mapped mask, length or boundary, which would differ between heads.
    """
    for name, dim in zip(Call._fields[LEAVES:TENSORS], dims[LEAVES:TENSORS], strict=True):
        if dim is not None:
            raise ValueError(f"{name} is mapped by vmap; share it (in_dims None), or choose backend='reference'")
    leaves: list[Any] = [
        None if x is None else fold(x, dim, size, axis)
        for x, dim, axis in zip(call[:LEAVES], dims[:LEAVES], HEAD_AXES, strict=True)
    ]
    return Call._make([*leaves, *call[LEAVES:]])


def fold(x: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    """Merge the mapped dimension into the heads, mapped first; a shared tensor is repeated."""
    x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:]) if dim is None else x.movedim(dim, axis)
    return x.flatten(axis, axis + 1)


def unfold_heads(x: Tensor, size: int, axis: int) -> tuple[Tensor, int | None]:
    """A result with its mapped dimension, and where it is; an absent result, which is empty, has none."""
    if x.dim() == 1 and x.numel() == 0:
        return x, None
    return x.unflatten(axis, (size, -1)), axis
