"""Searches over a box of continuous axes, checked before anything is created."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict, replace_at, shorten_paths, to_dict
from lit_lazy.config.user_classes import hash_user_code
from lit_lazy.data.source_interface import load_data
from lit_lazy.grid.ablation import MOST_CELLS, NOT_AXES, Cell, Row, check_name, prepare_rows
from lit_lazy.support.checked_fields import Bounds, PositiveInt, Share, check_fields, require
from lit_lazy.support.error_messages import naming, short_repr
from lit_lazy.support.stored_records import make_record, parse_record

DEFINITION, FORMAT = "search.json", 1
"""File of a search's definition in its folder, and its format; raised when a field changes its meaning."""
MOST_SEED = 2**31 - 1
"""Upper bound on the sampler's seed, which seeds numpy's generators together with the number of points drawn."""
MOST_AXES = 10
"""Upper bound, because every corner of the box is checked before anything is created."""
Objective = Literal["loss/val", "loss/excess"]
MONITORED: dict[Objective, str] = {"loss/val": "val/loss", "loss/excess": "val/excess"}
"""Lightning's metric of each objective at a validation."""


@dataclass(frozen=True)
class Real:
    """An axis from `low` to `high`, uniform or log-uniform."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        ends = f"Real({short_repr(self.low)}, {short_repr(self.high)})"
        check_fields(f"{ends}: ", self)
        require(self.low < self.high, f"{ends}: low", self.low, f"must be below high={self.high}")
        require(self.low > 0 or not self.log, f"{ends}: low", self.low, "with log=True it must be above 0")

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}{', log' if self.log else ''}"


@dataclass(frozen=True)
class Search:
    """A search for the point with the lowest loss by Optuna's TPE, with one training per point."""

    name: str
    axes: Mapping[str, Real]
    """Axis by dotted path of a real-valued field of the `RunConfig`."""
    base: str
    """The default experiment."""
    objective: Objective = "loss/val"
    """The final loss to minimise; `loss/excess` requires data with a known optimum."""
    trials: Annotated[int, Bounds(ge=1, le=MOST_CELLS)] = 30
    """Number of points to finish, including pruned ones."""
    startup: PositiveInt = 10
    """Number of initial random points; no point is pruned before this many are complete."""
    prune_from: Share = 1 / 3
    """Fraction of the steps before which no point is pruned; 1 disables pruning."""
    seed: Annotated[int, Bounds(ge=0, le=MOST_SEED)] = 0
    """Seed of the sampler; the trainings use the experiment's seed."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the experiment in all points."""

    def __post_init__(self) -> None:
        check_name("search", self.name)
        where = f"search {self.name!r}"
        check_fields(f"{where}: ", self)
        require(0 < len(self.axes) <= MOST_AXES, f"{where}: axes", list(self.axes), f"must be 1 to {MOST_AXES}")


@dataclass(frozen=True)
class Definition:
    """Everything that determines the points of a search; stored in the search's folder."""

    base: dict[str, Any]
    """Canonical config of the experiment, changed and overridden."""
    data: str
    """Fingerprint of the data."""
    axes: dict[str, Real]
    objective: Objective
    startup: int
    prune_from: float
    seed: int
    code: list[str] = field(default_factory=list)
    """Hashes of the user's code that it depends on; none in definitions of the first version."""

    @property
    def min_steps(self) -> int:
        """First step at which a point may be pruned."""
        return math.ceil(self.prune_from * self.steps)

    @property
    def steps(self) -> int:
        """Steps of a training."""
        return self.base["train"]["steps"]

    @property
    def names(self) -> dict[str, str]:
        """Shortest unambiguous name of each axis by path."""
        return shorten_paths(self.axes, NOT_AXES)

    def make_cell(self, number: int, point: Mapping[str, float]) -> Cell:
        """The cell of a point; `number` is its index in the search."""
        config = replace_at(from_dict(RunConfig, self.base), point)
        return Cell(
            key=cell_key(config, self.data),
            variant=point_name(number),
            source="ours",
            seed=config.seed,
            config=to_dict(config),
            axes={self.names[path]: repr(value) for path, value in point.items()},
        )

    def make_placeholder(self, number: int) -> Cell:
        """The cell of a point that is not drawn yet."""
        return Cell(point_name(number), point_name(number), "ours", self.base["seed"], {}, {})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Definition":
        """Parse a definition. Raises a one-line ValueError if the text is not valid."""
        return parse_record(text, DEFINITION, "definition of a search", FORMAT, partial(make_record, cls))

    def find_differences(self, other: "Definition") -> list[str]:
        """Names of the parts in which two searches differ."""
        return [name for name, value in asdict(self).items() if value != asdict(other)[name]]


def point_name(number: int) -> str:
    """The name of a point in messages, in MLflow and in the table."""
    return f"point {number}"


def define(search: Search, base: RunConfig, overridden: Sequence[str] = ()) -> Definition:
    """A search on an experiment that already includes the search's common changes and the user's overrides.

    overridden: dotted paths that the user set. Raises a one-line ValueError for an axis that the experiment lacks or
    that changes its data, for an axis limit that it rejects, and for an override of an axis.
    """
    if both := sorted(search.axes.keys() & {*overridden}):
        raise ValueError(f"--{both[0]}: is an axis of search {search.name!r}; leave the override out")
    ends = itertools.product(*((float(axis.low), float(axis.high)) for axis in search.axes.values()))
    points = [dict(zip(search.axes, point, strict=True)) for point in ends]
    corners = [(Row(f"corner {number}", point), (base.seed,)) for number, point in enumerate(points)]
    with naming(f"search {search.name!r}"):
        prepared, source = prepare_rows(corners, base), load_data(base.data)
        same = {row.fingerprint for row in prepared} == {source.fingerprint}
        require(same, "axes", list(search.axes), "change the data, on which all points are to be compared")
        known = search.objective != "loss/excess" or "oracle_nll" in source.validation.positions
        fix = f"the data {source.name!r} has no known optimum; take loss/val"
        require(known, "objective", search.objective, fix)
    return Definition(
        base=to_dict(base),
        data=source.fingerprint,
        code=hash_user_code(base),
        axes=dict(search.axes),
        objective=search.objective,
        startup=search.startup,
        prune_from=search.prune_from,
        seed=search.seed,
    )
