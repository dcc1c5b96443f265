"""The loss of next-token prediction."""

from torch import Tensor
from torch.nn import functional as F


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target: logits `[B, L, V]`, targets and result `[B, L]`."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
