"""The public functions of Lazy Attention: each checks its arguments once, then runs a backend."""

import warnings
from functools import cache, partial
from typing import Literal, overload

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from .call import (
    BACKENDS,
    Backend,
    Call,
    Stats,
    Threshold,
    Weights,
    check,
    check_choice,
    check_flag,
    check_type,
    check_types,
    is_autocast_enabled,
    prepare,
    require_values,
)
from .chunked import chunked_attention
from .cpu import library
from .cpu import ops as cpu_ops
from .fused.ops import find_obstacle, fused_attention
from .reference import reference_attention, reference_weights
from .vmap import is_transformed


class SharedSettings(TypedDict, total=False):
    """Static types of the keyword arguments that both functions take."""

    slopes: Tensor | None
    threshold: Threshold
    context_length: int | None
    renormalise: bool
    scale: float | None
    window: int | None
    backend: Backend


class VarlenSettings(SharedSettings, total=False, closed=True):
    """Static types of the keyword arguments of `lazy_attention_varlen`."""


class Settings(SharedSettings, total=False, closed=True):
    """Static types of the keyword arguments of `lazy_attention`."""

    cu_seqlens: Tensor | None
    kv_lengths: Tensor | None
    key_mask: Tensor | None


@overload
def lazy_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None = None,
    *,
    return_stats: Literal[False] = False,
    **settings: Unpack[Settings],
) -> Tensor: ...
@overload
def lazy_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None = None,
    *,
    return_stats: Literal[True],
    **settings: Unpack[Settings],
) -> tuple[Tensor, Stats]: ...


def lazy_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None = None,
    *,
    slopes: Tensor | None = None,
    threshold: Threshold = "per_query",
    context_length: int | None = None,
    renormalise: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
    backend: Backend = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Stats]:
    """Causal attention with softmax weights minus a threshold, clipped at zero.

    The output is `sum_j max(p_j - theta, 0) v_j`, where p is the softmax of
    `q.k * scale + bias[distance] - slopes * distance` over the keys that the query sees. Queries are aligned to the end
    of the keys: row r has the 1-based position `kv_lengths[b] - Lq + r + 1` (Lk without kv_lengths), counted within
    its document under cu_seqlens, and without keys that key_mask hides. A row that sees no key, or whose weights are
    all clipped, is exactly zero. Only `reference` supports higher-order gradients.

    Under torch.autocast q, k and v are cast to its dtype, as in torch's own attention; tau, bias and slopes are not.

    Args:
        q: `[B, H, Lq, D]`, float16, bfloat16, float32 or float64. Scores, softmax and threshold are float32 (float64
            for float64).
        k, v: `[B, Hkv, Lk, D]`, Lk >= Lq; query head h reads kv head `h // (H // Hkv)`.
        tau: `[H]`, or `[H, N]` for threshold "per_token"; float32 (or float64 with float64 q). Subtracted: tau > 0
            removes weight, tau = 0 is softmax attention.
        bias: `[H, W]`, added to the score at distance 0 .. W - 1 (column 0 is the query's own position). Keys beyond W
            stay visible, with bias 0. dtype as tau.
        slopes: `[H]`, subtracts `slopes[h] * distance` at every distance (ALiBi). dtype as tau.
        threshold: theta of a row that sees n keys: "per_query" tau / n; "per_token" tau[:, min(position, N) - 1] / n;
            "seq_len" tau / context_length; "constant" tau.
        context_length: the constant of threshold "seq_len": the training context, not the length of the batch.
        renormalise: divides a row's weights by their sum.
        scale: factor of the scores; 1 / sqrt(D) by default.
        cu_seqlens: int32 `[n + 1]` boundaries of packed documents, `0 .. Lk`; needs B = 1 and Lq = Lk.
        kv_lengths: int32 or int64 `[B]`, number of valid keys of each sequence, 0 .. Lk, for a cache with fewer queries
            than keys. Leave it out for a right-padded batch: no row sees later keys. The values of kv_lengths and
            cu_seqlens are checked only on the CPU outside torch.compile: elsewhere reading them would sync the device.
        key_mask: bool `[B, Lk]`, False hides a key, as in a left-padded batch; on a GPU "auto" then runs `chunked`.
        window: number of most recent keys that a query sees, its own included.
        backend: "reference" (eager, quadratic memory), "chunked" (linear memory), "cpu" (compiled C++, float32),
            "triton" (fused kernels), "auto" (cpu or triton if the device and the call allow it, else chunked).
        return_stats: also return `Stats`, `[B, H, Lq]` each; its log-sum-exp carries gradients.

    Returns:
        The output `[B, H, Lq, D]` in q's dtype, or `(output, Stats)`.

    Raises:
        TypeError: a tensor argument is not a tensor, or is sparse or nested.
        ValueError: an argument is invalid; the message names it, its value and the fix.
    """
    tensors = q, k, v, tau, bias, slopes, cu_seqlens, kv_lengths, key_mask
    call = Call(*tensors, None, threshold, context_length, renormalise, scale, window)
    out, stats = _check_and_run(call, backend, return_stats)
    return out if stats is None else (out, stats)


@overload
def lazy_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_stats: Literal[False] = False,
    **settings: Unpack[VarlenSettings],
) -> Tensor: ...
@overload
def lazy_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_stats: Literal[True],
    **settings: Unpack[VarlenSettings],
) -> tuple[Tensor, Stats]: ...


def lazy_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    slopes: Tensor | None = None,
    threshold: Threshold = "per_query",
    context_length: int | None = None,
    renormalise: bool = False,
    scale: float | None = None,
    window: int | None = None,
    backend: Backend = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, Stats]:
    """`lazy_attention` of packed documents with fewer queries than keys, in the layout of flash-attention's varlen.

    Document d has the rows `cu_seqlens_q[d] .. cu_seqlens_q[d + 1] - 1` of q and, likewise by cu_seqlens_k, at least as
    many rows of k and v. Its queries are aligned to the end of its keys: a chunk of a prompt whose prefix is cached
    (chunked prefill), or one query for each of many caches. Equal boundaries match `lazy_attention`'s cu_seqlens.

    Args:
        q: `[total_q, H, D]`.
        k, v: `[total_k, Hkv, D]`, total_k >= total_q.
        tau, bias and settings: as in `lazy_attention`; positions and thresholds count within a document.
        cu_seqlens_q, cu_seqlens_k: int32 `[n + 1]` boundaries, `0 .. total_q` and `0 .. total_k`; a document may have
            no queries, or neither queries nor keys. Checked only on the CPU outside torch.compile.
        return_stats: also return `Stats`, `[H, total_q]` each.

    Returns:
        The output `[total_q, H, D]` in q's dtype, or `(output, Stats)`.

    Raises:
        TypeError, ValueError: as in `lazy_attention`.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_type(name, x)
        if name in ("q", "k", "v") and x.dim() != 3:
            raise ValueError(f"{name} has shape {list(x.shape)}; give [total, heads, D]")
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    tensors = q, k, v, tau, bias, slopes, cu_seqlens_q, None, None, cu_seqlens_k
    call = Call(*tensors, threshold, context_length, renormalise, scale, window)
    out, stats = _check_and_run(call, backend, return_stats)
    out = out[0].transpose(0, 1)
    return out if stats is None else (out, Stats(*(x[0] for x in stats)))


def _check_and_run(call: Call, backend: Backend, return_stats: bool) -> tuple[Tensor, Stats | None]:
    check_flag("return_stats", return_stats)
    call = prepare(call)
    return run(call, resolve_backend(backend, call.q, call.key_mask), return_stats)


def run(call: Call, implementation: str, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Run a prepared call on the implementation that `resolve_backend` returned."""
    attend = _BACKENDS[implementation]
    if not is_autocast_enabled(call.q):
        return attend(call, with_stats)
    # The backends choose their own precision; autocast would round their matrix products.
    with torch.autocast(call.q.device.type, enabled=False):
        return attend(call, with_stats)


def attention_weights(
    q: Tensor,
    k: Tensor,
    tau: Tensor,
    bias: Tensor | None = None,
    *,
    slopes: Tensor | None = None,
    threshold: Threshold = "per_query",
    context_length: int | None = None,
    renormalise: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    window: int | None = None,
) -> Weights:
    """The weight matrix, for inspection: eager, `[B, H, Lq, Lk]` in memory.

    Arguments and errors as in `lazy_attention`. Pass `q[:, :, a:b]` and `k[:, :, :b]` for rows `a .. b - 1` of a long
    sequence.
    """
    tensors = q, k, k, tau, bias, slopes, None, None, key_mask
    call = Call(*tensors, None, threshold, context_length, renormalise, scale, window)
    check_types(call)
    require_values(q)
    check(call)
    with torch.autocast(q.device.type, enabled=False):
        return reference_weights(call)


_BACKENDS = {
    "reference": reference_attention,
    "chunked": chunked_attention,
    "cpu": cpu_ops.compiled_attention,
    "triton": fused_attention,
}


def resolve_backend(backend: Backend, q: Tensor, key_mask: Tensor | None = None) -> str:
    """Name of the implementation that runs a call; "auto" picks one for the arguments.

    Under a transform of torch.func, that is "chunked". Raises ValueError if backend is "cpu" or "triton" and does not
    support the call.
    """
    check_choice("backend", backend, BACKENDS)
    if is_transformed() and backend not in ("reference", "chunked"):
        if backend == "auto":
            return "chunked"
        raise ValueError(f"backend is {backend!r}, which torch.func cannot transform; choose 'chunked', or 'auto'")
    if backend == "auto":
        if q.device.type != "cuda":
            return _find_cpu_backend(q)
        if (why := find_obstacle(q, key_mask)) is None:
            return "triton"
        _warn_about_fallback("a GPU", why)
        return "chunked"
    why = {"cpu": partial(cpu_ops.find_obstacle, q), "triton": partial(find_obstacle, q, key_mask)}.get(backend)
    if why is not None and (text := why()) is not None:
        raise ValueError(text)
    return backend


def _find_cpu_backend(q: Tensor) -> str:
    if (why := cpu_ops.find_obstacle(q)) is None:
        return "cpu"
    missing = q.is_cpu and q.dtype == torch.float32 and library.get_instruction_set() is None
    if missing and not torch.compiler.is_compiling():
        _warn_about_fallback("a CPU", why)
    return "chunked"


@cache
def _warn_about_fallback(where: str, why: str) -> None:
    """Warn once per reason."""
    warnings.warn(f"flash_lazy runs 'chunked' on {where}: {why}", stacklevel=6)
