"""The specification of Lazy Attention: eager, one score matrix per head, gradients by autograd, quadratic memory.

All other backends are tested against it.
"""

import torch
from torch import Tensor

from .call import Call, Stats, Weights, compute_dtype
from .scores import attend_documents, count_tokens, eager_scores, locate_queries, weigh_values


def reference_attention(call: Call, with_stats: bool) -> tuple[Tensor, Stats | None]:
    """Output `[B, H, Lq, D]` in q's dtype, and `Stats` if requested. Shapes as in `lazy_attention`."""
    out, stats = _attend_sequences(call) if call.cu_seqlens is None else attend_documents(call, _attend_sequences)
    return out, stats if with_stats else None


def _attend_sequences(call: Call) -> tuple[Tensor, Stats]:
    rows = reference_weights(call)
    blind = ~rows.visible.any(3)[..., None]
    out = weigh_values(rows.w, call, rows.visible[:, 0]).masked_fill(blind, 0)
    stats = Stats(
        lse=torch.logsumexp(rows.scores.masked_fill(blind, 0), -1).masked_fill(blind[..., 0], -torch.inf),
        mass=rows.mass,
        first_weight=rows.w[..., 0],
        zeros=((rows.p <= rows.theta[..., None]) & rows.visible).sum(-1).to(out.dtype),
    )
    return out.to(call.q.dtype), Stats(stats.lse, *(field.detach() for field in stats[1:]))


def reference_weights(call: Call) -> Weights:
    """The weight matrix of queries aligned to the end of the keys, without packed documents."""
    own, visible = locate_queries(call)
    blind = ~visible.any(2)[:, None, :, None]
    hidden = ~visible[:, None]
    scores = eager_scores(call, own, visible).masked_fill(hidden, -torch.inf)
    p = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(hidden, 0)
    theta = _thresholds(call, count_tokens(call, own), visible)
    # Clear hidden keys again: with a negative threshold the ReLU would give them weight.
    w = torch.relu(p - theta[..., None]).masked_fill(hidden, 0)
    mass = w.sum(-1)
    if call.renormalise:
        w = w / torch.where(mass > 0, mass, 1)[..., None]
    return Weights(scores, p, theta, w, mass, visible[:, None])


def _thresholds(call: Call, position: Tensor, visible: Tensor) -> Tensor:
    """theta of each row, `[B, H, Lq]`."""
    n = visible.sum(-1)[:, None]  # [B, 1, Lq]
    tau = call.tau.to(compute_dtype(call.q))
    match call.threshold, call.context_length:
        case "per_query", _:
            theta = tau[:, None] / n.clamp(min=1)
        case "per_token", _:
            theta = tau[:, position.clamp(0, tau.shape[1] - 1)].transpose(0, 1) / n.clamp(min=1)
        case "seq_len", int(context_length):
            theta = tau[:, None] / context_length
        case _:  # constant
            theta = tau[:, None]
    return theta.expand(call.q.shape[:3])
