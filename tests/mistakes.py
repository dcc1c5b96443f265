"""Checks for user errors: one line, status 2, nothing created."""

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lit_lazy.command.main import main

MOST_SECONDS = 15.0
PASSWORD = "geheim"
"""Password of the databases in tests; no message may contain it."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("MLFLOW_TRACKING_URI", "LIT_LAZY_STORAGE"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def snapshot_tree(folder: Path) -> dict[Path, tuple[int, int] | None]:
    """Everything below a folder, files with modification time and size."""
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None for path in folder.rglob("*")
    }


def expect_refusal(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Check that a wrong command is rejected properly, and return its message."""
    capsys.readouterr()
    before, started = snapshot_tree(Path.cwd()), time.monotonic()
    try:
        status = main(arguments)
    except SystemExit as stopped:  # argparse exits by itself
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


def iter_commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The words and the parser of each command below a parser."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if words and (not below or not below[0].required):
        yield words, parser
    for name, command in [pair for action in below for pair in action.choices.items()]:
        yield from iter_commands(command, (*words, name))
