"""A threshold for each head of a trained model, as high as a given rise of the loss allows."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lit_lazy.data.token_dataset import Batch
from lit_lazy.measure.diagnostics import evaluation_mode
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import head_nll, mean_nll
from lit_lazy.support.checked_fields import PositiveFloat, check_value, require

log = logging.getLogger("lit_lazy.measure.raise_thresholds")
LARGEST = 4.0
"""Largest tau."""
PARTS, MOST_PARTS = 8, 32
"""The rise is spent in parts, each by the gradients where the former ended; more than planned if they were too high."""
HALVINGS = 6
"""Bisections of the part that goes beyond the rise."""


def raise_thresholds(model: DecoderLM, batch: Batch, rise: float) -> Tensor:
    """Raise tau of each head from 0 until the mean loss of the batch is `rise` nats above that at 0: `[layers, H]`.

    In each part every head spends the same rise, by the gradient of the loss with respect to its tau; a tau whose
    gradient is not above 0 rises by LARGEST / PARTS. No tau exceeds LARGEST: a warning says so if the loss then rises
    by less. They are left in the model.

    batch: `tokens` and `targets` `[B, T]`. Raises a one-line ValueError unless rise is above 0 and the model has a tau
    per head (`Elastic`, with another threshold than per_token), or if the loss at its own taus is lower by that.
    """
    check_value("rise", rise, PositiveFloat)
    require(bool(model.attentions), "model.mixer", type(model.cfg.mixer).__name__, "has no attention, so no thresholds")
    taus = [_get_tau(attention.normaliser) for attention in model.attentions]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in trained:
            parameter.requires_grad_(any(parameter is tau for tau in taus))
        with evaluation_mode(model):
            on_device = {name: part.to(model.device) for name, part in batch.items()}
            own = torch.stack([tau.detach().clone() for tau in taus])
            return _raise(_make_loss(model, on_device, taus), own, rise)
    finally:
        for parameter, before in trained:
            parameter.requires_grad_(before)


def _get_tau(normaliser: nn.Module) -> nn.Parameter:
    tau = getattr(normaliser, "tau", None)
    if not (isinstance(tau, nn.Parameter) and tau.dim() == 1):
        spec = type(normaliser).__name__.removeprefix("_")
        fix = "has no tau per head; choose Elastic, with another threshold than per_token"
        raise ValueError(f"model.attention.normaliser={spec}: {fix}")
    return tau


Loss = Callable[[Tensor], tuple[float, Tensor]]
"""The mean loss of a batch at all taus `[layers, H]`, which are left in the model, and its gradient `[layers, H]`."""


def _make_loss(model: DecoderLM, batch: Batch, taus: Sequence[nn.Parameter]) -> Loss:
    def measure(at: Tensor) -> tuple[float, Tensor]:
        for tau, value in zip(taus, at, strict=True):
            tau.data = value.clone()  # not in place: another model may share the tensor
        hidden = model.compute_hidden(batch["tokens"], batch.get("place"))
        loss = mean_nll(head_nll(hidden, model.head.weight, batch["targets"]), batch["targets"])
        return loss.item(), torch.stack(torch.autograd.grad(loss, taus))

    return measure


def _raise(measure: Loss, own: Tensor, rise: float) -> Tensor:
    with_own, _ = measure(own)
    at = torch.zeros_like(own)
    start, slope = measure(at)
    if with_own < start - rise:  # from 0 on, no rise is one over the model
        problem = f"thresholds rise from 0, where the loss is {start:.4f}; with its own the model has {with_own:.4f}"
        fix = "give a model that was trained without"
        raise ValueError(f"rise={rise:g}: {problem}, so it was trained with them; {fix}")
    now = start
    share, step = rise / PARTS / at.numel(), torch.full_like(at, LARGEST / PARTS)
    for _ in range(MOST_PARTS):
        added = torch.where(slope > 0, torch.minimum(share / slope, step), step)
        following = (at + added).clamp(max=LARGEST)
        now, slope = measure(following)
        if now - start > rise:
            return _bisect(measure, at, following, start + rise)
        at = following
    count = f"{int((at == LARGEST).sum())} of {at.numel()}"
    reached = f"the loss rose by {now - start:.4f} nats, and {count} heads are at the largest tau, {LARGEST:g}"
    log.warning("rise=%g: not reached; %s", rise, reached)
    return at


def _bisect(measure: Loss, low: Tensor, high: Tensor, limit: float) -> Tensor:
    """The taus nearest to `high` between two vectors that keep the loss at or below the limit."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if measure(middle)[0] > limit else (middle, high)
    measure(low)
    return low
