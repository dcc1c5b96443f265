"""Format numbers of the files that the project writes: an older file is read, a newer one is left as it is."""

import json
from collections.abc import Mapping
from typing import Any

from lit_lazy.support.errors import UnfinishedError


class NewerFormatError(UnfinishedError):
    """A file was written by a newer version. Nothing is wrong with it, so it is no ValueError."""


def parse_json(text: str | bytes) -> Any:
    """The content of a file of JSON. Raises ValueError for what JSON or UTF-8 cannot hold, and for very deep nesting.

    Python's own parser takes NaN, Infinity and half a surrogate pair, which fail where they are printed or stored.
    """

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    try:
        content = json.loads(text, parse_constant=refuse)
        json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("is nested too deep") from None
    return content


def require_known_format(file: str, content: Mapping[str, Any], newest: int) -> None:
    """Raises NewerFormatError if a file's content has a `format` above the newest that this version reads.

    Files without one were written before formats were numbered; they have format 1.
    """
    found = content.get("format", 1)
    if isinstance(found, int) and found > newest:
        raise NewerFormatError(
            f"{file}: was written by a newer version of lit-lazy (format {found}, this version reads up to {newest}); "
            "update lit-lazy; the file is left as it is"
        )
