"""Similarity of a sequence's hidden states, and size of their outliers.

The functions take hidden states `[..., T, d]` and return fp64 `[...]`, one value per sequence, computed in fp64.
"""

import torch
from torch import Tensor

from lit_lazy.measure.attention_metrics import States

MASSIVE_ABS = 100.0
"""A massive activation is larger than this (Sun et al., arXiv 2402.17762) ..."""
MASSIVE_OVER_MEDIAN = 1000.0
"""... and at least this many times the median |h| of its hidden state."""
LEAST_VARIANCE = 1e-6
"""Share of the mean square below which the variance is lost in the rounding of the sums of powers."""


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
