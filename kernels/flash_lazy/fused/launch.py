"""Block sizes, grids and buffers of the Triton kernels."""

import os
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_lazy.fused import kernels
from flash_lazy.fused.ops import INTERPRETED

AUTOTUNE = os.environ.get("FLASH_LAZY_AUTOTUNE", "1") != "0" and not INTERPRETED
SKIP_EMPTY_TILES = True
"""Whether products of tiles without a surviving weight are left out; the result is the same to the bit."""
LOG2E = 1.4426950408889634
RESIDENT_PER_PROCESSOR = 2
INTERPRETED_RESIDENT = 3
DECODE_BLOCK = 64
MOST_ROWS = 256
"""At least the rows, and the columns, of a tile of any configuration."""


class Blocks(NamedTuple):
    """One configuration of a kernel."""

    m: int
    n: int
    warps: int
    stages: int


# By kernel, bytes of an element, and the width up to which a list holds. The first of a list is the default: for half
# precision the largest blocks that spill no registers in a loop on sm_90 (docs/results/kernels/compiled.md).
CONFIGURATIONS: dict[str, dict[int, dict[int, list[Blocks]]]] = {
    "forward": {
        2: {
            64: [Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 3), Blocks(128, 128, 8, 2)],
            128: [Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(128, 128, 8, 2)],
            256: [Blocks(64, 32, 8, 1), Blocks(32, 64, 8, 2), Blocks(64, 64, 8, 2)],
        },
        4: {
            64: [Blocks(32, 32, 8, 1), Blocks(64, 32, 8, 1)],
            128: [Blocks(16, 32, 8, 1), Blocks(32, 32, 8, 1)],
            256: [Blocks(16, 16, 8, 1)],
        },
    },
    "query_gradient": {
        2: {
            64: [Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 3), Blocks(64, 64, 8, 2)],
            128: [Blocks(128, 32, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 32, 8, 2)],
            256: [Blocks(32, 32, 8, 2), Blocks(32, 64, 8, 1), Blocks(64, 32, 8, 1)],
        },
        4: {
            64: [Blocks(64, 32, 8, 1), Blocks(32, 32, 4, 1)],
            128: [Blocks(16, 32, 8, 1), Blocks(32, 16, 8, 1)],
            256: [Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)],
        },
    },
    "key_gradient": {
        2: {
            64: [Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 2)],
            128: [Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1), Blocks(32, 64, 8, 2)],
            256: [Blocks(32, 32, 8, 1), Blocks(32, 64, 8, 1), Blocks(32, 32, 4, 1)],
        },
        4: {
            64: [Blocks(32, 32, 8, 1), Blocks(32, 32, 4, 1)],
            128: [Blocks(16, 32, 8, 1), Blocks(32, 32, 8, 1)],
            256: [Blocks(16, 16, 8, 1)],
        },
    },
}


class Call(NamedTuple):
    """The arguments that every kernel of one call shares; shapes as in `lazy_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    tau: Tensor
    bias: Tensor | None
    slopes: Tensor | None
    cu_seqlens: Tensor | None
    kv_lengths: Tensor | None
    threshold: str
    context_length: int
    renormalise: bool
    scale: float
    window: int | None

    def shared(self) -> dict[str, Any]:
        """Kernel arguments that forward and backward have in common."""
        reach = 0 if self.bias is None else self.bias.shape[1]
        q, k, v = (near(x) for x in (self.q, self.k, self.v))
        return {
            "q": q,
            "k": k,
            "v": v,
            "tau": self.tau.contiguous(),
            "strip": _strip(self.bias),
            "slopes": None if self.slopes is None else self.slopes * LOG2E,
            "kv_lengths": None if self.kv_lengths is None else self.kv_lengths.contiguous(),
            "cu_seqlens": None if self.cu_seqlens is None else self.cu_seqlens.contiguous(),
            **_strides("q", q),
            **_strides("k", k),
            **_strides("v", v),
            "group": self.q.shape[1] // self.k.shape[1],
            "rows": self.q.shape[2],
            "keys": self.k.shape[2],
            "scale": self.scale * LOG2E,
            "strip_row": reach + 2 * kernels.STRIP_PAD.value,
            "reach": reach,
            "window": None if self.window is None else min(self.window, self.k.shape[2]),
            "context_length": self.context_length,
            "entries": self.tau.shape[-1],
            "THRESHOLD": self.threshold,
            **self.tile(),
        }

    def tile(self) -> dict[str, Any]:
        """Compile-time sizes of a row of q, k or v."""
        width = self.q.shape[3]
        upcast = INTERPRETED and self.q.dtype == torch.bfloat16
        return {"WIDTH": width, "BLOCK_D": max(16, _power(width)), "UPCAST": upcast}

    def documents(self) -> int:
        """Documents of a packed sequence."""
        return 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def launch(self, name: str, grid: Any, arguments: dict[str, Any]) -> None:
        """Runs a kernel with the blocks that its list, and the first call's timing, hold best."""
        kernel = getattr(kernels, f"{name}_kernel")
        choices = configurations(name, self.q)
        with _on(self.q):
            if AUTOTUNE:
                size = _power(self.k.shape[2])
                _autotuned(name, tuple(choices))[grid](**arguments, size=size)
            else:
                blocks = choices[0]
                meta = {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n}
                kernel[grid(meta)](**arguments, size=0, **meta, num_warps=blocks.warps, num_stages=blocks.stages)


def configurations(name: str, q: Tensor) -> list[Blocks]:
    """The stated list of a kernel for rows like q's."""
    lists = CONFIGURATIONS[name][q.element_size()]
    return lists[min(width for width in lists if width >= q.shape[3])]


@cache
def _autotuned(name: str, choices: tuple[Blocks, ...]) -> Any:
    configs = [
        triton.Config({"BLOCK_M": blocks.m, "BLOCK_N": blocks.n}, num_warps=blocks.warps, num_stages=blocks.stages)
        for blocks in choices
    ]
    kernel = getattr(kernels, f"{name}_kernel")
    return triton.autotune(configs, key=["size", "group", "WIDTH", "THRESHOLD", "RENORMALISE"], cache_results=True)(
        kernel
    )


def forward(call: Call, training: bool, stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output; maximum (base 2) and sum of each row `[2, B, H, Lq]`; mass times sum, first weight, zeros `[B, H, Lq]`.

    All but the output are empty unless they are needed.
    """
    q, k = call.q, call.k
    batches, heads, rows, _ = q.shape
    out, softmax, mass, first_weight, zeros = forward_buffers(q, call.renormalise, training, stats)
    choices = configurations("forward", q)
    columns = k.shape[2] if call.window is None else min(k.shape[2], call.window + max(blocks.m for blocks in choices))
    alive_row = max(_ceil(columns, blocks.n) for blocks in choices)
    maxima_row = max(_ceil(columns, blocks.n) * blocks.m for blocks in choices)
    most = max(_block_count(call, rows, blocks.m) for blocks in choices) * batches * heads
    resident = min(_resident(q), most)
    arguments = {
        **call.shared(),
        "out": out,
        "softmax": _unless_empty(softmax),
        "mass": _unless_empty(mass),
        "first_weight": _unless_empty(first_weight),
        "zeros": _unless_empty(zeros),
        "maxima": q.new_empty(resident * maxima_row, dtype=torch.float32),
        "alive_tiles": q.new_empty(resident * alive_row, dtype=torch.int32),
        **_strides("o", out, with_columns=False),
        "batches": batches,
        "heads": heads,
        "documents": call.documents(),
        "second": batches * heads * rows,
        "maxima_row": maxima_row,
        "alive_row": alive_row,
        "RENORMALISE": call.renormalise,
        "STATS": stats,
        "SKIP": SKIP_EMPTY_TILES,
    }
    call.launch("forward", lambda _: (resident,), arguments)
    return out, softmax, mass, first_weight, zeros


def forward_buffers(
    q: Tensor, renormalise: bool, training: bool, stats: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `forward` returns, not filled in yet."""

    def rows(wanted: bool) -> Tensor:
        return q.new_empty(q.shape[:3] if wanted else 0, dtype=torch.float32)

    softmax = q.new_empty((2, *q.shape[:3]) if training or stats else 0, dtype=torch.float32)
    return like(q), softmax, rows(stats or (training and renormalise)), rows(stats), rows(stats)


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
    q, k = call.q, call.k
    batches, heads, rows, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    dq, dk, dv, survivors, dbias, dslopes = backward_buffers(q, k, call.v, call.bias, bias_gradient, slopes_gradient)
    delta = torch.empty_like(survivors)
    correction = torch.empty_like(survivors) if call.renormalise else None
    grad = near(grad)
    shared = {
        **call.shared(),
        "grad": grad,
        "softmax": softmax,
        "mass": _unless_empty(mass),
        "delta": delta,
        "correction": correction,
        **_strides("g", grad),
        "batches": batches,
        "documents": call.documents(),
        "second": batches * heads * rows,
        "natural_scale": call.scale,
        "RENORMALISE": call.renormalise,
        "SKIP": SKIP_EMPTY_TILES,
    }
    rows_first = {
        **shared,
        "out": out,
        "dq": dq,
        "survivors": survivors,
        **_strides("o", grad if out is None else out, with_columns=False),
        **_strides("dq", dq, with_columns=False),
        "heads": heads,
    }
    call.launch(
        "query_gradient", lambda meta: (_block_count(call, rows, meta["BLOCK_M"]) * batches * heads,), rows_first
    )

    choices = configurations("key_gradient", q)
    most = max(_block_count(call, keys, blocks.n) for blocks in choices) * batches
    programs = min(_ceil(_resident(q), kv_heads), most)
    reach = 0 if call.bias is None else call.bias.shape[1]
    partial_bias = q.new_empty(programs, heads, reach, dtype=torch.float32) if bias_gradient else None
    partial_slopes = q.new_empty(programs, heads, dtype=torch.float32) if slopes_gradient else None
    keys_first = {
        **shared,
        "dk": dk,
        "dv": dv,
        "dbias": partial_bias,
        "dslopes": partial_slopes,
        **_strides("dk", dk, with_columns=False),
        **_strides("dv", dv, with_columns=False),
        "kv_heads": kv_heads,
    }
    call.launch("key_gradient", lambda _: (programs, kv_heads), keys_first)
    if partial_bias is not None:
        torch.sum(partial_bias, 0, out=dbias)
    if partial_slopes is not None:
        torch.sum(partial_slopes, 0, out=dslopes)
    return dq, dk, dv, survivors, dbias, dslopes


def backward_buffers(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, bias_gradient: bool, slopes_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `backward` returns, not filled in yet; what is not asked for is empty."""
    survivors = q.new_empty(q.shape[:3], dtype=torch.float32)
    dbias = q.new_empty(bias.shape if bias is not None and bias_gradient else 0, dtype=torch.float32)
    dslopes = q.new_empty(q.shape[1] if slopes_gradient else 0, dtype=torch.float32)
    return like(q), like(k), like(v), survivors, dbias, dslopes


def decode(call: Call) -> Tensor:
    """The output of a few queries: keys are split over programs and read once, values only where a weight survives."""
    q, k = call.q, call.k
    batches, heads, rows, width = q.shape
    kv_heads, keys = k.shape[1:3]
    seen = keys if call.window is None else min(keys, call.window + rows - 1)
    span = max(4 * DECODE_BLOCK, _power(_ceil(seen * batches * kv_heads, 2 * _resident(q))))
    splits = _ceil(seen, span)
    tops, totals, masses = (q.new_empty(batches, heads, rows, splits, dtype=torch.float32) for _ in range(3))
    parts = q.new_empty(batches, heads, rows, splits, width, dtype=torch.float32)
    scores = q.new_empty(batches, heads, rows, keys, dtype=torch.float32)
    shared = call.shared()
    shared |= {
        "scores": scores,
        "tops": tops,
        "totals": totals,
        "parts": parts,
        "masses": masses,
        "heads": heads,
        "splits": splits,
        "SPLITS": _power(splits),
        "SKIP": SKIP_EMPTY_TILES,
        "SPAN": span,
        "BLOCK_M": max(16, _power(rows * heads // kv_heads)),
        "BLOCK_N": DECODE_BLOCK,
    }
    with _on(q):
        for name in ("decode_scores_kernel", "decode_values_kernel"):
            kernel = getattr(kernels, name)
            chosen = {argument: shared[argument] for argument in kernel.arg_names}
            kernel[splits, kv_heads, batches](**chosen, num_warps=4, num_stages=2)
    out = parts.sum(3)
    if call.renormalise:
        mass = masses.sum(3)
        out = out / torch.where(mass > 0, mass, 1)[..., None]
    return like(q).copy_(out)


def _block_count(call: Call, length: int, block: int) -> int:
    if call.cu_seqlens is not None:
        return length // block + call.documents()
    return _ceil(length, block)


def _ceil(length: int, block: int) -> int:
    return -(-length // block)


def _power(length: int) -> int:
    """The least power of two that is not below."""
    return 1 << (length - 1).bit_length()


def _resident(x: Tensor) -> int:
    """Programs that a device is given at a time."""
    if x.device.type != "cuda":
        return INTERPRETED_RESIDENT
    return RESIDENT_PER_PROCESSOR * torch.cuda.get_device_properties(x.device).multi_processor_count


def _strip(bias: Tensor | None) -> Tensor | None:
    """Biases times log2(e) by distance, `[H, PAD + W + PAD]`: -inf before distance 0 and 0 from W on."""
    if bias is None:
        return None
    pad = kernels.STRIP_PAD.value
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
    return x.contiguous() if max(x.stride()[2:]) * MOST_ROWS >= 2**31 else x


def like(x: Tensor) -> Tensor:
    """An empty tensor in the layout of x where the kernels can write it: contiguous rows, not too far apart."""
    result = torch.empty_like(x)
    if result.stride(-1) == 1 and near(result) is result:
        return result
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _unless_empty(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def _on(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
