"""The forward kernel for Hopper, in Gluon.

It computes what `forward.forward_kernel` does, without ragged lengths, statistics, slopes and renormalisation, and
skips no tile.
"""

import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...call import Call
from ..launch import LOG2E, count_processors, use_device
from ..tiles import EDGE, PLAIN, STRIP_PAD, load_thresholds, place_scores
from .common import (
    ENTRY_REGISTERS,
    GROUP_ROWS,
    GROUPS,
    REGISTERS,
    HopperTiles,
    collect_documents,
    copy_rows,
    copy_tile,
    count_items,
    count_program_items,
    describe,
    describe_keys,
    gl,
    jit,
    locate_item,
    pad_bias,
    wait_turn,
)

CONFIGURATIONS = {64: HopperTiles(64, 8), 128: HopperTiles(64, 6)}
"""Configurations by head width."""


@jit
def _copy_tiles(q_rows, k_rows, v_rows, shared, sizes, N: tl.constexpr):
    """The copying warp: per item q, then its keys, then its keys and values in turn."""
    q_bufs, q_full, q_empty, tile_bufs, full, empty = shared
    group, documents = sizes[2], sizes[9]
    turn = 0
    for item in range(gl.program_id(0), count_program_items(sizes), gl.num_programs(0)):
        head, batch, first, _, _, _, low, high, _, _, tiles = locate_item(item, sizes, N)
        number = (item - gl.program_id(0)) // gl.num_programs(0)
        copy_rows(q_rows, batch, head, first, q_bufs, q_full, q_empty, number)
        kv_head = head // group
        for tile in range(tiles):
            copy_tile(k_rows, batch, kv_head, low + tile * N, high, documents, tile_bufs, full, empty, turn)
            turn += 1
        for tile in range(tiles):
            copy_tile(k_rows, batch, kv_head, low + tile * N, high, documents, tile_bufs, full, empty, turn)
            copy_tile(v_rows, batch, kv_head, low + tile * N, high, documents, tile_bufs, full, empty, turn + 1)
            turn += 2


@jit
def _weigh_scores(s, own, column, first, scale, strip, reach, window, top, cut, KIND: tl.constexpr):
    """Weights of a tile times the row's sum, from its products, as `forward_kernel` computes them."""
    s, factor = place_scores(s, (own - first)[:, None], column[None, :], scale, strip, reach, None, window, KIND)
    e = gl.exp2(s * factor - top[:, None])
    w = gl.maximum(e - cut[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
    if KIND != PLAIN:
        w = gl.where(s != -float("inf"), w, 0.0)
    return w


@jit
def _multiply(
    tensors, shared, sizes, others,
    D: tl.constexpr, N: tl.constexpr, THRESHOLD: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One group: maximum and sum of its 64 rows, then weights times values, the next scores in flight meanwhile."""
    tau, strip, out, softmax = tensors
    q_bufs, q_full, q_empty, tile_bufs, full, empty = shared
    heads, rows, window, reach = sizes[1], sizes[3], sizes[5], sizes[6]
    stride_ob, stride_oh, stride_ol, second, scale, strip_row, context_length, entries = others
    s_layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    w_layout: tl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: tl.constexpr = gl.SliceLayout(1, s_layout)
    column = gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))
    line = GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=row_layout)
    zeros = gl.zeros([GROUP_ROWS, N], gl.float32, s_layout)
    dtype: tl.constexpr = out.dtype.element_ty
    turn = 0
    for item in tl.range(gl.program_id(0), count_program_items(sizes), gl.num_programs(0), disable_licm=True):
        head, batch, first, end, start, shift, low, _, edge, near, tiles = locate_item(item, sizes, N)
        number = (item - gl.program_id(0)) // gl.num_programs(0)
        row = first + line
        own = row + shift
        head_strip = strip + head.to(gl.int64) * strip_row + STRIP_PAD
        mbarrier.wait(q_full.index(GROUP), number & 1)
        query = q_bufs.index(GROUP).reshape([GROUP_ROWS, D])

        top = gl.full([GROUP_ROWS], -float("inf"), gl.float32, row_layout)
        total = gl.zeros([GROUP_ROWS], gl.float32, row_layout)
        for KIND in gl.static_range(3):
            for tile in tl.range(
                0 if KIND == EDGE else (edge if KIND == PLAIN else near),
                edge if KIND == EDGE else (near if KIND == PLAIN else tiles),
                disable_licm=True,
            ):
                place = wait_turn(full, turn)
                key = tile_bufs.index(place).reshape([N, D]).permute((1, 0))
                s = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(empty.index(place), count=1)
                turn += 1
                s, factor = place_scores(
                    s, (own - low - tile * N)[:, None], column[None, :], scale, head_strip, reach, None, window, KIND
                )
                new_top = gl.maximum(top, gl.max(s, 1) * factor)
                safe = gl.where(new_top > -float("inf"), new_top, 0.0)
                total = total * gl.exp2(top - safe) + gl.sum(gl.exp2(s * factor - safe[:, None]), 1)
                top = new_top

        has_key = total != 0
        total = gl.where(has_key, total, 1.0)
        safe = gl.where(has_key, top, 0.0)
        theta = load_thresholds(tau, head, own, start, window, context_length, entries, THRESHOLD)
        cut = theta * total

        acc = gl.zeros([GROUP_ROWS, D], gl.float32, o_layout)
        place = wait_turn(full, turn)
        key = tile_bufs.index(place).reshape([N, D]).permute((1, 0))
        s = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(empty.index(place), count=1)
        turn += 1
        # The first tile is of any kind, and EDGE is right for all.
        w = _weigh_scores(s, own, column, low, scale, head_strip, reach, window, safe, cut, EDGE)
        weights = gl.convert_layout(w.to(dtype), w_layout)
        for KIND in gl.static_range(3):
            for tile in tl.range(
                1 if KIND == EDGE else gl.maximum(edge if KIND == PLAIN else near, 1),
                edge if KIND == EDGE else (near if KIND == PLAIN else tiles),
                disable_licm=True,
            ):
                key_place = wait_turn(full, turn + 1)
                key = tile_bufs.index(key_place).reshape([N, D]).permute((1, 0))
                s = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
                value_place = wait_turn(full, turn)
                acc = warpgroup_mma(weights, tile_bufs.index(value_place).reshape([N, D]), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
                mbarrier.arrive(empty.index(key_place), count=1)
                w = _weigh_scores(s, own, column, low + tile * N, scale, head_strip, reach, window, safe, cut, KIND)
                next_weights = gl.convert_layout(w.to(dtype), w_layout)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(value_place), count=1)
                weights = next_weights
                turn += 2
        mbarrier.arrive(q_empty.index(GROUP), count=1)
        place = wait_turn(full, turn)
        acc = warpgroup_mma(weights, tile_bufs.index(place).reshape([N, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(place), count=1)
        turn += 1

        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
        out_row = first + GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, o_layout))
        out_base = out + batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
        pointers = out_base + out_row.to(gl.int64)[:, None] * stride_ol
        pointers += gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))[None, :]
        gl.store(pointers, acc.to(dtype), mask=(out_row < end)[:, None])
        row_index = (batch.to(gl.int64) * heads + head) * rows + row
        gl.store(softmax + row_index, top, mask=row < end)
        gl.store(softmax + second + row_index, gl.where(has_key, total, 0.0), mask=row < end)


@jit
def hopper_forward_kernel(
    q_rows, k_rows, v_rows, tau, strip, out, softmax, stride_ob, stride_oh, stride_ol,
    batches, heads, group, rows, keys, second, scale, strip_row, reach, window, context_length, entries,
    cu_seqlens, cu_seqlens_k, documents,
    D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """Output of all rows, the longest first, by resident programs of 128 rows; two numbers per row to `softmax`."""
    dtype: tl.constexpr = out.dtype.element_ty
    q_bufs = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, GROUP_ROWS, D], q_rows.layout)
    tile_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_rows.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(each), count=1)
        mbarrier.init(q_empty.index(each), count=1)
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=GROUPS)
    shared = (q_bufs, q_full, q_empty, tile_bufs, full, empty)
    sizes = (batches, heads, group, rows, keys, window, reach, cu_seqlens, cu_seqlens_k, documents)
    tensors = (tau, strip, out, softmax)
    others = (stride_ob, stride_oh, stride_ol, second, scale, strip_row, context_length, entries)
    gl.warp_specialize(
        [
            (_multiply, (tensors, shared, sizes, others, D, N, THRESHOLD, 0)),
            (_multiply, (tensors, shared, sizes, others, D, N, THRESHOLD, 1)),
            (_copy_tiles, (q_rows, k_rows, v_rows, shared, sizes, N)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def compute_output(call: Call, out: Tensor, softmax: Tensor) -> None:
    """Fill out `[B, H, Lq, D]`, and softmax `[2, B, H, Lq]`, the maximum (base 2) and sum of each row."""
    q, k, v = call[:3]
    (batches, heads, rows, width), keys = q.shape, k.shape[2]
    blocks = CONFIGURATIONS[width]
    strip, strip_row, reach = pad_bias(call)
    with use_device(q):
        hopper_forward_kernel[(min(count_processors(q), count_items(call)),)](
            describe(q, GROUP_ROWS.value), describe_keys(call, k, blocks.n), describe_keys(call, v, blocks.n),
            call.tau.contiguous(), strip, out, softmax, *out.stride()[:3],
            batches, heads, heads // k.shape[1], rows, keys, batches * heads * rows, call.factor * LOG2E,
            strip_row, reach, min(call.window or keys, keys), call.context_length or 0, call.tau.shape[-1],
            *collect_documents(call),
            width, blocks.n, blocks.stages, call.threshold, REGISTERS,
            num_warps=4, maxnreg=ENTRY_REGISTERS,
        )  # fmt: skip
