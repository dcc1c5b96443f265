"""The public functions: they check every argument once, then hand over to a backend."""

import warnings
from functools import cache
from typing import Literal, get_args, overload

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from flash_lazy.call import (
    Call,
    Stats,
    Threshold,
    Weights,
    cast_for_autocast,
    check,
    check_flag,
    check_type,
    check_types,
)
from flash_lazy.chunked import chunked_attention
from flash_lazy.fused.ops import find_obstacle, fused_attention
from flash_lazy.reference import reference_attention, reference_weights

Backend = Literal["auto", "reference", "chunked", "triton"]


class SharedSettings(TypedDict, total=False):
    """The types of the settings of both functions; their signatures have the defaults, docstrings the meaning."""

    slopes: Tensor | None
    threshold: Threshold
    context_length: int | None
    renormalise: bool
    scale: float | None
    window: int | None
    backend: Backend


class VarlenSettings(SharedSettings, total=False, closed=True):
    """The types of `lazy_attention_varlen`'s settings."""


class Settings(SharedSettings, total=False, closed=True):
    """The types of `lazy_attention`'s settings."""

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
    """Causal attention whose softmax weights are lowered by a threshold and cut at zero.

    With p the softmax of `q.k * scale + bias[distance] - slopes * distance` over the keys that the query sees, the
    output is `sum_j max(p_j - theta, 0) v_j`. Queries are aligned to the end of the keys: row r stands at position
    `kv_lengths[b] - Lq + r + 1` (1-based; Lk without kv_lengths), counted within its own document under cu_seqlens.
    A row that sees no key, or whose weights are all cut, is exactly zero. First-order gradients only (all but
    `reference`).

    Under torch.autocast q, k and v are cast to its dtype, as for torch's own attention; tau, bias and slopes are not.

    Args:
        q: `[B, H, Lq, D]`, float16, bfloat16, float32 or float64. Scores, softmax and threshold are float32 (float64
            for float64).
        k, v: `[B, Hkv, Lk, D]`, Lk >= Lq; query head h reads kv head `h // (H // Hkv)`.
        tau: `[H]`, or `[H, N]` for threshold "per_token"; float32 (or float64 beside float64 q). Subtracted, so
            tau > 0 removes weight and tau = 0 is softmax attention.
        bias: `[H, W]`, added to the score at distance 0 .. W - 1 (column 0 is the query's own position); 0 beyond,
            where keys stay visible. dtype as tau.
        slopes: `[H]`, subtracts `slopes[h] * distance` at every distance (ALiBi). dtype as tau.
        threshold: theta of a row that sees n keys: "per_query" tau / n; "per_token" tau[:, min(position, N) - 1] / n;
            "seq_len" tau / context_length; "constant" tau.
        context_length: the constant of threshold "seq_len" (the training context, not the batch's length).
        renormalise: divides a row's weights by their sum.
        scale: factor of the scores; 1 / sqrt(D) by default.
        cu_seqlens: int32 `[n + 1]` boundaries of packed documents, `0 .. Lk`; needs B = 1 and Lq = Lk.
        kv_lengths: int32 or int64 `[B]`, number of valid keys of each sequence, 0 .. Lk, for a cache with fewer queries
            than keys. A right-padded batch needs none: no row looks at what comes after it. Its values and those of
            cu_seqlens are checked on the CPU, outside torch.compile: reading them elsewhere would wait for the device.
        key_mask: bool `[B, Lk]`, False hides a key, as in a left-padded batch; on a GPU "auto" then runs `chunked`.
        window: number of most recent keys a query sees, itself included.
        backend: "reference" (eager, memory quadratic in the length), "chunked" (memory linear), "triton" (fused
            kernels), "auto" (triton for what it can take on a CUDA device, else chunked).
        return_stats: also returns `Stats`, `[B, H, Lq]` each; its log-sum-exp carries gradients.

    Returns:
        The output `[B, H, Lq, D]` in q's dtype, or `(output, Stats)`.

    Raises:
        TypeError: one of the tensors is something else, or sparse, nested or without values.
        ValueError: an argument does not fit; the message names it, its value and what would fit.
    """
    tensors = q, k, v, tau, bias, slopes, cu_seqlens, kv_lengths, key_mask
    call = Call(*tensors, None, threshold, context_length, renormalise, scale, window)
    out, stats = _attend(call, backend, return_stats)
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
    """`lazy_attention` of packed documents with fewer queries than keys, in the shape of flash-attention's varlen.

    Document d has the rows `cu_seqlens_q[d] .. cu_seqlens_q[d + 1] - 1` of q and, by cu_seqlens_k, its own rows of k
    and v, at least as many. Its queries are aligned to the end of its keys: the chunk of a prompt whose prefix lies in
    a cache (chunked prefill), or one query for each of many caches. Equal boundaries are `lazy_attention`'s cu_seqlens.

    Args:
        q: `[total_q, H, D]`.
        k, v: `[total_k, Hkv, D]`, total_k >= total_q.
        tau, bias: as in `lazy_attention`, and so are the settings; positions and thresholds count within a document.
        cu_seqlens_q, cu_seqlens_k: int32 `[n + 1]` boundaries, `0 .. total_q` and `0 .. total_k`; a document may have
            no queries, or neither queries nor keys. Checked on the CPU, outside torch.compile.
        return_stats: also returns `Stats`, `[H, total_q]` each.

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
    out, stats = _attend(call, backend, return_stats)
    out = out[0].transpose(0, 1)
    return out if stats is None else (out, Stats(*(x[0] for x in stats)))


def _attend(call: Call, backend: Backend, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Checks a call and runs it, under autocast in its precision."""
    check_types(call)
    check_flag("return_stats", with_stats)
    call = cast_for_autocast(call)
    check(call)
    attend = _BACKENDS[resolve_backend(backend, call.q, call.key_mask)]
    # The backends state their own precision; autocast would round their matrix products.
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
    """The weights themselves, to be looked at: eager, and `[B, H, Lq, Lk]` large in memory.

    Arguments and errors as in `lazy_attention`. Rows `a .. b - 1` of a sequence are those of `q[:, :, a:b]` and
    `k[:, :, :b]`, so a long sequence can be looked at in blocks.
    """
    tensors = q, k, k, tau, bias, slopes, None, None, key_mask
    call = Call(*tensors, None, threshold, context_length, renormalise, scale, window)
    check_types(call)
    check(call)
    with torch.autocast(q.device.type, enabled=False):
        return reference_weights(call)


_BACKENDS = {"reference": reference_attention, "chunked": chunked_attention, "triton": fused_attention}


def resolve_backend(backend: Backend, q: Tensor, key_mask: Tensor | None = None) -> str:
    """The implementation that a call runs: what "auto" picks for its arguments, and any other name itself.

    Raises ValueError where "triton" is asked for by name and cannot take the call.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(get_args(Backend))}")
    if backend == "auto":
        if q.device.type != "cuda":
            return "chunked"
        if (why := find_obstacle(q, key_mask)) is None:
            return "triton"
        _warn_of_a_slower_backend(why)
        return "chunked"
    if backend == "triton" and (why := find_obstacle(q, key_mask)):
        raise ValueError(why)
    return backend


@cache
def _warn_of_a_slower_backend(why: str) -> None:
    """Once for each reason, on a GPU alone."""
    warnings.warn(f"flash_lazy runs 'chunked' on a GPU: {why}", stacklevel=5)
