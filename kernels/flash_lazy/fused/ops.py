"""The Triton kernels as PyTorch operators: what torch.compile, autograd and the fake tensors need to know of them.

Registered with torch alone; triton is imported when an operator first runs.
"""

import importlib.util
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flash_lazy.call import CALL_SCHEMA, LEAVES, TENSORS, Call, Stats, rows_in_documents, tau_divisor, tau_gradient
from flash_lazy.fused import configurations

LN2 = 0.6931471805599453
INSTALLED = importlib.util.find_spec("triton") is not None
OLDEST_TRITON = (3, 6)
MOST_BATCHES = 2**16 - 1
"""Along the third axis of a grid of programs, where decoding has its sequences."""


def fused_attention(call: Call, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Output `[B, H, Lq, D]` in q's dtype, and the row statistics where asked for. Shapes as in `lazy_attention`."""
    training = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call[:LEAVES])
    if not (training or with_stats) and _is_decoding(call):
        return decode(*call), None
    out, softmax, mass, first_weight, zeros = forward(*call, training, with_stats)
    if not with_stats:
        return out, None
    top, total = softmax[0], softmax[1].detach()
    # The gradient of lse as a whole travels as that of the maxima, see `_gradients`.
    lse = (top + total.log2()) * LN2
    mass = torch.where(total == 0, 0, mass.detach() / total)
    return out, Stats(lse, mass, first_weight.detach(), zeros.detach())


def find_obstacle(q: Tensor, key_mask: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take a call, naming the argument and the fix; None where they can."""
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
    if q.shape[-1] > configurations.WIDEST:
        widest = configurations.WIDEST
        return f"backend is 'triton' and q has width D = {q.shape[-1]}; give D <= {widest}, or choose 'chunked'"
    return None


@torch.compiler.assume_constant_result  # a question to the device would break a graph
def _find_machine_obstacle(device: torch.device) -> str | None:
    """Why a machine cannot run the kernels."""
    if (version := _triton_version()) < OLDEST_TRITON:
        return f"needs triton {_format_version(OLDEST_TRITON)}, and {_format_version(version)} is installed"
    if device.type == "cuda" and torch.version.hip is not None:
        return f"is tested on NVIDIA GPUs alone, and {device} is an AMD one"
    if device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs compute capability 8.0, and {device} has less"
    return None


@cache  # every call on a GPU asks
def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _is_decoding(call: Call) -> bool:
    """Whether a call has so few rows that splitting the keys over programs pays."""
    (batches, heads, rows, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
    few = heads // kv_heads * rows <= configurations.DECODE_ROWS and batches <= MOST_BATCHES
    return call.cu_seqlens is None and rows < keys and few


@torch.library.custom_op(
    "flash_lazy::forward",
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, bool training, bool stats) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output; maximum (base 2) and sum of each row `[2, B, H, Lq]`; mass times sum, first weight, zeros `[B, H, Lq]`.

    All but the output are empty unless they are needed.
    """
    from flash_lazy.fused.forward import forward

    *call, training, stats = arguments
    return forward(Call(*call), training, stats)


@forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from flash_lazy.fused.forward import forward_buffers

    *call, training, stats = arguments
    return forward_buffers(Call(*call), training, stats)


@torch.library.custom_op(
    "flash_lazy::backward",
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, Tensor? out, Tensor grad, Tensor? dlse, Tensor softmax, Tensor mass, bool bias_gradient, "
    "bool slopes_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, sum m dp of each row, and the gradients of bias and slopes (empty unless asked for)."""
    from flash_lazy.fused.backward import backward

    *call, out, grad, dlse, softmax, mass, bias_gradient, slopes_gradient = arguments
    return backward(Call(*call), out, grad, dlse, softmax, mass, bias_gradient, slopes_gradient)


@backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from flash_lazy.fused.backward import backward_buffers

    *call, _out, _grad, _dlse, _softmax, _mass, bias_gradient, slopes_gradient = arguments
    return backward_buffers(Call(*call), bias_gradient, slopes_gradient)


@torch.library.custom_op("flash_lazy::decode", mutates_args=(), schema=f"({CALL_SCHEMA}) -> Tensor")
def decode(*arguments: Any) -> Tensor:
    """The output of a few queries against many keys, without gradients."""
    from flash_lazy.fused.decode import decode

    return decode(Call(*arguments))


@decode.register_fake
def _(*arguments: Any) -> Tensor:
    from flash_lazy.fused.launch import allocate_like

    return allocate_like(Call(*arguments).q)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Inputs and two numbers a row; to renormalise, the output and one number more."""
    *arguments, _training, _stats = inputs
    call = Call(*arguments)
    out, softmax, mass, _, _ = output
    ctx.save_for_backward(*call[:TENSORS], out if call.renormalise else None, softmax, mass)
    ctx.settings = call[TENSORS:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, dsoftmax: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    *tensors, out, softmax, mass = ctx.saved_tensors
    call, needed = Call(*tensors, *ctx.settings), ctx.needs_input_grad
    grad = torch.zeros_like(call.q) if grad is None else grad
    dlse = None if dsoftmax is None else dsoftmax[0] / LN2
    dq, dk, dv, survivors, dbias, dslopes = backward(*call, out, grad, dlse, softmax, mass, *needed[4:6])
    leaves = (
        *(dq, dk, dv, _tau_gradient(call, survivors) if needed[3] else None),
        *(dbias if needed[4] else None, dslopes if needed[5] else None),
    )
    return *leaves, *[None] * (len(needed) - LEAVES)


forward.register_autograd(_gradients, setup_context=_setup_context)


def _tau_gradient(call: Call, survivors: Tensor) -> Tensor:
    """Gradient of tau from the kernel's sum m dp of each row `[B, H, Lq]`."""
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
