"""The records of a question: its declaration before the run, and the verdict on its claim."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lit_lazy.support.checks import require

Rule = Literal["lower", "higher", "same", "removed", "alone"]
"""The claim about every contrast.

lower, higher: the weighted sum is below or above 0. Refuted if it is significantly on the other side, or equivalent to
0 within the margin (TOST).
same: the weighted sum is equivalent to 0 within the margin. Refuted if its interval lies entirely outside the margin.
removed: rows with positive weight lie below `Declaration.removed` while rows with negative weight lie above
`Declaration.kept`. Refuted if both lie above `kept`.
alone: `removed`, but also refuted if one of several rows with negative weight lies below `removed`.
"""
Status = Literal["supported", "refuted", "undecided"]
MOST_CONTRASTS, FEWEST_SEEDS, MOST_SEEDS = 5, 5, 1000
"""Limits of a question; MOST_SEEDS is the largest number of seeds reported as deciding."""


@dataclass(frozen=True)
class Declaration:
    """A question as declared, and the provenance of the declaration."""

    claim: str
    source: str
    """Origin of the question: a reviewer's question (R1 to R15) or a place in the paper."""
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
    digest: str = ""
    """Hash of all fields above, the rows and the experiment."""
    commit: str = ""
    """Last commit that changed the declaration before its run; "" if it was uncommitted."""
    changed: bool = False
    """Whether the declaration changed after its run began."""

    def __post_init__(self) -> None:
        require(self.rule in get_args(Rule), "rule", self.rule, f"must be one of {', '.join(get_args(Rule))}")
        require(self.margin > 0, "margin", self.margin, "must be above 0: the largest difference that counts as none")
        require(self.removed < self.kept, "removed", self.removed, f"must be below kept={self.kept}")
        count = len(self.contrasts)
        require(0 < count <= MOST_CONTRASTS, "contrasts", count, f"must be 1 to {MOST_CONTRASTS}")
        require(len(self.seeds) >= FEWEST_SEEDS, "seeds", self.seeds, f"needs at least {FEWEST_SEEDS}")
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "each must occur once")

    @property
    def exploratory(self) -> tuple[str, ...]:
        """Reasons why the verdict is exploratory; empty if it tests a prior declaration."""
        reasons = {
            "its declaration, or a setting of its experiment, was in no commit before its run": not self.commit,
            "its declaration changed after its run began": self.changed,
            "some of its seeds were used in a pilot": bool({*self.seeds} & {*self.pilot_seeds}),
        }
        return tuple(reason for reason, holds in reasons.items() if holds)

    def differing_fields(self, other: "Declaration") -> list[str]:
        """Names of the fields in which two declarations differ, apart from their provenance."""
        provenance = ("digest", "commit", "changed")
        ours, theirs = self.to_json(), other.to_json()
        return [name for name in ours if name not in provenance and ours[name] != theirs[name]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Declaration":
        fields: dict[str, Any] = dict(data) | {name: tuple(data[name]) for name in ("seeds", "pilot_seeds")}
        return cls(**fields)


@dataclass(frozen=True)
class Finding:
    """The result of one contrast. `low` and `high` bound the simultaneous 95 % interval."""

    name: str
    status: Status
    why: str
    mean: float
    low: float
    high: float
    needed: int | None = None
    """Number of seeds that would decide it at unchanged means and spreads; None if decided, or if no number would."""
    would: Status | None = None
    """The status at `needed` seeds."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim: supported if every contrast supports it, refuted if one refutes it."""

    status: Status
    sentence: str
    n: int
    parts: tuple[Finding, ...]
    exploratory: tuple[str, ...]

    @property
    def outlook(self) -> tuple[int, Status] | None:
        """The number of seeds that would decide the claim, and the verdict; None if decided, or if no number would.

        One refuted contrast is enough, so it is the smallest number that refutes one, otherwise the largest number that
        a contrast needs to be supported.
        """
        undecided = [part for part in self.parts if part.status == "undecided"]
        if self.status != "undecided":
            return None
        if refuting := [part.needed for part in undecided if part.needed and part.would == "refuted"]:
            return min(refuting), "refuted"
        supporting = [part.needed for part in undecided if part.needed]
        return (max(supporting), "supported") if len(supporting) == len(undecided) else None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Verdict":
        parts = tuple(Finding(**part) for part in data["parts"])
        return cls(data["status"], data["sentence"], data["n"], parts, tuple(data["exploratory"]))
