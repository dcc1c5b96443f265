"""Eager building blocks: visible keys, scores with bias and slopes, values, and packed documents one by one."""

from collections.abc import Callable

import torch
from torch import Tensor

from .call import Call, Stats, compute_dtype, slice_documents


def locate_queries(call: Call) -> tuple[Tensor, Tensor]:
    """0-based index of the key at each query's position `[B, Lq]`, and the keys that it sees, bool `[B, Lq, Lk]`."""
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


def count_tokens(call: Call, own: Tensor) -> Tensor:
    """0-based position of each query `[B, Lq]` among the tokens that `key_mask` shows, from `locate_queries`' index."""
    return own if call.key_mask is None else call.key_mask.cumsum(1).gather(1, own.clamp(min=0)) - 1


def _distance(own: Tensor, keys: int) -> Tensor:
    return own[:, :, None] - torch.arange(keys, device=own.device)  # [B, Lq, Lk]


def eager_scores(call: Call, own: Tensor, visible: Tensor) -> Tensor:
    """Scaled scores `[B, H, Lq, Lk]` with bias and slopes, those of hidden keys included."""
    dtype = compute_dtype(call.q)
    # A query that sees no key may hold NaN, and 0 * NaN is NaN.
    q = call.q.to(dtype).masked_fill(~visible.any(2)[:, None, :, None], 0)
    k = _clear_and_repeat(call.k, call, visible)
    scores = q @ k.transpose(-1, -2) * call.factor
    distance = _distance(own, k.shape[2])
    if call.bias is not None:
        width = call.bias.shape[1]
        table = call.bias.to(dtype)[:, distance.clamp(0, width - 1)].transpose(0, 1)  # [B, H, Lq, Lk]
        scores = scores + table.masked_fill((distance >= width)[:, None], 0)
    if call.slopes is not None:
        scores = scores - call.slopes.to(dtype)[:, None, None] * distance[:, None]
    return scores


def weigh_values(w: Tensor, call: Call, visible: Tensor) -> Tensor:
    """The output `[B, H, Lq, D]` of weights `[B, H, Lq, Lk]`, in their dtype; visible bool `[B, Lq, Lk]`."""
    return w @ _clear_and_repeat(call.v, call, visible)


def _clear_and_repeat(x: Tensor, call: Call, visible: Tensor) -> Tensor:
    """Keys or values `[B, Hkv, Lk, D]` as `[B, H, Lk, D]`, 0 where no query sees them: they may hold NaN."""
    x = x.to(compute_dtype(call.q)).masked_fill(~visible.any(1)[:, None, :, None], 0)
    return x.repeat_interleave(call.q.shape[1] // x.shape[1], 1)


Attended = tuple[Tensor, Stats | None]


def attend_documents(call: Call, attend: Callable[[Call], Attended]) -> Attended:
    """Attend to each packed document as a sequence, and join the outputs and statistics."""
    results = []
    for rows, keys in slice_documents(call):
        if rows.start == rows.stop:
            continue
        q, k, v = call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys]
        mask = None if call.key_mask is None else call.key_mask[:, keys]
        results.append(attend(call._replace(q=q, k=k, v=v, cu_seqlens=None, cu_seqlens_k=None, key_mask=mask)))
    outs, stats = zip(*results, strict=True)
    given = [each for each in stats if each is not None]
    joined = Stats(*(torch.cat(field, 2) for field in zip(*given, strict=True))) if given else None
    return torch.cat(outs, 2), joined
