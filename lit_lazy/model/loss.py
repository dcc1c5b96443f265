"""The loss of next-token prediction."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_lazy.data.base import IGNORED

LOGITS_AT_ONCE = 2**26
"""256 MiB in fp32. Unlimited, 32k tokens with a vocabulary of 32k would need three copies of 4 GB."""


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target in nats, 0 for `IGNORED`: logits `[B, L, V]`, the others `[B, L]`."""
    return _nll(logits.flatten(0, 1), targets.flatten()).view(targets.shape)


def head_nll(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """`token_nll` of `hidden @ head.T`, fp32: hidden `[B, L, d]`, head `[V, d]`, targets and result `[B, L]`.

    Tokens are processed in blocks of at most LOGITS_AT_ONCE logits, which the backward pass recomputes.
    """
    return _apply_in_blocks(_nll, hidden, head, targets)


def head_nll_and_log_z(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`head_nll` and log Z, the log-sum-exp of the logits: `[B, L]` each, 0 for `IGNORED`, in the same memory."""
    nll, log_z = _apply_in_blocks(_nll_and_log_z, hidden, head, targets)
    return nll, log_z


def _apply_in_blocks(
    function: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, head: Tensor, targets: Tensor
) -> Tensor:
    """Apply a function of logits `[N, V]` and targets `[N]` with result `[..., N]` to all tokens: `[..., B, L]`."""
    tokens = max(1, LOGITS_AT_ONCE // head.shape[0])
    if targets.numel() <= tokens:
        return function(F.linear(hidden, head).flatten(0, 1), targets.flatten()).unflatten(-1, targets.shape)

    def apply(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        return function(F.linear(hidden, head), targets)

    blocks = zip(hidden.flatten(0, 1).split(tokens), targets.flatten().split(tokens), strict=True)
    found = [
        checkpoint(apply, block, head, block_targets, use_reentrant=False, preserve_rng_state=False)
        for block, block_targets in blocks
    ]
    return torch.cat(found, -1).unflatten(-1, targets.shape)


def _nll_and_log_z(logits: Tensor, targets: Tensor) -> Tensor:
    nll = _nll(logits, targets)
    target_logit = logits.float().gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.stack((nll, (nll + target_logit).masked_fill(targets == IGNORED, 0)))


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")


def mean_nll(nll: Tensor, targets: Tensor) -> Tensor:
    """Mean over the targets that are not `IGNORED`."""
    return nll.sum() / (targets != IGNORED).sum()
