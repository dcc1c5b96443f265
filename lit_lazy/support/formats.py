"""Format numbers of the files that the project writes: an older file is read, a newer one is left as it is."""

from collections.abc import Mapping
from typing import Any

from lit_lazy.support.errors import UnfinishedError


class NewerFormatError(UnfinishedError):
    """A file was written by a newer version. Nothing is wrong with it, so it is no ValueError."""


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
