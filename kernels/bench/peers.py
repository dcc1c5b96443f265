"""Inputs of the benchmark with a given share of empty tiles, and the peers: other implementations to compare with.

`eager_attention` and `two_call_attention` implement the definition without sharing code with the kernels.
"""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.workloads import Workload
from flash_lazy import lazy_attention
from flash_lazy.fused import configurations

TILE = 64
MIN_RECENCY, BISECTIONS, SAMPLED_BLOCKS, SAMPLED_SEQUENCES, TOLERANCE = 1e-2, 40, 32, 4, 0.003
MAX_SCORES = 2**30
"""Maximum scores per call for peers that keep all of them in memory."""


class Inputs(NamedTuple):
    """q `[B, H, Lq, D]`, k, v `[B, Hkv, L, D]`, tau `[H]`, bias `[H, W]`; the queries end where the keys end."""

    q: Tensor
    k: Tensor
    v: Tensor
    tau: Tensor
    bias: Tensor


def draw(workload: Workload, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random inputs with tau = 1; `set_recency` overwrites the first columns of q and k."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, rows: int) -> Tensor:
        shape = (workload.batch, heads, rows, workload.width)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k, v = normal(workload.heads, workload.rows), *(normal(workload.kv_heads, workload.length) for _ in range(2))
    bias = 0.1 * torch.randn(workload.heads, workload.reach, generator=generator, device=device)
    inputs = Inputs(q, k, v, torch.ones(workload.heads, device=device), bias)
    set_recency(inputs, 0.0)
    return inputs


def set_recency(inputs: Inputs, recency: float) -> None:
    """Make all scores increase by `recency` nats from the first key to the last."""
    length, width = inputs.k.shape[2:]
    inputs.q[..., 0] = width**0.5
    inputs.k[..., 0] = recency * torch.arange(length, device=inputs.k.device) / length


def compute_empty_share(inputs: Inputs, sampled: int = SAMPLED_BLOCKS) -> float:
    """Share of the causal TILE x TILE tiles in which no weight survives (tau `per_query`).

    Counted per query head, or with a single query row per kv head, whose values are read once for all its query heads.
    Computed from the definition in float32, on the first SAMPLED_SEQUENCES sequences and at most `sampled` evenly
    spaced blocks of rows.
    """
    q, k, _, tau, bias = inputs
    rows, length, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    q, k = q[:SAMPLED_SEQUENCES], k[:SAMPLED_SEQUENCES]
    blocks = -(-rows // TILE)
    chosen = torch.linspace(0, blocks - 1, min(sampled, blocks)).round().long().tolist()
    table = F.pad(bias, (0, max(0, length - bias.shape[1])))
    empty, tiles = 0, 0
    for block in chosen:
        row = torch.arange(block * TILE, min((block + 1) * TILE, rows), device=q.device)[:, None]
        own = length - rows + row
        seen = length - rows + len(row) + block * TILE
        distance = own - torch.arange(seen, device=q.device)
        keys = k[:, :, :seen].float().repeat_interleave(group, 1)
        scores = q[:, :, row[:, 0]].float() @ keys.mT * q.shape[3] ** -0.5
        scores += table[:, distance.clamp(min=0)]
        p = scores.masked_fill_(distance < 0, -torch.inf).softmax(-1)
        alive = ((p > tau[:, None, None] / (own + 1)) & (distance >= 0)).any(-2)
        if rows == 1:
            alive = alive.unflatten(1, (-1, group)).any(2)
        per_tile = F.pad(alive, (0, -seen % TILE)).unflatten(-1, (-1, TILE)).any(-1)
        empty += int((~per_tile).sum())
        tiles += per_tile.numel()
    return empty / tiles


def draw_with_share(
    workload: Workload, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[Inputs, float, float]:
    """Inputs with about the workload's share of empty tiles, the measured share, and the recency found by bisection.

    Every block of rows keeps a tile, so the share is at most 1 - 2 / (blocks + 1): short sequences may not reach it.
    """
    inputs = draw(workload, device, dtype)
    low, high = 0.0, 8.0 * workload.length
    recency = 0.0
    for _ in range(BISECTIONS):
        set_recency(inputs, recency)
        share = compute_empty_share(inputs)
        if abs(share - workload.share) < TOLERANCE or (recency == 0 and share >= workload.share):
            break
        low, high = (recency, high) if share < workload.share else (low, recency)
        recency = (max(low, MIN_RECENCY) * high) ** 0.5
    return inputs, share, recency


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    bias: Tensor | None = None,
    *,
    slopes: Tensor | None = None,
    threshold: str = "per_query",
    context_length: int | None = None,
    renormalise: bool = False,
    cu_seqlens: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The function in plain PyTorch: products in q's dtype, everything between in float32 (float64 for float64).

    Arguments as in `lazy_attention`; every row must see a key.
    """
    rows, keys = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    column = torch.arange(keys, device=q.device)
    last = torch.full((1, 1), keys, device=q.device) if kv_lengths is None else kv_lengths[:, None]
    own = last - rows + torch.arange(rows, device=q.device)  # [B or 1, Lq]
    start = torch.zeros_like(own)
    if cu_seqlens is not None:
        start = cu_seqlens.long()[torch.searchsorted(cu_seqlens.long(), own, right=True) - 1]
    distance = own[..., None] - column
    visible = (distance >= 0) & (column >= start[..., None])
    if window is not None:
        visible &= distance < window
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[3] ** -0.5
    if bias is not None:
        scores = scores + F.pad(bias, (0, 1))[:, distance.clamp(0, bias.shape[1])].transpose(0, 1)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance[:, None]
    p = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    offset = tau[:, (own - start).clamp(max=tau.shape[1] - 1)].transpose(0, 1) if tau.dim() > 1 else tau[:, None]
    seen = visible.sum(-1)[:, None]
    theta = offset / (seen if threshold in ("per_query", "per_token") else context_length or 1)
    w = (p - theta[..., None]).relu().masked_fill(~visible[:, None], 0)
    if renormalise:
        mass = w.sum(-1, keepdim=True)
        w = w / torch.where(mass > 0, mass, 1)
    return w.to(v.dtype) @ v


def two_call_attention(
    q: Tensor, k: Tensor, v: Tensor, tau: Tensor, bias: Tensor, block_mask: Any, attention: Callable[..., Any]
) -> Tensor:
    """The function (`per_query`) by two FlexAttention calls: the first gives the log-sum-exp, the second weighs values.

    The scores of the second call are log weights; it normalises by sum w, which its log-sum-exp undoes. The first call
    multiplies only 16 columns of the values.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    shift, reach = k.shape[2] - q.shape[2], bias.shape[1]

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        distance = row + shift - key
        return score + torch.where(distance < reach, bias[head, distance.clamp(0, reach - 1)], 0.0)

    shared = {"block_mask": block_mask, "return_aux": AuxRequest(lse=True), "enable_gqa": q.shape[1] > k.shape[1]}
    call = partial(attention, q, k, **shared)
    lse = call(v[..., :16], score_mod=add_bias)[1].lse

    def log_weight(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        p = torch.exp(add_bias(score, batch, head, row, key) - lse[batch, head, row])
        w = p - tau[head] / (row + shift + 1)
        return torch.where(w > 0, torch.log(torch.where(w > 0, w, 1.0)), -torch.inf)

    out, aux = call(v, score_mod=log_weight)
    return out * torch.exp(aux.lse)[..., None].to(out.dtype)


class Peer(NamedTuple):
    name: str
    attend: Callable[..., Tensor]
    """Computes the output from q, k, v, tau and bias."""
    kind: str | None
    """Key in `compile_report.PRODUCTS` of the products that it needs."""
    same: bool = True
    """Whether it computes the same function as flash_lazy."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def peers(backend: str, authors: Path | None) -> list[Peer]:
    ours = partial(lazy_attention, backend=backend)
    return [
        Peer("flash_lazy", ours, "lazy", around=partial(skip_empty_tiles, False)),
        Peer("flash_lazy, empty tiles skipped", ours, "lazy", around=partial(skip_empty_tiles, True)),
        *(
            Peer(f"SDPA {name}", _softmax, "softmax", False, partial(sdpa_kernel, getattr(SDPBackend, name)))
            for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
        ),
        Peer("SDPA MATH", _limit_scores(_softmax), "softmax", False, partial(sdpa_kernel, SDPBackend.MATH)),
        Peer("FlexAttention, two calls", _flex, "lazy"),
        Peer("eager", _limit_scores(eager_attention), "lazy"),
        Peer("AdaSplash", _adasplash, None, False),
        Peer("the authors' kernel", partial(_authors, authors), "authors"),
    ]


def skip_empty_tiles(skip: bool) -> AbstractContextManager[Any]:
    """Context in which the products of empty tiles are skipped, or computed."""
    return patch.object(configurations, "SKIP_EMPTY_TILES", skip)


def _softmax(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    grouped = q.shape[1] > k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=grouped)


def _limit_scores(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Restrict a function that keeps all scores to calls of at most MAX_SCORES scores."""

    def attend_within_limit(q: Tensor, k: Tensor, *others: Tensor) -> Tensor:
        scores = q.shape[:3].numel() * k.shape[2]
        if scores > MAX_SCORES:
            raise NotImplementedError(f"keeps all {scores:.1e} scores; measured only up to {MAX_SCORES:.1e}")
        return attend(q, k, *others)

    return attend_within_limit


def _flex(q: Tensor, k: Tensor, v: Tensor, tau: Tensor, bias: Tensor) -> Tensor:
    return _compile_flex()(q, k, v, tau, bias, _causal_mask(q.shape[2], q.device.type))


@cache
def _compile_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(*arguments: Any) -> Tensor:
        return two_call_attention(*arguments, attention=flex_attention)

    return torch.compile(attend, dynamic=False)


@cache
def _causal_mask(rows: int, device: str) -> Any:
    """Causal block mask; None for a single row, which sees every key."""
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return row >= key

    return create_block_mask(causal, None, None, rows, rows, device) if rows > 1 else None


def _adasplash(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    _require_training_shapes(q, k)
    import adasplash  # pyrefly: ignore [missing-import]

    return adasplash.adasplash(q, k, v, is_causal=True)


def _authors(checkout: Path | None, q: Tensor, k: Tensor, v: Tensor, tau: Tensor, bias: Tensor) -> Tensor:
    """github.com/Fzkuji/flash-lazy-attention, whose tau has the opposite sign."""
    if checkout is None:
        raise FileNotFoundError("needs --authors, a checkout of the authors' repository")
    _require_training_shapes(q, k)
    return _load_module(checkout).lazy_attention_triton(q, k, v, bias, -tau)


def _require_training_shapes(q: Tensor, k: Tensor) -> None:
    if q.shape[2] < k.shape[2]:
        raise NotImplementedError("does not support decoding")
    if q.shape[1] > k.shape[1]:
        raise NotImplementedError("does not support grouped heads")


@cache
def _load_module(checkout: Path) -> Any:
    path = checkout / "lazy_attention_triton.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
