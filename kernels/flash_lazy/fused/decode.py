"""Decoding: a few queries against many keys, which are split over programs. First scores, then values, then the sum."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_lazy.call import Call
from flash_lazy.fused import configurations
from flash_lazy.fused.launch import (
    LOG2E,
    allocate_like,
    ceil_div,
    collect_shared_arguments,
    next_power_of_2,
    resident_programs,
    strides,
    use_device,
)
from flash_lazy.fused.tiles import NEAR, any_alive, is_positive, load_rows, thresholds

TO_BASE_2 = tl.constexpr(LOG2E)
KEYS_OF_A_SPLIT = 256
"""The fewest that a program is worth."""


@triton.jit
def _locate_split(split, splits, batch, rows, keys, kv_lengths, window, BLOCK_N: tl.constexpr):
    """Keys of a split: first and end, and own - row.

    A sequence's keys from the first that any row sees to the last valid one, however many the cache could hold, fall on
    the splits alike, in whole tiles.
    """
    length = split * 0 + keys
    if kv_lengths is not None:
        length = tl.load(kv_lengths + batch).to(tl.int32)
    low = length * 0
    if window is not None:
        low = tl.maximum(length - rows - window + 1, 0)
    span = tl.cdiv(tl.cdiv(length - low, splits), BLOCK_N) * BLOCK_N
    first = low + split * span
    return first, tl.minimum(first + span, length), length - rows


@triton.jit
def decode_scores_kernel(
    q,
    k,
    bias,
    slopes,
    kv_lengths,
    scores,
    tops,
    totals,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    heads,
    group,
    rows,
    keys,
    splits,
    scale,
    reach,
    window,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scores of all queries of a kv head against one split of its keys, which are read once, and their partial sums.

    The block's lines are the rows of every query head of the group.
    """
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, shift = _locate_split(split, splits, batch, rows, keys, kv_lengths, window, BLOCK_N)
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    there = line < group * rows
    head = kv_head * group + tl.minimum(line // rows, group - 1)
    row = line % rows
    own = (row + shift)[:, None]
    lane = tl.arange(0, BLOCK_D)[None, :]
    q_rows = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64)[:, None] * stride_qh
    q_rows += row.to(tl.int64)[:, None] * stride_ql + lane.to(tl.int64) * stride_qd
    query = tl.load(q_rows, mask=there[:, None] & (lane < WIDTH), other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    k_base = k + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    at_row = (batch.to(tl.int64) * heads + head) * rows + row
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(tl.cdiv(tl.maximum(end - first, 0), BLOCK_N)):
        at = first + tile * BLOCK_N
        key = load_rows(k_base, at, end, stride_kl, stride_kd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
        index = (at + column)[None, :]
        distance = own - index
        s = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if slopes is not None:
            s -= tl.load(slopes + head)[:, None] * TO_BASE_2 * distance.to(tl.float32)
        visible = there[:, None] & (distance >= 0) & (index < end)
        if window is not None:
            visible &= distance < window
        if bias is not None:
            table = bias + head.to(tl.int64)[:, None] * reach
            s += TO_BASE_2 * tl.load(table + distance, mask=visible & (distance < reach), other=0.0)
        s = tl.where(visible, s, -float("inf"))
        tl.store(scores + at_row[:, None] * keys + index, s, mask=there[:, None] & (index < end))
        new_top = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new_top > -float("inf"), new_top, 0.0)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        top = new_top
    tl.store(tops + at_row * splits + split, top, mask=there)
    tl.store(totals + at_row * splits + split, total, mask=there)


@triton.jit
def decode_values_kernel(
    v,
    tau,
    kv_lengths,
    scores,
    tops,
    totals,
    parts,
    masses,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    heads,
    group,
    rows,
    keys,
    splits,
    window,
    context_length,
    entries,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    THRESHOLD: tl.constexpr,
    UPCAST: tl.constexpr,
    SKIP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One split's share of the outputs and of the row masses. Values in whose tile no weight survives are not read."""
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, shift = _locate_split(split, splits, batch, rows, keys, kv_lengths, window, BLOCK_N)
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    there = line < group * rows
    head = kv_head * group + tl.minimum(line // rows, group - 1)
    row = line % rows
    at_row = (batch.to(tl.int64) * heads + head) * rows + row
    each = tl.arange(0, SPLITS)[None, :]
    known = there[:, None] & (each < splits)
    top = tl.load(tops + at_row[:, None] * splits + each, mask=known, other=-float("inf"))
    total = tl.load(totals + at_row[:, None] * splits + each, mask=known, other=0.0)
    most = tl.max(top, 1)
    most = tl.where(most > -float("inf"), most, 0.0)
    total = tl.sum(total * tl.exp2(top - most[:, None]), 1)
    total = tl.where(total == 0, 1.0, total)
    theta = thresholds(tau, head, row + shift, 0, window, context_length, entries, THRESHOLD)
    cut = tl.where(there, theta * total, float("inf"))

    v_base = v + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(tl.cdiv(tl.maximum(end - first, 0), BLOCK_N)):
        at = first + tile * BLOCK_N
        key = (at + column)[None, :]
        s = tl.load(scores + at_row[:, None] * keys + key, mask=there[:, None] & (key < end), other=-float("inf"))
        e = tl.exp2(s - most[:, None])
        if not SKIP or any_alive(e, cut):
            survives = is_positive(s, e, cut[:, None], NEAR)
            w = tl.where(survives, e - cut[:, None], 0.0)
            value = load_rows(v_base, at, end, stride_vl, stride_vd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
            acc = tl.dot(w.to(value.dtype), value, acc, input_precision="ieee")
            mass += tl.sum(w, 1)
    acc = acc / total[:, None]
    mass = mass / total
    lane = tl.arange(0, BLOCK_D)[None, :]
    tl.store(parts + (at_row[:, None] * splits + split) * WIDTH + lane, acc, mask=there[:, None] & (lane < WIDTH))
    tl.store(masses + at_row * splits + split, mass, mask=there)


@triton.jit
def decode_sum_kernel(
    parts,
    masses,
    out,
    stride_ob,
    stride_oh,
    stride_ol,
    heads,
    rows,
    splits,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The output of one row of one head: its splits' shares summed, and divided by their mass to renormalise."""
    at_row = tl.program_id(0).to(tl.int64)
    batch, head, row = at_row // rows // heads, at_row // rows % heads, at_row % rows
    each = tl.arange(0, SPLITS)
    lane = tl.arange(0, BLOCK_D)
    known = (each < splits)[:, None] & (lane < WIDTH)[None, :]
    pointers = parts + (at_row * splits + each[:, None]) * WIDTH + lane[None, :]
    result = tl.sum(tl.load(pointers, mask=known, other=0.0), 0)
    if RENORMALISE:
        mass = tl.sum(tl.load(masses + at_row * splits + each, mask=each < splits, other=0.0))
        result /= tl.where(mass == 0, 1.0, mass)
    out += batch * stride_ob + head * stride_oh + row * stride_ol
    tl.store(out + lane, result.to(out.dtype.element_ty), mask=lane < WIDTH)


def decode(call: Call) -> Tensor:
    """The output of a few queries: keys are split over programs and read once, values only where a weight survives."""
    q, (batches, kv_heads, keys, _) = call.q, call.k.shape
    _, heads, rows, width = q.shape
    seen = keys if call.window is None else min(keys, call.window + rows - 1)
    splits = min(ceil_div(seen, KEYS_OF_A_SPLIT), ceil_div(2 * resident_programs(q), batches * kv_heads))
    tops, totals, masses = (q.new_empty(batches, heads, rows, splits, dtype=torch.float32) for _ in range(3))
    out = allocate_like(q)
    arguments = {
        **collect_shared_arguments(call._replace(bias=None, slopes=None)),
        "bias": None if call.bias is None else call.bias.contiguous(),
        "slopes": None if call.slopes is None else call.slopes.contiguous(),
        "reach": 0 if call.bias is None else call.bias.shape[1],
        "scores": q.new_empty(batches, heads, rows, keys, dtype=torch.float32),
        "tops": tops,
        "totals": totals,
        "parts": q.new_empty(batches, heads, rows, splits, width, dtype=torch.float32),
        "masses": masses,
        "out": out,
        **strides("o", out, with_columns=False),
        "heads": heads,
        "splits": splits,
        "SPLITS": next_power_of_2(splits),
        "BLOCK_M": max(16, next_power_of_2(rows * heads // kv_heads)),
        "BLOCK_N": configurations.DECODE_BLOCK,
    }
    grid = (splits, kv_heads, batches)
    launches: tuple[tuple[Any, tuple[int, ...]], ...] = (
        (decode_scores_kernel, grid),
        (decode_values_kernel, grid),
        (decode_sum_kernel, (batches * heads * rows,)),
    )
    with use_device(q):
        for kernel, programs in launches:
            chosen = {argument: arguments[argument] for argument in kernel.arg_names}
            kernel[programs](**chosen, num_warps=4, num_stages=2)
    return out
