"""The records of a question: what was declared before a run, and what its results say of the claim."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lit_lazy.support.checks import require

Rule = Literal["lower", "higher", "same", "removed", "alone"]
"""What is claimed of every contrast.

lower, higher: the weighted sum is below, above 0. Refuted where it is significantly the other way, or equivalent to 0
within the margin (TOST).
same: it is equivalent to 0 within the margin. Refuted where its interval lies wholly outside.
removed: the rows of positive weight lie below `Declaration.removed` where those of negative weight lie above
`Declaration.kept`. Refuted where both lie above `kept`.
alone: the same of several rows of negative weight, and refuted too where one of them lies below `removed` as well; of a
single one it is `removed`.
"""
Status = Literal["supported", "refuted", "undecided"]
MOST_CONTRASTS, FEWEST_SEEDS, MOST_SEEDS = 5, 5, 1000
"""Of a question; and the greatest number of seeds that "would decide"."""


@dataclass(frozen=True)
class Declaration:
    """A question as it was declared, and what is known of when."""

    claim: str
    source: str
    """Who asked: a reviewer's question (R1 to R15) or a place in the paper."""
    primary: str
    """Key of the metric that decides."""
    contrasts: Mapping[str, Mapping[str, float]]
    """Weights of the rows, by the contrast's name."""
    rule: Rule
    margin: float
    """The largest difference that counts as none, in the metric's unit."""
    seeds: tuple[int, ...]
    removed: float = 0.1
    kept: float = 0.3
    pilot_seeds: tuple[int, ...] = ()
    """Seeds whose results were seen before the declaration."""
    digest: str = ""
    """Of everything above, and of the rows and the experiment."""
    commit: str = ""
    """The last that changed the declaration before its run; "" where it was not committed then."""
    changed: bool = False
    """Whether the declaration was another when its run began."""

    def __post_init__(self) -> None:
        require(self.rule in get_args(Rule), "rule", self.rule, f"must be one of {', '.join(get_args(Rule))}")
        require(self.margin > 0, "margin", self.margin, "must be above 0: the largest difference that counts as none")
        require(self.removed < self.kept, "removed", self.removed, f"must be below kept={self.kept}")
        count = len(self.contrasts)
        require(0 < count <= MOST_CONTRASTS, "contrasts", count, f"must be 1 to {MOST_CONTRASTS}")
        fix = f"needs at least {FEWEST_SEEDS}"
        require(len(self.seeds) >= FEWEST_SEEDS, "seeds", self.seeds, fix)
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "each must occur once")

    @property
    def exploratory(self) -> tuple[str, ...]:
        """Why a verdict is no test of what was declared before; nothing where it is one."""
        reasons = {
            "its declaration, or a setting of its experiment, was in no commit before its run": not self.commit,
            "its declaration changed after its run began": self.changed,
            "some of its seeds were used in a pilot": bool({*self.seeds} & {*self.pilot_seeds}),
        }
        return tuple(reason for reason, holds in reasons.items() if holds)

    def differing_fields(self, other: "Declaration") -> list[str]:
        """Names of what two declarations say differently, whenever they were made."""
        made = ("digest", "commit", "changed")
        ours, theirs = self.to_json(), other.to_json()
        return [name for name in ours if name not in made and ours[name] != theirs[name]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {name: list(getattr(self, name)) for name in ("seeds", "pilot_seeds")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Declaration":
        fields: dict[str, Any] = dict(data) | {name: tuple(data[name]) for name in ("seeds", "pilot_seeds")}
        return cls(**fields)


@dataclass(frozen=True)
class Finding:
    """What is found of one contrast. `low` and `high` bound the simultaneous 95 % interval."""

    name: str
    status: Status
    why: str
    mean: float
    low: float
    high: float
    needed: int | None = None
    """Seeds that would decide it if means and spreads stay; None where it is decided, or no number would."""
    would: Status | None = None
    """What so many seeds would make of it."""


@dataclass(frozen=True)
class Verdict:
    """What the results say of the claim: supported where every contrast supports it, refuted where one refutes it."""

    status: Status
    sentence: str
    n: int
    parts: tuple[Finding, ...]
    exploratory: tuple[str, ...]

    @property
    def outlook(self) -> tuple[int, Status] | None:
        """The seeds that would decide the claim, and how; None where it is decided, or no number would.

        One refuted contrast is enough: so the fewest that refute one, else those that support the last.
        """
        undecided = [part for part in self.parts if part.status == "undecided"]
        if self.status != "undecided":
            return None
        if refuting := [part.needed for part in undecided if part.needed and part.would == "refuted"]:
            return min(refuting), "refuted"
        supporting = [part.needed for part in undecided if part.needed]
        return (max(supporting), "supported") if len(supporting) == len(undecided) else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"parts": [asdict(part) for part in self.parts], "exploratory": list(self.exploratory)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Verdict":
        parts = tuple(Finding(**part) for part in data["parts"])
        return cls(data["status"], data["sentence"], data["n"], parts, tuple(data["exploratory"]))
