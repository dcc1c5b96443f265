"""The rules of questions with looks: what is decided at each look, and how likely a later one is to decide.

A group-sequential design: look j spends the share w_j of the error rate ALPHA for support, per contrast, and the same
for refutation, divided by the number of declared contrasts. A claim is supported if every contrast is, so an error of
one contrast bounds its error; it is refuted if one contrast is, which needs the division. docs/method.md, section 10,
has the rules, docs/results/looks.md their simulated errors and power.

All functions are pure in the declaration and the outcomes by row and seed.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from lit_lazy.table.declaration import BY_STATEMENT, Chance, Declaration, Finding, Look, Statement, Status
from lit_lazy.table.statistics import LEAST, RESOLUTION, t_quantile

ALPHA = 0.025
"""Error rate of wrong support, and of wrong refutation, over all looks."""
MOST_ABSENT = 0.25
"""Largest share of seeds in which what a statement presumes may be absent."""
SHARE_CLAIMED, SHARE_DENIED = 1 / 2, 3 / 4
"""`mostly` is supported if a statement holds in more than the first share of trainings, refuted if in fewer than the
second."""
DRAWS = 2_000
UNLEARNED = "did not learn the task"
"""Ends the reason why a contrast is undecided, if a row of it did not learn."""
Outcomes = Mapping[str, Mapping[int, float]]
"""The primary outcome by row and seed."""


class Critical(NamedTuple):
    """Error rates of one contrast at one look with n seeds, for support and for refutation."""

    n: int
    support: float
    refute: float

    @property
    def t_support(self) -> float:
        """Standard errors that support takes: t(n - 1) at `support`."""
        return t_quantile(self.support, self.n - 1)

    @property
    def t_refute(self) -> float:
        return t_quantile(self.refute, self.n - 1)

    @property
    def fewest_met(self) -> int:
        """Seeds in which a statement must hold to be supported: the least y with P(Bin(n, 1/2) >= y) <= `support`."""
        from scipy.special import bdtrc

        return next(y for y in range(self.n + 2) if bdtrc(y - 1, self.n, SHARE_CLAIMED) <= self.support)


def compute_critical(declaration: Declaration, look: int) -> Critical:
    """Error rates at a look, counted from 0."""
    rate = ALPHA * declaration.weights[look]
    return Critical(declaration.looks[look], rate, rate / len(declaration.contrasts))


@dataclass(frozen=True)
class _Moments:
    """Mean and standard deviation over n seeds; arrays hold several draws."""

    mean: np.ndarray
    sd: np.ndarray

    @classmethod
    def measure(cls, x: np.ndarray) -> "_Moments":
        """Of `x`, whose last axis are seeds."""
        still = _is_still(x, np.abs(x).max(axis=-1))
        return cls(x.mean(axis=-1), np.where(still, np.nan, x.std(axis=-1, ddof=1)))

    def is_below(self, bound: float, factor: float, n: int) -> np.ndarray:
        """Whether mean + factor standard errors is below the bound; false without a spread."""
        return self.mean + factor * self.sd / math.sqrt(n) < bound

    def is_above(self, bound: float, factor: float, n: int) -> np.ndarray:
        return self.mean - factor * self.sd / math.sqrt(n) > bound


class _Decision(NamedTuple):
    supported: np.ndarray
    refuted: np.ndarray


def _decide(declaration: Declaration, name: str, parts: np.ndarray, critical: Critical) -> _Decision:
    """Support and refutation of a contrast, bool `[...]`, from the parts of `_measure_parts`, `[..., parts, n]`."""
    if declaration.rule in BY_STATEMENT:
        return _decide_statement(declaration, parts, critical)
    n, margin, a, b = critical.n, declaration.margin, critical.t_support, critical.t_refute
    if declaration.rule == "removed":
        claimed = np.array([weight > 0 for weight in declaration.contrasts[name].values() if weight])
        levels = _Moments.measure(parts)
        b = critical._replace(refute=critical.refute / int(claimed.sum())).t_refute
        present = np.all(levels.is_above(declaration.kept, a, n)[..., ~claimed], axis=-1)
        removed = np.all(levels.is_below(declaration.removed, a, n)[..., claimed], axis=-1)
        still_there = np.any(levels.is_above(declaration.kept, b, n)[..., claimed], axis=-1)
        return _Decision(np.logical_and(present, removed), np.logical_and(present, still_there))
    d = _Moments.measure((-1 if declaration.rule == "higher" else 1) * parts[..., 0, :])
    if declaration.rule == "same":
        within = d.is_below(margin, a, n) & d.is_above(-margin, a, n)
        return _Decision(within, d.is_above(margin / 2, b, n) | d.is_below(-margin / 2, b, n))
    if declaration.rule == "no_worse":
        return _Decision(d.is_below(margin, a, n), d.is_above(0, b, n))
    return _Decision(d.is_below(0, a, n), d.is_above(-margin, b, n))


def _decide_statement(declaration: Declaration, parts: np.ndarray, critical: Critical) -> _Decision:
    absent, met, rivals = parts[..., 0, :].sum(axis=-1), parts[..., 1, :].sum(axis=-1), parts[..., 2:, :].sum(axis=-1)
    supported, refuted = met >= critical.fewest_met, _is_rare(met, critical)
    known = absent <= MOST_ABSENT * critical.n
    if declaration.rule == "alone":
        # Support claims that no rival does it, so each must be shown not to.
        count = rivals.shape[-1]
        supported &= np.all(_is_rare(rivals, critical._replace(refute=critical.support)), axis=-1)
        each = critical._replace(support=critical.refute / max(count, 1))
        refuted |= np.any(rivals >= each.fewest_met, axis=-1)
        known &= count > 0
    return _Decision(known & supported, known & refuted)


def _is_rare(met: np.ndarray, critical: Critical) -> np.ndarray:
    """Whether a statement that holds in three quarters of trainings would hardly be met in so few seeds."""
    from scipy.special import bdtr

    return bdtr(met, critical.n, SHARE_DENIED) <= critical.refute


def _measure_parts(
    declaration: Declaration, name: str, outcomes: Outcomes, seeds: Sequence[int], unlearned: Collection[str]
) -> np.ndarray:
    """What a rule reads of a contrast, `[parts, n]`.

    The weighted sum; for `removed` the rows; for statements, as 0 or 1, whether what it presumes is absent, whether it
    is met, and whether it is met by each rival that learned the task.
    """
    if declaration.rule in BY_STATEMENT:
        statement = _get_statement(declaration, name)
        rows = [statement.holds.row, *(rival for rival in statement.rivals if rival not in unlearned)]
        by_seed = [{row: outcomes[row][seed] for row in statement.weights} for seed in seeds]
        given = [statement.given is None or statement.given.holds(x) for x in by_seed]
        compared = [replace(statement.holds, row=row) for row in rows]
        met = [[part.holds(x) and present for x, present in zip(by_seed, given, strict=True)] for part in compared]
        return np.array([[not present for present in given], *met], dtype=float)
    if declaration.rule == "removed":
        rows = [row for row, weight in declaration.contrasts[name].items() if weight]
        return np.array([[outcomes[row][seed] for seed in seeds] for row in rows])
    return _compute_sums(declaration.contrasts[name], outcomes, seeds)[None]


def _compute_sums(weights: Mapping[str, float], outcomes: Outcomes, seeds: Sequence[int]) -> np.ndarray:
    """The weighted sum of a contrast in each seed, `[n]`; equal numbers if they differ by the rounding of metrics."""
    terms = np.array([[weight * outcomes[row][seed] for row, weight in weights.items()] for seed in seeds])
    sums = np.array([math.fsum(row) for row in terms])
    return np.full_like(sums, sums.mean()) if _is_still(sums, np.abs(terms).max()) else sums


def _is_still(x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Whether values along the last axis differ by less than the resolution of metrics of that scale."""
    return np.ptp(x, axis=-1) <= np.maximum(RESOLUTION * scale, LEAST)


def _get_statement(declaration: Declaration, name: str) -> Statement:
    return next(statement for statement in declaration.statements if statement.name == name)


def find_open_rows(declaration: Declaration, looks: Sequence[Look]) -> list[str]:
    """The rows that the next look needs: those of contrasts that are undecided after the looks made."""
    decided = _collect_decided(looks)
    open_contrasts = [weights for name, weights in declaration.contrasts.items() if name not in decided]
    return list(dict.fromkeys(row for weights in open_contrasts for row, weight in weights.items() if weight))


def _collect_decided(looks: Sequence[Look]) -> dict[str, Finding]:
    parts = looks[-1].parts if looks else ()
    return {part.name: part for part in parts if part.status != "undecided"}


def combine_statuses(parts: Sequence[Finding]) -> Status:
    """The status of a claim: supported if every contrast is, refuted if one is."""
    statuses = {part.status for part in parts}
    return "refuted" if "refuted" in statuses else "undecided" if "undecided" in statuses else "supported"


Failures = Mapping[str, Collection[int]]
"""Seeds in which a row did not learn the task, by row."""


def judge_looks(
    declaration: Declaration, outcomes: Outcomes, failures: Failures = MappingProxyType({})
) -> tuple[Look, ...]:
    """The looks that the outcomes allow, up to the one that decides the claim.

    A contrast with a row that did not learn in more than half of a look's seeds is undecided. A look needs the outcome
    of every row with an open contrast in each of its seeds. `why` of a finding is a format string over the margin.
    """
    looks: list[Look] = []
    for number, n in enumerate(declaration.looks):
        seeds, decided = declaration.seeds[:n], _collect_decided(looks)
        if any(seed not in outcomes.get(row, {}) for row in find_open_rows(declaration, looks) for seed in seeds):
            break
        critical, unlearned = compute_critical(declaration, number), _find_unlearned(failures, seeds)
        parts = [
            decided.get(name) or _judge_contrast(declaration, name, outcomes, critical, unlearned)
            for name in declaration.contrasts
        ]
        looks.append(Look(n, tuple(parts)))
        if combine_statuses(parts) != "undecided":
            break
    return tuple(looks)


def _find_unlearned(failures: Failures, seeds: Sequence[int]) -> list[str]:
    """The rows that did not learn the task in more than half of the seeds."""
    return [row for row, failed in failures.items() if 2 * len({*failed} & {*seeds}) > len(seeds)]


def _judge_contrast(
    declaration: Declaration, name: str, outcomes: Outcomes, critical: Critical, unlearned: Collection[str]
) -> Finding:
    seeds = declaration.seeds[: critical.n]
    parts = _measure_parts(declaration, name, outcomes, seeds, unlearned)
    decision = _decide(declaration, name, parts, critical)
    status: Status = "refuted" if decision.refuted else "supported" if decision.supported else "undecided"
    if dead := describe_dead(declaration, name, unlearned):
        status, why = "undecided", dead
    else:
        why = _explain(declaration, status, parts, critical)
    if declaration.rule in BY_STATEMENT:
        return Finding(name, status, why, *_estimate_share(parts[1], critical), n=critical.n)
    d = _compute_sums(declaration.contrasts[name], outcomes, seeds)
    mean, half = float(d.mean()), critical.t_refute * float(d.std(ddof=1)) / math.sqrt(critical.n)
    return Finding(name, status, why, mean, mean - half, mean + half, n=critical.n)


def describe_dead(declaration: Declaration, name: str, unlearned: Collection[str]) -> str:
    """Why a contrast is undecided if rows of it, other than rivals, did not learn the task; otherwise ""."""
    rivals = _get_statement(declaration, name).rivals if declaration.statements else ()
    rows = [row for row, weight in declaration.contrasts[name].items() if weight and row in {*unlearned} - {*rivals}]
    names = " and ".join(rows).replace("{", "{{").replace("}", "}}")  # a format string, like all reasons
    return f"{names} {UNLEARNED}" if rows else ""


_WHY: Mapping[str, tuple[str, str]] = {
    "lower": ("lower", "not lower by {margin}"),
    "higher": ("higher", "not higher by {margin}"),
    "same": ("the same within ±{margin}", "differs by more than {half_margin}"),
    "no_worse": ("worse by less than {margin}, if at all", "worse"),
    "removed": ("below {removed} where it is above {kept} otherwise", "above {kept} as well"),
}
"""Reasons for support and for refutation, as format strings over the thresholds."""


def _explain(declaration: Declaration, status: Status, parts: np.ndarray, critical: Critical) -> str:
    if declaration.rule in BY_STATEMENT:
        absent, met, *rivals = parts.sum(axis=1).astype(int).tolist()
        text = f"met in {met} of {critical.n} seeds"
        if rivals:
            text += f", by its rivals in {', '.join(map(str, rivals))}"
        if absent:
            text += f"; what it presumes is absent in {absent}"
        return text
    if status == "undecided":
        still = bool(np.isnan(_Moments.measure(parts).sd).any())
        return "no seed moves it, so its spread is unknown" if still else "neither shown"
    return _WHY[declaration.rule][status == "refuted"]


def _estimate_share(met: np.ndarray, critical: Critical) -> tuple[float, float, float]:
    """The share of seeds in which a statement holds, with its simultaneous interval (Clopper and Pearson 1934)."""
    from scipy.special import betainccinv, betaincinv

    n, y, level = critical.n, int(met.sum()), critical.refute
    low = float(betaincinv(y, n - y + 1, level)) if y else 0.0
    return y / n, low, float(betainccinv(y + 1, n - y, level)) if y < n else 1.0


def compute_support_interval(declaration: Declaration, found: Finding) -> tuple[float, float]:
    """The interval of a finding at the error rate of support; its own has that of refutation."""
    critical = compute_critical(declaration, declaration.looks.index(found.n))
    if declaration.rule in BY_STATEMENT:
        met = np.arange(found.n) < round(found.mean * found.n)
        return _estimate_share(met, critical._replace(refute=critical.support))[1:]
    half = (found.high - found.mean) * critical.t_support / critical.t_refute
    return found.mean - half, found.mean + half


Region = tuple[float, float]


def list_regions(declaration: Declaration) -> tuple[list[Region], list[Region]]:
    """Where the intervals of a contrast must lie for support, and for refutation.

    They overlap where neither is wrong. None for the rule `removed`, which judges rows, not their difference.
    """
    m, inf = declaration.margin, math.inf
    return {
        "lower": ([(-inf, 0.0)], [(-m, inf)]),
        "higher": ([(0.0, inf)], [(-inf, m)]),
        "same": ([(-m, m)], [(-inf, -m / 2), (m / 2, inf)]),
        "no_worse": ([(-inf, m)], [(0.0, inf)]),
        "removed": ([], []),
    }.get(declaration.rule, ([(SHARE_CLAIMED, 1.0)], [(0.0, SHARE_DENIED)]))


def _measure_open(
    declaration: Declaration, looks: Sequence[Look], outcomes: Outcomes, failures: Failures
) -> tuple[dict[str, np.ndarray], set[str]]:
    """What the rule reads of each undecided contrast, and those of which a row did not learn the task."""
    seeds, decided = declaration.seeds[: looks[-1].n], _collect_decided(looks)
    unlearned = _find_unlearned(failures, seeds)
    names = [name for name in declaration.contrasts if name not in decided]
    parts = {name: _measure_parts(declaration, name, outcomes, seeds, unlearned) for name in names}
    return parts, {name for name in names if describe_dead(declaration, name, unlearned)}


def is_futile(declaration: Declaration, looks: Sequence[Look], outcomes: Outcomes, failures: Failures) -> bool:
    """Whether, from the second look on, no look that is left would decide the claim if means and spreads stay.

    It binds nobody: error rates hold whether or not the question goes on.
    """
    if len(looks) < 2:
        return False
    parts, dead = _measure_open(declaration, looks, outcomes, failures)
    kept: set[str] = set()
    for number in range(len(looks), len(declaration.looks)):
        critical = compute_critical(declaration, number)
        for name in {*parts} - kept - dead:
            found = _decide(declaration, name, _extrapolate(parts[name], critical.n, declaration), critical)
            if found.refuted:
                return False
            kept |= {name} if found.supported else set()
        if kept == {*parts}:
            return False
    return True


def _extrapolate(parts: np.ndarray, n: int, declaration: Declaration) -> np.ndarray:
    """`[parts, n]` with the mean and standard deviation of fewer seeds, or for statements with their shares."""
    if declaration.rule in BY_STATEMENT:
        counts = np.rint(parts.mean(axis=1) * n)
        return (np.arange(n) < counts[:, None]).astype(float)
    alternating = np.where(np.arange(n) % 2, 1.0, -1.0)
    alternating -= alternating.mean()
    spread = parts.std(axis=1, ddof=1) / alternating.std(ddof=1)
    return parts.mean(axis=1)[:, None] + spread[:, None] * alternating


def compute_chances(
    declaration: Declaration, looks: Sequence[Look], outcomes: Outcomes, failures: Failures
) -> tuple[Chance, ...]:
    """The probability that each look that is left has decided the claim by then, given the seeds so far.

    Draws of the seeds to come keep the covariance of all open contrasts and allow for the uncertainty of means and
    spreads: multivariate t around a mean drawn from its own distribution; for statements, a Bayesian bootstrap (Rubin
    1981) of the seeds so far with half a seed more in which all hold, and half a seed in which none does.
    """
    measured, dead = _measure_open(declaration, looks, outcomes, failures)
    parts = {name: own for name, own in measured.items() if name not in dead}
    if not parts:
        return ()
    future = _draw(np.concatenate(list(parts.values())), declaration, np.random.default_rng(0))
    ends = np.cumsum([len(own) for own in parts.values()])[:-1]
    drawn = dict(zip(parts, np.split(future, ends, axis=1), strict=True))
    supported, refuted = decide_draws(declaration, drawn, len(looks))

    def share_decided(at: np.ndarray, n: int) -> float:
        return float(np.mean((at > 0) & (at <= n)))

    return tuple(
        Chance(n, 0.0 if dead else share_decided(supported, n), share_decided(refuted, n))
        for n in declaration.looks[len(looks) :]
    )


def decide_draws(
    declaration: Declaration, parts: Mapping[str, np.ndarray], first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The seeds after which each draw of a claim is supported, and refuted, int `[draws]`; 0 if never.

    parts: of its undecided contrasts, what the rule reads, `[draws, parts, N]`, such as the weighted sum alone.
    first: the look to begin with, counted from 0.
    """
    draws = len(next(iter(parts.values())))
    supported, refuted = np.zeros(draws, dtype=int), np.zeros(draws, dtype=int)
    kept = {name: np.zeros(draws, dtype=bool) for name in parts}
    for number in range(first, len(declaration.looks)):
        critical = compute_critical(declaration, number)
        running = (supported == 0) & (refuted == 0)
        for name, drawn in parts.items():
            found = _decide(declaration, name, drawn[..., : critical.n], critical)
            refuted[running & ~kept[name] & found.refuted] = critical.n
            kept[name] |= running & found.supported & ~found.refuted
        supported[running & (refuted == 0) & np.logical_and.reduce(list(kept.values()))] = critical.n
    return supported, refuted


def _draw(x: np.ndarray, declaration: Declaration, rng: np.random.Generator) -> np.ndarray:
    """DRAWS continuations of `x`, `[parts, n]`, to the last look: `[DRAWS, parts, N]`, beginning with `x`."""
    n, more = x.shape[1], declaration.looks[-1] - x.shape[1]
    if declaration.rule in BY_STATEMENT:
        ends = np.ones((len(x), 2))
        ends[:, 1] = 0
        seen = np.concatenate([x, ends], axis=1)
        shares = rng.dirichlet([1.0] * n + [0.5, 0.5], size=DRAWS)
        chosen = (rng.random((DRAWS, more, 1)) > np.cumsum(shares, axis=1)[:, None]).sum(axis=-1)
        new = seen[:, np.minimum(chosen, n + 1)].transpose(1, 0, 2)
    else:
        mean = x.mean(axis=1)
        root = (x - mean[:, None]) / math.sqrt(n - 1)  # root @ root.T is the sample covariance
        scale = np.sqrt((n - 1) / rng.chisquare(n - 1, size=(DRAWS, 1, 1)))
        drawn_mean = mean[None, :, None] + scale * (root @ rng.normal(size=(DRAWS, n, 1))) / math.sqrt(n)
        new = drawn_mean + scale * (root @ rng.normal(size=(DRAWS, n, more)))
    return np.concatenate([np.broadcast_to(x, (DRAWS, *x.shape)), new], axis=2)
