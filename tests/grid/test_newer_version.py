"""Files of a newer version in a runs folder: refused in one line and left as they are, not taken for damaged."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_earlier_version import COMMAND, FINISHED, ID, INTERRUPTED, unpack

from lit_lazy.command.main import main

NEWER = {"format": 99, "a_field_of_tomorrow": 1}


def renew_result(runs: Path) -> Path:
    """Give the unfinished cell a result of a newer version."""
    cells = runs / ID / "cells"
    path = cells / INTERRUPTED / "result.json"
    path.write_text(json.dumps(json.loads((cells / FINISHED / "result.json").read_text()) | NEWER))
    return path


def renew_checkpoint(runs: Path) -> Path:
    path = runs / ID / "cells" / INTERRUPTED / "checkpoints" / "last.ckpt"
    torch.save(torch.load(path, weights_only=True) | NEWER, path)
    return path


def renew_plan(runs: Path) -> Path:
    (path,) = runs.glob("mlartifacts/**/plan.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | NEWER))
    return path


@pytest.mark.parametrize("renew", [renew_result, renew_plan, pytest.param(renew_checkpoint, marks=pytest.mark.long)])
def test_a_newer_file_is_refused_and_kept(
    renew: Callable[[Path], Path], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack(runs)
    path = renew(runs)
    kept = path.read_bytes()
    assert main([*COMMAND, "--runs", str(runs)]) == 1
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "was written by a newer version of lit-lazy (format 99, this version reads up to" in printed
    assert "Traceback" not in printed
    assert path.read_bytes() == kept
    assert not list(runs.rglob("*.damaged"))


def test_a_newer_packed_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = tmp_path / "cells.jsonl.xz"
    newer.write_bytes(lzma.compress(b'{"format": "lit-lazy cells 3", "cells": {}, "grid": "g"}\n'))
    assert main(["ablate", "run", *COMMAND[2:], "--runs", str(tmp_path / "runs"), "--results", str(newer)]) == 1
    assert "--results" in (said := capsys.readouterr().err)
    assert "was written by a newer version of lit-lazy (format 3" in said
    assert not (tmp_path / "runs").exists()
