"""Provenance, format and files of benchmark results."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lit_lazy.support.disk import check_writable_folder, write_text
from lit_lazy.support.provenance import collect_environment
from lit_lazy.support.secrets import format_command_line


def collect_provenance(out: Path | None) -> dict[str, Any]:
    """Command, date and machine. Raises ValueError if `out` is not writable."""
    if out is not None:
        check_writable_folder("--out", out.parent)
        for file in (out, out.with_suffix(".md")):
            if file.exists() and not (file.is_file() and os.access(file, os.W_OK)):
                raise ValueError(f"--out {str(out)!r}: {file.name} exists and is not writable; name another file")
    return {
        "command": format_command_line("python3 -m timings"),
        "date": datetime.now(UTC).date().isoformat(),
        "environment": collect_environment() | {"cpu": _cpu_name()},
    }


def format_provenance(result: Mapping[str, Any]) -> str:
    """Provenance, the last line of a table."""
    made = result["environment"]
    return (
        f"`{result['command']}`, {result['date']}, commit {made['git_sha']}, torch {made['torch']}, Python "
        f"{made['python']}, {made['machine']}, {made['cpu']}."
    )


def format_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def format_spread(spread: Mapping[str, float], factor: float = 1, digits: int = 2) -> str:
    """`median [lower, upper]` of `Quartiles` as a dict."""
    median, lower, upper = (f"{factor * spread[name]:.{digits}f}" for name in ("median", "lower", "upper"))
    return f"{median} [{lower}, {upper}]"


def format_mebibytes(size: int | None) -> str:
    return "not measured" if size is None else f"{size / 2**20:.0f}"


def publish(result: dict[str, Any], table: str, out: Path | None, console: Callable[[str], None]) -> None:
    """Print the table with `console`; `save` both if `out` is given."""
    console(table)
    if out is not None:
        save(result, table, out)


def save(result: dict[str, Any], table: str, out: Path) -> None:
    """Write the result to `out` (.json) and the table to the same name with .md, each completely or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps(result, indent=1) + "\n")
    write_text(out.with_suffix(".md"), table)


def _cpu_name() -> str:
    """Processor name, if the system reports one, and the vector instructions that torch uses."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return ", ".join([*names[:1], torch.backends.cpu.get_cpu_capability()])
