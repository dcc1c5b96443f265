"""Dropout whose masks depend only on seed, step, sequence and site in the model.

Masks are therefore independent of micro-batches and devices, and reproducible in activation checkpointing and resumed
runs.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Increment of SplitMix64 (Steele, Lea and Flood 2014), as a signed 64-bit integer."""
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def sequence_keys(seed: int, step: int, rows: Tensor) -> Tensor:
    """Seeds of the sequences' masks, int64 in the shape of `rows`, their int64 indices in the batch."""
    return _splitmix64(_splitmix64(_splitmix64(torch.full_like(rows, seed)) + step) + rows)


def apply_dropout(x: Tensor, p: float, keys: Tensor, site: int) -> Tensor:
    """Zero a share p of the elements of x `[B, L, d]` and divide the others by 1 - p.

    keys: `[B]` from `sequence_keys`. site: index of the dropout layer in the model.
    """
    numbers = torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
    drawn = _splitmix64(_splitmix64(keys + site)[:, None, None] + GOLDEN * numbers)
    return x.masked_fill(drawn < round(p * 2**64) - 2**63, 0) / (1 - p)


def _splitmix64(x: Tensor) -> Tensor:
    """SplitMix64's output function, on int64."""
    x = x + GOLDEN
    for shift, factor in ROUNDS:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical right shift."""
    return (x >> by) & (2 ** (64 - by) - 1)
