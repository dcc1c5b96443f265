"""The plan of a grid: what its table needs apart from the results of its cells."""

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from lit_lazy.support.stored_records import make_record, parse_record
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import Column, Contrast, RowInfo

PLAN = "plan.json"
"""File in a grid's folder."""
FORMAT = 5
"""Format of the plan; raised when a field is added, removed or changes its meaning."""


@dataclass(frozen=True)
class Plan:
    """Everything a table needs apart from the results of the cells."""

    ablation: str
    base: str
    baseline: str
    command: str
    """The commands that asked for rows or seeds, or declared something else, in their order."""
    rows: tuple[RowInfo, ...]
    """The rows requested so far; in plans of format 2 also the baseline, without keys."""
    columns: tuple[Column, ...]
    contrasts: tuple[Contrast, ...]
    axes: tuple[str, ...]
    """Names of the params in which the cells differ."""
    definitions: dict[str, str]
    """Hash of what each row of the ablation trains, by name."""
    facts: dict[str, str | int | float]
    """Facts about the data: oracle, baselines, sizes."""
    schema: int
    """`lit_lazy.config.key.SCHEMA` of the cells' keys."""
    declaration: Declaration | None = None
    """The declaration of the question that the ablation answers, if any."""
    primary: tuple[str, ...] = ()
    """As in `Ablation`."""
    files: dict[str, str] = field(default_factory=dict)
    """Hashes of the user's files that are in no commit, by name."""
    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    """Keys of the cells requested so far, by row and seed; none in plans of format 2."""
    axis_values: dict[str, dict[str, str]] = field(default_factory=dict)
    """Values of the axes, by row; none in plans of format 2."""
    config: dict[str, Any] = field(default_factory=dict)
    """The config of the experiment; none in plans of format 2."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Rows of cells from before a change, and the rows that trained anew after it; none in plans before format 4."""
    format: int = FORMAT

    def to_json(self) -> str:
        declared = None if self.declaration is None else self.declaration.to_json()
        return json.dumps(asdict(self) | {"declaration": declared}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Parse a plan.

        Raises a one-line ValueError if the text is none, NewerFormatError if a newer version wrote it.
        """
        return parse_record(text, PLAN, "plan", FORMAT, partial(make_record, cls))

    def get_keys(self, row: RowInfo) -> dict[str, str]:
        """The keys of a row's cells by seed."""
        return self.keys.get(row.variant, {})
