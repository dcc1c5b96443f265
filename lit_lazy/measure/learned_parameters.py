"""Learned parameters of attention other than projections: offset parameters, and positional biases by distance."""

import torch
from torch import Tensor

from lit_lazy.attention.bias import BiasTerms
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.sharded_tensors import gather_full_tensor


def collect_taus(model: DecoderLM) -> Tensor | None:
    """A copy of the offset parameters, `[layers, H]`, or `[layers, H, N]` for the threshold per_token.

    None if the normaliser has no per-head parameter `tau`.
    """
    found = []
    for layer in model.attentions:
        tau = dict(layer.normaliser.named_parameters()).get("tau")
        if tau is not None and tau.dim() in (1, 2) and len(tau) == layer.n_heads:
            found.append(gather_full_tensor(tau.detach()))
    return torch.stack(found) if found else None


@torch.no_grad()
def compute_bias_curves(model: DecoderLM, length: int) -> Tensor | None:
    """Bias added to the scores at distances 0..length-1, `[layers, H, length]`; None without a bias.

    The table, zero beyond its end, minus slope times distance. Raises ValueError if the bias does not support `length`
    keys (`Fire`).
    """
    terms = [layer.bias(length) for layer in model.attentions]
    if all(term == BiasTerms() for term in terms):
        return None
    flat = model.attentions[0].q.weight.new_zeros(model.attentions[0].n_heads, length)
    return torch.stack([_compute_bias_curve(term, flat) for term in terms])


def _compute_bias_curve(terms: BiasTerms, flat: Tensor) -> Tensor:
    """flat: zeros `[H, length]`."""
    curve = flat.clone()
    if terms.table is not None:
        table = terms.table[:, : flat.shape[1]]
        curve[:, : table.shape[1]] = table
    if terms.slopes is not None:
        curve -= terms.slopes[:, None] * torch.arange(flat.shape[1], device=flat.device)
    return curve


def fit_alibi(curves: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares fit `c - slope * d` of curves `[..., length]` over the distances d = 0..length-1, in fp64.

    Returns the slope (negative for a rising curve) and the distance to the line: the norm of the residual over the norm
    of the centred curve, 0 for a line and 1 if the best line is flat. Both `[...]`; the distance of a flat curve is
    NaN, and both are NaN at length 1.
    """
    curves = curves.double()
    offsets = torch.arange(curves.shape[-1], dtype=curves.dtype, device=curves.device)
    offsets -= offsets.mean()
    centred = curves - curves.mean(-1, keepdim=True)
    slope = -(centred * offsets).sum(-1) / offsets.square().sum()
    residual = centred + slope[..., None] * offsets
    flat = curves.amax(-1) == curves.amin(-1)
    return slope, (residual.norm(dim=-1) / centred.norm(dim=-1)).masked_fill(flat, torch.nan)
