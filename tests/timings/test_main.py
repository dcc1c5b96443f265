"""`python3 -m timings` and its functions refuse bad options and unwritable files before anything is measured."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_lazy.command.main import main
from lit_lazy.support.named_files import PROJECT
from timings import cells, diagnostics, gpu_step, looks, significance, step
from timings.__main__ import make_parser
from timings.cells import QUICK, bench_cells
from timings.diagnostics import bench_diagnostics
from timings.step import bench_step

HISTORY = not subprocess.run(["git", "cat-file", "-e", cells.AGAINST], cwd=cells.ROOT, capture_output=True).returncode
needs_history = pytest.mark.skipif(not HISTORY, reason="the other commit is not in this clone")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--out", "folder.json"], "folder.json exists and is not writable; name another file"),
        (["step", "--out", "/proc/x.json"], "--out '/proc': nothing can be written there"),
        (["step", "--out", "steps.txt"], "must end in .json"),
        (["grid", "--out", "loop/x.json"], "Too many levels of symbolic links; name another"),
        (["grid", "--cells", "many"], "--cells"),
        (["diagnostics", "--length", "8"], "unknown argument '--length'"),
        (["gpu_step", "--out", "file/x"], "file/x"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("folder.json").mkdir()
    Path("file").touch()
    try:
        status = gpu_step.main(words[1:]) if words[0] == "gpu_step" else main(words, make_parser)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("measure", "arguments", "message"),
    [
        (bench_step, {"lengths": (100,)}, "lengths has 100"),
        (bench_step, {"lengths": (1,)}, "lengths has 1"),
        (bench_step, {"lengths": (8192,), "tokens": 8192}, "lengths has 8192"),
        (bench_step, {"rounds": 1}, "rounds is 1"),
        (bench_diagnostics, {"rounds": 1}, "rounds is 1"),
        (bench_diagnostics, {"experiments": ("nothing",)}, "experiment 'nothing': unknown; there are "),
        *(
            pytest.param(bench_cells, arguments, message, marks=needs_history)
            for arguments, message in (
                ({"sections": ("decode",)}, "--sections has 'decode': choose from attention, decoding, threads, cells"),
                ({"sizes": QUICK._replace(pairs={"backcopy_tiny": 1})}, "pairs is 1"),
                ({"sizes": QUICK._replace(attention_rounds=1)}, "attention_rounds is 1"),
                ({"against": "nothing"}, "--against 'nothing': no commit of this clone"),
                ({"against": "--help"}, "--against '--help': no commit of this clone"),
                ({"against": "HEAD", "experiments": ("nothing",)}, "--experiments has 'nothing'"),
            )
        ),
    ],
)
def test_what_does_not_fit_is_named(measure: Callable[..., object], arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(**arguments)


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
