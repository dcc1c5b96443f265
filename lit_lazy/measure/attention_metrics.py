"""What attention does and has learned: first-key weight, surviving mass and sparsity as ratios of sums; parameters."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchmetrics import Metric

from flash_lazy import Stats
from lit_lazy.attention import Attention
from lit_lazy.attention.bias import BiasTerms
from lit_lazy.model.decoder import DecoderLM, gather_full_tensor


class States(Metric):
    """A torchmetrics `Metric` with float64 states, zero at first, that are added over batches and processes."""

    full_state_update = False
    higher_is_better = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...

    def add_states(self, shapes: Mapping[str, Sequence[int]], reduce: str = "sum") -> None:
        """Add states of these shapes; `reduce` merges those of several processes."""
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx=reduce)


class RatioOfSums(States):
    """sum(numerator) / sum(denominator) over all updates, in fp64.

    Unlike a mean of ratios, the result does not depend on the division into batches. NaN (undefined) while the
    denominator's sum is at most `minimum`.
    """

    def __init__(self, minimum: float = 0.0, sync_on_compute: bool = True) -> None:
        """sync_on_compute: include the updates of the group's other processes, which must call `compute` too."""
        super().__init__(sync_on_compute=sync_on_compute)
        self.minimum = minimum
        self.add_states({"numerator": (), "denominator": ()})

    def update(self, numerator: Tensor, denominator: Tensor | float) -> None:
        """Add the sums of tensors of any shape."""
        self.numerator += numerator.double().sum()
        self.denominator += torch.as_tensor(denominator, dtype=torch.float64).sum().to(self.denominator.device)

    def compute(self) -> Tensor:
        if self.denominator <= self.minimum:
            return self.denominator.new_full((), float("nan"))
        return self.numerator / self.denominator


FIRST_KEY_MIN_POSITION = 8
"""Rows before this 1-based position see so few keys that a large weight on the first key does not indicate a sink."""
MIN_MASS = 1e-6
"""Shares of a mass below this are undefined."""


class Ratios:
    """Ratios of sums by name, each from its first update on. Not synchronised: one process measures for itself."""

    def __init__(self) -> None:
        self.ratios: dict[str, RatioOfSums] = {}

    def add(self, name: str, numerator: Tensor, denominator: Tensor, minimum: float = 0.0) -> None:
        """Add the sums of tensors of any shape. minimum: as of `RatioOfSums`."""
        if name not in self.ratios:
            self.ratios[name] = RatioOfSums(minimum, sync_on_compute=False).to(numerator.device)
        self.ratios[name].update(numerator, denominator)

    def compute(self) -> dict[str, float]:
        """All ratios by name, undefined ones as NaN."""
        return {name: ratio.compute().item() for name, ratio in self.ratios.items()}


class AttentionMetrics(Ratios):
    """Ratios of sums over layers, heads, sequences and rows.

    For every group of rows, with the group's name appended (except "all"):
    `sink/first_key_weight`: mean weight on the first key, for rows from `FIRST_KEY_MIN_POSITION` on;
    `sink/first_key_share`: the same weight / the mass of the same rows;
    `mass`: mean surviving mass of a row, before any renormalisation;
    `sink/fixed_key_weight`: mean weight on the data's `watched_key`, for rows from both positions on.
    Over all rows, `sparsity/zero`: share of visible keys with a weight of 0.
    A rule that cannot give 0 has no sparsity; one whose weights can be negative has no shares either.
    """

    def __init__(self, attentions: Sequence[Attention], row_groups: Sequence[str] = ()) -> None:
        """row_groups: names of the data's row masks, measured separately; if empty, all rows form the group "all"."""
        super().__init__()
        self.attentions, self.suffixes = attentions, name_groups(row_groups)

    def update(self, stats: Sequence[Stats], rows: Mapping[str, Tensor], place: Tensor | None = None) -> None:
        """Add a batch: one `Stats` of `[B, H, L]` per layer, and each group's rows, bool `[B, L]`.

        place: position of each token in its document, int64 `[B, L]` from 0, if tokens see only their document.
        """
        for attention, layer in zip(self.attentions, stats, strict=True):
            rule, length = attention.normaliser, layer.mass.shape[-1]
            position = torch.arange(length, device=layer.mass.device)[None] if place is None else place
            for group, suffix in self.suffixes.items():
                selected = rows[group][:, None].expand_as(layer.mass)
                late = selected & (position >= FIRST_KEY_MIN_POSITION - 1)[:, None]
                first, mass = layer.first_weight[late], layer.mass[late]
                self.add(f"sink/first_key_weight{suffix}", first, late)
                if not rule.signed:
                    counted = mass > 0 if attention.renormalise else mass
                    self.add(f"sink/first_key_share{suffix}", first, counted, MIN_MASS)
                self.add(f"mass/{group}", layer.mass[selected], selected)
            if rule.can_zero and not rule.signed:
                seen = position + 1 if attention.window is None else (position + 1).clamp(max=attention.window)
                self.add("sparsity/zero", layer.zeros, seen[:, None].expand_as(layer.zeros))

    def update_watched_key(self, weights: Tensor, key: int, rows: Mapping[str, Tensor]) -> None:
        """Add a layer's weights `[B, H, L]` on the key at 1-based position `key`; rows as in `update`."""
        position = torch.arange(1, weights.shape[-1] + 1, device=weights.device)
        for group, suffix in self.suffixes.items():
            late = (rows[group] & (position >= max(key, FIRST_KEY_MIN_POSITION)))[:, None].expand_as(weights)
            self.add(f"sink/fixed_key_weight{suffix}", weights[late], late)

    def compute(self) -> dict[str, float]:
        """The defined ratios by name."""
        return {name: value for name, value in super().compute().items() if not math.isnan(value)}


def name_groups(row_groups: Sequence[str]) -> dict[str, str]:
    """Each group of rows and what follows the names of its weights; the group "all" if the data has none."""
    return {group: "" if group == "all" else f"_{group}" for group in tuple(row_groups) or ("all",)}


MOST_NUMBERS = 4096
"""Of one parameter in one layer; larger ones are matrices, of which a mean says nothing."""
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
        parts = {"learned/": layer.normaliser, "learned/gate.": layer.gate, "bias/learned.": layer.bias}
        for prefix, part in parts.items():
            for name, tensor in part.state_dict(keep_vars=True).items():
                if tensor.is_floating_point() and 0 < tensor.numel() <= MOST_NUMBERS:
                    full = FORMER.get(prefix + name, prefix + name)
                    found.setdefault(full, []).append(gather_full_tensor(tensor.detach()))
    alike = [name for name, by_layer in found.items() if len({values.shape for values in by_layer}) == 1]
    return {name: torch.stack(found[name]) for name in alike if len(found[name]) == len(model.attentions)}


def average_by_head(learned: Tensor, heads: int) -> Tensor:
    """The means of a parameter `[layers, ...]` over what is not layers or heads: `[layers, H]`, else `[layers, 1]`."""
    by_head = learned.dim() > 1 and learned.shape[1] == heads
    return learned.reshape(len(learned), heads if by_head else 1, -1).mean(-1)


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
