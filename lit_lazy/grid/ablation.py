"""Ablations: rows and their expansion into cells, checked before anything is created."""

import inspect
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from lit_lazy.config.key import cell_key, training_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import flatten, from_dict, replace_at, shorten_paths, to_dict
from lit_lazy.config.user_files import COMMANDS, load_attribute, locate_errors
from lit_lazy.data.source_interface import load_data
from lit_lazy.support.checked_fields import Bounds, NonNegativeInt, check_fields, require
from lit_lazy.support.console import track_progress
from lit_lazy.support.error_messages import describe_exception, did_you_mean, naming, short_repr
from lit_lazy.support.names_to_paths import LONGEST_NAME, get_name
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.designs import interactions, main_effects
from lit_lazy.table.records import Column, Contrast, check_row_name
from lit_lazy.training.check_before_run import load_outline, prepare
from lit_lazy.training.ineffective_settings import check_init_from

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
DIGITS, ROUNDING_ULPS = 12, 4
"""Significant digits of a number in a name, and the distance of a number that is a rounding error of it."""
Seeds = Annotated[tuple[NonNegativeInt, ...], Bounds(min_length=1)]
MOST_CELLS = 100_000
"""Upper bound for a grid, whose cells are all held in memory."""
NOT_AXES = (
    *(part.name for part in fields(RunConfig)),
    *("variant", "source", "status", "key", "folder", "checkpoint", "git_sha"),
)
"""Names that a cell's record and its run in MLflow have beside those of its axes."""


def check_name(what: str, name: object) -> None:
    """Raise a one-line ValueError if a folder cannot have this name."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"{what} {short_repr(name)}: is used as a folder name; use letters, digits, _, - and ., the first a "
            f"letter or a digit, at most {LONGEST_NAME}"
        )


def check_cell_count(field: str, count: int) -> None:
    """Raise a one-line ValueError if a grid or a search has too many cells."""
    require(count <= MOST_CELLS, field, count, f"must be at most {MOST_CELLS}; divide it into several")


def require_distinct(field: str, values: Iterable[object]) -> None:
    """Raise a one-line ValueError if a value occurs twice."""
    twice = [value for value, n in Counter(values).items() if n > 1]
    require(not twice, field, twice, "must each occur once")


def require_known(field: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise a one-line ValueError if a name is not a known one."""
    for name in names:
        if name not in known:
            raise ValueError(f"{field} {name!r}: is unknown{did_you_mean(name, known)}; known are {', '.join(known)}")


@dataclass(frozen=True)
class Row:
    """A named variant of the base experiment."""

    name: str
    changes: Mapping[str, Any]
    """New values by dotted path into the `RunConfig`; a function is called with the base experiment."""
    source: str = "ours"
    """Origin: paper (via review), authors' code, or ours."""
    seeds: Seeds | None = None
    """None for the ablation's seeds."""
    note: str = ""

    def __post_init__(self) -> None:
        here = f"row {short_repr(self.name)}"
        check_fields(f"{here}: ", self)
        check_row_name(self.name)
        require("," not in self.name, "row", self.name, "has a comma, which separates the names of rows; rename it")
        require_distinct(f"{here}: seeds", self.seeds or ())

    def apply_to(self, base: RunConfig) -> RunConfig:
        """The base experiment with the row's changes."""
        return replace_at(base, {path: _resolve_value(path, value, base) for path, value in self.changes.items()})


def _is_function(value: Any) -> bool:
    """Whether a change is computed from the base: a part may have `__call__` too."""
    return callable(value) and not is_dataclass(value)


def _resolve_value(path: str, value: Any, base: RunConfig) -> Any:
    """The value of a change, after calling a function. Raises a one-line ValueError if the value is unusable."""
    if isinstance(value, type):
        raise ValueError(f"{path}: is the class {value.__name__}; make one of it, {value.__name__}(...)")
    try:
        return value(base) if _is_function(value) else value
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: its function failed: {describe_exception(error)}") from error


@dataclass(frozen=True)
class Ablation:
    """A grid of trainings and its table: named rows or the product of axes, each with every seed."""

    name: str
    baseline: str = ""
    """The row with which all others are compared; the first by default."""
    seeds: Seeds = (0, 1, 2)
    columns: Annotated[tuple[Column, ...], Bounds(min_length=1)] = COLUMNS
    rows: tuple[Row, ...] = ()
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values by dotted path; each point of the product is a row, such as `tau_init=1.0 bias=Alibi`."""
    exclude: Callable[[Mapping[str, Any]], bool] = lambda point: False  # noqa: ARG005
    """Whether to omit a point of the product, given as values by dotted path."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the experiment in all rows."""
    contrasts: tuple[Contrast, ...] = ()
    """By default, of several axes: their main effects and two-way interactions."""
    base: str = "backcopy"
    """The default experiment."""
    primary: tuple[str, ...] = ()
    """Keys of the primary outcome; the first that the data source measures counts. Other columns are exploratory."""

    def __post_init__(self) -> None:
        check_name("ablation", self.name)
        here = f"ablation {self.name!r}"
        check_fields(f"{here}: ", self)
        with naming(here):
            self._check()

    def _check(self) -> None:
        """Check what the annotations cannot say, and choose the baseline."""
        if bool(self.rows) == bool(self.axes):
            raise ValueError("give either rows or axes")
        check_cell_count("points of its axes", math.prod(map(len, self.axes.values())))
        names, keys = dict.fromkeys(row.name for row in self.all_rows), [column.key for column in self.columns]
        if not names:
            raise ValueError("its axes have no point; give each axis a value, and exclude fewer points")
        if not self.baseline:
            object.__setattr__(self, "baseline", self.all_rows[0].name)
        require_distinct("rows", [row.name for row in self.all_rows])
        require_distinct("columns", keys)
        require_distinct("contrasts", [contrast.name for contrast in self.contrasts])
        require_distinct("seeds", self.seeds)
        require_known("baseline", [self.baseline], names)
        require_known("primary", self.primary, keys)
        for contrast in self.contrasts:
            require_known(f"contrast {contrast.name!r}: row", contrast.weights, names)
        for what, changes in [("common", self.common), *((f"row {row.name!r}", row.changes) for row in self.all_rows)]:
            if "seed" in changes:
                raise ValueError(f"{what} changes seed; give seeds=({changes['seed']},) instead")
        replaced = [[path for path, value in row.changes.items() if not _is_function(value)] for row in self.all_rows]
        for path in self.common:
            if all(any(f"{path}.".startswith(f"{given}.") for given in paths) for paths in replaced):
                raise ValueError(f"common[{path!r}] is replaced in every row; leave it out of common")

    @cached_property
    def all_rows(self) -> tuple[Row, ...]:
        """The named rows, or the product of axes as rows."""
        return self.rows or tuple(row for row, _ in self._points)

    @cached_property
    def all_contrasts(self) -> tuple[Contrast, ...]:
        """Those given, or those of the axes."""
        if self.contrasts or len(self.axes) < 2:
            return self.contrasts
        design = {row.name: levels for row, levels in self._points}
        return main_effects(design) + interactions(design)

    @cached_property
    def _points(self) -> list[tuple[Row, dict[str, str]]]:
        """The product of axes without excluded points as rows, and their values as text by short name."""
        names, found = shorten_paths(self.axes, NOT_AXES).values(), []
        products = itertools.product(*self.axes.values()), itertools.product(*map(_describe_values, self.axes.values()))
        for point, texts in zip(*products, strict=True):
            values, levels = dict(zip(self.axes, point, strict=True)), dict(zip(names, texts, strict=True))
            if not self.exclude(values):
                found.append((Row(" ".join(f"{axis}={level}" for axis, level in levels.items()), values), levels))
        return found


def _describe_values(values: Sequence[Any]) -> list[str]:
    """Each value as text: a part by its class, and by its settings where the axis has two of the class.

    Numbers without their rounding error, unless two values would then have one text.
    """
    classes = Counter(type(value) for value in values)

    def describe_all(describe: Callable[[Any], str]) -> list[str]:
        return [describe_part(value, describe) if is_dataclass(value) else describe(value) for value in values]

    def describe_part(part: Any, describe: Callable[[Any], str]) -> str:
        """`Elastic`, or with its settings `Elastic(tau_init=0.5 renormalise=True)`: those that are not the default."""
        set_here = [(f.name, getattr(part, f.name)) for f in fields(part) if getattr(part, f.name) != f.default]
        settings = " ".join(f"{name}={describe(value)}".replace(",", "") for name, value in set_here)
        name = type(part).__name__
        return f"{name}({settings})" if classes[type(part)] > 1 and settings else name

    short, exact = describe_all(describe_value), describe_all(str)
    counts = Counter(short)
    return [text if counts[text] == 1 else whole for text, whole in zip(short, exact, strict=True)]


def describe_value(value: Any) -> str:
    """A value as text, a float without its rounding error: 0.0003 for 3 * 0.0001, which is 0.00030000000000000003."""
    if not isinstance(value, float):
        return value.__name__ if inspect.isfunction(value) else str(value)  # without its place in memory
    short = float(f"{value:.{DIGITS}g}")
    return str(short if abs(short - value) <= ROUNDING_ULPS * math.ulp(value) else value)


@dataclass(frozen=True)
class Cell:
    """One training of a grid: a row with a seed."""

    key: str
    variant: str
    source: str
    seed: int
    config: dict[str, Any]
    """Canonical form of the RunConfig."""
    axes: dict[str, str]
    """Values of the fields that vary within the ablation, by short name."""

    @property
    def training_key(self) -> str:
        """The key of its training, whatever is measured on its model."""
        config = from_dict(RunConfig, self.config)
        return training_key(config, load_data(config.data).fingerprint)


def group_keys(cells: Iterable[Cell]) -> dict[str, dict[str, str]]:
    """The keys of cells by row and seed."""
    keys: dict[str, dict[str, str]] = {}
    for cell in cells:
        keys.setdefault(cell.variant, {})[str(cell.seed)] = cell.key
    return keys


class FirstStageMissing(ValueError):
    """The rates that a second stage takes from its first stage are not known yet."""


def load_defined(path: Path, name: str, kind: type[T]) -> T:
    """The ablation, question or search that a file defines as `name`; of a second stage, what its function returns.

    Raises `FirstStageMissing` if the first stage has no results yet, a one-line ValueError if the file defines none.
    """
    found = load_attribute(path, name)
    if found is None:
        commands = [how for other, how in {**COMMANDS, "config": "train"}.items() if load_attribute(path, other)]
        runs = f"`lit-lazy {commands[0]} {get_name('ablations', path)}` runs what it defines" if commands else ""
        raise ValueError(f"{path}: defines no `{name}`; {runs or f'give it one, {kind.__name__}(...)'}")
    if inspect.isfunction(found):
        found = _make_second_stage(path, found)
    if not isinstance(found, kind):
        raise ValueError(f"{path}: its `{name}` is a {type(found).__name__}; make it {kind.__name__}(...)")
    return found


def _make_second_stage(path: Path, make: Callable[[], object]) -> object:
    with locate_errors(path):
        try:
            return make()
        except FirstStageMissing as error:
            missing = FirstStageMissing(f"{path.stem}: {error}")
    raise missing


def select_rows(ablation: Ablation, rows: Sequence[str], seeds: Sequence[int]) -> list[tuple[Row, tuple[int, ...]]]:
    """Rows and their seeds; non-empty `rows` and `seeds` restrict them."""
    require_known("--rows", rows, {row.name: row for row in ablation.all_rows})
    kept = [row for row in ablation.all_rows if not rows or row.name in rows]
    return [(row, tuple(seeds) or row.seeds or ablation.seeds) for row in kept]


def apply_rows(
    chosen: Sequence[tuple[Row, tuple[int, ...]]], base: RunConfig, overridden: Sequence[str] = ()
) -> dict[str, RunConfig]:
    """The config of each chosen row on a base experiment, by row name.

    overridden: dotted paths that the user set on the base; a row must not set the same path, which would discard the
    override. Raises a one-line ValueError that names the row, also if two rows are the same training.
    """
    for row, _ in chosen:
        for path in row.changes:
            clash = [o for o in overridden if f"{o}.".startswith(f"{path}.") or f"{path}.".startswith(f"{o}.")]
            if clash:
                raise ValueError(f"--{clash[0]}: row {row.name!r} sets {path} itself; leave one of the two out")
    if "seed" in overridden:
        raise ValueError("--seed: an ablation's seeds are given by --seeds")
    check_cell_count("cells of the grid", sum(len(seeds) for _, seeds in chosen))
    configs: dict[str, RunConfig] = {}
    first: dict[tuple[str, int], str] = {}
    for row, seeds in track_progress(chosen, "reading rows"):
        with naming(f"row {row.name!r}"):
            configs[row.name] = config = row.apply_to(base)
        settings = cell_key(config, fingerprint="")  # equal settings have equal data
        for seed in seeds:
            twin = first.setdefault((settings, seed), row.name)
            if twin != row.name:
                raise ValueError(
                    f"rows {twin!r} and {row.name!r} are the same training (seed {seed}); leave one out, "
                    "for example by --rows"
                )
    return configs


class PreparedRow(NamedTuple):
    """A row with its seeds, and its training, checked on its data, which have this fingerprint."""

    row: Row
    seeds: tuple[int, ...]
    config: RunConfig
    fingerprint: str

    def make_key(self, seed: int) -> str:
        """The key of its cell with a seed."""
        return cell_key(replace(self.config, seed=seed), self.fingerprint)


def prepare_rows(
    chosen: Sequence[tuple[Row, tuple[int, ...]]], base: RunConfig, overridden: Sequence[str] = ()
) -> list[PreparedRow]:
    """`apply_rows`, and each row validated on its data."""
    configs, prepared = apply_rows(chosen, base, overridden), []
    for row, seeds in track_progress(chosen, "checking rows"):
        config = configs[row.name]
        with naming(f"row {row.name!r}"):
            source = prepare(config)
            check_init_from(config, source.outline)
        prepared.append(PreparedRow(row, seeds, config, source.fingerprint))
    return prepared


def expand(prepared: Sequence[PreparedRow]) -> list[Cell]:
    """The cells of prepared rows."""
    settings = {row.name: to_dict(config) for row, _, config, _ in prepared}
    axes = _find_axes(settings)
    return [
        Cell(
            key=one.make_key(seed),
            variant=one.row.name,
            source=one.row.source,
            seed=seed,
            config=settings[one.row.name] | {"seed": seed},
            axes=axes[one.row.name],
        )
        for one in track_progress(prepared, "making cells")
        for seed in one.seeds
    ]


def hash_row_definitions(ablation: Ablation, base: RunConfig, prepared: Sequence[PreparedRow]) -> dict[str, str]:
    """A hash of each row's training by row name; omits rows that do not fit the base.

    prepared: rows on this base that need not be prepared again.
    """
    known, found = {one.row.name: one for one in prepared}, {}
    for row in track_progress(ablation.all_rows, "comparing rows"):
        with suppress(ValueError):
            if (ready := known.get(row.name)) is None:
                config = row.apply_to(base)
                ready = PreparedRow(row, (), config, prepare(config).fingerprint)
            found[row.name] = ready.make_key(seed=0)
    return found


def has_built_data(ablation: Ablation, base: RunConfig) -> bool:
    """Whether the data of all rows that fit the base can be loaded without being built first: text is tokenised."""
    for row in ablation.all_rows:
        with suppress(ValueError):
            if load_outline(row.apply_to(base).data).sequences is None:
                return False
    return True


def _find_axes(settings: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """For each row's settings, the flattened fields that vary between rows, by shortest unambiguous name."""
    flat = {row: flatten(config) for row, config in settings.items()}
    values: dict[str, dict[str, Any]] = {path: {} for config in flat.values() for path in config}
    for config, path in itertools.product(flat.values(), values):
        values[path].setdefault(str(config.get(path)), config.get(path))
    names = shorten_paths((path for path, found in values.items() if len(found) > 1), NOT_AXES)
    shown = {path: dict(zip(values[path], _describe_values([*values[path].values()]), strict=True)) for path in names}
    return {
        row: {name: shown[path][str(config[path])] for path, name in names.items() if path in config}
        for row, config in flat.items()
    }
