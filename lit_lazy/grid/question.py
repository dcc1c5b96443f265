"""Questions: ablations with a declaration, made before the run, that turns results into a verdict."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.config.user_classes import hash_user_code
from lit_lazy.config.user_files import hash_uncommitted, load_attribute
from lit_lazy.grid.ablation import Ablation, Row, load_defined, require_distinct, require_known
from lit_lazy.support.checked_fields import NonEmptyText, check_fields, require
from lit_lazy.support.error_messages import naming
from lit_lazy.support.names_to_paths import PROJECT
from lit_lazy.support.provenance import find_last_commit
from lit_lazy.table.build import TABLE, read_table
from lit_lazy.table.declaration import Declaration, Rule, Statement, Verdict
from lit_lazy.table.records import Contrast
from lit_lazy.table.sequential_looks import ALPHA, find_open_rows

RESULTS = PROJECT / "docs" / "results"
"""Folder of published tables."""


@dataclass(frozen=True)
class Question:
    """A claim about an ablation. A file in `ablations/` exports it, or a function that returns it, as `question`."""

    ablation: Ablation
    """The rows and seeds, without contrasts and primary outcome, which the question defines."""
    claim: NonEmptyText
    """A sentence that the verdict judges as supported, refuted or undecided."""
    primary: str
    """Key of the deciding metric, a column of the ablation."""
    contrasts: tuple[Contrast | Statement, ...]
    """The contrasts to which the rule applies, at most five; statements for the rules `mostly` and `alone`."""
    rule: Rule
    """The claim about every contrast (`lit_lazy.table.declaration.Rule`)."""
    source: str
    """Origin, such as a reviewer's question (R1 to R15) or a place in the paper."""
    margin: float = 0.0
    """The largest difference that counts as none, in the metric's unit; not used by the rules `removed`, `mostly` and
    `alone`."""
    pilot_seeds: tuple[int, ...] = ()
    """Seeds whose results were seen before the declaration; a verdict that uses one is exploratory."""
    removed: float = 0.1
    """For the rules `removed` and `alone`: upper bound on a removed effect."""
    kept: float = 0.3
    """For the rules `removed` and `alone`: lower bound on a present effect."""
    looks: tuple[int, ...] = ()
    """Numbers of seeds after which the claim may be decided, such as (10, 20, 40, 80); the ablation has the last number
    of seeds, which are used in order. By default one look, after all seeds."""
    few_seeds_because: str = ""
    """Why a first look has fewer than ten seeds."""
    after: str = ""
    """The question that this one repeats, perhaps with another outcome; its verdict is shown beside this one."""

    def __post_init__(self) -> None:
        is_ablation = isinstance(self.ablation, Ablation)
        name = f"question {self.ablation.name!r}" if is_ablation else "question"
        check_fields(f"{name}: ", self)
        with naming(name):
            self._check()

    def _check(self) -> None:
        """Check what the annotations cannot say; the ablation and the declaration check the rest."""
        fix = "is not used by the rule `removed`, whose bounds are `removed` and `kept`; leave it out"
        require(not (self.rule == "removed" and self.margin), "margin", self.margin, fix)
        require_known("primary", [self.primary], [column.key for column in self.ablation.columns])
        for part in ("contrasts", "primary"):
            value = getattr(self.ablation, part)
            require(not value, f"ablation.{part}", value, "leave it to the question")
        require_distinct("contrasts", [contrast.name for contrast in self.contrasts])
        rows = self.ablation.all_rows
        for contrast in self.contrasts:
            require_known(f"contrast {contrast.name!r}: row", contrast.weights, [row.name for row in rows])
        with_seeds = [row.name for row in rows if row.seeds is not None]
        require(not with_seeds, "seeds of rows", with_seeds, "all rows of a question have the ablation's seeds")
        self.partial_declaration  # noqa: B018 (runs its checks)

    @property
    def all_looks(self) -> tuple[int, ...]:
        """The looks, or the only one."""
        return self.looks or (len(self.ablation.seeds),)

    @property
    def full_ablation(self) -> Ablation:
        """The ablation with the question's contrasts and primary outcome."""
        sums = tuple(contrast for contrast in self.contrasts if isinstance(contrast, Contrast))
        return replace(self.ablation, contrasts=sums, primary=(self.primary,))

    def select_look(self, verdict: Verdict | None) -> list[tuple[Row, tuple[int, ...]]]:
        """The rows of the look after those of a verdict, each with its seeds: first all rows, later those left open."""
        looks = () if verdict is None else verdict.looks
        names = find_open_rows(self.partial_declaration, looks) if looks else [r.name for r in self.ablation.all_rows]
        seeds = self.ablation.seeds[: self.all_looks[len(looks)]]
        return [(row, seeds) for row in self.ablation.all_rows if row.name in names]

    def declare(self, base_name: str, base: RunConfig, files: Sequence[Path]) -> Declaration:
        """The declaration on an experiment, with the commit of the first file, the question's, or that of a published
        table with this declaration.

        files: all files that define it. The commit is empty if one of them, or of the files that they import from their
        folders, has uncommitted changes.
        """
        configs = {row.name: row.apply_to(base) for row in self.ablation.all_rows}
        rows = {name: [to_dict(config, minimal=True), hash_user_code(config)] for name, config in configs.items()}
        declared = self.partial_declaration
        content = json.dumps([declared.to_json(), base_name, rows, [ALPHA, *declared.weights]], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        commit = "" if hash_uncommitted(files) else find_last_commit(files[0])
        return _recall(replace(declared, digest=digest, commit=commit), self.ablation.name, base_name)

    @property
    def partial_declaration(self) -> Declaration:
        """The declaration without experiment, row settings and commit."""
        given = {one.name: getattr(self, one.name) for one in fields(Declaration) if hasattr(self, one.name)}
        own: dict[str, Any] = {
            "contrasts": {contrast.name: dict(contrast.weights) for contrast in self.contrasts},
            "statements": tuple(contrast for contrast in self.contrasts if isinstance(contrast, Statement)),
            "looks": self.all_looks,
            "seeds": self.ablation.seeds,
        }
        return Declaration(**given | own)


def _recall(declared: Declaration, name: str, base_name: str) -> Declaration:
    """The declaration with the commit at which it was made, and what is known of the question before it.

    A file may change without its declaration: if a published table has the same digest, its commit counts. Without such
    a table the question before it is that of a published table.
    """
    path = RESULTS / f"{name}-{base_name}" / TABLE
    known = read_table(path).declaration if path.exists() else None
    if known is not None and known.digest == declared.digest:
        commit = known.commit if declared.commit else ""
        return replace(declared, commit=commit, earlier=known.earlier, earlier_seeds=known.earlier_seeds)
    for path in sorted(RESULTS.glob(f"{declared.after}-*/{TABLE}")) if declared.after else ():
        table = read_table(path)
        if table.verdict is not None:
            seeds = sorted({seed for row in table.rows for seed in row.seeds})
            return replace(declared, earlier=table.verdict.sentence, earlier_seeds=tuple(seeds))
    return declared


def load_ablation_or_question(path: Path) -> tuple[Ablation, Question | None]:
    """The ablation of a file, and its question if the file defines one; raises what `load_defined` does."""
    if load_attribute(path, "question") is None:
        return load_defined(path, "ablation", Ablation), None
    question, ablation = load_defined(path, "question", Question), load_attribute(path, "ablation")
    if ablation is not None and ablation is not question.ablation:
        raise ValueError(
            f"{path}: defines a `question` and another `ablation`; delete one, or import it under another name"
        )
    return question.full_ablation, question
