"""Reads a table.json, which holds the values of every seed, and computes the rest of the table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_lazy.support.checks import fits, require
from lit_lazy.support.errors import describe_exception
from lit_lazy.support.stored_records import make_record, parse_record
from lit_lazy.table.build import add_statistics
from lit_lazy.table.records import FORMAT, Column, Contrast, Table, TableRow
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
        return parse_record(text, named, "table.json", FORMAT, _make_table)
    except ValueError as error:
        raise ValueError(f"{named}: is {error}") from None


def _make_table(data: Mapping[str, Any]) -> Table:
    columns = tuple(make_record(Column, column) for column in data["columns"])
    rows = tuple(make_record(TableRow, row, metrics={}) for row in data["rows"])
    variants = [row.variant for row in rows]
    twice = sorted({variant for variant in variants if variants.count(variant) > 1})
    require(not twice, "rows", twice, "there twice")
    table = make_record(
        Table,
        data,
        rows=rows,
        columns=columns,
        summaries={},
        contrasts=(),
        primary=None,
        verdict=None,
    )
    known: dict[str, dict[str, dict[str, float]]] = {}
    for row in data["rows"]:
        # Format 1 has a metric's values by seed among its statistics.
        values = known[row["variant"]] = {key: part.get("values", part) for key, part in row["metrics"].items()}
        for part in values.values():
            require(fits(part, dict[str, float]), "values", part, "must be finite numbers by seed")
    contrasts = [Contrast(contrast["name"], contrast["weights"]) for contrast in data["contrasts"]]
    primary = [data["primary"]] if data["primary"] else []
    return add_verdict(add_statistics(table, known, contrasts, primary), table.declaration)
