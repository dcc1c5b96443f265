"""What attention does and has learned: first-key weight, surviving mass and sparsity as ratios of sums; parameters."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from flash_lazy import Stats
from lit_lazy.attention import Attention
from lit_lazy.attention.bias import BiasTerms
from lit_lazy.model.decoder import DecoderLM, gather_full_tensor


class RatioOfSums(Metric):
    """sum(numerator) / sum(denominator) over all updates, in fp64.

    Unlike a mean of ratios, the result does not depend on the division into batches. NaN (undefined) while the
    denominator's sum is at most `minimum`.
    """

    full_state_update = False
    higher_is_better = None
    numerator: Tensor
    denominator: Tensor

    def __init__(self, minimum: float = 0.0, sync_on_compute: bool = True) -> None:
        """sync_on_compute: include the updates of the group's other processes, which must call `compute` too."""
        super().__init__(sync_on_compute=sync_on_compute)
        self.minimum = minimum
        for name in ("numerator", "denominator"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, numerator: Tensor, denominator: Tensor | float) -> None:
        """Add the sums of tensors of any shape."""
        self.numerator += numerator.double().sum()
        self.denominator += torch.as_tensor(denominator, dtype=torch.float64).sum().to(self.denominator.device)

    def compute(self) -> Tensor:
        """The ratio, fp64 scalar."""
        if self.denominator <= self.minimum:
            return self.denominator.new_full((), float("nan"))
        return self.numerator / self.denominator


FIRST_KEY_MIN_POSITION = 8
"""Rows before this 1-based position see so few keys that a large weight on the first key does not indicate a sink."""
MIN_MASS = 1e-6
"""Shares of a mass below this are undefined."""


class AttentionMetrics:
    """Ratios of sums over layers, heads, sequences and rows; each accumulator is a torchmetrics `Metric`.

    For every group of rows, with the group's name appended (except "all"):
    `sink/first_key_weight`: mean weight on the first key, for rows from `FIRST_KEY_MIN_POSITION` on;
    `sink/first_key_share`: the same weight / the mass of the same rows;
    `mass`: mean surviving mass of a row, before any renormalisation;
    `sink/fixed_key_weight`: mean weight on the data's `watched_key`, for rows from both positions on.
    Over all rows, `sparsity/zero`: share of visible keys with a weight of 0.
    Not synchronised: one process of a run measures while the others train.
    """

    def __init__(
        self,
        row_groups: Sequence[str],
        can_zero: bool,
        renormalised: bool,
        windows: Sequence[int | None] = (),
        signed: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """row_groups: names of the data's row masks, measured separately; if empty, all rows form the group "all".

        can_zero: whether a weight can be exactly 0; if not, sparsity is omitted. renormalised: whether the weights of a
        row with mass sum to 1. windows: maximum number of keys that a row sees in each layer, None or empty for all.
        signed: whether weights can be negative; if so, shares and sparsity are omitted.
        """
        self.renormalised, self.windows = renormalised, tuple(windows)
        self.suffixes = {group: "" if group == "all" else f"_{group}" for group in tuple(row_groups) or ("all",)}
        minima: dict[str, float] = {}
        for group, suffix in self.suffixes.items():
            shares = {} if signed else {f"sink/first_key_share{suffix}": MIN_MASS}
            minima |= {f"sink/first_key_weight{suffix}": 0.0, **shares, f"mass/{group}": 0.0}
        minima |= {"sparsity/zero": 0.0} if can_zero and not signed else {}
        self.ratios = {name: RatioOfSums(least, sync_on_compute=False).to(device) for name, least in minima.items()}

    @classmethod
    def of(
        cls, attentions: Sequence[Attention], row_groups: Sequence[str] = (), device: torch.device | str = "cpu"
    ) -> "AttentionMetrics":
        """Metrics for a model of these layers, which have one rule. Without layers, no metric is defined."""
        if not attentions:
            return cls(row_groups, can_zero=False, renormalised=False, device=device)
        rule, windows = attentions[0].normaliser, [layer.window for layer in attentions]
        return cls(row_groups, rule.can_zero, attentions[0].renormalise, windows, rule.signed, device)

    def update(self, stats: Sequence[Stats], rows: Mapping[str, Tensor], place: Tensor | None = None) -> None:
        """Add a batch: one `Stats` of `[B, H, L]` per layer, and each group's rows, bool `[B, L]`.

        place: position of each token in its document, int64 `[B, L]` from 0, if tokens see only their document.
        """
        for layer, window in zip(stats, self.windows or [None] * len(stats), strict=True):
            length = layer.mass.shape[-1]
            position = torch.arange(length, device=layer.mass.device)[None] if place is None else place
            for group, suffix in self.suffixes.items():
                selected = rows[group][:, None].expand_as(layer.mass)
                self.ratios[f"mass/{group}"].update(layer.mass[selected], selected)
                late = selected & (position >= FIRST_KEY_MIN_POSITION - 1)[:, None]
                first, mass = layer.first_weight[late], layer.mass[late]
                self.ratios[f"sink/first_key_weight{suffix}"].update(first, late)
                if (share := self.ratios.get(f"sink/first_key_share{suffix}")) is not None:
                    share.update(first, mass > 0 if self.renormalised else mass)
            if "sparsity/zero" in self.ratios:
                seen = position + 1 if window is None else (position + 1).clamp(max=window)
                self.ratios["sparsity/zero"].update(layer.zeros, seen[:, None].expand_as(layer.zeros))

    def update_watched_key(self, weights: Sequence[Tensor], key: int, rows: Mapping[str, Tensor]) -> None:
        """Add a batch's weights `[B, H, L]` per layer on the key at 1-based position `key`; rows as in `update`."""
        for layer in weights:
            position = torch.arange(1, layer.shape[-1] + 1, device=layer.device)
            for group, suffix in self.suffixes.items():
                late = (rows[group] & (position >= max(key, FIRST_KEY_MIN_POSITION)))[:, None].expand_as(layer)
                fresh = RatioOfSums(sync_on_compute=False).to(layer.device)
                self.ratios.setdefault(f"sink/fixed_key_weight{suffix}", fresh).update(layer[late], late)

    def compute(self) -> dict[str, float]:
        """The defined ratios by name."""
        values = {name: ratio.compute().item() for name, ratio in self.ratios.items() if ratio.update_called}
        return {name: value for name, value in values.items() if value == value}


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
