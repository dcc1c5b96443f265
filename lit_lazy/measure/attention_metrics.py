"""What attention does: first-key weight, surviving mass and sparsity as ratios of sums."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchmetrics import Metric

from flash_lazy import Stats
from lit_lazy.attention import Attention


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
    `mass/GROUP`, also `mass/all`: mean surviving mass of a row, before any renormalisation;
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
                self.add("sparsity/zero", layer.zeros, count_seen(attention, position).expand_as(layer.zeros))

    def update_watched_key(self, weights: Tensor, key: int, rows: Mapping[str, Tensor]) -> None:
        """Add a layer's weights `[B, H, L]` on the key at 1-based position `key`; rows as in `update`."""
        position = torch.arange(1, weights.shape[-1] + 1, device=weights.device)
        for group, suffix in self.suffixes.items():
            late = (rows[group] & (position >= max(key, FIRST_KEY_MIN_POSITION)))[:, None].expand_as(weights)
            self.add(f"sink/fixed_key_weight{suffix}", weights[late], late)

    def compute(self) -> dict[str, float]:
        """The defined ratios by name."""
        return {name: value for name, value in super().compute().items() if not math.isnan(value)}


def count_seen(attention: Attention, position: Tensor) -> Tensor:
    """Keys that each row sees, `[B, 1, L]`, by its position in its document, `[B, L]` from 0."""
    seen = (position + 1)[:, None]
    return seen if attention.window is None else seen.clamp(max=attention.window)


def name_groups(row_groups: Sequence[str]) -> dict[str, str]:
    """Each group of rows and what follows the names of its weights; the group "all" if the data has none."""
    return {group: "" if group == "all" else f"_{group}" for group in tuple(row_groups) or ("all",)}
