"""The Triton kernels as PyTorch operators: what torch.compile, autograd and the fake tensors need to know of them.

Registered with torch alone; triton is imported when an operator first runs.
"""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from flash_lazy.chunked import tau_gradient
from flash_lazy.reference import Options, Stats

LN2 = 0.6931471805599453
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads it, too, when the kernels are imported: it must be set before."""
WIDEST = 256
"""Largest width of a head."""
DECODE_ROWS = 64
"""Most query rows of one kv head (group times Lq) that are decoded: they share a block, against a split of the keys."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    options: Options,
    with_stats: bool,
) -> tuple[Tensor, Stats | None]:
    """Output `[B, H, Lq, D]` in q's dtype, and the row statistics where asked for. Shapes as in `lazy_attention`."""
    inputs = [x for x in (q, k, v, tau, bias, slopes) if x is not None]
    training = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    arguments = (
        *(q, k, v, tau, bias, slopes, options.cu_seqlens, options.kv_lengths),
        *(options.threshold, options.context_length, options.renormalise, options.scale, options.window),
    )
    if not (training or with_stats) and options.cu_seqlens is None and _is_decoding(q, k):
        return decode(*arguments), None
    out, softmax, mass, first_weight, zeros = forward(*arguments, training, with_stats)
    if not with_stats:
        return out, None
    top, total = softmax
    lse = (top + total.log2()) * LN2
    mass = torch.where(total > 0, mass / total, 0)
    return out, Stats(*(x.detach() for x in (lse, mass, first_weight, zeros)))


def obstacle(q: Tensor, key_mask: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take a call, naming the argument and the mend; None where they can."""
    if not INSTALLED:
        return "backend is 'triton', which is not installed; pip install triton (Linux), or choose 'chunked'"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"backend is 'triton' and q on {q.device}; move q, k and v to a GPU, or choose 'chunked'"
    if _is_too_old(q.device):
        return f"backend is 'triton', which needs compute capability 8.0, and {q.device} has less; choose 'chunked'"
    if key_mask is not None:
        return "backend is 'triton', which takes no key_mask; use kv_lengths or cu_seqlens, or choose 'chunked'"
    if q.dtype == torch.float64:
        return "backend is 'triton' and q float64; give float16, bfloat16 or float32, or choose 'chunked'"
    if q.shape[-1] > WIDEST:
        return f"backend is 'triton' and q has width D = {q.shape[-1]}; give D <= {WIDEST}, or choose 'chunked'"
    return None


@torch.compiler.assume_constant_result  # a question to the device would break a graph
def _is_too_old(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) < (8, 0)


def _is_decoding(q: Tensor, k: Tensor) -> bool:
    """Whether a call has so few rows that splitting the keys over programs pays."""
    return q.shape[2] < k.shape[2] and q.shape[1] // k.shape[1] * q.shape[2] <= DECODE_ROWS


@torch.library.custom_op("flash_lazy::forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_lengths: Tensor | None,
    threshold: str,
    context_length: int,
    renormalise: bool,
    scale: float,
    window: int | None,
    training: bool,
    stats: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output; maximum (base 2) and sum of each row `[2, B, H, Lq]`; mass times sum, first weight, zeros `[B, H, Lq]`.

    All but the output are empty unless they are needed.
    """
    from flash_lazy.fused import launch

    call = launch.Call(
        *(q, k, v, tau, bias, slopes, cu_seqlens, kv_lengths),
        *(threshold, context_length, renormalise, scale, window),
    )
    return launch.forward(call, training, stats)


@forward.register_fake
def _(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from flash_lazy.fused import launch

    renormalise, training, stats = arguments[9], *arguments[-2:]
    return launch.forward_buffers(q, renormalise, training, stats)


@torch.library.custom_op("flash_lazy::backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_lengths: Tensor | None,
    threshold: str,
    context_length: int,
    renormalise: bool,
    scale: float,
    window: int | None,
    out: Tensor | None,
    grad: Tensor,
    softmax: Tensor,
    mass: Tensor,
    bias_gradient: bool,
    slopes_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, sum m dp of each row, and the gradients of bias and slopes (empty unless asked for)."""
    from flash_lazy.fused import launch

    call = launch.Call(
        *(q, k, v, tau, bias, slopes, cu_seqlens, kv_lengths),
        *(threshold, context_length, renormalise, scale, window),
    )
    return launch.backward(call, out, grad, softmax, mass, bias_gradient, slopes_gradient)


@backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from flash_lazy.fused import launch

    return launch.backward_buffers(q, k, v, arguments[1], *arguments[-2:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Inputs and two numbers a row; to renormalise, the output and one number more."""
    *ctx.options, _, _ = inputs[8:]
    out, softmax, mass, _, _ = output
    ctx.save_for_backward(*inputs[:8], out if inputs[10] else None, softmax, mass)


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, softmax, mass = ctx.saved_tensors
    needed = ctx.needs_input_grad
    dq, dk, dv, survivors, dbias, dslopes = backward(*inputs, *ctx.options, out, grad, softmax, mass, *needed[4:6])
    dtau = _tau_gradient(survivors, inputs, ctx.options) if needed[3] else None
    return dq, dk, dv, dtau, dbias if needed[4] else None, dslopes if needed[5] else None, *[None] * 9


forward.register_autograd(_gradients, setup_context=_keep)


def _tau_gradient(survivors: Tensor, inputs: list[Tensor], options: list[Any]) -> Tensor:
    q, k, _, tau, _, _, cu_seqlens, kv_lengths = inputs
    threshold, context_length, _, _, window = options
    keys = k.shape[2]
    own = torch.arange(keys - q.shape[2], keys, device=q.device)[None]  # [B or 1, Lq]
    if kv_lengths is not None:
        own = own - (keys - kv_lengths.long())[:, None]
    if cu_seqlens is not None:
        cuts = cu_seqlens.long()
        own = own - cuts[torch.searchsorted(cuts, own, right=True) - 1]
    if threshold == "seq_len":
        divisor = torch.full_like(own, context_length)
    elif threshold == "constant":
        divisor = torch.ones_like(own)
    else:
        divisor = (own + 1).clamp(1, window)
    entry = own.clamp(0, tau.shape[-1] - 1) if threshold == "per_token" else None
    return tau_gradient(survivors / divisor[:, None], entry, tau)


@torch.library.custom_op("flash_lazy::decode", mutates_args=())
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_lengths: Tensor | None,
    threshold: str,
    context_length: int,
    renormalise: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    """The output of a few queries against many keys, without gradients."""
    from flash_lazy.fused import launch

    call = launch.Call(
        *(q, k, v, tau, bias, slopes, cu_seqlens, kv_lengths),
        *(threshold, context_length, renormalise, scale, window),
    )
    return launch.decode(call)


@decode.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    from flash_lazy.fused import launch

    return launch.like(q)
