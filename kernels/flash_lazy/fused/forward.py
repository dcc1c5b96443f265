"""The forward kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call
from . import configurations
from .launch import (
    allocate_like,
    ceil_div,
    collect_shared_arguments,
    count_call_blocks,
    count_resident_programs,
    launch,
    name_strides,
    none_if_empty,
)
from .tiles import (
    EDGE,
    PLAIN,
    STRIP_PAD,
    compute_tile_scores,
    count_blocks,
    describe_rows,
    is_positive,
    load_rows,
    load_thresholds,
    load_tile,
    locate_block,
    locate_key_tiles,
    store_rows,
)

try:
    from . import hopper
except ImportError:  # a triton without Gluon
    hopper = None

LIST_CHUNK = tl.constexpr(16)
ROUNDING = tl.constexpr(2.0**-18)
"""Tolerance below the threshold within which a tile counts as alive: a recomputed score may differ in its last bits."""


@triton.jit(do_not_specialize=["size"])
def forward_kernel(
    q,
    k,
    v,
    tau,
    strip,
    slopes,
    kv_lengths,
    cu_seqlens,
    cu_seqlens_k,
    out,
    softmax,
    mass,
    first_weight,
    zeros,
    maxima,
    alive_tiles,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_ol,
    batches,
    heads,
    group,
    rows,
    keys,
    documents,
    second,
    maxima_row,
    alive_row,
    scale,
    strip_row,
    reach,
    window,
    context_length,
    entries,
    size,  # noqa: ARG001 - key of the autotuner
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RENORMALISE: tl.constexpr,
    STATS: tl.constexpr,
    UPCAST: tl.constexpr,
    SKIP: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Output of all rows, the longest first. With SKIP, each program stores the row maxima of its block's tiles.

    Products per tile: q.k for maximum and sum; a second q.k and w.v, with SKIP only if a weight survives.
    """
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    maxima += tl.program_id(0).to(tl.int64) * maxima_row
    alive_tiles += tl.program_id(0).to(tl.int64) * alive_row
    blocks = count_blocks(rows, cu_seqlens, documents, BLOCK_M)
    for item in tl.range(tl.program_id(0), blocks * batches * heads, tl.num_programs(0), disable_licm=True):
        head = item % heads
        batch = item // heads % batches
        index = blocks - 1 - item // heads // batches
        first, end, start, shift, _ = locate_block(
            index, batch, rows, keys, kv_lengths, cu_seqlens, cu_seqlens_k, documents, False, BLOCK_M
        )
        low, high, edge, near, tiles = locate_key_tiles(first, end, start, shift, window, reach, BLOCK_M, BLOCK_N)
        row = first + line
        own = row + shift

        q_base = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        k_base = k + batch.to(tl.int64) * stride_kb + (head // group).to(tl.int64) * stride_kh
        v_base = v + batch.to(tl.int64) * stride_vb + (head // group).to(tl.int64) * stride_vh
        k_rows = describe_rows(k_base, high, stride_kl, WIDTH, BLOCK_N, BLOCK_D, DESCRIBED)
        v_rows = describe_rows(v_base, high, stride_vl, WIDTH, BLOCK_N, BLOCK_D, DESCRIBED)
        head_strip = None if strip is None else strip + head.to(tl.int64) * strip_row + STRIP_PAD
        slope = None if slopes is None else tl.load(slopes + head)
        query = load_rows(q_base, first, end, stride_ql, stride_qd, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST)
        query = tl.where(own[:, None] >= start, query, 0.0).to(query.dtype)  # a row without a visible key may be NaN

        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for KIND in tl.static_range(3):
            if KIND != EDGE or window is not None:
                for tile in tl.range(
                    0 if KIND == EDGE else (edge if KIND == PLAIN else near),
                    edge if KIND == EDGE else (near if KIND == PLAIN else tiles),
                    disable_licm=True,
                ):
                    origin = low + tile * BLOCK_N
                    key = load_tile(
                        k_rows,
                        origin,
                        high,
                        stride_kl,
                        stride_kd,
                        WIDTH,
                        BLOCK_N,
                        BLOCK_D,
                        KIND != PLAIN,
                        UPCAST,
                        DESCRIBED,
                    )
                    s, factor = compute_tile_scores(
                        query,
                        tl.trans(key),
                        own,
                        origin,
                        scale,
                        head_strip,
                        reach,
                        slope,
                        window,
                        KIND,
                        BLOCK_N,
                    )
                    tile_top = tl.max(s, 1) * factor
                    if SKIP:
                        tl.store(maxima + tile * BLOCK_M + line, tile_top)
                    new_top = tl.maximum(top, tile_top)
                    safe = tl.where(new_top > -float("inf"), new_top, 0.0)
                    total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s * factor - safe[:, None]), 1)
                    top = new_top

        has_key = total != 0  # also true for NaN, by which the row's output is divided
        total = tl.where(has_key, total, 1.0)
        safe = tl.where(has_key, top, 0.0)
        theta = load_thresholds(tau, head, own, start, window, context_length, entries, THRESHOLD)
        cut = theta * total
        limit = safe + tl.log2(tl.where(cut > 0, cut, 1.0))
        limit = tl.where(cut > 0, limit - ROUNDING * (tl.abs(limit) + 16.0), -float("inf"))
        limit = tl.where(row < end, limit, float("inf"))

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_mass = tl.zeros([BLOCK_M], tl.float32)
        row_first = tl.zeros([BLOCK_M], tl.float32)
        survivors = tl.zeros([BLOCK_M], tl.float32)
        tl.debug_barrier()
        listed = tiles * 0
        for KIND in tl.static_range(3):
            if KIND != EDGE or window is not None:
                begin = 0 if KIND == EDGE else (edge if KIND == PLAIN else near)
                stop = edge if KIND == EDGE else (near if KIND == PLAIN else tiles)
                count = stop - begin
                if SKIP:
                    count = listed * 0
                    for chunk in range(begin, stop, LIST_CHUNK):
                        candidates = chunk + tl.arange(0, LIST_CHUNK)
                        tops = tl.load(
                            maxima + candidates[None, :] * BLOCK_M + line[:, None],
                            mask=(candidates < stop)[None, :],
                            other=-float("inf"),
                        )
                        alive = tl.max(((tops <= limit[:, None]) == 0).to(tl.int32), 0)
                        slot = listed + count + tl.cumsum(alive, 0) - 1
                        tl.store(alive_tiles + slot, candidates, mask=alive > 0)
                        count += tl.sum(alive)
                    tl.debug_barrier()
                for turn in tl.range(count, disable_licm=True):
                    tile = begin + turn
                    if SKIP:
                        tile = tl.load(alive_tiles + listed + turn)
                    origin = low + tile * BLOCK_N
                    key = load_tile(
                        k_rows,
                        origin,
                        high,
                        stride_kl,
                        stride_kd,
                        WIDTH,
                        BLOCK_N,
                        BLOCK_D,
                        KIND != PLAIN,
                        UPCAST,
                        DESCRIBED,
                    )
                    value = load_tile(
                        v_rows,
                        origin,
                        high,
                        stride_vl,
                        stride_vd,
                        WIDTH,
                        BLOCK_N,
                        BLOCK_D,
                        KIND != PLAIN,
                        UPCAST,
                        DESCRIBED,
                    )
                    s, factor = compute_tile_scores(
                        query,
                        tl.trans(key),
                        own,
                        origin,
                        scale,
                        head_strip,
                        reach,
                        slope,
                        window,
                        KIND,
                        BLOCK_N,
                    )
                    e = tl.exp2(s * factor - safe[:, None])
                    w = tl.maximum(e - cut[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
                    if KIND != PLAIN:
                        w = tl.where(s != -float("inf"), w, 0.0)  # 0 exceeds a negative threshold
                    acc = tl.dot(w.to(value.dtype), value, acc, input_precision="ieee")
                    if RENORMALISE or STATS:
                        row_mass += tl.sum(w, 1)
                    if STATS:
                        survivors += tl.sum(is_positive(s, e, cut[:, None], KIND).to(tl.float32), 1)
                        row_first += tl.sum(tl.where((origin + column)[None, :] == start, w, 0.0), 1)
                listed += count

        valid_row = row < end
        row_index = (batch.to(tl.int64) * heads + head) * rows + row
        # Weights and exponentials still have the row's sum as a factor: large enough for float16, exact as a softmax.
        divisor = total
        if RENORMALISE:
            divisor = tl.where(row_mass == 0, 1.0, row_mass)
            divisor = tl.where(total == total, divisor, total)
        acc = acc / divisor[:, None]
        out_base = out + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
        store_rows(out_base, acc, first, end, stride_ol, WIDTH, BLOCK_M, BLOCK_D)
        if softmax is not None:
            tl.store(softmax + row_index, top, mask=valid_row)
            tl.store(softmax + second + row_index, tl.where(has_key, total, 0.0), mask=valid_row)
        if mass is not None:
            tl.store(mass + row_index, row_mass, mask=valid_row)
        if STATS:
            seen = tl.maximum(own - start + 1, 0)
            if window is not None:
                seen = tl.minimum(seen, window)
            tl.store(first_weight + row_index, row_first / divisor, mask=valid_row)
            tl.store(zeros + row_index, seen.to(tl.float32) - survivors, mask=valid_row)


def forward(call: Call, training: bool, stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output; maximum (base 2) and sum of each row `[2, B, H, Lq]`; mass times sum, first weight, zeros `[B, H, Lq]`.

    All but the output are empty unless needed.
    """
    q = call.q
    batches, heads, rows, _ = q.shape
    if configurations.HOPPER and hopper is not None and not stats and hopper.covers(call):
        out, softmax, mass, first_weight, zeros = allocate_forward_buffers(call, True, stats)
        hopper.compute_output(call, out, softmax)
        return out, softmax if training else softmax.new_empty(0), mass, first_weight, zeros
    out, softmax, mass, first_weight, zeros = allocate_forward_buffers(call, training, stats)
    choices = configurations.list_choices("forward", q)
    columns = call.k.shape[2]
    if call.window is not None:
        columns = min(columns, call.window + max(blocks.m for blocks in choices))
    alive_row = max(ceil_div(columns, blocks.n) for blocks in choices)
    maxima_row = max(ceil_div(columns, blocks.n) * blocks.m for blocks in choices)
    blocks = max(count_call_blocks(call, rows, blocks.m) for blocks in choices) * batches * heads
    resident = min(count_resident_programs(q), blocks)
    skipping = configurations.SKIP_EMPTY_TILES  # otherwise neither buffer is used
    arguments = {
        **collect_shared_arguments(call),
        "out": out,
        "softmax": none_if_empty(softmax),
        "mass": none_if_empty(mass),
        "first_weight": none_if_empty(first_weight),
        "zeros": none_if_empty(zeros),
        "maxima": q.new_empty(skipping * resident * maxima_row, dtype=torch.float32),
        "alive_tiles": q.new_empty(skipping * resident * alive_row, dtype=torch.int32),
        **name_strides("o", out, with_columns=False),
        "heads": heads,
        "maxima_row": maxima_row,
        "alive_row": alive_row,
        "STATS": stats,
    }
    launch(forward_kernel, call, lambda _: (resident,), arguments)
    return out, softmax, mass, first_weight, zeros


def allocate_forward_buffers(call: Call, training: bool, stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of `forward`."""
    q = call.q

    def allocate_rows(needed: bool) -> Tensor:
        return q.new_empty(q.shape[:3] if needed else 0, dtype=torch.float32)

    softmax = q.new_empty((2, *q.shape[:3]) if training or stats else 0, dtype=torch.float32)
    mass = allocate_rows(stats or (training and call.renormalise))
    return allocate_like(q), softmax, mass, allocate_rows(stats), allocate_rows(stats)
