"""Collapse: similarity of a sequence's hidden states, and size of their outliers. Kinds of sinks, which bring outliers.

The functions take hidden states `[..., T, d]` and return fp64 `[...]`, one value per sequence, computed in fp64.
"""

from typing import ClassVar

import torch
from torch import Tensor

from lit_lazy.measure.attention_metrics import States
from lit_lazy.measure.head_metrics import SINK_WEIGHT, HeadMetric, find_long, reverse_cumsum
from lit_lazy.measure.row_statistics import RowSummary

MASSIVE_ABS = 100.0
"""A massive activation is larger than this (Sun et al., arXiv 2402.17762) ..."""
MASSIVE_OVER_MEDIAN = 1000.0
"""... and at least this many times the median |h| of its hidden state."""
LEAST_VARIANCE = 1e-6
"""Share of the mean square below which the variance is lost in the rounding of the sums of powers."""
NO_OPERATION_RATIO = 0.2
"""A sink whose value is at most this part of the others' in size passes on next to nothing."""
BROADCAST_RATIO, BROADCAST_RANK = 0.5, 1.5
"""One whose value is at least this part, in a head whose update has at most this stable rank, reaches all tokens."""


def token_cosine(x: Tensor) -> Tensor:
    """Mean cosine over all pairs of different tokens, by `(|sum of x_i / |x_i||^2 - n) / (n (n - 1))`.

    n is the number of nonzero tokens; zero tokens have no direction and are excluded. NaN where n < 2.
    """
    x = x.double()
    norm = x.norm(dim=-1, keepdim=True)
    directions = x / norm.masked_fill(norm == 0, 1)
    n = (norm != 0).sum((-2, -1))
    cosine = (directions.sum(-2).square().sum(-1) - n) / (n * (n - 1))
    return cosine.masked_fill(n < 2, torch.nan)


def effective_rank(x: Tensor) -> Tensor:
    """`exp(-sum of q_k ln q_k)`, q the singular values over their sum (Roy and Vetterli, EUSIPCO 2007); not centred.

    Singular values come from the eigenvalues of the smaller Gram matrix, `[d, d]` or `[T, T]`. Values within its
    rounding error (below the square root of min(T, d) * 2.2e-16 of the largest) count as 0. NaN where x is 0 or not
    finite.
    """
    eigenvalues = _compute_gram_eigenvalues(x)
    rounding = min(x.shape[-2:]) * torch.finfo(eigenvalues.dtype).eps * eigenvalues[..., -1:]
    singular = eigenvalues.where(eigenvalues > rounding, 0).sqrt()
    q = singular / singular.sum(-1, keepdim=True)
    return torch.special.entr(q).sum(-1).exp()


def stable_rank(x: Tensor) -> Tensor:
    """`|X|_F^2 / |X|_2^2`, the sum of the squared singular values over the largest; 1 if all rows are parallel.

    NaN where x is 0 or not finite.
    """
    eigenvalues = _compute_gram_eigenvalues(x).clamp(min=0)
    return eigenvalues.sum(-1) / eigenvalues[..., -1]


def _compute_gram_eigenvalues(x: Tensor) -> Tensor:
    """Eigenvalues of the smaller Gram matrix of x, ascending, fp64 `[..., min(T, d)]`; 0 where x is not finite."""
    x = x.double()
    gram = x.mT @ x if x.shape[-1] <= x.shape[-2] else x @ x.mT
    # eigvalsh raises on non-finite values; zeros end as 0 / 0 = NaN.
    finite = gram.isfinite().all(-1).all(-1)[..., None, None]
    return torch.linalg.eigvalsh(gram.where(finite, 0))


def rank_residual(x: Tensor) -> Tensor:
    """`|X - 1 m^T| / |X|` with `|X| = sqrt(|X|_1 |X|_inf)` (Dong et al., arXiv 2103.03404); NaN where X is 0.

    |X|_1 is the largest absolute column sum, |X|_inf the largest absolute row sum. m is the mean of the tokens, which
    minimises the Frobenius norm of the residual; the paper takes the m that minimises its own norm.
    """
    x = x.double()
    return _composite_norm(x - x.mean(-2, keepdim=True)) / _composite_norm(x)


def _composite_norm(x: Tensor) -> Tensor:
    x = x.abs()
    return (x.sum(-2).amax(-1) * x.sum(-1).amax(-1)).sqrt()


def repeated_gap(y: Tensor, y_repeated: Tensor) -> Tensor:
    """`|y_T - y*_{T+1}| / |y_T|`, Euclidean norms (Barbero et al., arXiv 2406.04267, theorem 4.2).

    y: hidden states `[..., T, d]` of sequences; y_repeated: `[..., T+1, d]`, of the same sequences with their last
    token repeated.
    """
    last, repeated = y[..., -1, :].double(), y_repeated[..., -1, :].double()
    return (last - repeated).norm(dim=-1) / last.norm(dim=-1)


class Collapse(States):
    """Collapse and outliers of the hidden states of one layer, over the counted tokens of all sequences.

    Means over the sequences on which the value is defined:
    `hidden/cosine`: `token_cosine`;
    `hidden/effective_rank`: `effective_rank`;
    `hidden/rank_residual`: `rank_residual`;
    `hidden/median_abs`: median of |h| over the entries of a sequence (the lower median);
    `hidden/max_over_median`: the largest |h| of a sequence over that median.
    Over all entries of all sequences:
    `hidden/max_abs`: the largest |h|;
    `hidden/max_norm`: the largest Euclidean norm of a token;
    `hidden/massive`: share of entries with |h| > 100 and |h| >= 1000 times their sequence's median |h|;
    `hidden/kurtosis`: E(h - mu)^4 / sigma^4, 3 for a normal distribution, from fp64 sums of powers. NaN where the
    variance is below 1e-6 of the mean square.
    Every value is NaN without a counted token or if a counted hidden state is not finite.
    """

    MEANS = ("cosine", "effective_rank", "rank_residual", "median_abs", "max_over_median")

    def __init__(self) -> None:
        super().__init__()
        n = len(self.MEANS)
        self.add_states({"sums": [n], "sequences": [n], "powers": [4], "entries": (), "massive": ()})
        self.add_states({"max_abs": (), "max_norm": ()}, reduce="max")

    def update(self, hidden: Tensor, counted: Tensor | None = None) -> None:
        """Add hidden states `[B, T, d]`. counted: bool `[B, T]`, False at padding; None counts all."""
        for index, sequence in enumerate(hidden.double()):
            if len(tokens := sequence if counted is None else sequence[counted[index]]):
                self._add(tokens)

    def _add(self, x: Tensor) -> None:
        """Add one sequence, fp64 `[T, d]`."""
        size = x.abs()
        median = size.median()
        ratio = (size.max() / median).where(median > 0, torch.nan)
        values = torch.stack((token_cosine(x), effective_rank(x), rank_residual(x), median, ratio))
        undefined = values.isnan()
        self.sums += values.masked_fill(undefined, 0)
        self.sequences += ~undefined
        square = x.square()
        self.powers += torch.stack((x.sum(), square.sum(), (square * x).sum(), square.square().sum()))
        self.entries += x.numel()
        self.massive += ((size > MASSIVE_ABS) & (size >= MASSIVE_OVER_MEDIAN * median)).sum()
        self.max_abs = torch.maximum(self.max_abs, size.max())
        self.max_norm = torch.maximum(self.max_norm, x.norm(dim=-1).max())

    def compute(self) -> dict[str, Tensor]:
        mean, second, third, fourth = self.powers / self.entries
        variance = second - mean**2
        central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        values = dict(zip(self.MEANS, self.sums / self.sequences, strict=True)) | {
            "max_abs": self.max_abs,
            "max_norm": self.max_norm,
            "massive": self.massive / self.entries,
            "kurtosis": (central / variance**2).where(variance >= LEAST_VARIANCE * second, torch.nan),
        }
        defined = (self.entries > 0) & self.powers.isfinite().all()
        return {f"hidden/{name}": value.where(defined, torch.nan) for name, value in values.items()}


class SinkKinds(HeadMetric):
    """Kinds of the sinks of each head, all `[H]`: heads that use one to do nothing, or spread what it holds.

    Fesser et al., arXiv 2606.08105, with the thresholds of their code (KempnerInstitute/attention_sink, a83cd59,
    `vit_causal/common.py`). Theirs are vision models without a causal mask, so a sink is defined here as in `Sink`.
    A sequence's sink is the key s with the largest alpha of those in its first half, if that exceeds `SINK_WEIGHT`.
    With u_j = W_h v_j, the value of token j by the head's part of the output projection, the sink's ratio is |u_s| over
    the mean |u_j| of the other tokens. With U `[T, d]`, what the head adds to the residual stream, its stable rank is
    |U|_F^2 / |U|_2^2.
    `sink/no_operation`: share of `find_long` sequences with a sink of a ratio of at most `NO_OPERATION_RATIO`;
    `sink/broadcast`: of a ratio of at least `BROADCAST_RATIO` and a stable rank of at most `BROADCAST_RANK`;
    `sink/neither`: of neither.
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
        long = find_long(summary)
        found = (alpha > SINK_WEIGHT) & (others > 0) & long[:, None]
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
        self.sequences += long.sum()

    def compute(self) -> dict[str, Tensor]:
        return {
            "sink/no_operation": self.no_operation / self.sequences,
            "sink/broadcast": self.broadcast / self.sequences,
            "sink/neither": (self.sinks - self.no_operation - self.broadcast) / self.sequences,
            "sink/value_ratio": self.ratio / self.sinks,
            "sink/stable_rank": self.rank / self.sinks,
        }
