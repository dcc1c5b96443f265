"""What the kernels for Hopper share: items of 128 rows, a ring of copied tiles, and the calls that they cover.

One warp copies tiles to shared memory, two groups of four multiply 64 rows each. Geometry, masks and thresholds are
those of `tiles`. Gluon has no interpreter, so only a GPU runs these kernels.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...call import Call
from .. import configurations
from ..launch import can_describe, count_call_blocks, make_strip
from ..tiles import count_blocks, locate_block, locate_key_tiles

# The types of Python do not apply to what Gluon compiles.
jit: Any = gluon.jit
gl: Any = language

GROUPS = tl.constexpr(2)
GROUP_ROWS = tl.constexpr(64)
"""Rows of a group of four warps: those of one wgmma instruction."""
ROWS = tl.constexpr(128)
"""Rows of an item."""
ENTRY_REGISTERS, REGISTERS = 168, 240
"""Registers of a thread on entry, 65,536 over 12 warps, and of one that multiplies."""


class HopperTiles(NamedTuple):
    """A configuration: keys of a tile, tiles in flight."""

    n: int
    stages: int


WIDTHS = (64, 128)
"""Head widths."""


def covers(call: Call, *others: Tensor) -> bool:
    """Whether the kernels take a call, and tensors like q, on a device for which they are made.

    Documents of queries and keys too: each has at least as many keys as rows, so every row has a key.
    """
    q, k, v = call[:3]
    plain = call.slopes is None and call.kv_lengths is None and not call.renormalise
    plain &= call.cu_seqlens is None or configurations.HOPPER_DOCUMENTS
    made_for = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] == 9
    shaped = q.shape[3] in WIDTHS and 0 < q.shape[2] <= k.shape[2]
    return made_for and plain and shaped and all(map(_can_copy, (q, k, v, *others)))


def _can_copy(x: Tensor) -> bool:
    return can_describe(x) and min(x.stride()) > 0  # an expanded tensor has a step of 0


def pad_bias(call: Call) -> tuple[Tensor, int, int]:
    """The padded biases as in `launch.make_strip`, their stride by head, and reach; without bias a strip of reach 0."""
    if call.bias is None:
        return make_strip(call.q.new_zeros(1, 0, dtype=torch.float32)), 0, 0
    strip = make_strip(call.bias)
    return strip, strip.stride(0), call.bias.shape[1]


def describe(x: Tensor, block: int) -> TensorDescriptor:
    shape, layout = _choose_tile(x, block)
    return TensorDescriptor.from_tensor(x, shape, layout)


def describe_keys(call: Call, x: Tensor, block: int) -> TensorDescriptor:
    """Of keys or values: `describe`, or with documents what reads 0 from any row on, see `copy_tile`.

    A packed tensor `[1, H, L, D]` becomes `[H, L + 1, block, D]`, two axes with the step of a row: `[h, e, r]` is row
    e - block + r of head h. What lies beyond r = block - 1 is read as 0, so a tile of rows up to e ends there. The
    address is block rows below x, where no tile begins.
    """
    if call.cu_seqlens is None:
        return describe(x, block)
    _, heads, length, width = x.shape
    _, stride_h, stride_l, _ = x.stride()
    shape = [heads, length + 1, block, width]
    return TensorDescriptor(_Below(x, block), shape, [stride_h, stride_l, stride_l, 1], *_choose_tile(x, block))


class _Below:
    """What a descriptor asks of a tensor, for the address some rows below x."""

    def __init__(self, x: Tensor, rows: int) -> None:
        self.dtype = x.dtype
        self._address = x.data_ptr() - rows * x.stride(2) * x.element_size()

    def data_ptr(self) -> int:
        return self._address


def _choose_tile(x: Tensor, block: int) -> tuple[list[int], Any]:
    """Shape and layout of a tile in shared memory."""
    shape = [1, 1, block, x.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return shape, gl.NVMMASharedLayout.get_default_for(shape, dtype)


def collect_documents(call: Call) -> tuple[Tensor | None, Tensor | None, int | None]:
    """The last of the kernels' `sizes`; all None without documents, so that nothing of them is compiled."""
    if call.cu_seqlens is None:
        return None, None, None
    key_ends = None if call.cu_seqlens_k is None else call.cu_seqlens_k.contiguous()
    return call.cu_seqlens.contiguous(), key_ends, len(call.cu_seqlens) - 1


def count_items(call: Call) -> int:
    return count_call_blocks(call, call.q.shape[2], ROWS.value) * call.q.shape[0] * call.q.shape[1]


@jit
def count_program_items(sizes):
    """End of the items of all programs; program p takes p and every `num_programs`-th after it."""
    batches, heads, _, rows, _, _, _, cu_seqlens, _, documents = sizes
    return count_blocks(rows, cu_seqlens, documents, ROWS) * batches * heads


@jit
def locate_item(item, sizes, N: tl.constexpr):
    """Head, batch, first row, end of rows, document's first key and own - row of an item, the longest first; then its
    key tiles as `locate_key_tiles` gives them.

    With documents some items have no row. They get one tile of zeros, at the position of their first row, because a
    program counts on a tile in every item; nothing of it is stored. Rows beyond the end of an item are those of the
    next document; they reach no other row, and are not stored either.
    """
    batches, heads, _, rows, keys, window, reach, cu_seqlens, cu_seqlens_k, documents = sizes
    head = item % heads
    batch = item // heads % batches
    index = count_blocks(rows, cu_seqlens, documents, ROWS) - 1 - item // heads // batches
    if cu_seqlens is None:  # what `locate_block` gives, in the order that compiles to the fewest instructions
        first = index * ROWS
        end = rows
        start = item * 0
        shift = keys - rows
    else:
        first, end, start, shift, _ = locate_block(
            index, batch, rows, keys, None, cu_seqlens, cu_seqlens_k, documents, False, ROWS
        )
    low, high, edge, near, tiles = locate_key_tiles(first, end, start, shift, window, reach, ROWS, N)
    if cu_seqlens is not None:
        low = gl.where(tiles == 0, first + shift, low)
        high = gl.where(tiles == 0, low, high)
        tiles = gl.maximum(tiles, 1)
    return head, batch, first, end, start, shift, low, high, edge, near, tiles


@jit
def wait_turn(full, turn):
    """Wait until tile number `turn` has arrived; returns its place."""
    place = turn % full.type.shape[0]
    mbarrier.wait(full.index(place), (turn // full.type.shape[0]) & 1)
    return place


@jit
def copy_tile(rows, batch, head, first, end, documents, tile_bufs, full, empty, turn):
    """Copy a tile into the place of number `turn` as soon as both groups have released it.

    With documents, zeros are copied from `end` on, that of the item's keys (`describe_keys`). Otherwise NaN in the next
    document would reach this one, in scores that are then hidden and as 0 times NaN in sums.
    """
    place = turn % full.type.shape[0]
    mbarrier.wait(empty.index(place), ((turn // full.type.shape[0]) & 1) ^ 1)
    mbarrier.expect(full.index(place), rows.block_type.nbytes)
    if documents is None:
        tma.async_copy_global_to_shared(rows, [batch, head, first, 0], full.index(place), tile_bufs.index(place))
    else:
        block: tl.constexpr = rows.block_type.shape[2]
        stop = gl.minimum(end, first + block)
        at = [head, stop, first + block - stop, 0]
        tma.async_copy_global_to_shared(rows, at, full.index(place), tile_bufs.index(place))


@jit
def copy_rows(rows, batch, head, first, bufs, full, empty, number):
    """Copy the rows of item `number` of a program, each group's as soon as it has released those of the last item."""
    for each in gl.static_range(GROUPS):
        mbarrier.wait(empty.index(each), (number & 1) ^ 1)
        mbarrier.expect(full.index(each), rows.block_type.nbytes)
        tma.async_copy_global_to_shared(
            rows, [batch, head, first + each * GROUP_ROWS, 0], full.index(each), bufs.index(each)
        )
