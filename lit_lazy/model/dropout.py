"""Dropout whose masks are a function of the seed, the step, the sequence and the place in the model alone.

So they are the same however a batch is cut into micro-batches or shared by devices, when a block is computed again for
its backward pass, and after a run was killed.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Steps of SplitMix64 (Steele, Lea and Flood 2014), whose arithmetic is that of 64 bits, here with a sign."""
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def sequence_keys(seed: int, step: int, rows: Tensor) -> Tensor:
    """What the masks of sequences are drawn from: int64 of the shape of `rows`, their int64 numbers in the batch."""
    return _splitmix64(_splitmix64(_splitmix64(torch.full_like(rows, seed)) + step) + rows)


def apply_dropout(x: Tensor, p: float, keys: Tensor, site: int) -> Tensor:
    """x `[B, L, d]` with a share p of its numbers 0, and the others divided by 1 - p.

    keys: `[B]`, of `sequence_keys`. site: number of the place in the model.
    """
    numbers = torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
    drawn = _splitmix64(_splitmix64(keys + site)[:, None, None] + GOLDEN * numbers)
    return x.masked_fill(drawn < round(p * 2**64) - 2**63, 0) / (1 - p)


def _splitmix64(x: Tensor) -> Tensor:
    """SplitMix64's output function of int64 numbers."""
    x = x + GOLDEN
    for shift, factor in ROUNDS:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """To the right, as bits without a sign."""
    return (x >> by) & (2 ** (64 - by) - 1)
