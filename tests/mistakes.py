"""A user's mistakes: reported in one line, with status 2, and nothing is created."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lit_lazy.command.main import main

MOST_SECONDS = 15.0
PASSWORD = "geheim"
"""Of the databases that tests name; no message may show it."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    for variable in ("MLFLOW_TRACKING_URI", "LIT_LAZY_STORAGE"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def snapshot_tree(folder: Path) -> dict[Path, tuple[int, int] | None]:
    """Everything below a folder: files with the time of their last change and their size."""
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None for path in folder.rglob("*")
    }


def expect_refusal(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a wrong command prints, which has to end as it should."""
    capsys.readouterr()
    before, started = snapshot_tree(Path.cwd()), time.monotonic()
    try:
        status = main(arguments)
    except SystemExit as stopped:  # argparse ends a process itself
        status = stopped.code
    printed = capsys.readouterr()
    assert time.monotonic() - started < MOST_SECONDS
    assert snapshot_tree(Path.cwd()) == before
    assert status == 2
    assert printed.out == ""
    assert re.fullmatch(r"lit-lazy[^\n]*: [^\n]+\n", printed.err), printed.err
    assert PASSWORD not in printed.err
    assert not re.search(r"Traceback|<class|Parser key|typing\.", printed.err)
    return printed.err
