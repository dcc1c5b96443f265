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
from ..launch import can_describe, make_strip
from ..tiles import locate_key_tiles

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
    """Whether the kernels take a call, and tensors like q, on a device for which they are made."""
    q, k, v = call[:3]
    plain = call.slopes is None and call.kv_lengths is None and call.cu_seqlens is None and not call.renormalise
    made_for = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] == 9
    shaped = q.shape[3] in WIDTHS and q.shape[2] <= k.shape[2]
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
    shape = [1, 1, block, x.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(x, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))


@jit
def locate_item(item, batches, heads, rows, keys, window, reach, N: tl.constexpr):
    """Head, batch and first row of an item, the longest first, and its key tiles as `locate_key_tiles` gives them."""
    blocks = gl.cdiv(rows, ROWS)
    head = item % heads
    batch = item // heads % batches
    first = (blocks - 1 - item // heads // batches) * ROWS
    low, _, edge, near, tiles = locate_key_tiles(first, rows, item * 0, keys - rows, window, reach, ROWS, N)
    return head, batch, first, low, edge, near, tiles


@jit
def wait_turn(full, turn):
    """Wait until tile number `turn` has arrived; returns its place."""
    place = turn % full.type.shape[0]
    mbarrier.wait(full.index(place), (turn // full.type.shape[0]) & 1)
    return place


@jit
def copy_tile(rows, batch, head, first, tile_bufs, full, empty, turn):
    """Copy a tile into the place of number `turn` as soon as both groups have released it."""
    place = turn % full.type.shape[0]
    mbarrier.wait(empty.index(place), ((turn // full.type.shape[0]) & 1) ^ 1)
    mbarrier.expect(full.index(place), rows.block_type.nbytes)
    tma.async_copy_global_to_shared(rows, [batch, head, first, 0], full.index(place), tile_bufs.index(place))


@jit
def copy_rows(rows, batch, head, first, bufs, full, empty, number):
    """Copy the rows of item `number` of a program, each group's as soon as it has released those of the last item."""
    for each in gl.static_range(GROUPS):
        mbarrier.wait(empty.index(each), (number & 1) ^ 1)
        mbarrier.expect(full.index(each), rows.block_type.nbytes)
        tma.async_copy_global_to_shared(
            rows, [batch, head, first + each * GROUP_ROWS, 0], full.index(each), bufs.index(each)
        )
