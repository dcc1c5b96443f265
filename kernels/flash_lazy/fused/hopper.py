"""The forward kernel for Hopper, in Gluon: one warp copies tiles, two groups of four multiply 64 rows each.

It computes what `forward.forward_kernel` does, without documents, ragged lengths, statistics, slopes, renormalisation or
skipped tiles; geometry, masks and thresholds are those of `tiles`. Gluon has no interpreter, so only a GPU runs it.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_lazy.call import Call
from flash_lazy.fused.launch import LOG2E, can_describe, ceil_div, make_strip, use_device
from flash_lazy.fused.tiles import (
    EDGE,
    PLAIN,
    STRIP_PAD,
    compute_exponentials,
    is_positive,
    load_gradient_rows,
    load_thresholds,
    locate_key_tiles,
    locate_row_tiles,
    place_scores,
)

GROUP_ROWS = gl.constexpr(64)
"""Rows of a group of four warps: those of one wgmma instruction."""


@gluon.jit
def _locate_item(item, batches, heads, rows, keys, window, reach, M: gl.constexpr, N: gl.constexpr):
    """Head, batch and first row of an item, the longest first, and its key tiles as `locate_key_tiles` gives them."""
    blocks = gl.cdiv(rows, M)
    head = item % heads
    batch = item // heads % batches
    first = (blocks - 1 - item // heads // batches) * M
    low, _, edge, near, tiles = locate_key_tiles(first, rows, item * 0, keys - rows, window, reach, M, N)
    return head, batch, first, low, edge, near, tiles


@gluon.jit
def _wait_turn(full, turn):
    """Wait until tile number `turn` has arrived; returns its place."""
    place = turn % full.type.shape[0]
    mbarrier.wait(full.index(place), (turn // full.type.shape[0]) & 1)
    return place


@gluon.jit
def _copy_tile(rows, batch, head, first, tile_bufs, full, empty, turn):
    """Copy a tile into the place of number `turn` as soon as both groups have released it."""
    place = turn % full.type.shape[0]
    mbarrier.wait(empty.index(place), ((turn // full.type.shape[0]) & 1) ^ 1)
    mbarrier.expect(full.index(place), rows.block_type.nbytes)
    tma.async_copy_global_to_shared(rows, [batch, head, first, 0], full.index(place), tile_bufs.index(place))


@gluon.jit
def _copy_tiles(q_rows, k_rows, v_rows, shared, sizes, N: gl.constexpr):
    """The copying warp: per item q, then its keys, then its keys and values in turn."""
    q_bufs, q_full, q_empty, tile_bufs, full, empty = shared
    GROUPS: gl.constexpr = q_full.type.shape[0]
    batches, heads, group, rows, keys, window, reach = sizes
    turn = 0
    for item in range(gl.program_id(0), gl.cdiv(rows, GROUPS * GROUP_ROWS) * batches * heads, gl.num_programs(0)):
        head, batch, first, low, _, _, tiles = _locate_item(item, batches, heads, rows, keys, window, reach, GROUPS * GROUP_ROWS, N)
        number = (item - gl.program_id(0)) // gl.num_programs(0)
        for each in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(each), (number & 1) ^ 1)
            mbarrier.expect(q_full.index(each), q_rows.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_rows, [batch, head, first + each * GROUP_ROWS, 0], q_full.index(each), q_bufs.index(each)
            )
        kv_head = head // group
        for tile in range(tiles):
            _copy_tile(k_rows, batch, kv_head, low + tile * N, tile_bufs, full, empty, turn)
            turn += 1
        for tile in range(tiles):
            _copy_tile(k_rows, batch, kv_head, low + tile * N, tile_bufs, full, empty, turn)
            _copy_tile(v_rows, batch, kv_head, low + tile * N, tile_bufs, full, empty, turn + 1)
            turn += 2


@gluon.jit
def _weigh_scores(s, own, column, first, scale, strip, reach, window, top, cut, KIND: gl.constexpr):
    """Weights of a tile times the row's sum, from its products, as `forward_kernel` computes them."""
    s, factor = place_scores(s, (own - first)[:, None], column[None, :], scale, strip, reach, None, window, KIND)
    e = gl.exp2(s * factor - top[:, None])
    w = gl.maximum(e - cut[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
    if KIND != PLAIN:
        w = gl.where(s != -float("inf"), w, 0.0)
    return w


@gluon.jit
def _multiply(
    tensors, shared, sizes, others,
    D: gl.constexpr, N: gl.constexpr, THRESHOLD: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One group: maximum and sum of its 64 rows, then weights times values, the next scores in flight meanwhile."""
    tau, strip, out, softmax = tensors
    q_bufs, q_full, q_empty, tile_bufs, full, empty = shared
    GROUPS: gl.constexpr = q_full.type.shape[0]
    batches, heads, group, rows, keys, window, reach = sizes
    stride_ob, stride_oh, stride_ol, second, scale, strip_row, context_length, entries = others
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    column = gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))
    line = GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=row_layout)
    zeros = gl.zeros([GROUP_ROWS, N], gl.float32, s_layout)
    dtype: gl.constexpr = out.dtype.element_ty
    turn = 0
    for item in tl.range(
            gl.program_id(0), gl.cdiv(rows, GROUPS * GROUP_ROWS) * batches * heads, gl.num_programs(0), disable_licm=True
        ):
        head, batch, first, low, edge, near, tiles = _locate_item(item, batches, heads, rows, keys, window, reach, GROUPS * GROUP_ROWS, N)
        number = (item - gl.program_id(0)) // gl.num_programs(0)
        row = first + line
        own = row + keys - rows
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
                place = _wait_turn(full, turn)
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
        theta = load_thresholds(tau, head, own, item * 0, window, context_length, entries, THRESHOLD)
        cut = theta * total

        acc = gl.zeros([GROUP_ROWS, D], gl.float32, o_layout)
        place = _wait_turn(full, turn)
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
                key_place = _wait_turn(full, turn + 1)
                key = tile_bufs.index(key_place).reshape([N, D]).permute((1, 0))
                s = warpgroup_mma(query, key, zeros, use_acc=False, is_async=True)
                value_place = _wait_turn(full, turn)
                acc = warpgroup_mma(weights, tile_bufs.index(value_place).reshape([N, D]), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
                mbarrier.arrive(empty.index(key_place), count=1)
                w = _weigh_scores(
                    s, own, column, low + tile * N, scale, head_strip, reach, window, safe, cut, KIND
                )
                next_weights = gl.convert_layout(w.to(dtype), w_layout)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(value_place), count=1)
                weights = next_weights
                turn += 2
        mbarrier.arrive(q_empty.index(GROUP), count=1)
        place = _wait_turn(full, turn)
        acc = warpgroup_mma(weights, tile_bufs.index(place).reshape([N, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(place), count=1)
        turn += 1

        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
        out_row = first + GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, o_layout))
        out_base = out + batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
        pointers = out_base + out_row.to(gl.int64)[:, None] * stride_ol
        pointers += gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))[None, :]
        gl.store(pointers, acc.to(dtype), mask=(out_row < rows)[:, None])
        row_index = (batch.to(gl.int64) * heads + head) * rows + row
        gl.store(softmax + row_index, top, mask=row < rows)
        gl.store(softmax + second + row_index, gl.where(has_key, total, 0.0), mask=row < rows)


@gluon.jit
def hopper_forward_kernel(
    q_rows, k_rows, v_rows, tau, strip, out, softmax, stride_ob, stride_oh, stride_ol,
    batches, heads, group, rows, keys, second, scale, strip_row, reach, window, context_length, entries,
    D: gl.constexpr, GROUPS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, THRESHOLD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Output of all rows, the longest first, by resident programs of 128 rows; two numbers per row to `softmax`."""
    dtype: gl.constexpr = out.dtype.element_ty
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, GROUP_ROWS, D], q_rows.layout)
    tile_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_rows.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for each in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(each), count=1)
        mbarrier.init(q_empty.index(each), count=1)
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=GROUPS)
    shared = (q_bufs, q_full, q_empty, tile_bufs, full, empty)
    sizes = (batches, heads, group, rows, keys, window, reach)
    tensors = (tau, strip, out, softmax)
    others = (stride_ob, stride_oh, stride_ol, second, scale, strip_row, context_length, entries)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (tensors, shared, sizes, others, D, N, THRESHOLD, 0)),
                (_multiply, (tensors, shared, sizes, others, D, N, THRESHOLD, 1)),
                (_copy_tiles, (q_rows, k_rows, v_rows, shared, sizes, N)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (tensors, shared, sizes, others, D, N, THRESHOLD, 0)),
                (_multiply, (tensors, shared, sizes, others, D, N, THRESHOLD, 1)),
                (_multiply, (tensors, shared, sizes, others, D, N, THRESHOLD, 2)),
                (_copy_tiles, (q_rows, k_rows, v_rows, shared, sizes, N)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


@gluon.jit
def _copy_rows(q_rows, grad_rows, k_rows, v_rows, shared, sizes):
    """The copying warp of the key gradient: keys and values of each group, then q and dO of its rows in turn."""
    key_bufs, key_full, q_bufs, grad_bufs, full, empty = shared
    batches, heads, group, rows, keys, window, reach = sizes
    GROUPS: gl.constexpr = key_full.type.shape[0]
    M: gl.constexpr = q_rows.block_type.shape[2]
    N: gl.constexpr = GROUPS * GROUP_ROWS
    kv_head = gl.program_id(0)
    batch = gl.program_id(1)
    first = gl.program_id(2) * N
    for each in gl.static_range(GROUPS):
        mbarrier.expect(key_full.index(each), 2 * k_rows.block_type.nbytes)
        origin = [batch, kv_head, first + each * GROUP_ROWS, 0]
        tma.async_copy_global_to_shared(k_rows, origin, key_full.index(each), key_bufs.index(2 * each))
        tma.async_copy_global_to_shared(v_rows, origin, key_full.index(each), key_bufs.index(2 * each + 1))
    low, _, _, _, tiles = locate_row_tiles(first, keys, keys - rows, first * 0, window, reach, M, N)
    for turn in range(group * tiles):
        place = turn % full.type.shape[0]
        mbarrier.wait(empty.index(place), ((turn // full.type.shape[0]) & 1) ^ 1)
        mbarrier.expect(full.index(place), 2 * q_rows.block_type.nbytes)
        origin = [batch, kv_head * group + turn // tiles, low + turn % tiles * M, 0]
        tma.async_copy_global_to_shared(q_rows, origin, full.index(place), q_bufs.index(place))
        tma.async_copy_global_to_shared(grad_rows, origin, full.index(place), grad_bufs.index(place))


@gluon.jit
def _sum_over_rows(
    tensors, shared, sizes, others, D: gl.constexpr, M: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """One group: dk and dv of its 64 keys. Scores are `[keys, rows]`, so that weights are operands in registers.
    """
    strip, by_row, dk, dv = tensors
    key_bufs, key_full, q_bufs, grad_bufs, full, empty = shared
    batches, heads, group, rows, keys, window, reach = sizes
    stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl, padded_rows, scale, natural_scale, strip_row = others
    GROUPS: gl.constexpr = key_full.type.shape[0]
    N: gl.constexpr = GROUPS * GROUP_ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = dk.dtype.element_ty
    line = gl.arange(0, M, layout=gl.SliceLayout(0, s_layout))
    column = GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, s_layout))
    zeros = gl.zeros([GROUP_ROWS, M], gl.float32, s_layout)
    kv_head = gl.program_id(0)
    batch = gl.program_id(1)
    first = gl.program_id(2) * N
    shift = keys - rows
    low, _, near, edge, tiles = locate_row_tiles(first, keys, shift, first * 0, window, reach, M, N)
    key_gradient = gl.zeros([GROUP_ROWS, D], gl.float32, o_layout)
    value_gradient = gl.zeros([GROUP_ROWS, D], gl.float32, o_layout)
    mbarrier.wait(key_full.index(GROUP), 0)
    key = key_bufs.index(2 * GROUP).reshape([GROUP_ROWS, D])
    value = key_bufs.index(2 * GROUP + 1).reshape([GROUP_ROWS, D])
    turn = 0
    for member in range(group):
        head = kv_head * group + member
        head_strip = strip + head.to(gl.int64) * strip_row + STRIP_PAD
        for KIND in gl.static_range(2, -1, -1):  # NEAR tiles come first, in the order in which they are copied
            for tile in tl.range(
                edge if KIND == EDGE else (near if KIND == PLAIN else 0),
                tiles if KIND == EDGE else (edge if KIND == PLAIN else near),
                disable_licm=True,
            ):
                row = tl.multiple_of(low + tile * M, M) + line
                top, cut, share, mean = load_gradient_rows(
                    by_row, batches * heads, tl.multiple_of(padded_rows, 128), batch * heads + head, row, None
                )
                place = _wait_turn(full, turn)
                query = q_bufs.index(place).reshape([M, D])
                gradient = grad_bufs.index(place).reshape([M, D])
                s = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
                dp = warpgroup_mma(value, gradient.permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
                s, factor = place_scores(
                    s, (row + shift - first)[None, :], column[:, None], scale, head_strip, reach, None, window, KIND
                )
                e = compute_exponentials(s, factor, top[None, :])
                w = gl.maximum(e - cut[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL) * share[None, :]
                if KIND != PLAIN:
                    w = gl.where(s != -float("inf"), w, 0.0)
                weights = gl.convert_layout(w.to(dtype), w_layout)
                value_gradient = warpgroup_mma(weights, gradient, value_gradient, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                dp = gl.where(is_positive(s, e, cut[None, :], KIND), dp, 0.0)
                ds = e * (share[None, :] * dp - mean[None, :])
                ds = gl.convert_layout(ds.to(dtype), w_layout)
                key_gradient = warpgroup_mma(ds, query, key_gradient, is_async=True)
                key_gradient, value_gradient = warpgroup_mma_wait(0, deps=(key_gradient, value_gradient))
                mbarrier.arrive(empty.index(place), count=1)
                turn += 1
    key_row = first + GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, o_layout))
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))[None, :]
    k_base = dk + batch.to(gl.int64) * stride_kb + kv_head.to(gl.int64) * stride_kh
    v_base = dv + batch.to(gl.int64) * stride_vb + kv_head.to(gl.int64) * stride_vh
    valid = (key_row < keys)[:, None]
    key_row = key_row.to(gl.int64)[:, None]
    gl.store(k_base + key_row * stride_kl + lane, (key_gradient * natural_scale).to(dtype), mask=valid)
    gl.store(v_base + key_row * stride_vl + lane, value_gradient.to(dtype), mask=valid)


@gluon.jit
def hopper_key_gradient_kernel(
    q_rows, grad_rows, k_rows, v_rows, strip, by_row, dk, dv,
    stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    batches, heads, group, rows, keys, padded_rows, scale, natural_scale, strip_row, reach, window,
    D: gl.constexpr, GROUPS: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads of the group; blocks with the most rows come first."""
    dtype: gl.constexpr = dk.dtype.element_ty
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    key_bufs = gl.allocate_shared_memory(dtype, [2 * GROUPS, 1, 1, GROUP_ROWS, D], k_rows.layout)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, D], q_rows.layout)
    grad_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, D], q_rows.layout)
    key_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for each in gl.static_range(GROUPS):
        mbarrier.init(key_full.index(each), count=1)
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=GROUPS)
    shared = (key_bufs, key_full, q_bufs, grad_bufs, full, empty)
    sizes = (batches, heads, group, rows, keys, window, reach)
    tensors = (strip, by_row, dk, dv)
    others = (
        stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl, padded_rows, scale, natural_scale, strip_row
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_over_rows, (tensors, shared, sizes, others, D, M, 0)),
            (_sum_over_rows, (tensors, shared, sizes, others, D, M, 1)),
            (_copy_rows, (q_rows, grad_rows, k_rows, v_rows, shared, sizes)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


class ForwardBlocks(NamedTuple):
    """A configuration of the forward kernel: groups of four warps, keys of a tile, tiles in flight."""

    groups: int
    n: int
    stages: int


class KeyGradientBlocks(NamedTuple):
    """A configuration of the key gradient: rows of a tile, tiles in flight."""

    m: int
    stages: int


FORWARD = {64: ForwardBlocks(2, 64, 8), 128: ForwardBlocks(2, 64, 6)}
KEY_GRADIENT = {64: KeyGradientBlocks(64, 4), 128: KeyGradientBlocks(32, 4)}
"""Configurations by head width."""
REGISTERS = {2: (168, 240), 3: (128, 160)}
"""Registers of a thread on entry and of one that multiplies, by groups: 65,536 over 12 or 16 warps."""


def covers(call: Call) -> bool:
    """Whether the kernels take a call, on a device for which they are made."""
    q, k, v = call[:3]
    plain = call.slopes is None and call.kv_lengths is None and call.cu_seqlens is None and not call.renormalise
    made_for = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] == 9
    shaped = q.shape[3] in FORWARD and q.shape[2] <= k.shape[2]
    return made_for and plain and shaped and all(map(can_describe, (q, k, v)))


def covers_key_gradient(call: Call, grad: Tensor) -> bool:
    """Whether `key_gradient` takes a call: as many rows as keys, so that tiles of rows begin at multiples of theirs."""
    return covers(call) and call.q.shape[2] == call.k.shape[2] and can_describe(grad)


def forward(call: Call, out: Tensor, softmax: Tensor) -> None:
    """Fill out `[B, H, Lq, D]`, and softmax `[2, B, H, Lq]`, the maximum (base 2) and sum of each row."""
    q, k, v = call[:3]
    (batches, heads, rows, width), keys = q.shape, k.shape[2]
    blocks = FORWARD[width]
    entry, held = REGISTERS[blocks.groups]
    strip, strip_row, reach = _make_strip(call)
    items = ceil_div(rows, blocks.groups * GROUP_ROWS.value) * batches * heads
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    with use_device(q):
        hopper_forward_kernel[(min(processors, items),)](
            _describe(q, GROUP_ROWS.value), _describe(k, blocks.n), _describe(v, blocks.n),
            call.tau.contiguous(), strip, out, softmax, *out.stride()[:3],
            batches, heads, heads // k.shape[1], rows, keys, batches * heads * rows, call.factor * LOG2E,
            strip_row, reach, min(call.window or keys, keys), call.context_length or 0, call.tau.shape[-1],
            width, blocks.groups, blocks.n, blocks.stages, call.threshold, held,
            num_warps=4, maxnreg=entry,
        )  # fmt: skip


def key_gradient(call: Call, grad: Tensor, by_row: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Fill dk and dv from dO and what the query gradient saves of each row, `[4, B, H, P]`."""
    q, k, v = call[:3]
    (batches, heads, rows, width), (_, kv_heads, keys, _) = q.shape, k.shape
    blocks = KEY_GRADIENT[width]
    entry, held = REGISTERS[2]
    strip, strip_row, reach = _make_strip(call)
    with use_device(q):
        hopper_key_gradient_kernel[(kv_heads, batches, ceil_div(keys, 2 * GROUP_ROWS.value))](
            _describe(q, blocks.m), _describe(grad, blocks.m),
            _describe(k, GROUP_ROWS.value), _describe(v, GROUP_ROWS.value),
            strip, by_row, dk, dv, *dk.stride()[:3], *dv.stride()[:3],
            batches, heads, heads // kv_heads, rows, keys, by_row.shape[3], call.factor * LOG2E, call.factor,
            strip_row, reach, min(call.window or keys, keys),
            width, 2, blocks.m, blocks.stages, held,
            num_warps=4, maxnreg=entry,
        )  # fmt: skip


def _make_strip(call: Call) -> tuple[Tensor, int, int]:
    """The padded biases as in `launch.make_strip`, their stride by head, and reach; without bias a strip of reach 0."""
    if call.bias is None:
        return make_strip(call.q.new_zeros(1, 0, dtype=torch.float32)), 0, 0
    strip = make_strip(call.bias)
    return strip, strip.stride(0), call.bias.shape[1]


def _describe(x: Tensor, block: int) -> TensorDescriptor:
    shape = [1, 1, block, x.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(x, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))
