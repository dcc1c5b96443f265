"""Scores written out eagerly: which keys a query sees, and the scaled products with bias and slopes."""

import torch
from torch import Tensor

from flash_lazy.call import Call, compute_dtype


def locate_queries(call: Call) -> tuple[Tensor, Tensor]:
    """The 0-based index of the key at each query's own position `[B, Lq]`, and which keys it sees `[B, Lq, Lk]`."""
    batch, rows, keys, device = call.q.shape[0], call.q.shape[2], call.k.shape[2], call.q.device
    lengths = torch.full((batch,), keys, device=device) if call.kv_lengths is None else call.kv_lengths.long()
    own = lengths[:, None] - rows + torch.arange(rows, device=device)
    distance = _distance(own, keys)
    visible = distance >= 0
    if call.window is not None:
        visible = visible & (distance < call.window)
    if call.key_mask is not None:
        visible = visible & call.key_mask[:, None, :]
    return own, visible


def _distance(own: Tensor, keys: int) -> Tensor:
    return own[:, :, None] - torch.arange(keys, device=own.device)  # [B, Lq, Lk]


def eager_scores(call: Call, own: Tensor, visible: Tensor) -> Tensor:
    """Scaled, with bias and slopes, of hidden keys too: `[B, H, Lq, Lk]`."""
    dtype = compute_dtype(call.q)
    # A query without a key and a key without a query may hold anything, also NaN, and 0 * NaN is NaN: clear them.
    blind = ~visible.any(2)[:, None, :, None]
    unseen = ~visible.any(1)[:, None, :, None]
    q = call.q.to(dtype).masked_fill(blind, 0)
    k = call.k.to(dtype).masked_fill(unseen, 0).repeat_interleave(q.shape[1] // call.k.shape[1], 1)
    scores = q @ k.transpose(-1, -2) * call.factor
    distance = _distance(own, k.shape[2])
    if call.bias is not None:
        width = call.bias.shape[1]
        table = call.bias.to(dtype)[:, distance.clamp(0, width - 1)].transpose(0, 1)  # [B, H, Lq, Lk]
        scores = scores + table.masked_fill((distance >= width)[:, None], 0)
    if call.slopes is not None:
        scores = scores - call.slopes.to(dtype)[:, None, None] * distance[:, None]
    return scores
