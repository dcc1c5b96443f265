"""The compiled attention as PyTorch operators, with support for autograd, torch.compile and fake tensors."""

import ctypes
from functools import cache
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_lazy.call import CALL_SCHEMA, LEAVES, TENSORS, Call, Stats, Threshold, slice_documents
from flash_lazy.cpu import library

THRESHOLDS = ("per_query", "seq_len", "per_token", "constant")
"""In the order of `Threshold` in attention.h."""
assert set(THRESHOLDS) == set(get_args(Threshold))
SUMS = 3
"""Numbers per row that the forward pass saves: largest score, sum of exponentials, divisor of the output."""

_Steps = ctypes.c_int64 * 3


class _CallFields(ctypes.Structure):
    """`Call` of attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "rows", "keys", "width", "sequences")),
        ("sequence", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((name, _Steps) for name in ("q_step", "k_step", "v_step", "out_step")),
        *((name, ctypes.c_void_p) for name in ("tau", "bias", "slopes")),
        *((name, ctypes.c_int64) for name in ("tau_columns", "reach", "window", "context_length")),
        ("key_mask", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("threshold", "renormalise")),
        ("threads", ctypes.c_int64),
    ]


class _GradientFields(ctypes.Structure):
    """`Gradients` of attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "dlse", "q", "k", "v", "tau", "bias", "slopes")),
        *((name, _Steps) for name in ("out_step", "q_step", "k_step", "v_step")),
    ]


def compiled_attention(call: Call, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Output `[B, H, Lq, D]` in q's dtype, and `Stats` if requested. Shapes as in `lazy_attention`."""
    training = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call[:LEAVES])
    if torch.compiler.is_compiling():
        # torch.compile does not trace into operators, whose dispatch costs eager mode more than a small call.
        out, _, stats = _forward(*call, training, with_stats)
    elif training:
        out, stats = _CompiledFunction.apply(*call, with_stats)
    else:
        out, _, stats = _outputs(*call, False, with_stats)
    if not with_stats:
        return out, None
    lse, *others = stats
    return out, Stats(lse, *(x.detach() for x in others))


def find_obstacle(q: Tensor) -> str | None:
    """Why the compiled backend does not support a call, naming the argument and the fix; None if it does."""
    if q.device.type != "cpu":
        return f"backend is 'cpu' and q on {q.device}; move q, k and v to the CPU, or choose 'auto'"
    autocast = torch.is_autocast_enabled("cpu") and q.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if autocast else q.dtype
    if dtype != torch.float32:
        return f"backend is 'cpu' and q {dtype}; give float32, or choose 'chunked'"
    if (why := _find_library_obstacle()) is not None:
        return f"backend is 'cpu', but {why}, or choose 'chunked'"
    return None


@torch.compiler.assume_constant_result
def _find_library_obstacle() -> str | None:
    return library.find_obstacle()


def _outputs(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sums `[3, B, H, Lq]` and stats `[4, B, H, Lq]`, the latter two empty unless needed."""
    *fields, training, with_stats = arguments
    call = prepare_layout(Call(*fields))
    out, sums, stats = buffers = _forward_buffers(call, training, with_stats)
    record, _alive = describe(call, out)
    library.load().flash_lazy_forward(ctypes.byref(record), _address(out), _address(sums), _address(stats))
    return buffers


def _gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, tau, bias and slopes; the last two are empty if absent or not requested."""
    *fields, sums, grad, dlse, with_bias, with_slopes = arguments
    call, grad = prepare_layout(Call(*fields)), _with_unit_step(grad)
    dlse = None if dlse is None else dlse.contiguous()
    found = dq, dk, dv, dtau, dbias, dslopes = _backward_buffers(call, with_bias, with_slopes)
    if call.kv_lengths is not None:  # keys beyond a sequence's length get no gradient
        dk.zero_(), dv.zero_()
    record, _alive = describe(call, grad)
    gradients = _GradientFields(
        *(_address(x) for x in (grad, dlse, dq, dk, dv, dtau, dbias, dslopes)),
        *(_steps(x) for x in (grad, dq, dk, dv)),
    )
    library.load().flash_lazy_backward(ctypes.byref(record), _address(sums), ctypes.byref(gradients))
    return found


def prepare_layout(call: Call) -> Call:
    """Lay out the tensors as the library reads them: rows and parameters contiguous."""
    q, k, v = (_with_unit_step(x) for x in call[:3])
    tau, bias, slopes = (None if x is None else x.contiguous() for x in call[3:LEAVES])
    mask = None if call.key_mask is None else call.key_mask.contiguous()
    assert tau is not None
    return call._replace(q=q, k=k, v=v, tau=tau, bias=bias, slopes=slopes, key_mask=mask)


def _with_unit_step(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward_buffers(call: Call, training: bool, with_stats: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised results of `_outputs`; the output has q's layout, which the model reads next."""
    q = call.q
    sums, stats = (
        q.new_empty((count, *q.shape[:3]) if wanted else 0)
        for count, wanted in ((SUMS, training), (len(Stats._fields), with_stats))
    )
    return torch.empty_like(q), sums, stats


def _backward_buffers(call: Call, with_bias: bool, with_slopes: bool) -> tuple[Tensor, ...]:
    """Uninitialised results of `_gradients`, in the layouts of the inputs."""
    head = (
        torch.empty_like(x) if x is not None and wanted else call.q.new_empty(0)
        for x, wanted in ((call.bias, with_bias), (call.slopes, with_slopes))
    )
    return *(torch.empty_like(x) for x in call[:4]), *head


def describe(call: Call, out: Tensor) -> tuple[_CallFields, Any]:
    """The call as the library takes it, with `out`'s steps, and what must stay alive as long."""
    q, k, tau = call.q, call.k, call.tau
    batch, heads, rows, width = q.shape
    sequences = _list_sequences(call)
    record = _CallFields(
        *(batch, heads, k.shape[1], rows, k.shape[2], width, len(sequences) // 5),
        ctypes.addressof(sequences),
        *(_address(x) for x in (q, k, call.v)),
        *(_steps(x) for x in (q, k, call.v, out)),
        *(_address(x) for x in (tau, call.bias, call.slopes)),
        *(tau.shape[1] if tau.dim() == 2 else 1, 0 if call.bias is None else call.bias.shape[1]),
        *(call.window or 0, call.context_length or 1),
        _address(call.key_mask),
        *(call.factor, THRESHOLDS.index(call.threshold), call.renormalise, torch.get_num_threads()),
    )
    return record, sequences


def _list_sequences(call: Call) -> Any:
    """Index in the batch, first row, rows, first key and keys of each sequence, one after the other."""
    batch, rows, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if call.cu_seqlens is not None:
        parts = slice_documents(call)
        return _to_array(
            chain.from_iterable((0, r.start, r.stop - r.start, k.start, k.stop - k.start) for r, k in parts)
        )
    if call.kv_lengths is not None:
        lengths = enumerate(call.kv_lengths.tolist())
        return _to_array(chain.from_iterable((index, 0, rows, 0, length) for index, length in lengths))
    return _list_full_sequences(batch, rows, keys)


@cache
def _list_full_sequences(batch: int, rows: int, keys: int) -> Any:
    return _to_array(chain.from_iterable((index, 0, rows, 0, keys) for index in range(batch)))


def _to_array(values: Any) -> Any:
    listed = list(values)
    return (ctypes.c_int64 * len(listed))(*listed)


def _address(x: Tensor | None) -> int | None:
    return None if x is None or not x.numel() else x.data_ptr()


def _steps(x: Tensor) -> Any:
    return _Steps(*x.stride()[:3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], output[1])
    ctx.settings = inputs[TENSORS : len(Call._fields)]
    ctx.set_materialize_grads(False)


def _leaf_gradients(gradients: Any, ctx: Any, grad: Tensor | None, dstats: Tensor | None) -> tuple[Tensor | None, ...]:
    """One gradient for each argument of the forward pass; None where none is needed."""
    *tensors, sums = ctx.saved_tensors
    call, needed = Call(*tensors, *ctx.settings), ctx.needs_input_grad
    grad = torch.zeros_like(call.q) if grad is None else grad
    found = gradients(*call, sums, grad, None if dstats is None else dstats[0], *needed[4:LEAVES])
    leaves = (x if is_needed else None for x, is_needed in zip(found, needed[:LEAVES], strict=True))
    return *leaves, *[None] * (len(needed) - LEAVES)


class _CompiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *call, with_stats = arguments
        out, sums, stats = _outputs(*call, True, with_stats)
        _setup_context(ctx, arguments, (out, sums))
        return out, stats

    @staticmethod
    @once_differentiable  # its stub drops the parameters' names
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: Tensor | None, dstats: Tensor | None) -> tuple[Tensor | None, ...]:
        return _leaf_gradients(_gradients, ctx, grad, dstats)


_forward = torch.library.custom_op(
    "flash_lazy::cpu_forward",
    _outputs,
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, bool training, bool stats) -> (Tensor, Tensor, Tensor)",
)
_backward = torch.library.custom_op(
    "flash_lazy::cpu_backward",
    _gradients,
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, Tensor sums, Tensor grad, Tensor? dlse, bool with_bias, bool with_slopes) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _operator_gradients(
    ctx: Any, grad: Tensor | None, _dsums: Tensor | None, dstats: Tensor | None
) -> tuple[Tensor | None, ...]:
    return _leaf_gradients(_backward, ctx, grad, dstats)


_forward.register_autograd(_operator_gradients, setup_context=_setup_context)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *call, training, with_stats = arguments
    return _forward_buffers(Call(*call), training, with_stats)


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *call, _sums, _grad, _dlse, with_bias, with_slopes = arguments
    return _backward_buffers(Call(*call), with_bias, with_slopes)
