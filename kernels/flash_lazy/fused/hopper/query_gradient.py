"""The kernel of dq for Hopper, in Gluon.

It computes what `backward.query_gradient_kernel` does for the calls that the forward kernel for Hopper covers, without
the gradient of the log-sum-exp, and skips no tile.
"""

import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...call import Call
from ..launch import LOG2E, count_processors, use_device
from ..tiles import (
    EDGE,
    PLAIN,
    STRIP_PAD,
    compute_exponentials,
    is_positive,
    load_softmax,
    load_thresholds,
    place_scores,
    store_by_row,
)
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

CONFIGURATIONS = {64: HopperTiles(64, 8), 128: HopperTiles(32, 16)}
"""Configurations by head width."""


@jit
def _copy_tiles(q_rows, grad_rows, k_rows, v_rows, shared, sizes, N: tl.constexpr):
    """The copying warp: per item q and the output's gradient, then its keys and values in turn."""
    q_bufs, q_full, q_empty, grad_bufs, grad_full, grad_empty, tile_bufs, full, empty = shared
    group, documents = sizes[2], sizes[9]
    turn = 0
    for item in range(gl.program_id(0), count_program_items(sizes), gl.num_programs(0)):
        head, batch, first, _, _, _, low, high, _, _, tiles = locate_item(item, sizes, N)
        number = (item - gl.program_id(0)) // gl.num_programs(0)
        copy_rows(q_rows, batch, head, first, q_bufs, q_full, q_empty, number)
        copy_rows(grad_rows, batch, head, first, grad_bufs, grad_full, grad_empty, number)
        for tile in range(tiles):
            copy_tile(k_rows, batch, head // group, low + tile * N, high, documents, tile_bufs, full, empty, turn)
            copy_tile(v_rows, batch, head // group, low + tile * N, high, documents, tile_bufs, full, empty, turn + 1)
            turn += 2


@jit
def _multiply(
    tensors, shared, sizes, others,
    D: tl.constexpr, N: tl.constexpr, THRESHOLD: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One group: dq of its 64 rows, and what `by_row` and `survivors` say of them."""
    tau, strip, softmax, dq, by_row, survivors = tensors
    q_bufs, q_full, q_empty, grad_bufs, grad_full, grad_empty, tile_bufs, full, empty = shared
    heads, rows, window, reach = sizes[1], sizes[3], sizes[5], sizes[6]
    stride_dqb, stride_dqh, stride_dql, second, scale, natural_scale, strip_row, context_length, entries = others
    s_layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    w_layout: tl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: tl.constexpr = gl.SliceLayout(1, s_layout)
    column = gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))
    line = GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=row_layout)
    zeros = gl.zeros([GROUP_ROWS, N], gl.float32, s_layout)
    dtype: tl.constexpr = dq.dtype.element_ty
    turn = 0
    for item in tl.range(gl.program_id(0), count_program_items(sizes), gl.num_programs(0), disable_licm=True):
        head, batch, first, end, start, shift, low, _, edge, near, tiles = locate_item(item, sizes, N)
        number = (item - gl.program_id(0)) // gl.num_programs(0)
        row = first + line
        own = row + shift
        head_strip = strip + head.to(gl.int64) * strip_row + STRIP_PAD
        row_index = (batch.to(gl.int64) * heads + head) * rows + row
        top, total, share = load_softmax(softmax, second, row_index, row < end)
        theta = load_thresholds(tau, head, own, start, window, context_length, entries, THRESHOLD)
        cut = gl.where(row < end, theta * total, float("inf"))
        mbarrier.wait(q_full.index(GROUP), number & 1)
        mbarrier.wait(grad_full.index(GROUP), number & 1)
        query = q_bufs.index(GROUP).reshape([GROUP_ROWS, D])
        gradient = grad_bufs.index(GROUP).reshape([GROUP_ROWS, D])

        surviving = gl.zeros([GROUP_ROWS, D], gl.float32, o_layout)
        attended = gl.zeros([GROUP_ROWS, D], gl.float32, o_layout)
        row_delta = gl.zeros([GROUP_ROWS], gl.float32, row_layout)
        row_survivors = gl.zeros([GROUP_ROWS], gl.float32, row_layout)
        for KIND in gl.static_range(3):
            for tile in tl.range(
                0 if KIND == EDGE else (edge if KIND == PLAIN else near),
                edge if KIND == EDGE else (near if KIND == PLAIN else tiles),
                disable_licm=True,
            ):
                key_place = wait_turn(full, turn)
                key = tile_bufs.index(key_place).reshape([N, D])
                s = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
                value_place = wait_turn(full, turn + 1)
                value = tile_bufs.index(value_place).reshape([N, D])
                dp = warpgroup_mma(gradient, value.permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
                s, factor = place_scores(
                    s, (own - low - tile * N)[:, None], column[None, :], scale, head_strip, reach, None, window, KIND
                )
                e = compute_exponentials(s, factor, top[:, None])
                weights = gl.convert_layout(e.to(dtype), w_layout)
                attended = warpgroup_mma(weights, key, attended, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                mbarrier.arrive(empty.index(value_place), count=1)
                dp = gl.where(is_positive(s, e, cut[:, None], KIND), dp, 0.0)
                row_survivors += gl.sum(dp, 1)
                dp = e * dp
                row_delta += gl.sum(dp, 1)
                weights = gl.convert_layout(dp.to(dtype), w_layout)
                surviving = warpgroup_mma(weights, key, surviving, is_async=True)
                attended = warpgroup_mma_wait(0, deps=(attended,))
                surviving = warpgroup_mma_wait(0, deps=(surviving,))
                mbarrier.arrive(empty.index(key_place), count=1)
                turn += 2
        mbarrier.arrive(q_empty.index(GROUP), count=1)
        mbarrier.arrive(grad_empty.index(GROUP), count=1)

        row_delta *= share
        out_layout: tl.constexpr = gl.SliceLayout(1, o_layout)
        result = surviving - gl.convert_layout(row_delta, out_layout)[:, None] * attended
        result *= gl.convert_layout(share * natural_scale, out_layout)[:, None]
        out_row = first + GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=out_layout)
        pointers = dq + batch.to(gl.int64) * stride_dqb + head.to(gl.int64) * stride_dqh
        pointers += out_row.to(gl.int64)[:, None] * stride_dql
        pointers += gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))[None, :]
        gl.store(pointers, result.to(dtype), mask=(out_row < end)[:, None])
        store_by_row(by_row, survivors, second, row_index, row < end, top, cut, share, row_delta, row_survivors)


@jit
def hopper_query_gradient_kernel(
    q_rows, grad_rows, k_rows, v_rows, tau, strip, softmax, dq, by_row, survivors, stride_dqb, stride_dqh, stride_dql,
    batches, heads, group, rows, keys, second, scale, natural_scale, strip_row, reach, window, context_length, entries,
    cu_seqlens, cu_seqlens_k, documents,
    D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dq of all rows, by_row and survivors as `query_gradient_kernel`, by resident programs of 128 rows."""
    dtype: tl.constexpr = dq.dtype.element_ty
    q_bufs = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, GROUP_ROWS, D], q_rows.layout)
    grad_bufs = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, GROUP_ROWS, D], grad_rows.layout)
    tile_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_rows.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    grad_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    grad_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(each), count=1)
        mbarrier.init(q_empty.index(each), count=1)
        mbarrier.init(grad_full.index(each), count=1)
        mbarrier.init(grad_empty.index(each), count=1)
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=GROUPS)
    shared = (q_bufs, q_full, q_empty, grad_bufs, grad_full, grad_empty, tile_bufs, full, empty)
    sizes = (batches, heads, group, rows, keys, window, reach, cu_seqlens, cu_seqlens_k, documents)
    tensors = (tau, strip, softmax, dq, by_row, survivors)
    others = (stride_dqb, stride_dqh, stride_dql, second, scale, natural_scale, strip_row, context_length, entries)
    gl.warp_specialize(
        [
            (_multiply, (tensors, shared, sizes, others, D, N, THRESHOLD, 0)),
            (_multiply, (tensors, shared, sizes, others, D, N, THRESHOLD, 1)),
            (_copy_tiles, (q_rows, grad_rows, k_rows, v_rows, shared, sizes, N)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def compute_query_gradient(
    call: Call, grad: Tensor, softmax: Tensor, dq: Tensor, by_row: Tensor, survivors: Tensor
) -> None:
    """Fill dq, by_row `[4, B, H, Lq]` and survivors `[B, H, Lq]`."""
    q, k, v = call[:3]
    (batches, heads, rows, width), keys = q.shape, k.shape[2]
    blocks = CONFIGURATIONS[width]
    strip, strip_row, reach = pad_bias(call)
    with use_device(q):
        hopper_query_gradient_kernel[(min(count_processors(q), count_items(call)),)](
            *(describe(x, GROUP_ROWS.value) for x in (q, grad)), *(describe_keys(call, x, blocks.n) for x in (k, v)),
            call.tau.contiguous(), strip, softmax, dq, by_row, survivors, *dq.stride()[:3],
            batches, heads, heads // k.shape[1], rows, keys, batches * heads * rows, call.factor * LOG2E, call.factor,
            strip_row, reach, min(call.window or keys, keys), call.context_length or 0, call.tau.shape[-1],
            *collect_documents(call),
            width, blocks.n, blocks.stages, call.threshold, REGISTERS,
            num_warps=4, maxnreg=ENTRY_REGISTERS,
        )  # fmt: skip
