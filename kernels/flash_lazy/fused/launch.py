"""Shared code of the kernel launches: arguments, block sizes, strides, buffers."""

import heapq
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ..call import Call
from . import configurations
from .configurations import Blocks
from .tiles import STRIP_PAD

LOG2E = 1.4426950408889634
TUNED_FOR = ("size", "group", "reach", "WIDTH", "THRESHOLD", "RENORMALISE", "SKIP")


def collect_shared_arguments(call: Call) -> dict[str, Any]:
    """Kernel arguments shared by forward and backward."""
    q, k, v = (ensure_32bit_offsets(x) for x in (call.q, call.k, call.v))
    batches, heads, rows, width = q.shape
    keys = k.shape[2]
    reach = 0 if call.bias is None else call.bias.shape[1]
    return {
        "q": q,
        "k": k,
        "v": v,
        "tau": call.tau.contiguous(),
        "strip": None if call.bias is None else make_strip(call.bias),
        "slopes": None if call.slopes is None else call.slopes * LOG2E,
        "kv_lengths": None if call.kv_lengths is None else call.kv_lengths.contiguous(),
        "cu_seqlens": None if call.cu_seqlens is None else call.cu_seqlens.contiguous(),
        "cu_seqlens_k": None if call.cu_seqlens_k is None else call.cu_seqlens_k.contiguous(),
        **name_strides("q", q),
        **name_strides("k", k),
        **name_strides("v", v),
        "batches": batches,
        "group": heads // k.shape[1],
        "rows": rows,
        "keys": keys,
        "documents": _count_documents(call),
        "second": batches * heads * rows,
        "scale": call.factor * LOG2E,
        "strip_row": reach + 2 * STRIP_PAD.value,
        "reach": reach,
        "window": None if call.window is None else min(call.window, keys),
        "context_length": call.context_length or 0,
        "entries": call.tau.shape[-1],
        "THRESHOLD": call.threshold,
        "RENORMALISE": call.renormalise,
        "SKIP": configurations.SKIP_EMPTY_TILES,
        "WIDTH": width,
        "BLOCK_D": max(16, next_power_of_2(width)),
        "UPCAST": configurations.INTERPRETED and q.dtype == torch.bfloat16,
    }


def launch(
    kernel: Any,
    call: Call,
    grid: Callable[[dict[str, Any]], tuple[int, ...]],
    arguments: dict[str, Any],
    listed: str | None = None,
) -> None:
    """Run a kernel with the first blocks of its list, or with AUTOTUNE the fastest at the first call of a size.

    listed: name of its list, by default the kernel's.
    """
    choices = configurations.list_choices(listed or kernel.__name__.removesuffix("_kernel"), call.q)
    if not all(can_describe(arguments[name]) for name in ("q", "k", "v", "grad") if name in arguments):
        choices = [blocks._replace(described=False) for blocks in choices]
    arguments = {name: value for name, value in arguments.items() if name in kernel.arg_names}

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:  # noqa: ARG001 - triton's interface
        return call.q.new_empty(size, dtype=torch.int8)

    def run() -> None:
        triton.set_allocator(allocate)
        if configurations.AUTOTUNE:
            _autotune(kernel, tuple(dict.fromkeys(choices)))[grid](**arguments, size=next_power_of_2(call.k.shape[2]))
        else:
            blocks = choices[0]
            meta = make_meta(kernel, blocks)
            options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
            kernel[grid(meta)](**arguments, size=0, **meta, **options)

    with use_device(call.q):
        copy_context().run(run)  # the allocator, memory for descriptors, is a context variable of the caller's


def make_meta(kernel: Any, blocks: Blocks) -> dict[str, Any]:
    meta = {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "DESCRIBED": blocks.described}
    return {name: value for name, value in meta.items() if name in kernel.arg_names}


@cache
def _autotune(kernel: Any, choices: tuple[Blocks, ...]) -> Any:
    configs = [
        triton.Config(make_meta(kernel, blocks), num_warps=blocks.warps, num_stages=blocks.stages) for blocks in choices
    ]
    key = [name for name in TUNED_FOR if name in kernel.arg_names]
    return triton.autotune(configs, key=key, cache_results=True)(kernel)


def _count_documents(call: Call) -> int:
    return 0 if call.cu_seqlens is None else len(call.cu_seqlens) - 1


def count_call_blocks(call: Call, length: int, block: int) -> int:
    if call.cu_seqlens is not None:
        return length // block + _count_documents(call)
    return ceil_div(length, block)


def ceil_div(length: int, block: int) -> int:
    return -(-length // block)


def next_power_of_2(length: int) -> int:
    return 1 << (length - 1).bit_length()


def count_resident_programs(x: Tensor) -> int:
    """Number of programs that are resident on a device."""
    if x.device.type != "cuda":
        return configurations.INTERPRETED_RESIDENT
    return configurations.RESIDENT_PER_PROCESSOR * count_processors(x)


def count_processors(x: Tensor) -> int:
    """Number of multiprocessors of x's GPU."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count


@cache
def balance_programs(slots: int, kv_heads: int, costs: tuple[int, ...]) -> int:
    """Number of programs per kv head that minimises the makespan of items with these costs on a device with `slots`.

    A program takes every n-th item. The candidates are slots per head, rounded down or up, and multiples of it; the
    best depends on the distribution of costs. Slightly more programs than slots can take twice as long, since the last
    start when all others are done; many more are balanced, but each needs a partial gradient of the bias.
    """
    per_head = slots / kv_heads
    counts = {int(per_head), math.ceil(per_head), *(int(factor * per_head) for factor in (2, 3, 4))}
    candidates = sorted({min(max(1, count), len(costs)) for count in counts})
    return min(candidates, key=lambda count: makespan(count, slots, kv_heads, costs))


@cache
def makespan(programs: int, slots: int, kv_heads: int, costs: tuple[int, ...]) -> int:
    """End time of the last of `programs` per kv head; each starts in a free slot, the first of all heads first."""
    loads = [sum(costs[first::programs]) for first in range(programs)]
    free = [0] * min(slots, programs * kv_heads)
    for load in loads:
        for _ in range(kv_heads):
            heapq.heapreplace(free, free[0] + load)
    return max(free)


def make_strip(bias: Tensor) -> Tensor:
    """Biases times log2(e) by distance, `[H, PAD + W + PAD]`: -inf at negative distances, 0 from W on."""
    pad = STRIP_PAD.value
    strip = bias.new_full((bias.shape[0], bias.shape[1] + 2 * pad), -torch.inf)
    torch.mul(bias, LOG2E, out=strip[:, pad:-pad])
    strip[:, -pad:] = 0
    return strip


def name_strides(name: str, x: Tensor, with_columns: bool = True) -> dict[str, int]:
    letters = "bhld" if with_columns else "bhl"
    return {f"stride_{name}{letter}": x.stride(axis) for axis, letter in enumerate(letters)}


def can_describe(x: Tensor) -> bool:
    """Whether a tensor descriptor can stand for the rows of x: 16-byte steps, on a device that loads tiles by them."""
    steps = (
        (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])) if x.device.type != "meta" else ()
    )
    aligned = x.stride(-1) == 1 and all(step % 16 == 0 for step in steps)
    return x.element_size() == 2 and aligned and loads_by_descriptor(x.device)


def loads_by_descriptor(device: torch.device) -> bool:
    """Whether a device has an engine that copies tiles: Hopper and later. Elsewhere triton takes them apart again."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def ensure_32bit_offsets(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if offsets within a tile would exceed 32 bits.

    Offsets of tiles are always computed in 64 bits.
    """
    return x.contiguous() if max(x.stride()[2:]) * configurations.MAX_BLOCK >= 2**31 else x


def allocate_like(x: Tensor) -> Tensor:
    """Empty tensor like x, in its layout if the kernels can write it (contiguous rows, 32-bit offsets)."""
    result = torch.empty_like(x)
    if result.stride(-1) == 1 and ensure_32bit_offsets(result) is result:
        return result
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def none_if_empty(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def use_device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
