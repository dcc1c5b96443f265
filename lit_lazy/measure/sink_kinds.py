"""Two kinds of attention sink: heads that use it to do nothing, and heads that spread what it holds.

Fesser et al., arXiv 2606.08105, with the thresholds of their code (KempnerInstitute/attention_sink, a83cd59,
`vit_causal/common.py`). Theirs are vision models without a causal mask, so a sink is defined here as in `Sink`.
"""

from typing import ClassVar

import torch
from torch import Tensor

from lit_lazy.measure.collapse import stable_rank
from lit_lazy.measure.head_metrics import SINK_WEIGHT, HeadMetric, reverse_cumsum
from lit_lazy.measure.row_statistics import RowSummary

NO_OPERATION_RATIO = 0.2
"""A sink whose value is at most this part of the others' in size passes on next to nothing."""
BROADCAST_RATIO, BROADCAST_RANK = 0.5, 1.5
"""One whose value is at least this part, in a head whose update has at most this stable rank, reaches all tokens."""


class SinkKinds(HeadMetric):
    """Kinds of the sinks of each head, all `[H]`.

    A sequence's sink is the key s with the largest alpha of those in its first half, if that exceeds `SINK_WEIGHT`.
    With u_j = W_h v_j, the value of token j by the head's part of the output projection, the sink's ratio is |u_s| over
    the mean |u_j| of the other tokens. With U `[T, d]`, what the head adds to the residual stream, its stable rank is
    |U|_F^2 / |U|_2^2.
    `sink/no_operation`: share of sequences with a sink of a ratio of at most `NO_OPERATION_RATIO`; `sink/broadcast`: of
    a ratio of at least `BROADCAST_RATIO` and a stable rank of at most `BROADCAST_RANK`; `sink/neither`: of neither.
    `sink/value_ratio`, `sink/stable_rank`: means over the sequences with a sink; NaN without any.
    """

    SUMS: ClassVar = {**dict.fromkeys(("ratio", "rank", "no_operation", "broadcast", "sinks"), "H"), "sequences": ""}

    def update(self, summary: RowSummary, v: Tensor, outputs: Tensor, projection: Tensor) -> None:
        """Add a batch: v `[B, Hkv, T, D]`; outputs `[B, T, H * D]` of the heads; projection `[d, H * D]` of them."""
        counted = summary.counted[:, None]
        # alpha: mean weight on a key over the rows from the key on.
        rows = reverse_cumsum(summary.counted.double())
        in_first_half = torch.arange(rows.shape[1], device=rows.device) < (rows[:, :1] // 2).clamp(min=1)
        by_key = summary.columns.double() / rows.clamp(min=1)[:, None]
        alpha, key = by_key.masked_fill(~in_first_half[:, None], -torch.inf).max(-1)
        # A triangular factor of W_h has the norms and singular values of W_h.
        factor = torch.linalg.qr(projection.double().unflatten(1, (self.n_heads, -1)).transpose(0, 1)).R
        values = v.double().repeat_interleave(self.n_heads // v.shape[1], 1)
        size = torch.where(counted, (values @ factor.mT).norm(dim=-1), 0)
        own = size.gather(-1, key[..., None])[..., 0]
        others = (size.sum(-1) - own) / (counted.sum(-1) - 1).clamp(min=1)
        found = (alpha > SINK_WEIGHT) & (others > 0)
        ratio, rank = torch.zeros(2, *found.shape, dtype=torch.float64, device=found.device)
        ratio[found] = own[found] / others[found]
        heads = outputs.double().unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        updates = torch.where(counted[..., None], heads, 0)[found] @ factor[found.nonzero()[:, 1]].mT
        rank[found] = stable_rank(updates).nan_to_num(0)

        self.ratio += ratio.sum(0)
        self.rank += rank.sum(0)
        self.no_operation += (found & (ratio <= NO_OPERATION_RATIO)).sum(0)
        self.broadcast += ((ratio >= BROADCAST_RATIO) & (rank > 0) & (rank <= BROADCAST_RANK)).sum(0)
        self.sinks += found.sum(0)
        self.sequences += summary.counted.any(1).sum()

    def compute(self) -> dict[str, Tensor]:
        return {
            "sink/no_operation": self.no_operation / self.sequences,
            "sink/broadcast": self.broadcast / self.sequences,
            "sink/neither": (self.sinks - self.no_operation - self.broadcast) / self.sequences,
            "sink/value_ratio": self.ratio / self.sinks,
            "sink/stable_rank": self.rank / self.sinks,
        }
