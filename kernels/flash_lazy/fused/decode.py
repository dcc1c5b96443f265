"""Decoding: few queries against many keys, which are split over programs. Three kernels: scores, values, sum."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call
from . import configurations
from .launch import (
    LOG2E,
    allocate_like,
    ceil_div,
    collect_shared_arguments,
    count_resident_programs,
    name_strides,
    next_power_of_2,
    use_device,
)
from .tiles import NEAR, has_survivor, is_positive, load_rows, load_thresholds

TO_BASE_2 = tl.constexpr(LOG2E)
MIN_SPLIT_KEYS = 256
"""Minimum keys per program."""


@triton.jit
def _locate_split(split, splits, batch, rows, keys, kv_lengths, window, BLOCK_N: tl.constexpr):
    """Keys of a split: first and end, and own - row.

    The splits divide the sequence's keys evenly, in complete tiles, from the first key visible to any row to the last
    valid one, regardless of the cache's capacity.
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

    The lines of the block are the rows of all query heads of the group.
    """
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, shift = _locate_split(split, splits, batch, rows, keys, kv_lengths, window, BLOCK_N)
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    valid_line = line < group * rows
    head = kv_head * group + tl.minimum(line // rows, group - 1)
    row = line % rows
    own = (row + shift)[:, None]
    lane = tl.arange(0, BLOCK_D)[None, :]
    q_rows = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64)[:, None] * stride_qh
    q_rows += row.to(tl.int64)[:, None] * stride_ql + lane.to(tl.int64) * stride_qd
    query = tl.load(q_rows, mask=valid_line[:, None] & (lane < WIDTH), other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    k_base = k + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    row_index = (batch.to(tl.int64) * heads + head) * rows + row
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(tl.cdiv(tl.maximum(end - first, 0), BLOCK_N)):
        origin = first + tile * BLOCK_N
        key = load_rows(k_base, origin, end, stride_kl, stride_kd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
        index = (origin + column)[None, :]
        distance = own - index
        s = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if slopes is not None:
            s -= tl.load(slopes + head)[:, None] * TO_BASE_2 * distance.to(tl.float32)
        visible = valid_line[:, None] & (distance >= 0) & (index < end)
        if window is not None:
            visible &= distance < window
        if bias is not None:
            table = bias + head.to(tl.int64)[:, None] * reach
            s += TO_BASE_2 * tl.load(table + distance, mask=visible & (distance < reach), other=0.0)
        s = tl.where(visible, s, -float("inf"))
        tl.store(scores + row_index[:, None] * keys + index, s, mask=valid_line[:, None] & (index < end))
        new_top = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new_top > -float("inf"), new_top, 0.0)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        top = new_top
    tl.store(tops + row_index * splits + split, top, mask=valid_line)
    tl.store(totals + row_index * splits + split, total, mask=valid_line)


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
    """One split's part of the outputs and row masses. SKIP reads no values of tiles without a surviving weight."""
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, shift = _locate_split(split, splits, batch, rows, keys, kv_lengths, window, BLOCK_N)
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    valid_line = line < group * rows
    head = kv_head * group + tl.minimum(line // rows, group - 1)
    row = line % rows
    row_index = (batch.to(tl.int64) * heads + head) * rows + row
    split_index = tl.arange(0, SPLITS)[None, :]
    valid_split = valid_line[:, None] & (split_index < splits)
    top = tl.load(tops + row_index[:, None] * splits + split_index, mask=valid_split, other=-float("inf"))
    total = tl.load(totals + row_index[:, None] * splits + split_index, mask=valid_split, other=0.0)
    row_top = tl.max(top, 1)
    row_top = tl.where(row_top > -float("inf"), row_top, 0.0)
    total = tl.sum(total * tl.exp2(top - row_top[:, None]), 1)
    total = tl.where(total == 0, 1.0, total)
    theta = load_thresholds(tau, head, row + shift, 0, window, context_length, entries, THRESHOLD)
    cut = tl.where(valid_line, theta * total, float("inf"))

    v_base = v + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(tl.cdiv(tl.maximum(end - first, 0), BLOCK_N)):
        origin = first + tile * BLOCK_N
        key = (origin + column)[None, :]
        s = tl.load(
            scores + row_index[:, None] * keys + key, mask=valid_line[:, None] & (key < end), other=-float("inf")
        )
        e = tl.exp2(s - row_top[:, None])
        if not SKIP or has_survivor(e, cut):
            survives = is_positive(s, e, cut[:, None], NEAR)
            w = tl.where(survives, e - cut[:, None], 0.0)
            value = load_rows(v_base, origin, end, stride_vl, stride_vd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
            acc = tl.dot(w.to(value.dtype), value, acc, input_precision="ieee")
            mass += tl.sum(w, 1)
    acc = acc / total[:, None]
    mass = mass / total
    lane = tl.arange(0, BLOCK_D)[None, :]
    tl.store(
        parts + (row_index[:, None] * splits + split) * WIDTH + lane, acc, mask=valid_line[:, None] & (lane < WIDTH)
    )
    tl.store(masses + row_index * splits + split, mass, mask=valid_line)


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
    """Output of one row of one head: the sum over its splits, with RENORMALISE divided by their mass."""
    row_index = tl.program_id(0).to(tl.int64)
    batch, head, row = row_index // rows // heads, row_index // rows % heads, row_index % rows
    split_index = tl.arange(0, SPLITS)
    lane = tl.arange(0, BLOCK_D)
    valid_split = (split_index < splits)[:, None] & (lane < WIDTH)[None, :]
    pointers = parts + (row_index * splits + split_index[:, None]) * WIDTH + lane[None, :]
    result = tl.sum(tl.load(pointers, mask=valid_split, other=0.0), 0)
    if RENORMALISE:
        mass = tl.sum(tl.load(masses + row_index * splits + split_index, mask=split_index < splits, other=0.0))
        result /= tl.where(mass == 0, 1.0, mass)
    out += batch * stride_ob + head * stride_oh + row * stride_ol
    tl.store(out + lane, result.to(out.dtype.element_ty), mask=lane < WIDTH)


def decode(call: Call) -> Tensor:
    """Output of a few queries; keys are split over programs, and keys and values are read at most once."""
    q, (batches, kv_heads, keys, _) = call.q, call.k.shape
    _, heads, rows, width = q.shape
    seen = keys if call.window is None else min(keys, call.window + rows - 1)
    splits = min(ceil_div(seen, MIN_SPLIT_KEYS), ceil_div(2 * count_resident_programs(q), batches * kv_heads))
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
        **name_strides("o", out, with_columns=False),
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
            used = {name: arguments[name] for name in kernel.arg_names}
            kernel[programs](**used, num_warps=4, num_stages=2)
    return out
