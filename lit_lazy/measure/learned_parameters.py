"""What attention has learned: the parameters of normalisers, biases and gates, and the curves of biases."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lit_lazy.attention.bias import BiasTerms
from lit_lazy.model.decoder import DecoderLM, gather_full_tensor
from lit_lazy.support.error_messages import describe_exception

log = logging.getLogger("lit_lazy.measure.learned_parameters")

MOST_NUMBERS = 4096
"""Of one parameter in one layer; larger ones are matrices, of which a mean says nothing."""
PREFIXES = "learned/", "learned/gate.", "bias/learned."
"""Of the names of what the normaliser, the gate and the bias of a layer have learned."""
FORMER = {"learned/tau": "tau"}
"""Names from before every learned parameter was collected."""


def collect_learned(model: DecoderLM) -> dict[str, Tensor]:
    """Copies of what the normalisers, biases and gates have learned: `[layers, ...]` by name.

    Parameter `x` of the normaliser is `learned/x`, of the gate `learned/gate.x`, and of the bias, which figures draw as
    a curve, `bias/learned.x`; the offset parameter is `tau`, `[layers, H]`, or `[layers, H, N]` for the threshold
    per_token. Buffers that checkpoints keep count too, as a schedule may change them. Left out is what has more than
    MOST_NUMBERS numbers, and what some layer lacks or has in another shape.
    """
    found: dict[str, list[Tensor]] = {}
    for layer in model.attentions:
        for prefix, part in zip(PREFIXES, (layer.normaliser, layer.gate, layer.bias), strict=True):
            for name, tensor in _iter_learned(prefix, part):
                found.setdefault(name, []).append(gather_full_tensor(tensor.detach()))
    alike = [name for name, by_layer in found.items() if len({values.shape for values in by_layer}) == 1]
    return {name: torch.stack(found[name]) for name in alike if len(found[name]) == len(model.attentions)}


def _iter_learned(prefix: str, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in part.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and 0 < tensor.numel() <= MOST_NUMBERS:
            yield FORMER.get(prefix + name, prefix + name), tensor


def list_by_head(model: DecoderLM) -> set[str]:
    """Names of the parameters whose first axis is that of the heads: it is twice as long with twice as many heads.

    None of a part that takes no other number of heads.
    """
    spec, length, layer = model.cfg.attention, model.context_length, model.attentions[0]
    shape = model.cfg.layer_shape(0, length)
    wide = replace(shape, n_heads=2 * shape.n_heads, n_kv_heads=2 * shape.n_kv_heads)
    builders = (
        (layer.normaliser, lambda: spec.normaliser.build(wide)),
        (layer.gate, lambda: spec.gate.build(wide)),
        (layer.bias, lambda: spec.bias.build(wide.n_heads, length)),
    )
    found: set[str] = set()
    for prefix, (part, build) in zip(PREFIXES, builders, strict=True):
        if not (learned := dict(_iter_learned(prefix, part))):
            continue
        try:
            with torch.device("meta"):
                other = dict(_iter_learned(prefix, build()))
        except Exception as error:  # a user's part may fail in any way
            why = describe_exception(error)
            log.warning("%s takes no other number of heads (%s): curves are means over them", type(part).__name__, why)
            continue
        lengths = (shape.n_heads,), (wide.n_heads,)
        found |= {
            name for name, x in learned.items() if name in other and (x.shape[:1], other[name].shape[:1]) == lengths
        }
    return found


def average_by_head(learned: Tensor, by_head: bool) -> Tensor:
    """The means of a parameter `[layers, H, ...]`, or `[layers, ...]`, by head: `[layers, H]`, else `[layers, 1]`."""
    return learned.reshape(*learned.shape[: 1 + by_head], -1).mean(-1).reshape(len(learned), -1)


def describe_learned(learned: Mapping[str, Tensor]) -> dict[str, float]:
    """Mean, minimum and maximum of each parameter over all its numbers, as `NAME/mean`, `NAME/min` and `NAME/max`."""
    found = {}
    for name, values in learned.items():
        exact = values.double()
        found |= {f"{name}/mean": exact.mean(), f"{name}/min": exact.min(), f"{name}/max": exact.max()}
    return {name: value.item() for name, value in found.items()}


@torch.no_grad()
def compute_bias_curves(model: DecoderLM, length: int) -> Tensor | None:
    """Bias added to the scores at distances 0..length-1, `[layers, H, length]`; None without a bias.

    The table, zero beyond its end, minus slope times distance. Raises ValueError if the bias does not support `length`
    keys (`Fire`).
    """
    terms = [layer.bias(length) for layer in model.attentions]
    if all(term == BiasTerms() for term in terms):
        return None
    curves = model.attentions[0].q.weight.new_zeros(len(terms), model.attentions[0].n_heads, length)
    for curve, (table, slopes) in zip(curves, terms, strict=True):
        if table is not None:
            curve[:, : table.shape[1]] = table[:, :length]
        if slopes is not None:
            curve -= slopes[:, None] * torch.arange(length, device=curve.device)
    return curves


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
