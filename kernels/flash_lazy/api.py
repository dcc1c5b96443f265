"""The public function: checks every argument once, then hands over to a backend."""

import math
from collections.abc import Mapping
from typing import Literal, get_args, overload

import torch
from torch import Tensor

from flash_lazy import chunked, reference
from flash_lazy.fused import ops
from flash_lazy.reference import Options, Stats, Threshold, Weights

Backend = Literal["auto", "reference", "chunked", "triton"]


@overload
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
    return_stats: Literal[False] = False,
) -> Tensor: ...
@overload
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
    return_stats: Literal[True],
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
        kv_lengths: int32 or int64 `[B]`, number of valid keys of each sequence, 0 .. Lk. Its values and those of
            cu_seqlens are checked on the CPU, outside torch.compile: reading them elsewhere would wait for the device.
        key_mask: bool `[B, Lk]`, False hides a key.
        window: number of most recent keys a query sees, itself included.
        backend: "reference" (eager, memory quadratic in the length), "chunked" (memory linear), "triton" (fused
            kernels), "auto" (triton for what it can take on a CUDA device, else chunked).
        return_stats: also returns `Stats`, float32 `[B, H, Lq]` each.

    Returns:
        The output `[B, H, Lq, D]` in q's dtype, or `(output, Stats)`.

    Raises:
        TypeError: one of the tensors is something else.
        ValueError: an argument does not fit; the message names it, its value and what would fit.
    """
    tensors = {"q": q, "k": k, "v": v, "tau": tau}
    optional = {
        "bias": bias,
        "slopes": slopes,
        "cu_seqlens": cu_seqlens,
        "kv_lengths": kv_lengths,
        "key_mask": key_mask,
    }
    _check_types(tensors | {name: x for name, x in optional.items() if x is not None})
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    _check_tensors(q, k, v)
    _check_threshold(threshold, context_length)
    _check_head_parameters(q, tau, bias, slopes, threshold)
    _check_visibility(q, k, cu_seqlens, kv_lengths, key_mask, window)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; give a finite number, or None for 1 / sqrt(D)")
    implementation = resolve_backend(backend, q, key_mask)

    options = Options(
        threshold=threshold,
        context_length=context_length or 0,
        renormalise=renormalise,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        cu_seqlens=cu_seqlens,
        kv_lengths=kv_lengths,
        key_mask=key_mask,
        window=window,
    )
    attend = _ATTEND[implementation]
    # The backends state their own precision; autocast would round their matrix products.
    with torch.autocast(q.device.type, enabled=False):
        out, stats = attend(q, k, v, tau, bias, slopes, options, return_stats)
    return out if stats is None else (out, stats)


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

    Arguments as there. Rows `a .. b - 1` of a sequence are those of `q[:, :, a:b]` and `k[:, :, :b]`, so a long
    sequence can be looked at in blocks.
    """
    _check_tensors(q, k, k)
    _check_threshold(threshold, context_length)
    _check_head_parameters(q, tau, bias, slopes, threshold)
    _check_visibility(q, k, None, None, key_mask, window)
    options = Options(
        threshold=threshold,
        context_length=context_length or 0,
        renormalise=renormalise,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        cu_seqlens=None,
        kv_lengths=None,
        key_mask=key_mask,
        window=window,
    )
    with torch.autocast(q.device.type, enabled=False):
        return reference.weights(q, k, tau, bias, slopes, options)


_ATTEND = {"reference": reference.attend, "chunked": chunked.attend, "triton": ops.attend}


def resolve_backend(backend: Backend, q: Tensor, key_mask: Tensor | None = None) -> str:
    """The implementation that a call runs: what "auto" picks for its arguments, and any other name itself.

    Raises ValueError where "triton" is asked for by name and cannot take the call.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(get_args(Backend))}")
    if backend == "auto":
        return "triton" if q.device.type == "cuda" and ops.obstacle(q, key_mask) is None else "chunked"
    if backend == "triton" and (obstacle := ops.obstacle(q, key_mask)):
        raise ValueError(obstacle)
    return backend


def _check_types(tensors: Mapping[str, object]) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {x!r}, a {type(x).__name__}; give a tensor")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} has shape {_shape(x)}; give [B, H, L, D] with every size at least 1")
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"{name} is {x.dtype}; give float16, bfloat16, float32 or float64")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}; cast them to one dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move them to one device")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {_shape(v)} and k {_shape(k)}; give both [B, Hkv, Lk, D]")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k has shape {_shape(k)} and q {_shape(q)}; B and D must agree")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads and q {q.shape[1]}; q's must be a multiple of k's")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} rows and k {k.shape[2]}; queries end where keys end, so give Lq <= Lk")


def _check_head_parameters(
    q: Tensor, tau: Tensor, bias: Tensor | None, slopes: Tensor | None, threshold: Threshold
) -> None:
    heads = q.shape[1]
    layouts = (
        ("tau", tau, "[H, N]" if threshold == "per_token" else "[H]"),
        ("bias", bias, "[H, W]"),
        ("slopes", slopes, "[H]"),
    )
    for name, x, layout in layouts:
        if x is None:
            continue
        if x.dim() != layout.count(",") + 1 or x.shape[0] != heads or 0 in x.shape:
            raise ValueError(f"{name} has shape {_shape(x)}; with threshold={threshold!r} give {layout}, H = {heads}")
        if x.dtype != torch.float32 and not x.dtype == q.dtype == torch.float64:
            raise ValueError(f"{name} is {x.dtype}; keep it float32 (float64 is allowed beside float64 q)")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move them to one device")


def _check_threshold(threshold: Threshold, context_length: int | None) -> None:
    if threshold not in get_args(Threshold):
        raise ValueError(f"threshold is {threshold!r}; choose one of {', '.join(get_args(Threshold))}")
    if threshold == "seq_len" and (not isinstance(context_length, int) or context_length < 1):
        need = "threshold='seq_len' needs the training context, a whole number >= 1"
        raise ValueError(f"context_length is {context_length}; {need}")
    if threshold != "seq_len" and context_length is not None:
        raise ValueError(f"context_length is {context_length}; only threshold='seq_len' uses it, so leave it out")


def _check_visibility(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    kv_lengths: Tensor | None,
    key_mask: Tensor | None,
    window: int | None,
) -> None:
    batch, keys = k.shape[0], k.shape[2]
    for name, x in (("cu_seqlens", cu_seqlens), ("kv_lengths", kv_lengths), ("key_mask", key_mask)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move them to one device")
    if cu_seqlens is not None:
        if kv_lengths is not None:
            raise ValueError("kv_lengths and cu_seqlens are both given; packed documents carry their own lengths")
        if batch != 1 or q.shape[2] != keys:
            raise ValueError(f"cu_seqlens needs B = 1 and Lq = Lk; q has shape {_shape(q)} and k {_shape(k)}")
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
            raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} of shape {_shape(cu_seqlens)}; give int32 [n + 1]")
        if _may_be_read(cu_seqlens):
            cuts = cu_seqlens.tolist()
            if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != keys or cuts != sorted(cuts):
                raise ValueError(f"cu_seqlens is {cuts}; give boundaries that rise from 0 to Lk = {keys}")
    if kv_lengths is not None:
        if kv_lengths.dtype not in (torch.int32, torch.int64) or kv_lengths.shape != (batch,):
            got = f"{kv_lengths.dtype} of shape {_shape(kv_lengths)}"
            raise ValueError(f"kv_lengths is {got}; give int32 or int64 [B], B = {batch}")
        if _may_be_read(kv_lengths) and not 0 <= int(kv_lengths.min()) <= int(kv_lengths.max()) <= keys:
            raise ValueError(f"kv_lengths is {kv_lengths.tolist()}; give values from 0 to Lk = {keys}")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (batch, keys)):
        got = f"{key_mask.dtype} of shape {_shape(key_mask)}"
        raise ValueError(f"key_mask is {got}; give bool [B, Lk] = [{batch}, {keys}], True for keys to see")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        need = "a whole number, at least 1 (the query's own key)"
        raise ValueError(f"window is {window}; give {need}, or None for no window")


def _may_be_read(x: Tensor) -> bool:
    """Whether looking at a tensor's values waits for no device and breaks no graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _shape(x: Tensor) -> str:
    return str(list(x.shape))
