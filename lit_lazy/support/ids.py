"""Random ids that folders keep."""

import re
import uuid
from pathlib import Path

from lit_lazy.support.disk import write_text
from lit_lazy.support.locks import make_file_lock


def read_id(file: Path) -> str:
    """The random id in a file, which gets one if it has none or a damaged one."""
    with make_file_lock(file.with_name(f"{file.name}.lock")):
        known = file.read_bytes() if file.exists() else b""
        if not re.fullmatch(rb"[0-9a-f]{32}", known):
            write_text(file, uuid.uuid4().hex)
        return file.read_text(encoding="utf-8")
