"""Statistics of the rows and keys of the weights, for diagnostics, without a matrix of weights in memory."""

from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call
from . import library
from .ops import describe, prepare_layout


class AttentionSummary(NamedTuple):
    """Statistics of the rows that count, 0 for the others; `[B, H, L]`, float32, unless a shape is given.

    Of the softmax's scores in nats, with bias; w are the weights of the values, after renormalising.
    mass: sum of the weights before renormalising. total: sum of w. theta: threshold.
    zeros, small: number of visible keys whose w is 0, or at most `small`.
    entropy: of w / total in nats, and squares: the sum of their squares; 0 in a row without weight.
    score_variance: of the visible scores, sum of squares / (n - 1).
    first `[B, H, L, K]`: w of each of the first K keys.
    columns `[B, H, L]`, float64: sum over the rows of w of each key.
    touched int32 `[B, H, T, T]`: number of rows of each square tile with a w other than 0.
    """

    mass: Tensor
    total: Tensor
    theta: Tensor
    zeros: Tensor
    small: Tensor
    entropy: Tensor
    squares: Tensor
    score_variance: Tensor
    first: Tensor
    columns: Tensor
    touched: Tensor


SUMS = 8
"""Fields of `AttentionSummary` of one number per row, the first ones."""


_SUMMARIES_RECORD = Struct("2q f 5P")
"""`Summaries` of attention.cpp."""


def summarise_attention(call: Call, counted: Tensor, first_keys: int, tile: int, small: float) -> AttentionSummary:
    """Summary of a checked call of full sequences: float32 on the CPU, Lq = Lk, without key_mask and cu_seqlens.

    counted: bool `[B, L]`. first_keys: K. tile: rows and keys of a tile. small: see `AttentionSummary`.
    """
    call, counted = prepare_layout(call), counted.contiguous()
    batch, heads, length, _ = call.q.shape
    tiles = -(-length // tile)
    sums, first = call.q.new_empty(SUMS, batch, heads, length), call.q.new_empty(batch, heads, length, first_keys)
    columns = torch.empty(batch, heads, length, dtype=torch.float64)
    touched = torch.empty(batch, heads, tiles, tiles, dtype=torch.int32)
    record, alive = describe(call, call.q)
    addresses = (x.data_ptr() for x in (counted, sums, first, columns, touched))
    library.load().flash_lazy_summarise(record, _SUMMARIES_RECORD.pack(first_keys, tile, small, *addresses))
    del alive
    by_row = dict(zip(AttentionSummary._fields, sums, strict=False))
    return AttentionSummary(**by_row, first=first, columns=columns, touched=touched)
