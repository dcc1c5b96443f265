"""The records of a question: its declaration before the run, and the verdict on its claim."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Literal, get_args

from lit_lazy.support.checked_fields import check_fields, require

Rule = Literal["lower", "higher", "same", "no_worse", "mostly", "removed", "alone"]
"""The claim about every contrast.

lower, higher: the weighted sum is below or above 0. Refuted if it is not so by the margin.
same: the weighted sum is equivalent to 0 within the margin. Refuted if it is off by more than half of the margin.
no_worse: the weighted sum is below the margin. Refuted if it is above 0.
mostly: a statement holds in more than half of all trainings. Refuted if it holds in fewer than three quarters.
removed: rows with positive weight lie below `Declaration.removed` while rows with negative weight lie above
`Declaration.kept`. Refuted if both lie above `kept`.
alone: `mostly`, and of no rival.
"""
Status = Literal["supported", "refuted", "undecided"]
MOST_CONTRASTS = 5
RULES = 2
"""Version of the rules, which a digest is also of. Those of version 1 judged the first round (docs/results)."""
SAFE_FIRST_LOOK = 10
"""Seeds below which a first look errs too often if outcomes are skewed (docs/results/looks.md)."""
UNCOMMITTED = "its declaration, its experiment or a file that they import was not committed before its run"
BY_STATEMENT = ("mostly", "alone")
"""Rules that count the seeds in which a statement holds."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of a row compared with a number, or with that many times the outcome of the row `of`."""

    row: str
    sign: Literal["<", ">"]
    value: float
    of: str | None = None

    def __post_init__(self) -> None:
        require(self.sign in ("<", ">"), "sign", self.sign, "must be < or >")
        number = isinstance(self.value, int | float) and math.isfinite(self.value)
        require(number, "value", self.value, "must be a number; the row that it is times is `of`")
        require(self.row != self.of, "of", self.of, "must be another row")

    def holds(self, outcomes: Mapping[str, float]) -> bool:
        """Whether it is true of one seed's outcomes by row."""
        bound = self.value if self.of is None else self.value * outcomes[self.of]
        return outcomes[self.row] < bound if self.sign == "<" else outcomes[self.row] > bound

    def __str__(self) -> str:
        return f"{self.row} {self.sign} {self.value:g}" + ("" if self.of is None else f" x {self.of}")


@dataclass(frozen=True)
class Statement:
    """A statement that holds in a seed or not, for the rules `mostly` and `alone`.

    `given` is what makes the question meaningful in a seed, such as a sink that softmax has: where it does not hold,
    neither does the statement, and the seed is counted apart. `rivals` are rows of which, under the rule `alone`, the
    same must not hold in place of the row of `holds`.
    """

    name: str
    holds: Comparison
    given: Comparison | None = None
    rivals: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(f"statement {self.name!r}: ", self)
        clash = {*self.rivals} & {self.holds.row, self.holds.of}
        require(
            not clash, f"statement {self.name!r}: rivals", sorted(map(str, clash)), "must be rows that it is not about"
        )

    @property
    def weights(self) -> dict[str, float]:
        """Its rows: 1 for the one it is about, -1 for the others."""
        compared = [self.holds, *([] if self.given is None else [self.given])]
        others = [name for part in compared for name in (part.row, part.of) if name not in (None, self.holds.row)]
        return {self.holds.row: 1.0, **dict.fromkeys([*map(str, others), *self.rivals], -1.0)}

    def __str__(self) -> str:
        return f"{self.holds}" + ("" if self.given is None else f", where {self.given}")


@dataclass(frozen=True)
class Declaration:
    """A question as declared, and the provenance of the declaration."""

    claim: str
    source: str
    """Origin of the question, such as a reviewer's (R1 to R15) or a place in the paper."""
    primary: str
    """Key of the deciding metric."""
    contrasts: Mapping[str, Mapping[str, float]]
    """Row weights by name of the contrast."""
    rule: Rule
    margin: float
    """The largest difference that counts as none, in the metric's raw unit."""
    seeds: tuple[int, ...]
    removed: float = 0.1
    kept: float = 0.3
    pilot_seeds: tuple[int, ...] = ()
    """Seeds whose results were seen before the declaration."""
    rules: int = RULES
    """Version of the rules."""
    looks: tuple[int, ...] = ()
    """Numbers of seeds, the first so many of `seeds`, at which the question may be decided."""
    statements: tuple[Statement, ...] = ()
    """For the rules `mostly` and `alone`: one per contrast."""
    few_seeds_because: str = ""
    """Why the first look has fewer than ten seeds."""
    after: str = ""
    """The question that this one repeats with other seeds, perhaps with another outcome or claim."""
    digest: str = ""
    """Hash of all fields above, the rows and the experiment."""
    commit: str = ""
    """Last commit that changed the declaration before its run; "" if it was uncommitted."""
    changed: bool = False
    """Whether the declaration changed after its run began."""
    begun: tuple[str, ...] = ()
    """Digest and commit of the declaration with which the run began; empty if it never changed."""
    seen: bool = False
    """Whether a result may be older than the commit of the declaration: it was taken from elsewhere, or moved aside."""
    earlier: str = ""
    """The verdict of the earlier question, as a sentence."""
    earlier_seeds: tuple[int, ...] = ()
    """Seeds of the earlier question."""

    def __post_init__(self) -> None:
        fix = f"must be version {RULES}; docs/results/first-round.md has the questions of the first"
        require(self.rules == RULES, "rules", self.rules, fix)
        require(self.rule in get_args(Rule), "rule", self.rule, f"must be one of {', '.join(get_args(Rule))}")
        margin = self.margin > 0 or self.rule in ("removed", *BY_STATEMENT)
        require(margin, "margin", self.margin, "must be above 0: the largest difference that counts as none")
        require(self.removed < self.kept, "removed", self.removed, f"must be below kept={self.kept}")
        count = len(self.contrasts)
        require(0 < count <= MOST_CONTRASTS, "contrasts", count, f"must be 1 to {MOST_CONTRASTS}")
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "each must occur once")
        fix = "must be numbers of seeds, such as (10, 20, 40, 80), which first-round.md's questions lack"
        require(bool(self.looks), "looks", self.looks, fix)
        grow = self.looks[0] >= 2 and all(a < b for a, b in pairwise(self.looks))
        require(grow, "looks", self.looks, "must grow from one to the next, and start at 2 seeds or more")
        safe = self.looks[0] >= SAFE_FIRST_LOOK or bool(self.few_seeds_because)
        fix = f"start with at least {SAFE_FIRST_LOOK} seeds, or say why not in few_seeds_because"
        require(safe, "looks", self.looks, fix)
        fix = f"must have one seed per training of the last look, {self.looks[-1]}"
        require(len(self.seeds) == self.looks[-1], "seeds", f"{len(self.seeds)} seeds", fix)
        stated = (self.rule in BY_STATEMENT) == bool(self.statements)
        fix = f"must be Statement(...) for the rules {' and '.join(BY_STATEMENT)}, Contrast(...) for all others"
        require(stated, "contrasts", list(self.contrasts), fix)
        for statement in self.statements:
            alone = (self.rule == "alone") == bool(statement.rivals)
            require(alone, "rivals", statement.rivals, "the rule `alone` needs at least one; other rules have none")

    @property
    def weights(self) -> tuple[float, ...]:
        """Share of the error rate that is spent at each look: that of its new seeds in all seeds."""
        return tuple((n - former) / self.looks[-1] for former, n in pairwise((0, *self.looks)))

    @property
    def exploratory(self) -> tuple[str, ...]:
        """Reasons why the verdict is exploratory; empty if it tests a prior declaration."""
        reasons = {
            UNCOMMITTED: not self.commit,
            "its declaration changed after its run began": self.changed,
            "some of its results may have been known before its declaration was committed": self.seen,
            "some of its seeds were used in a pilot": bool({*self.seeds} & {*self.pilot_seeds}),
            f"some of its seeds were used in {self.after}": bool({*self.seeds} & {*self.earlier_seeds}),
        }
        return tuple(reason for reason, holds in reasons.items() if holds)

    def differing_fields(self, other: "Declaration") -> list[str]:
        """Names of the fields in which two declarations differ, apart from their provenance."""
        provenance = ("digest", "commit", "changed", "begun", "seen", "earlier", "earlier_seeds")
        ours, theirs = self.to_json(), other.to_json()
        return [name for name in {**ours, **theirs} if name not in provenance and ours.get(name) != theirs.get(name)]

    def to_json(self) -> dict[str, Any]:
        """Without what is at its default and not always there, so that a further field changes no digest."""
        optional = ("statements", "few_seeds_because", "after", "begun", "seen", "earlier", "earlier_seeds")
        absent = {one.name for one in fields(self) if one.name in optional and getattr(self, one.name) == one.default}
        kept = asdict(self, dict_factory=lambda pairs: {k: list(v) if isinstance(v, tuple) else v for k, v in pairs})
        return {name: value for name, value in kept.items() if name not in absent}


@dataclass(frozen=True)
class Finding:
    """The result of one contrast. `low` and `high` bound the simultaneous interval.

    Under `mostly` and `alone`, mean and interval are of the share of seeds in which the statement holds.
    """

    name: str
    status: Status
    why: str
    mean: float
    low: float
    high: float
    n: int
    """Seeds at the look that decided it, or at the last one."""


@dataclass(frozen=True)
class Look:
    """The contrasts after a look, in the order of the declaration. `n` is its number of seeds."""

    n: int
    parts: tuple[Finding, ...]


@dataclass(frozen=True)
class Chance:
    """The probability that a claim is supported or refuted by a look that has not been made yet."""

    n: int
    supported: float
    refuted: float


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim: supported if every contrast supports it, refuted if one refutes it."""

    status: Status
    sentence: str
    n: int
    parts: tuple[Finding, ...]
    exploratory: tuple[str, ...]
    looks: tuple[Look, ...]
    """The looks that were made."""
    futile: bool = False
    """Whether no look that is left would decide, if means and spreads stay."""
    chances: tuple[Chance, ...] = ()
    """Of the looks that are left, if it is undecided."""
