"""Reads a table.json."""

from pathlib import Path

from lit_lazy.support.errors import describe_exception
from lit_lazy.support.formats import parse_json
from lit_lazy.table.records import Table
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
    """The table of a table.json's text. Raises a one-line ValueError that starts with `named` if the text is none."""
    try:
        table = Table.from_json(parse_json(text))
        return add_verdict(table, table.declaration)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{named}: is no table.json ({describe_exception(error)})") from None
