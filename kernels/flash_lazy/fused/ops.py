"""The Triton kernels as PyTorch operators, with support for torch.compile, autograd and fake tensors.

Registration needs only torch; triton is imported when a call first asks for it.
"""

import importlib.util
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..call import (
    CALL_SCHEMA,
    LEAVES,
    OPERATORS,
    TENSORS,
    Call,
    Stats,
    mark_constant,
    rows_in_documents,
    tau_divisor,
    tau_gradient,
)
from . import configurations

LN2 = 0.6931471805599453
INSTALLED = importlib.util.find_spec("triton") is not None
MIN_TRITON = (3, 6)
MAX_BATCHES = 2**16 - 1
"""Limit of a grid's third axis, which decoding uses for its sequences."""


def fused_attention(call: Call, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Output `[B, H, Lq, D]` in q's dtype and, with `with_stats`, the row statistics. Shapes as in `lazy_attention`."""
    if call.factor < 0:  # the kernels take the maximum before they scale
        call = call._replace(q=-call.q, scale=-call.factor)
    training = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call[:LEAVES])
    if not (training or with_stats) and _is_decoding(call):
        return decode(*call), None
    out, softmax, mass, first_weight, zeros = forward(*call, training, with_stats)
    if not with_stats:
        return out, None
    top, total = softmax[0], softmax[1].detach()
    # The gradient of lse is passed on as that of the maxima, see `_backpropagate`.
    lse = (top + total.log2()) * LN2
    mass = torch.where(total == 0, 0, mass.detach() / total)
    return out, Stats(lse, mass, first_weight.detach(), zeros.detach())


def find_obstacle(q: Tensor, key_mask: Tensor | None) -> str | None:
    """Why the Triton kernels do not support a call, naming the argument and the fix; None if they do."""
    if not INSTALLED:
        return "backend is 'triton', which is not installed; pip install triton (Linux), or choose 'chunked'"
    if q.device.type != "cuda" and not configurations.INTERPRETED:
        return f"backend is 'triton' and q on {q.device}; move q, k and v to a GPU, or choose 'chunked'"
    if why := _find_machine_obstacle(q.device):
        return f"backend is 'triton', which {why}; choose 'chunked'"
    if key_mask is not None:
        return "backend is 'triton', which takes no key_mask; use kv_lengths or cu_seqlens, or choose 'chunked'"
    if q.dtype == torch.float64:
        return "backend is 'triton' and q float64; give float16, bfloat16 or float32, or choose 'chunked'"
    if (width := q.shape[-1]) > configurations.MAX_WIDTH:
        limit = configurations.MAX_WIDTH
        return f"backend is 'triton' and q has width D = {width}; give D <= {limit}, or choose 'chunked'"
    return None


@mark_constant  # querying the device would break the graph
def _find_machine_obstacle(device: torch.device) -> str | None:
    if (version := _read_triton_version()) < MIN_TRITON:
        return f"needs triton {_format_version(MIN_TRITON)}, and {_format_version(version)} is installed"
    if device.type == "cuda" and torch.version.hip is not None:
        return f"is tested only on NVIDIA GPUs, and {device} is an AMD one"
    if device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs compute capability 8.0, and {device} has less"
    return None


@cache  # called in every attention call on a GPU
def _read_triton_version() -> tuple[int, ...]:
    import triton

    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _is_decoding(call: Call) -> bool:
    """Whether a call has few enough rows to split the keys over programs."""
    (batches, heads, rows, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
    few = heads // kv_heads * rows <= configurations.DECODE_ROWS and batches <= MAX_BATCHES
    return call.cu_seqlens is None and rows < keys and few


@torch.library.custom_op(
    f"{OPERATORS}forward",
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, bool training, bool stats) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output; maximum (base 2) and sum of each row `[2, B, H, Lq]`; mass times sum, first weight, zeros `[B, H, Lq]`.

    All but the output are empty unless needed.
    """
    from .forward import forward

    *call, training, stats = arguments
    return forward(Call(*call), training, stats)


@forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .forward import allocate_forward_buffers

    *call, training, stats = arguments
    return allocate_forward_buffers(Call(*call), training, stats)


@torch.library.custom_op(
    f"{OPERATORS}backward",
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, Tensor? out, Tensor grad, Tensor? dlse, Tensor softmax, Tensor mass, bool bias_gradient, "
    "bool slopes_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, sum m dp of each row, and the gradients of bias and slopes (empty unless requested)."""
    from .backward import backward

    *call, out, grad, dlse, softmax, mass, bias_gradient, slopes_gradient = arguments
    return backward(Call(*call), out, grad, dlse, softmax, mass, bias_gradient, slopes_gradient)


@backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .backward import allocate_backward_buffers

    *call, _out, _grad, _dlse, _softmax, _mass, bias_gradient, slopes_gradient = arguments
    return allocate_backward_buffers(Call(*call), bias_gradient, slopes_gradient)


@torch.library.custom_op(f"{OPERATORS}decode", mutates_args=(), schema=f"({CALL_SCHEMA}) -> Tensor")
def decode(*arguments: Any) -> Tensor:
    """Output of a few queries against many keys, without gradients."""
    from .decode import decode

    return decode(Call(*arguments))


@decode.register_fake
def _(*arguments: Any) -> Tensor:
    from .launch import allocate_like

    return allocate_like(Call(*arguments).q)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the inputs and two numbers per row; with renormalise, also the output and a third number."""
    *arguments, _training, _stats = inputs
    call = Call(*arguments)
    out, softmax, mass, _, _ = output
    ctx.save_for_backward(*call[:TENSORS], out if call.renormalise else None, softmax, mass)
    ctx.settings = call[TENSORS:]
    ctx.set_materialize_grads(False)


def _setup_decoding_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    empty = output.new_empty(0)
    _setup_context(ctx, (*inputs, False, False), (output, empty, empty, empty, empty))


def _backpropagate(
    ctx: Any, grad: Tensor | None, dsoftmax: Tensor | None = None, *_: None
) -> tuple[Tensor | None, ...]:
    *tensors, out, softmax, mass = ctx.saved_tensors
    call, needed = Call(*tensors, *ctx.settings), ctx.needs_input_grad
    if not softmax.numel():  # of a program that was recorded without gradients
        whole, softmax, mass = forward(*call, True, False)[:3]
        out = None if out is None else whole
    grad = torch.zeros_like(call.q) if grad is None else grad
    dlse = None if dsoftmax is None else dsoftmax[0] / LN2
    dq, dk, dv, survivors, dbias, dslopes = backward(*call, out, grad, dlse, softmax, mass, *needed[4:6])
    leaves = (
        *(dq, dk, dv, _tau_gradient(call, survivors) if needed[3] else None),
        *(dbias if needed[4] else None, dslopes if needed[5] else None),
    )
    return *leaves, *[None] * (len(needed) - LEAVES)


forward.register_autograd(_backpropagate, setup_context=_setup_context)
decode.register_autograd(_backpropagate, setup_context=_setup_decoding_context)


def _tau_gradient(call: Call, survivors: Tensor) -> Tensor:
    """Gradient of tau from each row's sum m dp `[B, H, Lq]`."""
    rows, keys = call.q.shape[2], call.k.shape[2]
    own = torch.arange(keys - rows, keys, device=call.q.device)[None]  # [B or 1, Lq], within the row's document
    if call.kv_lengths is not None:
        own = own - (keys - call.kv_lengths.long())[:, None]
    if call.cu_seqlens is not None:
        own, start = rows_in_documents(call, call.cu_seqlens)
        own = own - start
    seen = own + 1 if call.window is None else (own + 1).clamp(max=call.window)
    entry = own.clamp(0, call.tau.shape[-1] - 1) if call.threshold == "per_token" else None
    return tau_gradient(survivors / tau_divisor(call, seen)[:, None], entry, call.tau)
