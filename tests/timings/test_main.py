"""`python3 -m timings` refuses bad options and unwritable files in one line, before anything is measured."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_lazy.command.main import main
from lit_lazy.support.named_files import PROJECT
from timings import cells, diagnostics, looks, significance, step
from timings.__main__ import make_parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--out", "folder.json"], "folder.json exists and is not writable; name another file"),
        (["step", "--out", "/proc/x.json"], "--out '/proc': nothing can be written there"),
        (["step", "--out", "steps.txt"], "must end in .json"),
        (["grid", "--out", "loop/x.json"], "Too many levels of symbolic links; name another"),
        (["grid", "--cells", "many"], "--cells"),
        (["diagnostics", "--length", "8"], "unknown argument '--length'"),
    ],
)
def test_bad_input_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("folder.json").mkdir()
    try:
        status = main(words, make_parser)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "format_page"),
    [
        ("bench-cells", cells.format_table),
        ("bench-diagnostics", diagnostics.format_table),
        ("bench-step", step.format_table),
        ("default-test", significance.format_markdown),
        ("looks", looks.format_markdown),
    ],
)
def test_a_committed_page_is_made_of_the_file_beside_it(name: str, format_page: Callable[[dict], str]) -> None:
    file = PROJECT / "docs" / "results" / f"{name}.json"
    assert file.with_suffix(".md").read_text() == format_page(json.loads(file.read_text()))
