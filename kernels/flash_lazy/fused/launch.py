"""Arguments, grids and buffers of the Triton kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from flash_lazy.fused import configurations
from flash_lazy.fused.backward import key_gradient_kernel, query_gradient_kernel
from flash_lazy.fused.configurations import Blocks
from flash_lazy.fused.decode import decode_scores_kernel, decode_values_kernel
from flash_lazy.fused.forward import forward_kernel
from flash_lazy.fused.tiles import STRIP_PAD
from flash_lazy.inputs import Call

KERNELS: dict[str, Any] = {
    "forward": forward_kernel,
    "query_gradient": query_gradient_kernel,
    "key_gradient": key_gradient_kernel,
    "decode_scores": decode_scores_kernel,
    "decode_values": decode_values_kernel,
}
DECODING = ("decode_scores", "decode_values")
"""The kernels that have blocks of their own; those of the others are chosen from configurations.CONFIGURATIONS."""
LOG2E = 1.4426950408889634


def forward(call: Call, training: bool, stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output; maximum (base 2) and sum of each row `[2, B, H, Lq]`; mass times sum, first weight, zeros `[B, H, Lq]`.

    All but the output are empty unless they are needed.
    """
    q = call.q
    batches, heads, rows, _ = q.shape
    out, softmax, mass, first_weight, zeros = forward_buffers(call, training, stats)
    choices = configurations.choices("forward", q)
    columns = call.k.shape[2]
    if call.window is not None:
        columns = min(columns, call.window + max(blocks.m for blocks in choices))
    alive_row = max(_ceil(columns, blocks.n) for blocks in choices)
    maxima_row = max(_ceil(columns, blocks.n) * blocks.m for blocks in choices)
    most = max(_block_count(call, rows, blocks.m) for blocks in choices) * batches * heads
    resident = min(_resident(q), most)
    arguments = {
        **_shared(call),
        "out": out,
        "softmax": _unless_empty(softmax),
        "mass": _unless_empty(mass),
        "first_weight": _unless_empty(first_weight),
        "zeros": _unless_empty(zeros),
        "maxima": q.new_empty(resident * maxima_row, dtype=torch.float32),
        "alive_tiles": q.new_empty(resident * alive_row, dtype=torch.int32),
        **_strides("o", out, with_columns=False),
        "heads": heads,
        "maxima_row": maxima_row,
        "alive_row": alive_row,
        "STATS": stats,
    }
    _launch("forward", call, lambda _: (resident,), arguments)
    return out, softmax, mass, first_weight, zeros


def forward_buffers(call: Call, training: bool, stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `forward` returns, not filled in yet."""
    q = call.q

    def rows(wanted: bool) -> Tensor:
        return q.new_empty(q.shape[:3] if wanted else 0, dtype=torch.float32)

    softmax = q.new_empty((2, *q.shape[:3]) if training or stats else 0, dtype=torch.float32)
    return like(q), softmax, rows(stats or (training and call.renormalise)), rows(stats), rows(stats)


def backward(
    call: Call,
    out: Tensor | None,
    grad: Tensor,
    softmax: Tensor,
    mass: Tensor,
    bias_gradient: bool,
    slopes_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, `survivors` `[B, H, Lq]` (d tau but for its factor), and those of bias and slopes."""
    dq, dk, dv, survivors, dbias, dslopes = backward_buffers(call, bias_gradient, slopes_gradient)
    grad = near(grad)
    shared = {
        **_shared(call),
        "grad": grad,
        "softmax": softmax,
        "mass": _unless_empty(mass),
        "delta": torch.empty_like(survivors),
        "correction": torch.empty_like(survivors) if call.renormalise else None,
        **_strides("g", grad),
        "natural_scale": call.factor,
    }
    _query_gradient(call, shared, grad if out is None else out, dq, survivors)
    _key_gradient(call, shared, dk, dv, dbias, dslopes)
    return dq, dk, dv, survivors, dbias, dslopes


def _query_gradient(call: Call, shared: dict[str, Any], out: Tensor, dq: Tensor, survivors: Tensor) -> None:
    """Fills dq, survivors, and of the shared arguments delta and correction. out is read to renormalise alone."""
    batches, heads, rows, _ = call.q.shape
    arguments = {
        **shared,
        "out": out if call.renormalise else None,
        "dq": dq,
        "survivors": survivors,
        **_strides("o", out, with_columns=False),
        **_strides("dq", dq, with_columns=False),
        "heads": heads,
    }

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (_block_count(call, rows, meta["BLOCK_M"]) * batches * heads,)

    _launch("query_gradient", call, grid, arguments)


def _key_gradient(call: Call, shared: dict[str, Any], dk: Tensor, dv: Tensor, dbias: Tensor, dslopes: Tensor) -> None:
    """Fills dk and dv, and dbias and dslopes where they are not empty."""
    q, (batches, kv_heads, keys, _) = call.q, call.k.shape
    choices = configurations.choices("key_gradient", q)
    most = max(_block_count(call, keys, blocks.n) for blocks in choices) * batches
    programs = min(_ceil(_resident(q), kv_heads), most)
    # Sums of each program, added up afterwards in a fixed order.
    partial_bias, partial_slopes = (x.new_empty(programs, *x.shape) if x.numel() else None for x in (dbias, dslopes))
    arguments = {
        **shared,
        "dk": dk,
        "dv": dv,
        "dbias": partial_bias,
        "dslopes": partial_slopes,
        **_strides("dk", dk, with_columns=False),
        **_strides("dv", dv, with_columns=False),
        "kv_heads": kv_heads,
    }
    _launch("key_gradient", call, lambda _: (programs, kv_heads), arguments)
    for partial, total in ((partial_bias, dbias), (partial_slopes, dslopes)):
        if partial is not None:
            torch.sum(partial, 0, out=total)


def backward_buffers(
    call: Call, bias_gradient: bool, slopes_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `backward` returns, not filled in yet; what is not asked for is empty."""
    q, bias = call.q, call.bias
    survivors = q.new_empty(q.shape[:3], dtype=torch.float32)
    dbias = q.new_empty(bias.shape if bias is not None and bias_gradient else 0, dtype=torch.float32)
    dslopes = q.new_empty(q.shape[1] if slopes_gradient else 0, dtype=torch.float32)
    return like(q), like(call.k), like(call.v), survivors, dbias, dslopes


def decode(call: Call) -> Tensor:
    """The output of a few queries: keys are split over programs and read once, values only where a weight survives."""
    q, (batches, kv_heads, keys, _) = call.q, call.k.shape
    _, heads, rows, width = q.shape
    seen = keys if call.window is None else min(keys, call.window + rows - 1)
    block = configurations.DECODE_BLOCK
    span = max(4 * block, _power(_ceil(seen * batches * kv_heads, 2 * _resident(q))))
    splits = _ceil(seen, span)
    tops, totals, masses = (q.new_empty(batches, heads, rows, splits, dtype=torch.float32) for _ in range(3))
    parts = q.new_empty(batches, heads, rows, splits, width, dtype=torch.float32)
    arguments = {
        **_shared(call),
        "scores": q.new_empty(batches, heads, rows, keys, dtype=torch.float32),
        "tops": tops,
        "totals": totals,
        "parts": parts,
        "masses": masses,
        "heads": heads,
        "splits": splits,
        "SPLITS": _power(splits),
        "SPAN": span,
        "BLOCK_M": max(16, _power(rows * heads // kv_heads)),
        "BLOCK_N": block,
    }
    with _on(q):
        for name in DECODING:
            kernel = KERNELS[name]
            chosen = {argument: arguments[argument] for argument in kernel.arg_names}
            kernel[splits, kv_heads, batches](**chosen, num_warps=4, num_stages=2)
    out = parts.sum(3)
    if call.renormalise:
        mass = masses.sum(3)
        out = out / torch.where(mass > 0, mass, 1)[..., None]
    return like(q).copy_(out)


def _shared(call: Call) -> dict[str, Any]:
    """Kernel arguments that forward and backward have in common."""
    q, k, v = (near(x) for x in (call.q, call.k, call.v))
    batches, heads, rows, width = q.shape
    keys = k.shape[2]
    reach = 0 if call.bias is None else call.bias.shape[1]
    return {
        "q": q,
        "k": k,
        "v": v,
        "tau": call.tau.contiguous(),
        "strip": _strip(call.bias),
        "slopes": None if call.slopes is None else call.slopes * LOG2E,
        "kv_lengths": None if call.kv_lengths is None else call.kv_lengths.contiguous(),
        "cu_seqlens": None if call.cu_seqlens is None else call.cu_seqlens.contiguous(),
        **_strides("q", q),
        **_strides("k", k),
        **_strides("v", v),
        "batches": batches,
        "group": heads // k.shape[1],
        "rows": rows,
        "keys": keys,
        "documents": _document_count(call),
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
        "BLOCK_D": max(16, _power(width)),
        "UPCAST": configurations.INTERPRETED and q.dtype == torch.bfloat16,
    }


def _launch(
    name: str, call: Call, grid: Callable[[dict[str, Any]], tuple[int, ...]], arguments: dict[str, Any]
) -> None:
    """Runs a kernel with the blocks that its list, and the first call's timing, hold best."""
    choices = configurations.choices(name, call.q)
    with _on(call.q):
        if configurations.AUTOTUNE:
            _autotuned(name, tuple(choices))[grid](**arguments, size=_power(call.k.shape[2]))
        else:
            blocks = choices[0]
            meta = {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n}
            options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
            KERNELS[name][grid(meta)](**arguments, size=0, **meta, **options)


@cache
def _autotuned(name: str, choices: tuple[Blocks, ...]) -> Any:
    configs = [
        triton.Config({"BLOCK_M": blocks.m, "BLOCK_N": blocks.n}, num_warps=blocks.warps, num_stages=blocks.stages)
        for blocks in choices
    ]
    key = ["size", "group", "WIDTH", "THRESHOLD", "RENORMALISE"]
    return triton.autotune(configs, key=key, cache_results=True)(KERNELS[name])


def _document_count(call: Call) -> int:
    """Documents of a packed sequence."""
    return 0 if call.cu_seqlens is None else len(call.cu_seqlens) - 1


def _block_count(call: Call, length: int, block: int) -> int:
    if call.cu_seqlens is not None:
        return length // block + _document_count(call)
    return _ceil(length, block)


def _ceil(length: int, block: int) -> int:
    return -(-length // block)


def _power(length: int) -> int:
    """The least power of two that is not below."""
    return 1 << (length - 1).bit_length()


def _resident(x: Tensor) -> int:
    """Programs that a device is given at a time."""
    if x.device.type != "cuda":
        return configurations.INTERPRETED_RESIDENT
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    return configurations.RESIDENT_PER_PROCESSOR * processors


def _strip(bias: Tensor | None) -> Tensor | None:
    """Biases times log2(e) by distance, `[H, PAD + W + PAD]`: -inf before distance 0 and 0 from W on."""
    if bias is None:
        return None
    pad = STRIP_PAD.value
    strip = torch.nn.functional.pad(bias * LOG2E, (pad, pad))
    strip[:, :pad] = -torch.inf
    return strip


def _strides(name: str, x: Tensor, with_columns: bool = True) -> dict[str, int]:
    letters = "bhld" if with_columns else "bhl"
    return {f"stride_{name}{letter}": x.stride(axis) for axis, letter in enumerate(letters)}


def near(x: Tensor) -> Tensor:
    """x, or a copy where the rows of a tile lie too far apart for the kernels' offsets of 32 bits within a tile.

    Where a tile begins is always computed in 64 bits.
    """
    return x.contiguous() if max(x.stride()[2:]) * configurations.MOST_ROWS >= 2**31 else x


def like(x: Tensor) -> Tensor:
    """An empty tensor in the layout of x where the kernels can write it: contiguous rows, not too far apart."""
    result = torch.empty_like(x)
    if result.stride(-1) == 1 and near(result) is result:
        return result
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _unless_empty(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def _on(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
