"""The loss of next-token prediction."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_lazy.data.token_dataset import IGNORED

HiddenAndHead = tuple[Tensor, Tensor]
LOGITS_AT_ONCE = 2**26
"""256 MiB in fp32. Unlimited, 32k tokens with a vocabulary of 32k would need three copies of 4 GB."""


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target in nats, 0 for `IGNORED`: logits `[B, L, V]`, the others `[B, L]`."""
    return _nll(logits.flatten(0, 1), targets.flatten()).view(targets.shape)


def head_nll(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """`token_nll` of `hidden @ head.T`, fp32: hidden `[B, L, d]`, head `[V, d]`, targets and result `[B, L]`.

    Tokens are processed in blocks of at most LOGITS_AT_ONCE logits, which the backward pass recomputes.
    """
    return _apply_in_blocks(_nll, targets, (hidden, head))


def head_nll_and_log_z(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`head_nll` and log Z, the log-sum-exp of the logits: `[B, L]` each, 0 for `IGNORED`, in the same memory."""
    nll, log_z = _apply_in_blocks(_nll_and_log_z, targets, (hidden, head))
    return nll, log_z


def average_logits(
    first: HiddenAndHead, second: HiddenAndHead, targets: Tensor, function: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Mean over the targets of a function of two models' logits `[N, V]`, fp32, with result `[N]`, by the same blocks.

    first, second: input of the head `[B, L, d]` and head `[V, d]`.
    """

    def apply(first: Tensor, second: Tensor, targets: Tensor) -> Tensor:
        return function(first.float(), second.float()).masked_fill(targets == IGNORED, 0)

    return mean_nll(_apply_in_blocks(apply, targets, first, second), targets)


def _apply_in_blocks(function: Callable[..., Tensor], targets: Tensor, *models: HiddenAndHead) -> Tensor:
    """Apply a function to all tokens, with result `[..., B, L]`.

    function: of the logits `[N, V]` of each model and the targets `[N]`, with result `[..., N]`.
    """
    hidden, heads = [hidden for hidden, _ in models], [head for _, head in models]
    tokens = max(1, LOGITS_AT_ONCE // sum(map(len, heads)))
    if targets.numel() <= tokens:
        logits = (F.linear(*model).flatten(0, 1) for model in models)
        return function(*logits, targets.flatten()).unflatten(-1, targets.shape)

    def apply(targets: Tensor, *hidden: Tensor) -> Tensor:
        return function(*map(F.linear, hidden, heads), targets)

    blocks = zip(targets.flatten().split(tokens), *(x.flatten(0, 1).split(tokens) for x in hidden), strict=True)
    found = [checkpoint(apply, *block, use_reentrant=False, preserve_rng_state=False) for block in blocks]
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
