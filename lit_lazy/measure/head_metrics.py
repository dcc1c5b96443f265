"""Metrics of one layer's heads: sinks, surviving mass, sparsity, entropy, spread of scores, norms of values.

Each class is a torchmetrics `Metric` whose states are float64 sums, so results do not depend on the division into
batches or processes. Only rows that the `RowSummary` counts are used. Undefined values are NaN. Every result is a dict
of float64 `[H, ...]`.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_lazy.measure.attention_metrics import MIN_MASS, States
from lit_lazy.measure.row_statistics import FIRST_KEYS, TILES, RowSummary

SINK_WEIGHT = 0.3
"""A key with a mean weight above this is a sink (epsilon of Gu et al., arXiv 2410.10781)."""
SINK_MIN_ROWS = 10
"""Sequences with fewer rows are left out of shares of sequences with a sink: equal weights alone would be one, as their
mean on the first key is the mean of 1, 1/2, ... 1/n over n rows."""
SPREAD_MIN_KEYS = 8
"""Rows that see fewer keys are excluded from the spread of scores."""


class HeadMetric(States):
    """A metric of heads whose states are sums."""

    SUMS: ClassVar[dict[str, str]] = {}
    """Axes of each state, by name: H heads, T positions, K first keys, S sizes of tiles."""

    def __init__(self, n_heads: int, length: int = 0) -> None:
        """length: maximum sequence length, and the length of every result by position."""
        super().__init__()
        self.n_heads, self.first_keys = n_heads, min(FIRST_KEYS, length)
        sizes = {"H": n_heads, "T": length, "K": self.first_keys, "S": len(TILES)}
        self.add_states({name: [sizes[axis] for axis in axes] for name, axes in self.SUMS.items()})

    def _wrap_compute(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        # torchmetrics would squeeze a tensor of one element, and so the head axis of a layer with one head.
        wrapped = super()._wrap_compute(lambda: SimpleNamespace(arrays=compute()))
        return lambda: wrapped().arrays


class Sink(HeadMetric):
    """alpha_k, the mean weight on key k over the rows i >= k (Gu et al., arXiv 2410.10781), for the first K keys.

    `sink/weight` `[H, K]`: alpha_k over all sequences.
    `sink/share` `[H, K]`: the sum of those weights / the sum of all weights of those rows; undefined if signed.
    `sink/rate`, `sink/rate_share` `[H, K]`: fraction of `find_long` sequences whose alpha_k, or whose share, exceeds
    `SINK_WEIGHT`; a sequence without mass has no sink.
    `sink/position` `[H]`: 1-based key of the largest alpha in the first half of the sequence. The last keys have so few
    rows that a token's weight on itself makes alpha large.
    """

    SUMS: ClassVar = {
        **dict.fromkeys(("weight", "total", "sinks", "share_sinks"), "HK"),
        **dict.fromkeys(("shares", "sequences"), ""),
        "columns": "HT",
        "rows": "T",
    }

    def update(self, summary: RowSummary) -> None:
        length = summary.total.shape[-1]
        keys = min(self.first_keys, length)
        rows = reverse_cumsum(summary.counted.double())[:, None, :keys]
        weight = summary.first.double().sum(2)
        total = reverse_cumsum(summary.total.double())[..., :keys] * (not summary.signed)
        alpha = weight / rows.clamp(min=1)
        share = torch.where(total / rows.clamp(min=1) < MIN_MASS, 0, weight / total)
        long = find_long(summary)

        self.weight[:, :keys] += weight.sum(0)
        self.total[:, :keys] += total.sum(0)
        self.sinks[:, :keys] += (alpha > SINK_WEIGHT)[long].sum(0)
        self.share_sinks[:, :keys] += (share > SINK_WEIGHT)[long].sum(0)
        self.sequences += long.sum()
        self.shares += long.sum() * (not summary.signed)
        self.columns[:, :length] += summary.columns.double().sum(0)
        self.rows[:length] += summary.counted.sum(0)

    def compute(self) -> dict[str, Tensor]:
        rows = reverse_cumsum(self.rows)
        first_rows = rows[: self.first_keys]
        half = max(1, int((rows > 0).sum()) // 2)
        alpha, key = (self.columns[:, :half] / rows[:half]).max(-1)
        return {
            "sink/weight": self.weight / first_rows,
            "sink/share": _mask_undefined(self.total / first_rows >= MIN_MASS, self.weight / self.total),
            "sink/rate": self.sinks / self.sequences,
            "sink/rate_share": self.share_sinks / self.shares,
            "sink/position": _mask_undefined(alpha > 0, (key + 1).double()),
        }


class Mass(HeadMetric):
    """Surviving mass, the sum of a row's weights before renormalising.

    `mass/row` `[H, T]`: mean by position, over `mass/row_count` `[H, T]` rows; `mass/first_key` `[H, T]`: mean weight
    on the first key by position, before renormalising; `mass/empty_rows` `[H]`: share of rows whose weights are all 0;
    `mass/dead` `[H]`: 1 if all rows from position 2 on are empty, else 0 (row 1 sees one key, whose weight is 1 - tau).
    """

    SUMS: ClassVar = {"mass": "HT", "first": "HT", "alive": "HT", "rows": "T"}

    def update(self, summary: RowSummary) -> None:
        length = summary.mass.shape[-1]
        mass, total = summary.mass.double(), summary.total.double()
        first = summary.first[..., 0].double()
        if summary.renormalised:  # the weights are w / mass, which mass / total reverts
            first = first * mass / torch.where(total != 0, total, 1)
        seen = (summary.visible * summary.counted)[:, None]
        self.mass[:, :length] += mass.sum(0)
        self.first[:, :length] += first.sum(0)
        self.alive[:, :length] += (summary.zeros < seen).sum(0)  # not by the mass: negative weights may cancel
        self.rows[:length] += summary.counted.sum(0)

    def compute(self) -> dict[str, Tensor]:
        dead = (self.alive[:, 1:].sum(-1) == 0).double()
        return {
            "mass/row": self.mass / self.rows,
            "mass/row_count": self.rows.expand_as(self.mass),
            "mass/first_key": self.first / self.rows,
            "mass/empty_rows": 1 - self.alive.sum(-1) / self.rows.sum(),
            "mass/dead": _mask_undefined(self.rows[1:].sum() > 0, dead),
        }


class Sparsity(HeadMetric):
    """Shares of the visible keys, pooled over rows and sequences, all `[H]`; NaN for signed weights.

    `sparsity/zero`: weight 0; NaN if the normaliser never gives 0 (`RowSummary.can_zero`).
    `sparsity/small`: weight of at most `SMALL_WEIGHT` (Softpick's measure, arXiv 2504.20966; not 0 for a softmax).
    `sparsity/block_64`, `sparsity/block_128`: share of the square tiles with a visible key whose weights are all 0; the
    last tiles may be partial. Sequences shorter than a tile are excluded.
    """

    SUMS: ClassVar = {"zeros": "H", "small": "H", "visible": "", "can_zero": "", "alive_tiles": "HS", "tiles": "S"}

    def update(self, summary: RowSummary) -> None:
        if summary.signed:
            return
        self.zeros += summary.zeros.double().sum((0, 2))
        self.small += summary.small.double().sum((0, 2))
        self.visible += (summary.visible * summary.counted).sum()
        self.can_zero += summary.can_zero
        self.alive_tiles += torch.stack([summary.alive_tiles[tile].sum(0) for tile in TILES], -1)
        self.tiles += torch.stack([summary.tiles[tile].sum() for tile in TILES])

    def compute(self) -> dict[str, Tensor]:
        empty = 1 - self.alive_tiles / self.tiles
        return {
            "sparsity/zero": _mask_undefined(self.can_zero > 0, self.zeros / self.visible),
            "sparsity/small": self.small / self.visible,
            **{f"sparsity/block_{tile}": empty[:, index] for index, tile in enumerate(TILES)},
        }


class Entropy(HeadMetric):
    """Entropy H of a row's weights / their sum, means over the rows with mass, all `[H]`; NaN for signed weights.

    `entropy/nats`: H; `entropy/normalised`: H / ln n over the rows that see n >= 2 keys; `entropy/keys`: exp(H), the
    effective number of keys; `entropy/participation`: 1 / the sum of the squares.
    """

    SUMS: ClassVar = dict.fromkeys(("nats", "normalised", "keys", "participation", "rows", "wide_rows"), "H")

    def update(self, summary: RowSummary) -> None:
        alive = (summary.total > 0) & (not summary.signed)
        wide = alive & (summary.visible >= 2)
        entropy, log_visible = summary.entropy.double(), summary.visible.double().log()
        self.nats += _sum_rows(entropy, alive)
        self.normalised += _sum_rows(entropy / log_visible, wide)
        self.keys += _sum_rows(entropy.exp(), alive)
        self.participation += _sum_rows(1 / summary.squares.double(), alive)
        self.rows += alive.sum((0, 2))
        self.wide_rows += wide.sum((0, 2))

    def compute(self) -> dict[str, Tensor]:
        return {
            "entropy/nats": self.nats / self.rows,
            "entropy/normalised": self.normalised / self.wide_rows,
            "entropy/keys": self.keys / self.rows,
            "entropy/participation": self.participation / self.rows,
        }


class Spread(HeadMetric):
    """Spread of the scores within a row, and what a null model of that spread cuts; all `[H]`.

    Over the rows that see at least `SPREAD_MIN_KEYS` keys. `scores/spread`: standard deviation of the visible scores,
    including bias, in nats: root of the mean variance.
    The null model has independent Gaussian scores of the row's variance, number of keys and threshold
    (`null_sparsity`); one common spread for unlike rows would report a spurious excess. NaN without a threshold.
    `sparsity/null`: the null sparsity, pooled over keys like the measured one; `sparsity/over_null`: the measured
    sparsity of the same rows minus `sparsity/null`; `sparsity/null_mass`: the mean null mass.
    """

    SUMS: ClassVar = {
        **dict.fromkeys(("variance", "null", "zeros", "mass"), "H"),
        **dict.fromkeys(("visible", "rows", "thresholded"), ""),
    }

    def update(self, summary: RowSummary) -> None:
        wide, variance = summary.counted & (summary.visible >= SPREAD_MIN_KEYS), summary.score_variance.double()
        sparsity, mass = null_sparsity(variance.sqrt(), summary.theta * summary.visible)
        self.variance += _sum_rows(variance, wide[:, None])
        self.null += _sum_rows(sparsity * summary.visible, wide[:, None])
        self.zeros += _sum_rows(summary.zeros.double(), wide[:, None])
        self.visible += (summary.visible * wide).sum()
        self.mass += _sum_rows(mass, wide[:, None])
        self.rows += wide.sum()
        self.thresholded += summary.thresholded

    def compute(self) -> dict[str, Tensor]:
        defined = self.thresholded > 0
        return {
            "scores/spread": (self.variance / self.rows).sqrt(),
            "sparsity/null": _mask_undefined(defined, self.null / self.visible),
            "sparsity/over_null": _mask_undefined(defined, (self.zeros - self.null) / self.visible),
            "sparsity/null_mass": _mask_undefined(defined, self.mass / self.rows),
        }


class ValueNorms(HeadMetric):
    """`sink/value_norm` `[H, K]`: mean over sequences of |v_k| / mean_j |v_j|, v of the head's key-value head.

    Far below 1 at a sink: the value-state drain of Guo et al. (arXiv 2410.13835).
    """

    SUMS: ClassVar = {"ratio": "HK", "sequences": "HK"}

    def update(self, v: Tensor, counted: Tensor | None = None) -> None:
        """v `[B, Hkv, T, D]`; counted bool `[B, T]`, False at padding."""
        counts = torch.ones_like(v[:, 0, :, 0], dtype=torch.bool) if counted is None else counted
        norm = v.double().norm(dim=-1).repeat_interleave(self.n_heads // v.shape[1], 1)
        norm = torch.where(counts[:, None], norm, 0)
        mean = norm.sum(-1) / counts.sum(-1, keepdim=True).clamp(min=1)
        keys = min(self.first_keys, v.shape[2])
        defined = (mean[..., None] > 0) & counts[:, None, :keys]
        self.ratio[:, :keys] += torch.where(defined, norm[..., :keys] / mean[..., None], 0).sum(0)
        self.sequences[:, :keys] += defined.sum(0)

    def compute(self) -> dict[str, Tensor]:
        return {"sink/value_norm": self.ratio / self.sequences}


def null_sparsity(spread: Tensor, strike: Tensor) -> tuple[Tensor, Tensor]:
    """Sparsity and mass of rows of independent scores N(0, spread^2), many keys n, strike = n theta; shapes broadcast.

    n p is then log-normal with mean 1, so the mass is the price of a call option with that strike (Black and Scholes
    1973): d1 = -ln(strike) / spread + spread / 2, d2 = d1 - spread, sparsity = 1 - Phi(d2) and mass = Phi(d1) - strike
    Phi(d2). Without a positive threshold nothing is cut: sparsity 0, mass 1 - strike. The strike of threshold
    "per_query" is tau.
    """
    spread, strike = spread.double(), strike.double()
    sigma = spread.clamp(min=torch.finfo(torch.float64).tiny)
    d1 = -strike.log() / sigma + sigma / 2
    above = torch.special.ndtr(d1 - sigma)
    mass = torch.where(strike > 0, torch.special.ndtr(d1) - strike * above, 1 - strike)
    return torch.where(strike > 0, 1 - above, 0), mass


def find_long(summary: RowSummary) -> Tensor:
    """Sequences of at least `SINK_MIN_ROWS` counted rows, bool `[B]`."""
    return summary.counted.sum(1) >= SINK_MIN_ROWS


def reverse_cumsum(x: Tensor) -> Tensor:
    """Sum over the last dimension from each position to the end."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _sum_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Sum of x `[B, H, T]` over the chosen rows, `[H]`."""
    return torch.where(rows, x, 0).sum((0, 2))


def _mask_undefined(defined: Tensor, x: Tensor) -> Tensor:
    return torch.where(defined, x, torch.nan)
