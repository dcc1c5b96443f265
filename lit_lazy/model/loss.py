"""The loss of next-token prediction."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_lazy.data.base import IGNORED

LOGITS_AT_ONCE = 2**26
"""256 MiB in fp32: of 32k tokens' logits in a vocabulary of 32k there would be three copies of 4 GB."""


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target: logits `[B, L, V]`, targets and result `[B, L]`.

    0 where the target is `IGNORED`.
    """
    return _nll(logits.flatten(0, 1), targets.flatten()).view(targets.shape)


def head_nll(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """`token_nll` of `hidden @ head.T`, fp32: hidden `[B, L, d]`, head `[V, d]`, targets and result `[B, L]`.

    Never more than LOGITS_AT_ONCE logits are in memory, also in the backward pass, which computes them again: tokens
    come in blocks where there are more.
    """
    return _apply_in_blocks(_nll, hidden, head, targets)


def head_nll_and_log_z(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`head_nll`, and beside it log Z, the log of the sum of exp over all logits; both `[B, L]`, in the same memory.

    0 where the target is `IGNORED`.
    """
    nll, log_z = _apply_in_blocks(_nll_and_log_z, hidden, head, targets)
    return nll, log_z


def _apply_in_blocks(
    of_logits: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, head: Tensor, targets: Tensor
) -> Tensor:
    """A function of logits `[N, V]` and targets `[N]` to `[..., N]`, of all tokens: `[..., B, L]`."""
    tokens = max(1, LOGITS_AT_ONCE // head.shape[0])
    if targets.numel() <= tokens:
        return of_logits(F.linear(hidden, head).flatten(0, 1), targets.flatten()).unflatten(-1, targets.shape)

    def of_hidden(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        return of_logits(F.linear(hidden, head), targets)

    blocks = zip(hidden.flatten(0, 1).split(tokens), targets.flatten().split(tokens), strict=True)
    found = [
        checkpoint(of_hidden, block, head, wanted, use_reentrant=False, preserve_rng_state=False)
        for block, wanted in blocks
    ]
    return torch.cat(found, -1).unflatten(-1, targets.shape)


def _nll_and_log_z(logits: Tensor, targets: Tensor) -> Tensor:
    nll = _nll(logits, targets)
    of_target = logits.float().gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.stack((nll, (nll + of_target).masked_fill(targets == IGNORED, 0)))


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")


def mean_nll(nll: Tensor, targets: Tensor) -> Tensor:
    """The mean over the targets that are not `IGNORED`."""
    return nll.sum() / (targets != IGNORED).sum()
