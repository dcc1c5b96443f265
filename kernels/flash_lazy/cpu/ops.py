"""The compiled attention as PyTorch operators, with support for autograd, torch.compile and fake tensors."""

from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..call import (
    CALL_SCHEMA,
    LEAVES,
    OPERATORS,
    TENSORS,
    THRESHOLDS,
    Call,
    Stats,
    differentiate_once,
    is_traced,
    mark_constant,
    refuse_forward_mode,
    slice_documents,
)
from . import library

SUMS = 3
"""Numbers per row that the forward pass saves: largest score, sum of exponentials, divisor of the output."""

# Packing bytes costs less than filling a ctypes structure, and as much as a small call matters.
_CALL_RECORD = Struct("6q qP 3P 12q 3P 4q P f2i q")
"""`Call` of attention.cpp."""
_GRADIENTS_RECORD = Struct("8P 12q")
"""`Gradients` of attention.cpp."""


def compiled_attention(call: Call, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Output `[B, H, Lq, D]` in q's dtype, and `Stats` if requested. Shapes as in `lazy_attention`."""
    training = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call[:LEAVES])
    training = training or forward_ad._current_level >= 0  # which autograd then refuses
    if is_traced(call[:TENSORS]):
        # Tracers need an operator, whose dispatch costs eager mode more than a small call.
        out, _, stats = _forward(*call, training, with_stats)
    elif training:
        out, stats = _CompiledFunction.apply(*call, with_stats)
    else:
        out, _, stats = _attend(call, False, with_stats)
    if not with_stats or stats is None:
        return out, None
    lse, *others = stats
    return out, Stats(lse, *(x.detach() for x in others))


def find_obstacle(q: Tensor) -> str | None:
    """Why the compiled backend does not support a call, naming the argument and the fix; None if it does."""
    if not q.is_cpu:
        return f"backend is 'cpu' and q on {q.device}; move q, k and v to the CPU, or choose 'auto'"
    autocast = torch.is_autocast_enabled("cpu") and q.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if autocast else q.dtype
    if dtype != torch.float32:
        return f"backend is 'cpu' and q {dtype}; give float32, or choose 'chunked'"
    if (why := _find_library_obstacle()) is not None:
        return f"backend is 'cpu', but {why}, or choose 'chunked'"
    return None


@mark_constant
def _find_library_obstacle() -> str | None:
    return library.find_obstacle()


def _outputs(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sums `[3, B, H, Lq]` and stats `[4, B, H, Lq]`, the latter two empty unless needed."""
    *fields, training, with_stats = arguments
    call = Call(*fields)
    return _fill_absent(call, *_attend(call, training, with_stats))


def _attend(call: Call, training: bool, with_stats: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, sums if training, and stats if requested."""
    call = prepare_layout(call)
    out, sums, stats = buffers = _forward_buffers(call, training, with_stats)
    record, _alive = describe(call, out)
    library.load().flash_lazy_forward(record, out.data_ptr(), _address(sums), _address(stats))
    return buffers


def _gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, tau, bias and slopes; the last two are empty if absent or not requested."""
    *fields, sums, grad, dlse, with_bias, with_slopes = arguments
    call, grad = prepare_layout(Call(*fields)), _with_unit_step(grad.resolve_neg())
    dlse = None if dlse is None else dlse.contiguous()
    found = dq, dk, dv, dtau, dbias, dslopes = _backward_buffers(call, with_bias, with_slopes)
    if call.kv_lengths is not None:  # keys beyond a sequence's length get no gradient
        dk.zero_(), dv.zero_()
    record, _alive = describe(call, grad)
    gradients = _GRADIENTS_RECORD.pack(
        *map(_address, (grad, dlse, dq, dk, dv, dtau, dbias, dslopes)),
        *chain.from_iterable(x.stride()[:3] for x in (grad, dq, dk, dv)),
    )
    library.load().flash_lazy_backward(record, _address(sums), gradients)
    return found


def prepare_layout(call: Call) -> Call:
    """Lay out the tensors as the library reads them: rows and parameters contiguous."""
    q, k, v, tau, bias, slopes = call[:LEAVES]
    if any(x is not None and x.is_neg() for x in call[:LEAVES]):
        call = Call(*(x if x is None else x.resolve_neg() for x in call[:LEAVES]), *call[LEAVES:])  # type: ignore[arg-type]
        q, k, v, tau, bias, slopes = call[:LEAVES]
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        call = call._replace(q=_with_unit_step(q), k=_with_unit_step(k), v=_with_unit_step(v))
    others = tau, bias, slopes, call.key_mask
    if not all(x is None or x.is_contiguous() for x in others):
        tau, bias, slopes, mask = (None if x is None else x.contiguous() for x in others)
        assert tau is not None
        call = call._replace(tau=tau, bias=bias, slopes=slopes, key_mask=mask)
    return call


def _with_unit_step(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward_buffers(call: Call, training: bool, with_stats: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Uninitialised results of `_attend`; the output has q's layout, which the model reads next."""
    q = call.q
    sums = q.new_empty(SUMS, *q.shape[:3]) if training else None
    stats = q.new_empty(len(Stats._fields), *q.shape[:3]) if with_stats else None
    return torch.empty_like(q), sums, stats


def _fill_absent(call: Call, *results: Tensor | None) -> Any:
    """Results of an operator, which cannot be None: empty instead."""
    return tuple(call.q.new_empty(0) if x is None else x for x in results)


def _backward_buffers(call: Call, with_bias: bool, with_slopes: bool) -> tuple[Tensor, ...]:
    """Uninitialised results of `_gradients`, in the layouts of the inputs."""
    head = (
        torch.empty_like(x) if x is not None and wanted else None
        for x, wanted in ((call.bias, with_bias), (call.slopes, with_slopes))
    )
    return _fill_absent(call, *(torch.empty_like(x) for x in call[:4]), *head)


def describe(call: Call, out: Tensor) -> tuple[bytes, Tensor | None]:
    """The call as the library takes it, with `out`'s steps, and what must stay alive as long."""
    q, k, v, tau, bias, slopes = call[:LEAVES]
    assert q.dtype == torch.float32, q.dtype  # of others it would read what lies behind them
    batch, heads, rows, width = q.shape
    _, kv_heads, keys, _ = k.shape
    sequences = _list_sequences(call)
    record = _CALL_RECORD.pack(
        *(batch, heads, kv_heads, rows, keys, width),
        *(batch if sequences is None else len(sequences), _address(sequences)),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr()),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
        *(tau.data_ptr(), _address(bias), _address(slopes)),
        *(tau.shape[1] if tau.dim() == 2 else 1, 0 if bias is None else bias.shape[1]),
        *(call.window or 0, call.context_length or 1, _address(call.key_mask)),
        *(call.factor, THRESHOLDS.index(call.threshold), call.renormalise, torch.get_num_threads()),
    )
    return record, sequences


def _list_sequences(call: Call) -> Tensor | None:
    """Index in the batch, first row, rows, first key and keys of each sequence, int64 `[n, 5]`; None for full ones."""
    if call.cu_seqlens is not None:
        parts = slice_documents(call)
        _check_sequences("cu_seqlens", call, parts)
        return _to_integers([(0, r.start, r.stop - r.start, k.start, k.stop - k.start) for r, k in parts])
    if call.kv_lengths is not None:
        lengths, rows = call.kv_lengths.tolist(), call.q.shape[2]
        _check_sequences("kv_lengths", call, [(slice(0, rows), slice(0, length)) for length in lengths])
        return _to_integers([(index, 0, rows, 0, length) for index, length in enumerate(lengths)])
    return None


def _check_sequences(name: str, call: Call, parts: list[tuple[slice, slice]]) -> None:
    """Refuse what torch.compile leaves unchecked: the library would read beyond the tensors."""
    rows, keys = call.q.shape[2], call.k.shape[2]
    if any(not 0 <= r.start <= r.stop <= rows or not 0 <= k.start <= k.stop <= keys for r, k in parts):
        raise ValueError(f"{name} is {getattr(call, name).tolist()}; it reaches beyond the {rows} rows or {keys} keys")


def _to_integers(values: list[tuple[int, ...]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")  # whatever the default device is


def _address(x: Tensor | None) -> int:
    """Address of the elements; 0 without any."""
    return 0 if x is None else x.data_ptr()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], output[1])
    ctx.settings = inputs[TENSORS : len(Call._fields)]
    ctx.set_materialize_grads(False)


def _leaf_gradients(
    gradients: Any, ctx: Any, saved: Sequence[Any], grad: Tensor | None, dstats: Tensor | None
) -> tuple[Tensor | None, ...]:
    """One gradient for each argument of the forward pass; None where none is needed."""
    *tensors, sums = saved
    call, needed = Call(*tensors, *ctx.settings), ctx.needs_input_grad
    grad = torch.zeros_like(call.q) if grad is None else grad
    found = gradients(*call, sums, grad, None if dstats is None else dstats[0], *needed[4:LEAVES])
    leaves = (x if is_needed else None for x, is_needed in zip(found, needed[:LEAVES], strict=True))
    return *leaves, *[None] * (len(needed) - LEAVES)


class _CompiledFunction(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *call, with_stats = arguments
        out, sums, stats = _outputs(*call, True, with_stats)
        _setup_context(ctx, arguments, (out, sums))
        return out, stats

    @staticmethod
    @differentiate_once
    def backward(ctx: Any, saved: Sequence[Any], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _leaf_gradients(_gradients, ctx, saved, *grads)


_forward = torch.library.custom_op(
    f"{OPERATORS}cpu_forward",
    _outputs,
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, bool training, bool stats) -> (Tensor, Tensor, Tensor)",
)
_backward = torch.library.custom_op(
    f"{OPERATORS}cpu_backward",
    _gradients,
    mutates_args=(),
    schema=f"({CALL_SCHEMA}, Tensor sums, Tensor grad, Tensor? dlse, bool with_bias, bool with_slopes) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _operator_gradients(
    ctx: Any, grad: Tensor | None, _dsums: Tensor | None, dstats: Tensor | None
) -> tuple[Tensor | None, ...]:
    *tensors, sums = ctx.saved_tensors
    if not sums.numel():  # of a program that was recorded without gradients
        sums = _forward(*tensors, *ctx.settings, True, False)[1]
    return _leaf_gradients(_backward, ctx, (*tensors, sums), grad, dstats)


_forward.register_autograd(_operator_gradients, setup_context=_setup_context)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *call, training, with_stats = arguments
    call = prepare_layout(Call(*call))
    return _fill_absent(call, *_forward_buffers(call, training, with_stats))


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *call, _sums, _grad, _dlse, with_bias, with_slopes = arguments
    return _backward_buffers(prepare_layout(Call(*call)), with_bias, with_slopes)
