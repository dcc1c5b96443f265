"""The backward kernels: a sweep over keys for dq, over rows for dk, dv and dslopes, along diagonals for dbias."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call
from . import configurations
from .launch import (
    allocate_like,
    balance_programs,
    ceil_div,
    collect_shared_arguments,
    count_call_blocks,
    count_resident_programs,
    ensure_32bit_offsets,
    launch,
    name_strides,
    none_if_empty,
)
from .tiles import (
    EDGE,
    NEAR,
    PLAIN,
    STRIP_PAD,
    add_rows,
    compute_distances,
    compute_exponentials,
    compute_tile_scores,
    count_blocks,
    describe_rows,
    has_survivor,
    is_positive,
    load_by_row,
    load_rows,
    load_softmax,
    load_thresholds,
    load_tile,
    locate_block,
    locate_key_tiles,
    store_by_row,
    store_rows,
)

try:
    from . import hopper
except ImportError:  # a triton without Gluon
    hopper = None

BIAS_WAVES = 4
"""Programs of the bias gradient for each one that is resident: its diagonals are of unequal length."""


@triton.jit(do_not_specialize=["size"])
def query_gradient_kernel(
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
    grad,
    softmax,
    mass,
    dq,
    by_row,
    survivors,
    correction,
    dlse,
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
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    stride_dqb,
    stride_dqh,
    stride_dql,
    batches,
    heads,
    group,
    rows,
    keys,
    documents,
    second,
    scale,
    natural_scale,
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
    UPCAST: tl.constexpr,
    SKIP: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq of one block of rows, per row survivors = sum m dp (d tau without its factor), and `by_row` `[4, B, H, Lq]`:
    maximum, threshold times the row's sum, 1 / sum, and delta / sum, where delta = sum p m dp.

    dq = scale (sum p m dp k - delta sum p k) is linear in delta, so one sweep yields both sums and delta.
    Products per tile: q.k, p.k, dO.v, (p m dp).k and with RENORMALISE (p m).k; with SKIP the last ones only if a weight
    survives.
    dlse, the gradient of the rows' log-sum-exp, is subtracted from delta. Without dq, only the numbers per row.
    """
    item = tl.program_id(0)
    head = item % heads
    batch = item // heads % batches
    blocks = count_blocks(rows, cu_seqlens, documents, BLOCK_M)
    index = blocks - 1 - item // heads // batches
    first, end, start, shift, _ = locate_block(
        index, batch, rows, keys, kv_lengths, cu_seqlens, cu_seqlens_k, documents, False, BLOCK_M
    )
    low, high, edge, near, tiles = locate_key_tiles(first, end, start, shift, window, reach, BLOCK_M, BLOCK_N)
    line = tl.arange(0, BLOCK_M)
    row = first + line
    own = row + shift
    valid_row = row < end
    row_index = (batch.to(tl.int64) * heads + head) * rows + row

    q_base = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    k_base = k + batch.to(tl.int64) * stride_kb + (head // group).to(tl.int64) * stride_kh
    v_base = v + batch.to(tl.int64) * stride_vb + (head // group).to(tl.int64) * stride_vh
    grad_base = grad + batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
    k_rows = describe_rows(k_base, high, stride_kl, WIDTH, BLOCK_N, BLOCK_D, DESCRIBED)
    v_rows = describe_rows(v_base, high, stride_vl, WIDTH, BLOCK_N, BLOCK_D, DESCRIBED)
    head_strip = None if strip is None else strip + head.to(tl.int64) * strip_row + STRIP_PAD
    slope = None if slopes is None else tl.load(slopes + head)
    query = load_rows(q_base, first, end, stride_ql, stride_qd, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST)
    query = tl.where(own[:, None] >= start, query, 0.0).to(query.dtype)
    gradient = load_rows(grad_base, first, end, stride_gl, stride_gd, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST)
    top, total, share = load_softmax(softmax, second, row_index, valid_row)
    theta = load_thresholds(tau, head, own, start, window, context_length, entries, THRESHOLD)
    # Until the end, exponentials are p times the row's sum, and so is the threshold.
    cut = tl.where(valid_row, theta * total, float("inf"))
    row_mass = tl.zeros([BLOCK_M], tl.float32)
    approx_mean = row_mass
    if RENORMALISE:
        row_mass = tl.load(mass + row_index, mask=valid_row, other=0.0)
        out_base = out + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
        output = load_rows(out_base, first, end, stride_ol, 1, WIDTH, BLOCK_M, BLOCK_D, True, UPCAST)
        approx_mean = tl.sum(output.to(tl.float32) * gradient.to(tl.float32), 1)

    surviving = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_delta = tl.zeros([BLOCK_M], tl.float32)
    row_survivors = tl.zeros([BLOCK_M], tl.float32)
    row_count = tl.zeros([BLOCK_M], tl.float32)
    row_residual = tl.zeros([BLOCK_M], tl.float32)
    kept = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
                e = compute_exponentials(s, factor, top[:, None])
                if not SKIP or has_survivor(e, cut):
                    survives = is_positive(s, e, cut[:, None], KIND)
                    dp = tl.dot(gradient, tl.trans(value), input_precision="ieee")
                    if RENORMALISE:
                        dp -= approx_mean[:, None]
                    dp = tl.where(survives, dp, 0.0)
                    row_survivors += tl.sum(dp, 1)
                    row_delta += tl.sum(e * dp, 1)
                    if RENORMALISE:
                        if dq is not None:
                            kept = tl.dot(tl.where(survives, e, 0.0).to(key.dtype), key, kept, input_precision="ieee")
                        row_residual += tl.sum(tl.where(survives, e - cut[:, None], 0.0) * dp, 1)
                        row_count += tl.sum(survives.to(tl.float32), 1)
                    if dq is not None:
                        surviving = tl.dot((e * dp).to(key.dtype), key, surviving, input_precision="ieee")
                if dq is not None:
                    attended = tl.dot(e.to(key.dtype), key, attended, input_precision="ieee")

    row_delta *= share
    result = (surviving - row_delta[:, None] * attended) * share[:, None]
    if RENORMALISE:
        # dp stands for (dp - mean) / mass. So far it was centred by `approx_mean`, from the rounded output; its error,
        # `residual`, is subtracted here.
        inverse = tl.where(row_mass == 0, 0.0, total / tl.where(row_mass == 0, 1.0, row_mass))
        residual = row_residual * share * inverse
        kept_mass = row_mass * share + tl.where(row_count > 0, theta, 0.0) * row_count
        result -= (kept - kept_mass[:, None] * attended) * (residual * share)[:, None]
        result *= inverse[:, None]
        row_delta = (row_delta - residual * kept_mass) * inverse
        row_survivors = (row_survivors - residual * row_count) * inverse
        tl.store(correction + row_index, approx_mean + residual, mask=valid_row)
    if dlse is not None:
        row_dlse = tl.where(share == 0, 0.0, tl.load(dlse + row_index, mask=valid_row, other=0.0))
        result += (row_dlse * share)[:, None] * attended
        row_delta -= row_dlse
    if dq is not None:
        dq_base = dq + batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh
        store_rows(dq_base, result * natural_scale, first, end, stride_dql, WIDTH, BLOCK_M, BLOCK_D)
    store_by_row(by_row, survivors, second, row_index, valid_row, top, cut, share, row_delta, row_survivors)


@triton.jit
def _centre(dp, mass, correction, softmax, second, row_index, valid_row):
    """Gradients of the renormalised weights' numerators from those of the weights, and 1 / (mass times sum) of rows."""
    row_mass = tl.load(mass + row_index, mask=valid_row, other=0.0)
    mean = tl.load(correction + row_index, mask=valid_row, other=0.0)
    total = tl.load(softmax + second + row_index, mask=valid_row, other=0.0)
    inverse = tl.where(row_mass == 0, 0.0, 1.0 / tl.where(row_mass == 0, 1.0, row_mass))
    return (dp - mean[:, None]) * (total * inverse)[:, None], inverse


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum_diagonals(ds, BLOCK: tl.constexpr):
    """Sums of ds `[BLOCK, BLOCK]` over equal row - column, by row - column modulo BLOCK: those from 0 on, and negative
    ones.

    Each row is rotated until column c holds row - column = c modulo BLOCK: one distance from row c on, another above.
    """
    remainder = tl.arange(0, BLOCK)[None, :]
    line = tl.arange(0, BLOCK)[:, None]
    rotated = tl.gather(ds, (line - remainder) & (BLOCK - 1), 1)
    return tl.reduce(
        (tl.where(line >= remainder, rotated, 0.0), tl.where(line >= remainder, 0.0, rotated)), 0, _add_both
    )


@triton.jit(do_not_specialize=["size"])
def bias_gradient_kernel(
    q,
    k,
    v,
    strip,
    slopes,
    kv_lengths,
    cu_seqlens,
    cu_seqlens_k,
    grad,
    softmax,
    mass,
    by_row,
    correction,
    partial,
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
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    batches,
    heads,
    group,
    rows,
    keys,
    documents,
    second,
    scale,
    strip_row,
    reach,
    window,
    size,  # noqa: ARG001 - key of the autotuner
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RENORMALISE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,  # noqa: ARG001 - tiles are square
    BLOCK_N: tl.constexpr,
):
    """Gradient of a head's biases at the distances of two diagonals of square tiles, over every n-th row block.

    Along a diagonal each score has the same distance in every tile, so tiles are added score by score, and summed over
    distances once at the end: `partial` `[P, H, diagonals, 2, BLOCK_N]` receives the sums of `_sum_diagonals`. The two
    tiles of a row block lie side by side and read its q and dO once. Products per tile: q.k and dO.v.
    """
    near = 2 * tl.program_id(0)
    head = tl.program_id(1)
    line = tl.arange(0, BLOCK_N)
    slope = None if slopes is None else tl.load(slopes + head)
    head_strip = strip + head.to(tl.int64) * strip_row + STRIP_PAD
    blocks = count_blocks(rows, cu_seqlens, documents, BLOCK_N)
    skipped = near * 0
    if cu_seqlens is None and kv_lengths is None:
        skipped = tl.maximum(near - tl.cdiv(keys - rows, BLOCK_N), 0)  # blocks whose tiles lie before the first key
    ds = tl.zeros([BLOCK_N, 2 * BLOCK_N], tl.float32)
    for item in tl.range(tl.program_id(2) + skipped * batches, blocks * batches, tl.num_programs(2), disable_licm=True):
        batch = item % batches
        first, end, start, shift, _ = locate_block(
            item // batches, batch, rows, keys, kv_lengths, cu_seqlens, cu_seqlens_k, documents, False, BLOCK_N
        )
        row = first + line
        own = row + shift
        valid_row = row < end
        row_index = (batch.to(tl.int64) * heads + head) * rows + row
        origin = first + shift - (near + 1) * BLOCK_N
        column = origin + tl.arange(0, 2 * BLOCK_N)
        if near * BLOCK_N + 1 >= reach:  # the last pair may need only its near diagonal
            start = tl.maximum(start, origin + BLOCK_N)
        q_base = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        k_base = k + batch.to(tl.int64) * stride_kb + (head // group).to(tl.int64) * stride_kh
        v_base = v + batch.to(tl.int64) * stride_vb + (head // group).to(tl.int64) * stride_vh
        grad_base = grad + batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
        last = tl.minimum(first + BLOCK_N, end) + shift
        query = load_rows(q_base, first, end, stride_ql, stride_qd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST, True)
        gradient = load_rows(grad_base, first, end, stride_gl, stride_gd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST, True)
        key = load_rows(
            k_base, origin, last, stride_kl, stride_kd, WIDTH, 2 * BLOCK_N, BLOCK_D, True, UPCAST, True, begin=start
        )
        value = load_rows(
            v_base, origin, last, stride_vl, stride_vd, WIDTH, 2 * BLOCK_N, BLOCK_D, True, UPCAST, True, begin=start
        )
        top, cut, share, mean = load_by_row(by_row, second, row_index, valid_row)
        s, factor = compute_tile_scores(
            query, tl.trans(key), own, origin, scale, head_strip, reach, slope, window,
            NEAR if window is None else EDGE, 2 * BLOCK_N,
        )  # fmt: skip
        s = tl.where((column >= start)[None, :], s, -float("inf"))
        e = compute_exponentials(s, factor, top[:, None])
        dp = tl.dot(gradient, tl.trans(value), input_precision="ieee")
        if RENORMALISE:
            dp, _ = _centre(dp, mass, correction, softmax, second, row_index, valid_row)
        dp = tl.where(is_positive(s, e, cut[:, None], NEAR), dp, 0.0)
        ds += e * (share[:, None] * dp - mean[:, None])
    # Columns run towards the diagonal, so the first half is the far one.
    far_ds, near_ds = tl.split(tl.permute(tl.reshape(ds, [BLOCK_N, 2, BLOCK_N]), (0, 2, 1)))
    place = ((tl.program_id(2).to(tl.int64) * heads + head) * 2 * tl.num_programs(0) + near) * 2 * BLOCK_N + line
    sums, negative = _sum_diagonals(near_ds, BLOCK_N)
    tl.store(partial + place, sums)
    tl.store(partial + place + BLOCK_N, negative)
    sums, negative = _sum_diagonals(far_ds, BLOCK_N)
    tl.store(partial + place + 2 * BLOCK_N, sums)
    tl.store(partial + place + 3 * BLOCK_N, negative)


@triton.jit
def _locate_row_tiles(first, end, shift, top_row, window, reach, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows that see a block of keys: first and end, the ends of their NEAR and PLAIN tiles, and all tiles.

    Keys past `end` come after every row's own key, so NEAR tiles mask them.
    """
    low = tl.maximum(first - shift, top_row)
    last_own = end - 1
    if window is not None:
        last_own = tl.minimum(last_own, tl.minimum(first + BLOCK_N, end) - 1 + window - 1)
    high = tl.where(first < end, tl.maximum(last_own + 1 - shift, low), low)
    tiles = tl.cdiv(high - low, BLOCK_M)
    edge = tiles
    if window is not None:
        edge = tl.minimum(tl.maximum(first + window - (low + shift), 0) // BLOCK_M, tiles)
    near = tl.minimum(tl.cdiv(tl.maximum(first + BLOCK_N - 1 + reach - (low + shift), 0), BLOCK_M), edge)
    return low, high, near, edge, tiles


@triton.jit(do_not_specialize=["size"])
def key_gradient_kernel(
    q,
    k,
    v,
    strip,
    slopes,
    kv_lengths,
    cu_seqlens,
    cu_seqlens_k,
    grad,
    softmax,
    mass,
    by_row,
    correction,
    dk,
    dv,
    dq_sum,
    dslopes,
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
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    stride_dkb,
    stride_dkh,
    stride_dkl,
    stride_dvb,
    stride_dvh,
    stride_dvl,
    batches,
    kv_heads,
    group,
    rows,
    keys,
    documents,
    second,
    scale,
    natural_scale,
    strip_row,
    reach,
    window,
    size,  # noqa: ARG001 - key of the autotuner
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RENORMALISE: tl.constexpr,
    UPCAST: tl.constexpr,
    SKIP: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk and dv of blocks of keys, those with the most rows first, summed over the query heads of the group.

    Products per tile: k.q, ds.q, v.dO and w.dO, with SKIP the last two only if a weight survives. Into dq_sum, float32,
    unless None, it adds dq of its keys, by ds.k; programs add in no fixed order.
    """
    kv_head = tl.program_id(0)  # the first programs, of all heads, have the most rows
    line = tl.arange(0, BLOCK_M)
    heads = kv_heads * group
    if dslopes is not None:
        dslopes += tl.program_id(1) * heads
        for member in tl.range(group, disable_licm=True):
            tl.store(dslopes + kv_head * group + member, 0.0)
        tl.debug_barrier()
    blocks = count_blocks(keys, cu_seqlens, documents, BLOCK_N)
    for item in tl.range(tl.program_id(1), blocks * batches, tl.num_programs(1), disable_licm=True):
        batch = item % batches
        index = item // batches
        first, end, _, shift, top_row = locate_block(
            index, batch, rows, keys, kv_lengths, cu_seqlens, cu_seqlens_k, documents, True, BLOCK_N
        )
        low, high, near, edge, tiles = _locate_row_tiles(first, end, shift, top_row, window, reach, BLOCK_M, BLOCK_N)
        k_base = k + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        v_base = v + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
        key = load_rows(k_base, first, end, stride_kl, stride_kd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
        value = load_rows(v_base, first, end, stride_vl, stride_vd, WIDTH, BLOCK_N, BLOCK_D, True, UPCAST)
        key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        value_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for member in tl.range(group, disable_licm=True):
            head = kv_head * group + member
            q_base = q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
            grad_base = grad + batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
            q_rows = describe_rows(q_base, high, stride_ql, WIDTH, BLOCK_M, BLOCK_D, DESCRIBED)
            grad_rows = describe_rows(grad_base, high, stride_gl, WIDTH, BLOCK_M, BLOCK_D, DESCRIBED)
            head_rows = (batch.to(tl.int64) * heads + head) * rows
            head_strip = None if strip is None else strip + head.to(tl.int64) * strip_row + STRIP_PAD
            slope = None if slopes is None else tl.load(slopes + head)
            slope_gradient = tl.zeros([BLOCK_M], tl.float32)
            for KIND in tl.static_range(3):
                if KIND != EDGE or window is not None:
                    for tile in tl.range(
                        edge if KIND == EDGE else (near if KIND == PLAIN else 0),
                        tiles if KIND == EDGE else (edge if KIND == PLAIN else near),
                        disable_licm=True,
                    ):
                        origin = low + tile * BLOCK_M
                        row = origin + line
                        own = row + shift
                        valid_row = row < high
                        query = load_tile(
                            q_rows,
                            origin,
                            high,
                            stride_ql,
                            stride_qd,
                            WIDTH,
                            BLOCK_M,
                            BLOCK_D,
                            True,
                            UPCAST,
                            DESCRIBED,
                            True,
                        )
                        gradient = load_tile(
                            grad_rows,
                            origin,
                            high,
                            stride_gl,
                            stride_gd,
                            WIDTH,
                            BLOCK_M,
                            BLOCK_D,
                            True,
                            UPCAST,
                            DESCRIBED,
                            True,
                        )
                        top, cut, share, mean = load_by_row(by_row, second, head_rows + row, valid_row)
                        s, factor = compute_tile_scores(
                            query,
                            tl.trans(key),
                            own,
                            first,
                            scale,
                            head_strip,
                            reach,
                            slope,
                            window,
                            KIND,
                            BLOCK_N,
                        )
                        e = compute_exponentials(s, factor, top[:, None])
                        dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                        if not SKIP or has_survivor(e, cut):
                            survives = is_positive(s, e, cut[:, None], KIND)
                            w = tl.where(survives, e - cut[:, None], 0.0)
                            dp = tl.dot(gradient, tl.trans(value), input_precision="ieee")
                            inverse = share
                            if RENORMALISE:
                                dp, inverse = _centre(dp, mass, correction, softmax, second, head_rows + row, valid_row)
                            w = w * inverse[:, None]
                            dp = tl.where(survives, dp, 0.0)
                            value_gradient = tl.dot(
                                tl.trans(w.to(gradient.dtype)), gradient, value_gradient, input_precision="ieee"
                            )
                        ds = e * (share[:, None] * dp - mean[:, None])
                        key_gradient = tl.dot(tl.trans(ds.to(query.dtype)), query, key_gradient, input_precision="ieee")
                        if dq_sum is not None:
                            add_rows(
                                dq_sum + head_rows * WIDTH,
                                tl.dot(ds.to(key.dtype), key, input_precision="ieee") * natural_scale,
                                origin,
                                high,
                                WIDTH,
                                BLOCK_M,
                                BLOCK_D,
                            )
                        if dslopes is not None:
                            slope_gradient += tl.sum(
                                ds * compute_distances((own - first)[:, None], tl.arange(0, BLOCK_N)[None, :]), 1
                            )
            if dslopes is not None:
                tl.store(dslopes + head, tl.load(dslopes + head) - tl.sum(slope_gradient))
                tl.debug_barrier()
        dk_base = dk + batch.to(tl.int64) * stride_dkb + kv_head.to(tl.int64) * stride_dkh
        dv_base = dv + batch.to(tl.int64) * stride_dvb + kv_head.to(tl.int64) * stride_dvh
        last = end if cu_seqlens is not None else keys  # keys past kv_lengths get zeros
        store_rows(dk_base, key_gradient * natural_scale, first, last, stride_dkl, WIDTH, BLOCK_N, BLOCK_D)
        store_rows(dv_base, value_gradient, first, last, stride_dvl, WIDTH, BLOCK_N, BLOCK_D)


def backward(
    call: Call,
    out: Tensor | None,
    grad: Tensor,
    dlse: Tensor | None,
    softmax: Tensor,
    mass: Tensor,
    bias_gradient: bool,
    slopes_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, `survivors` `[B, H, Lq]` (d tau without its factor), and those of bias and slopes.

    grad: gradient of the output. dlse: that of the rows' log-sum-exp `[B, H, Lq]`, contiguous, or None.
    """
    dq, dk, dv, survivors, dbias, dslopes = allocate_backward_buffers(call, bias_gradient, slopes_gradient)
    grad = ensure_32bit_offsets(grad)
    shared = {
        **collect_shared_arguments(call),
        "grad": grad,
        "softmax": softmax,
        "mass": none_if_empty(mass),
        "by_row": survivors.new_empty(4, *survivors.shape),
        "correction": torch.empty_like(survivors) if call.renormalise else None,
        **name_strides("g", grad),
        "natural_scale": call.factor,
    }
    merged = configurations.MERGED_BACKWARD
    dq_sum = torch.zeros(call.q.shape, dtype=torch.float32, device=call.q.device) if merged else None
    _launch_query_gradient(call, shared, grad if out is None else out, dlse, None if merged else dq, survivors)
    shared = {**shared, "softmax": softmax if call.renormalise else None}  # by_row has the rest of it
    _launch_key_gradient(call, shared, dk, dv, dq_sum, dslopes)
    if dq_sum is not None:
        dq.copy_(dq_sum)
    if dbias.numel():
        _launch_bias_gradient(call, shared, dbias)
    return dq, dk, dv, survivors, dbias, dslopes


def _launch_query_gradient(
    call: Call, shared: dict[str, Any], out: Tensor, dlse: Tensor | None, dq: Tensor | None, survivors: Tensor
) -> None:
    """Fill dq unless None, survivors, and the shared by_row and correction; `out` is read only with renormalise."""
    batches, heads, rows, _ = call.q.shape
    for_hopper = configurations.HOPPER_BACKWARD and hopper is not None and dlse is None and dq is not None
    if for_hopper and hopper.covers(call, shared["grad"]):
        hopper.compute_query_gradient(call, shared["grad"], shared["softmax"], dq, shared["by_row"], survivors)
        return
    arguments = {
        **shared,
        "out": out if call.renormalise else None,
        "dlse": dlse,
        "dq": dq,
        "survivors": survivors,
        **name_strides("o", out, with_columns=False),
        **name_strides("dq", call.q if dq is None else dq, with_columns=False),
        "heads": heads,
    }

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (count_call_blocks(call, rows, meta["BLOCK_M"]) * batches * heads,)

    launch(query_gradient_kernel, call, grid, arguments)


def _launch_key_gradient(
    call: Call, shared: dict[str, Any], dk: Tensor, dv: Tensor, dq_sum: Tensor | None, dslopes: Tensor
) -> None:
    """Fill dk and dv, and dslopes unless empty; add to dq_sum unless None."""
    q, kv_heads = call.q, call.k.shape[1]
    listed = "key_gradient" if dq_sum is None else "merged_gradient"
    block = configurations.list_choices(listed, q)[0].n
    keys, window = call.k.shape[2], call.k.shape[2] if call.window is None else call.window
    blocks = count_call_blocks(call, keys, block)
    costs = _estimate_costs(q.shape[0], q.shape[2], keys, window, block, blocks)
    programs = balance_programs(count_resident_programs(q), kv_heads, costs)
    # A partial sum per program, added afterwards in a fixed order.
    partial = q.new_empty(programs, len(dslopes), dtype=torch.float32) if dslopes.numel() else None
    arguments = {
        **shared,
        "dk": dk,
        "dv": dv,
        "dq_sum": dq_sum,
        "dslopes": partial,
        **name_strides("dk", dk, with_columns=False),
        **name_strides("dv", dv, with_columns=False),
        "kv_heads": kv_heads,
    }
    launch(key_gradient_kernel, call, lambda _: (kv_heads, programs), arguments, listed)
    if partial is not None:
        torch.sum(partial, 0, out=dslopes)


def _launch_bias_gradient(call: Call, shared: dict[str, Any], dbias: Tensor) -> None:
    """Fill dbias `[H, W]`."""
    heads, reach = dbias.shape
    block = configurations.list_choices("bias_gradient", call.q)[0].n
    pairs = ceil_div(ceil_div(reach, block) + 1, 2)
    programs = max(1, ceil_div(BIAS_WAVES * count_resident_programs(call.q), pairs * heads))
    partial = dbias.new_empty(programs, heads, 2 * pairs, 2, block)
    arguments = {**shared, "partial": partial, "heads": heads}
    launch(bias_gradient_kernel, call, lambda _: (pairs, heads, programs), arguments)
    sums = partial.sum(0)
    torch.add(*(x.flatten(1)[:, :reach] for x in (sums[:, :-1, 0], sums[:, 1:, 1])), out=dbias)


@cache  # a loop in Python before every launch otherwise
def _estimate_costs(batches: int, rows: int, keys: int, window: int, block: int, blocks: int) -> tuple[int, ...]:
    """Rows that see each block of keys, in processing order; kv_lengths are ignored."""
    firsts = (index * block for index in range(blocks))
    visible = (min(keys, first + block - 1 + window) - max(first, keys - rows) for first in firsts)
    return tuple(max(block, count) for count in visible for _ in range(batches))


def allocate_backward_buffers(
    call: Call, bias_gradient: bool, slopes_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of `backward`; those not requested are empty."""
    q, bias = call.q, call.bias
    survivors = q.new_empty(q.shape[:3], dtype=torch.float32)
    dbias = q.new_empty(bias.shape if bias is not None and bias_gradient else 0, dtype=torch.float32)
    dslopes = q.new_empty(q.shape[1] if slopes_gradient else 0, dtype=torch.float32)
    return allocate_like(q), allocate_like(call.k), allocate_like(call.v), survivors, dbias, dslopes
