"""The specification: Lazy Attention written out eagerly, one matrix of scores per head, gradients by autograd.

Every other backend is tested against this one. Its memory is quadratic in the length; it runs in float64 where the
inputs are float64 and in float32 otherwise.
"""

import torch
from torch import Tensor

from flash_lazy.call import Call, Stats, Weights, compute_dtype, slice_documents
from flash_lazy.scores import eager_scores, locate_queries


def reference_attention(call: Call, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Output `[B, H, Lq, D]` in q's dtype, and the row statistics where asked for. Shapes as in `lazy_attention`."""
    out, stats = _attend_sequences(call) if call.cu_seqlens is None else _attend_documents(call)
    return out, stats if with_stats else None


def _attend_documents(call: Call) -> tuple[Tensor, Stats]:
    """Documents are sequences of their own."""
    outs, stats = [], []
    for rows, keys in slice_documents(call):
        if rows.start == rows.stop:
            continue
        q, k, v = call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys]
        mask = None if call.key_mask is None else call.key_mask[:, keys]
        out, stat = _attend_sequences(call._replace(q=q, k=k, v=v, cu_seqlens=None, cu_seqlens_k=None, key_mask=mask))
        outs.append(out)
        stats.append(stat)
    return torch.cat(outs, 2), Stats(*(torch.cat(field, 2) for field in zip(*stats, strict=True)))


def _attend_sequences(call: Call) -> tuple[Tensor, Stats]:
    rows = reference_weights(call)
    unseen = ~rows.visible.any(2)[..., None]
    v = call.v.to(rows.w.dtype).masked_fill(unseen, 0).repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)
    blind = ~rows.visible.any(3)[..., None]
    out = (rows.w @ v).masked_fill(blind, 0)
    stats = Stats(
        lse=torch.logsumexp(rows.scores.masked_fill(blind, 0), -1).masked_fill(blind[..., 0], -torch.inf),
        mass=rows.mass,
        first_weight=rows.w[..., 0],
        zeros=((rows.p <= rows.theta[..., None]) & rows.visible).sum(-1).to(out.dtype),
    )
    return out.to(call.q.dtype), Stats(stats.lse, *(field.detach() for field in stats[1:]))


def reference_weights(call: Call) -> Weights:
    """The weight matrix of queries aligned to the end of the keys; not for packed documents."""
    own, visible = locate_queries(call)
    blind = ~visible.any(2)[:, None, :, None]
    hidden = ~visible[:, None]
    scores = eager_scores(call, own, visible).masked_fill(hidden, -torch.inf)
    p = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(hidden, 0)
    theta = _thresholds(call, own, visible)
    # Hidden keys are cleared again: below a negative threshold the ReLU alone would give them weight.
    w = torch.relu(p - theta[..., None]).masked_fill(hidden, 0)
    mass = w.sum(-1)
    if call.renormalise:
        w = w / torch.where(mass > 0, mass, 1)[..., None]
    return Weights(scores, p, theta, w, mass, visible[:, None])


def _thresholds(call: Call, own: Tensor, visible: Tensor) -> Tensor:
    """theta of every row, `[B, H, Lq]`."""
    n = visible.sum(-1)[:, None]  # [B, 1, Lq]
    tau = call.tau.to(compute_dtype(call.q))
    match call.threshold, call.context_length:
        case "per_query", _:
            theta = tau[:, None] / n.clamp(min=1)
        case "per_token", _:
            theta = tau[:, own.clamp(0, tau.shape[1] - 1)].transpose(0, 1) / n.clamp(min=1)
        case "seq_len", int(context_length):
            theta = tau[:, None] / context_length
        case _:  # constant
            theta = tau[:, None]
    return theta.expand(call.q.shape[:3])
