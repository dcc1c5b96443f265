"""Reads a table.json, which holds the values of every seed, and computes the rest of the table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_lazy.support.checks import check_kinds, fits, require
from lit_lazy.support.errors import describe_exception
from lit_lazy.support.formats import parse_json, require_known_format
from lit_lazy.table.build import add_statistics
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import FORMAT, Column, Contrast, Table, TableRow, Yardstick
from lit_lazy.table.verdicts import add_verdict

TABLE = "table.json"


def read_table(path: Path) -> Table:
    """The table of a table.json. Raises a one-line ValueError that names the path if it cannot be read."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(path)!r}: is no table.json ({describe_exception(error)})") from None
    return parse_table(text, repr(str(path)))


def parse_table(text: str | bytes, named: str) -> Table:
    """The table of a table.json's text. Raises a one-line ValueError that starts with `named` if the text is none.

    Raises NewerFormatError if a newer version wrote it.
    """
    try:
        data = parse_json(text)
        if isinstance(data, Mapping):
            require_known_format(named, data, FORMAT)
        return _make_table(data)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{named}: is no table.json ({describe_exception(error)})") from None


def _make_table(data: Mapping[str, Any]) -> Table:
    columns = tuple(map(Column.from_json, data["columns"]))
    rows = tuple(_make(TableRow, row, git_shas=tuple(row["git_shas"]), metrics={}) for row in data["rows"])
    variants = [row.variant for row in rows]
    twice = sorted({variant for variant in variants if variants.count(variant) > 1})
    require(not twice, "rows", twice, "there twice")
    table = _make(
        Table,
        data,
        rows=rows,
        columns=columns,
        summaries={},
        contrasts=(),
        warnings=tuple(data["warnings"]),
        notes=tuple(data["notes"]),
        primary=None,
        declaration=Declaration.from_json(data["declaration"]) if data.get("declaration") else None,
        verdict=None,
        yardstick=_make(Yardstick, data["yardstick"]) if data.get("yardstick") else None,
    )
    known = {row["variant"]: {key: _pick_values(part) for key, part in row["metrics"].items()} for row in data["rows"]}
    values = {
        column.key: {
            row.variant: {
                seed: known[row.variant].get(column.key, {}).get(str(seed)) for seed in row.cells.get("complete", [])
            }
            for row in rows
        }
        for column in columns
    }
    contrasts = [Contrast(contrast["name"], contrast["weights"]) for contrast in data["contrasts"]]
    primary = [data["primary"]] if data["primary"] else []
    return add_verdict(add_statistics(table, values, contrasts, primary), table.declaration)


def _pick_values(metric: Mapping[str, Any]) -> Mapping[str, float]:
    """A metric's values by seed; format 1 has them among its statistics."""
    values: Mapping[str, float] = metric.get("values", metric)
    require(fits(values, dict[str, float]), "values", values, "must be finite numbers by seed")
    return values


def _make(kind: type, values: Mapping[str, Any], **changes: Any) -> Any:
    """A dataclass from those of the values that are its fields. Raises ValueError for a value of another type."""
    known = {name: values[name] for name in kind.__dataclass_fields__ if name in values}
    made = kind(**known | changes)
    check_kinds(kind.__name__, made)
    return made
