"""Names of metrics and rows that MLflow stores: its rule, stated without importing it."""

import posixpath
import re

from lit_lazy.support.errors import short_repr

LONGEST = 250
"""Characters of a metric's name in MLflow, and of a row's name."""
REFUSED = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow does not take in the name of a metric."""


def is_metric_name(name: str) -> bool:
    """Whether MLflow takes a name for a metric: some characters only, and no path that has another form."""
    inside = posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
    return inside and len(name) <= LONGEST and not REFUSED.search(name)


def make_outcome_name(key: str, row: str) -> str:
    """The name in MLflow of a row's mean of a metric. A row's name may have any printable characters, and be long."""
    return REFUSED.sub("_", f"{key}/{row}")[: LONGEST - 10].rstrip("./")


def check_row_name(name: object) -> None:
    """Raise a one-line ValueError if MLflow, a table or a terminal cannot have a row of this name."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST or not name.isprintable() or name.strip() != name:
        raise ValueError(f"row {short_repr(name)} has an empty, long or unprintable name; rename it")
    if posixpath.normpath(f"key/{name}") != f"key/{name}":
        fix = "leave out //, /./, /../ and outer slashes"
        raise ValueError(f"row {name!r}: MLflow would read its name as a path; {fix}")
