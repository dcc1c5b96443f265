"""A question: an ablation with a declaration, made before it is run, that turns its results into a verdict."""

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lit_lazy.config.files import load_attribute, locate_error
from lit_lazy.config.key import hash_user_code, to_minimal_dict
from lit_lazy.config.schema import RunConfig
from lit_lazy.grid.ablation import Ablation, load_ablation
from lit_lazy.grid.stages import FirstStageMissing
from lit_lazy.support.checks import require
from lit_lazy.support.provenance import find_last_commit
from lit_lazy.support.typecheck import check_kinds
from lit_lazy.table.question import Declaration, Rule
from lit_lazy.table.records import Contrast


@dataclass(frozen=True)
class Question:
    """What is asked of an ablation. A file in `ablations/` exports it as `question`, or a function that makes it."""

    ablation: Ablation
    """Its rows and seeds, without contrasts and primary outcome: they are the question's."""
    claim: str
    """A sentence that the verdict says to be supported, refuted or undecided."""
    primary: str
    """Key of the one metric that decides; a column of the ablation."""
    contrasts: tuple[Contrast, ...]
    """What the rule is applied to, at most five."""
    rule: Rule
    """What is claimed of every contrast: lower, higher, same, removed or alone (`lit_lazy.table.question.Rule`)."""
    margin: float
    """The largest difference that counts as none, in the metric's unit."""
    source: str
    """Who asked: a reviewer's question (R1 to R15), or a place in the paper."""
    pilot_seeds: tuple[int, ...] = ()
    """Seeds whose results were seen before; a verdict that uses one is exploratory."""
    removed: float = 0.1
    """Of the rules `removed` and `alone`: what is removed lies below it."""
    kept: float = 0.3
    """Of the rules `removed` and `alone`: what is there lies above it."""

    def __post_init__(self) -> None:
        name = f"question {self.ablation.name!r}"
        check_kinds(name, self)
        require(bool(self.claim.strip()), f"{name}: claim", self.claim, "must be a sentence, which the verdict judges")
        keys = [column.key for column in self.ablation.columns]
        require(self.primary in keys, f"{name}: primary", self.primary, f"must be a column: {', '.join(keys)}")
        for part in ("contrasts", "primary"):
            given = getattr(self.ablation, part)
            require(not given, f"{name}: ablation.{part}", given, "leave it to the question")
        own = [row.name for row in self.ablation.all_rows if row.seeds is not None]
        require(not own, f"{name}: seeds of rows", own, "all rows of a question have the ablation's seeds")
        self.full_ablation  # noqa: B018 (its checks)
        try:
            self.partial_declaration  # noqa: B018 (its checks)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    @property
    def full_ablation(self) -> Ablation:
        """The ablation with the question's contrasts and primary outcome."""
        return replace(self.ablation, contrasts=self.contrasts, primary=(self.primary,))

    def declare(self, base_name: str, base: RunConfig, files: Sequence[Path]) -> Declaration:
        """What is declared on an experiment, and the commit of the first file, the question's.

        files: all that it is declared in. Where one of them is in no commit as it is, no more is the declaration.
        """
        rows = {}
        for row in self.ablation.all_rows:
            config = row.apply_to(base)
            rows[row.name] = [to_minimal_dict(config), hash_user_code(config)]
        declared = self.partial_declaration
        content = json.dumps([declared.to_json(), base_name, rows], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        commits = list(map(find_last_commit, files))
        return replace(declared, digest=digest, commit=commits[0] if all(commits) else "")

    @property
    def partial_declaration(self) -> Declaration:
        """All but the experiment, the rows' settings and the commit."""
        return Declaration(
            claim=self.claim,
            source=self.source,
            primary=self.primary,
            contrasts={contrast.name: dict(contrast.weights) for contrast in self.contrasts},
            rule=self.rule,
            margin=self.margin,
            seeds=self.ablation.seeds,
            removed=self.removed,
            kept=self.kept,
            pilot_seeds=self.pilot_seeds,
        )


def load_ablation_or_question(path: Path) -> tuple[Ablation, Question | None]:
    """The ablation of a file, and the question that it answers where the file exports one.

    A second stage exports a function that makes it. Raises `FirstStageMissing` where it has to wait for the first.
    """
    question = load_attribute(path, "question")
    if question is None:
        return load_ablation(path), None
    if inspect.isfunction(question):
        question = _make_question(path, question)
    if not isinstance(question, Question):
        raise ValueError(f"{path}: its `question` is a {type(question).__name__}; let it be a Question(...)")
    return question.full_ablation, question


def _make_question(path: Path, make: Callable[[], object]) -> object:
    """What a file's function returns. Raises ValueError, in one line that names file and line, where it fails."""
    try:
        return make()
    except FirstStageMissing as error:
        raise FirstStageMissing(f"{path.stem}: {error}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{path}: {locate_error(error, path)}") from error
