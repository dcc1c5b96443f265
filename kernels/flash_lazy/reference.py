"""The specification: Lazy Attention written out eagerly, one matrix of scores per head, gradients by autograd.

Every other backend is tested against this one. Its memory is quadratic in the length; it runs in float64 where the
inputs are float64 and in float32 otherwise.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Threshold = Literal["per_query", "seq_len", "per_token", "constant"]


class Stats(NamedTuple):
    """What a row of the weight matrix looks like; every field is float32 `[B, H, Lq]` and carries no gradient.

    lse: log-sum-exp of the visible scores, bias included (-inf for a row that sees no key).
    mass: sum of the row's weights before renormalising.
    first_weight: weight that multiplied the value of the document's first key, hence after renormalising where that
        is asked for; 0 where the key is hidden or outside the window.
    zeros: number of visible keys with p <= theta.
    """

    lse: Tensor
    mass: Tensor
    first_weight: Tensor
    zeros: Tensor


class Weights(NamedTuple):
    """The weight matrix of some rows, in the precision of `compute_dtype`.

    scores: `[B, H, Lq, Lk]`, scaled, bias included, -inf at hidden keys.
    p: softmax of the scores, 0 at hidden keys and in a row that sees no key.
    theta: threshold of each row, broadcast to `[B, H, Lq]`.
    w: what multiplies the values, `[B, H, Lq, Lk]`: max(p - theta, 0), divided by the mass where renormalised.
    mass: sum of a row's weights before renormalising, `[B, H, Lq]`.
    visible: bool `[B, 1, Lq, Lk]`.
    """

    scores: Tensor
    p: Tensor
    theta: Tensor
    w: Tensor
    mass: Tensor
    visible: Tensor


@dataclass(frozen=True)
class Options:
    """The validated options of one call; `flash_lazy.api.lazy_attention` says what each one means."""

    threshold: Threshold
    context_length: int  # 0 unless threshold is seq_len
    renormalise: bool
    scale: float
    cu_seqlens: Tensor | None
    kv_lengths: Tensor | None
    key_mask: Tensor | None
    window: int | None


def compute_dtype(q: Tensor) -> torch.dtype:
    """Scores, softmax and threshold are float64 for float64 inputs and float32 for everything else."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


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
    out, stats = _attend(q, k, v, tau, bias, slopes, options)
    return out, stats if with_stats else None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, tau: Tensor, bias: Tensor | None, slopes: Tensor | None, options: Options
) -> tuple[Tensor, Stats]:
    if options.cu_seqlens is None:
        return _attend_one(q, k, v, tau, bias, slopes, options)
    outs, stats = [], []
    for start, end in pairwise(options.cu_seqlens.tolist()):  # documents are sequences of their own
        if start == end:
            continue
        doc = slice(start, end)
        mask = None if options.key_mask is None else options.key_mask[:, doc]
        alone = replace(options, cu_seqlens=None, key_mask=mask)
        out, stat = _attend_one(q[:, :, doc], k[:, :, doc], v[:, :, doc], tau, bias, slopes, alone)
        outs.append(out)
        stats.append(stat)
    return torch.cat(outs, 2), Stats(*(torch.cat(field, 2) for field in zip(*stats, strict=True)))


def _attend_one(
    q: Tensor, k: Tensor, v: Tensor, tau: Tensor, bias: Tensor | None, slopes: Tensor | None, options: Options
) -> tuple[Tensor, Stats]:
    rows = weights(q, k, tau, bias, slopes, options)
    unseen = ~rows.visible.any(2)[..., None]
    v = v.to(rows.w.dtype).masked_fill(unseen, 0).repeat_interleave(q.shape[1] // v.shape[1], 1)
    blind = ~rows.visible.any(3)[..., None]
    out = (rows.w @ v).masked_fill(blind, 0)
    stats = Stats(
        lse=torch.logsumexp(rows.scores, -1),
        mass=rows.mass,
        first_weight=rows.w[..., 0],
        zeros=((rows.p <= rows.theta[..., None]) & rows.visible).sum(-1),
    )
    return out.to(q.dtype), Stats(*(field.detach().float() for field in stats))


def weights(q: Tensor, k: Tensor, tau: Tensor, bias: Tensor | None, slopes: Tensor | None, options: Options) -> Weights:
    """The weight matrix of queries aligned to the end of the keys; not for packed documents."""
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    dtype = compute_dtype(q)
    tau = tau.to(dtype)

    # Which key each query sees. own[b, r] is the 0-based index of the key at the query's own position.
    lengths = torch.full((batch,), keys, device=q.device) if options.kv_lengths is None else options.kv_lengths.long()
    own = lengths[:, None] - rows + torch.arange(rows, device=q.device)
    distance = own[:, :, None] - torch.arange(keys, device=q.device)  # [B, Lq, Lk]
    visible = distance >= 0
    if options.window is not None:
        visible = visible & (distance < options.window)
    if options.key_mask is not None:
        visible = visible & options.key_mask[:, None, :]
    n = visible.sum(-1)[:, None]  # [B, 1, Lq]

    # A query without a key and a key without a query may hold anything, also NaN, and 0 * NaN is NaN: clear them.
    blind = ~visible.any(2)[:, None, :, None]
    unseen = ~visible.any(1)[:, None, :, None]
    q = q.to(dtype).masked_fill(blind, 0)
    k = k.to(dtype).masked_fill(unseen, 0).repeat_interleave(heads // k.shape[1], 1)

    scores = q @ k.transpose(-1, -2) * options.scale
    if bias is not None:
        width = bias.shape[1]
        table = bias.to(dtype)[:, distance.clamp(0, width - 1)].transpose(0, 1)  # [B, H, Lq, Lk]
        scores = scores + table.masked_fill((distance >= width)[:, None], 0)
    if slopes is not None:
        scores = scores - slopes.to(dtype)[:, None, None] * distance[:, None]

    hidden = ~visible[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    p = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(hidden, 0)

    if options.threshold == "per_token":
        last = tau.shape[1] - 1
        tau_rows = tau[:, own.clamp(0, last)].transpose(0, 1)  # [B, H, Lq]
    else:
        tau_rows = tau[:, None]
    match options.threshold:
        case "per_query" | "per_token":
            theta = tau_rows / n.clamp(min=1)
        case "seq_len":
            theta = tau_rows / options.context_length
        case "constant":
            theta = tau_rows
    theta = theta.expand(batch, heads, rows)
    # Hidden keys are cleared again: below a negative threshold the ReLU alone would give them weight.
    w = torch.relu(p - theta[..., None]).masked_fill(hidden, 0)
    mass = w.sum(-1)
    if options.renormalise:
        w = w / torch.where(mass > 0, mass, 1)[..., None]
    return Weights(scores, p, theta, w, mass, visible[:, None])
