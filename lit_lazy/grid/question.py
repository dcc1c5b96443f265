"""Questions: ablations with a declaration, made before the run, that turns results into a verdict."""

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lit_lazy.config.key import hash_user_code
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.config.user_files import hash_uncommitted, load_attribute, locate_errors
from lit_lazy.grid.ablation import Ablation, Row, load_ablation
from lit_lazy.grid.stages import FirstStageMissing
from lit_lazy.support.checks import check_kinds, require
from lit_lazy.support.errors import naming
from lit_lazy.support.named_files import PROJECT
from lit_lazy.support.provenance import find_last_commit
from lit_lazy.table.build import TABLE, read_table
from lit_lazy.table.declaration import Declaration, Rule, Statement, Verdict
from lit_lazy.table.looks import ALPHA, find_open_rows
from lit_lazy.table.records import Contrast

RESULTS = PROJECT / "docs" / "results"
"""Folder of published tables."""


@dataclass(frozen=True)
class Question:
    """A claim about an ablation. A file in `ablations/` exports it, or a function that returns it, as `question`."""

    ablation: Ablation
    """The rows and seeds, without contrasts and primary outcome, which the question defines."""
    claim: str
    """A sentence that the verdict judges as supported, refuted or undecided."""
    primary: str
    """Key of the deciding metric, a column of the ablation."""
    contrasts: tuple[Contrast | Statement, ...]
    """The contrasts to which the rule applies, at most five; statements for the rules `mostly` and `alone`."""
    rule: Rule
    """The claim about every contrast (`lit_lazy.table.declaration.Rule`)."""
    source: str
    """Origin: a reviewer's question (R1 to R15) or a place in the paper."""
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
        check_kinds(name, self)
        fix = "is not used by the rule `removed`, whose bounds are `removed` and `kept`; leave it out"
        require(not (self.rule == "removed" and self.margin), f"{name}: margin", self.margin, fix)
        require(bool(self.claim.strip()), f"{name}: claim", self.claim, "must be a sentence, which the verdict judges")
        few = self.few_seeds_because
        require(not few or bool(few.strip()), f"{name}: few_seeds_because", few, "must be a sentence, or left out")
        keys = [column.key for column in self.ablation.columns]
        require(self.primary in keys, f"{name}: primary", self.primary, f"must be a column: {', '.join(keys)}")
        for part in ("contrasts", "primary"):
            value = getattr(self.ablation, part)
            require(not value, f"{name}: ablation.{part}", value, "leave it to the question")
        names = [contrast.name for contrast in self.contrasts]
        twice = [one for one in dict.fromkeys(names) if names.count(one) > 1]
        require(not twice, f"{name}: contrasts", twice, "are there twice; rename one")
        rows = {row.name for row in self.ablation.all_rows}
        for statement in (part for part in self.contrasts if isinstance(part, Statement)):
            strange = [row for row in statement.weights if row not in rows]
            require(not strange, f"{name}: contrast {statement.name!r}", strange, "must be rows of its ablation")
        with_seeds = [row.name for row in self.ablation.all_rows if row.seeds is not None]
        fix = "all rows of a question have the ablation's seeds"
        require(not with_seeds, f"{name}: seeds of rows", with_seeds, fix)
        self.full_ablation  # noqa: B018 (runs its checks)
        with naming(name):
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
        rows = {}
        for row in self.ablation.all_rows:
            config = row.apply_to(base)
            rows[row.name] = [to_dict(config, minimal=True), hash_user_code(config)]
        declared = self.partial_declaration
        content = json.dumps([declared.to_json(), base_name, rows, [ALPHA, *declared.weights]], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        commit = "" if hash_uncommitted(files) else find_last_commit(files[0])
        return _recall(replace(declared, digest=digest, commit=commit), self.ablation.name, base_name)

    @property
    def partial_declaration(self) -> Declaration:
        """The declaration without experiment, row settings and commit."""
        return Declaration(
            claim=self.claim,
            source=self.source,
            primary=self.primary,
            contrasts={contrast.name: dict(contrast.weights) for contrast in self.contrasts},
            statements=tuple(contrast for contrast in self.contrasts if isinstance(contrast, Statement)),
            looks=self.all_looks,
            few_seeds_because=self.few_seeds_because,
            after=self.after,
            rule=self.rule,
            margin=self.margin,
            seeds=self.ablation.seeds,
            removed=self.removed,
            kept=self.kept,
            pilot_seeds=self.pilot_seeds,
        )


def _recall(declared: Declaration, name: str, base_name: str) -> Declaration:
    """The declaration with the commit at which it was made, and what is known of the question before it.

    A file may change without its declaration: if a published table has the same digest, its commit counts. Without such
    a table the question before it is that of a published table.
    """
    path = RESULTS / f"{name}-{base_name}" / TABLE
    known = read_table(path).declaration if path.exists() else None
    if known is not None and known.digest == declared.digest:
        earlier = replace(declared, earlier=known.earlier, earlier_seeds=known.earlier_seeds)
        return replace(earlier, commit=known.commit) if declared.commit else earlier
    for path in sorted(RESULTS.glob(f"{declared.after}-*/{TABLE}")) if declared.after else ():
        table = read_table(path)
        if table.verdict is not None:
            seeds = sorted({seed for row in table.rows for seed in row.seeds})
            return replace(declared, earlier=table.verdict.sentence, earlier_seeds=tuple(seeds))
    return declared


def load_ablation_or_question(path: Path) -> tuple[Ablation, Question | None]:
    """The ablation of a file, and its question if the file exports one.

    A second stage exports a function that returns the question or ablation. Raises `FirstStageMissing` if the first
    stage has no results yet.
    """
    question, ablation = load_attribute(path, "question"), load_attribute(path, "ablation")
    if question is None:
        made = _make_second_stage(path, ablation) if inspect.isfunction(ablation) else load_ablation(path)
        if not isinstance(made, Ablation):
            raise ValueError(f"{path}: its `ablation` returns a {type(made).__name__}; return an Ablation(...)")
        return made, None
    if inspect.isfunction(question):
        question = _make_second_stage(path, question)
    if not isinstance(question, Question):
        raise ValueError(f"{path}: its `question` is a {type(question).__name__}; make it a Question(...)")
    if ablation is not None and ablation is not question.ablation:
        raise ValueError(
            f"{path}: defines a `question` and another `ablation`; delete one, or import it under another name"
        )
    return question.full_ablation, question


def _make_second_stage(path: Path, make: Callable[[], object]) -> object:
    with locate_errors(path):
        try:
            return make()
        except FirstStageMissing as error:
            missing = FirstStageMissing(f"{path.stem}: {error}")
    raise missing
