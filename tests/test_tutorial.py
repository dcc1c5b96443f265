"""docs/tutorial.md, from its first block to its last, on the tiny model."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch_alone import ROOT

BIN = Path(sys.executable).parent
TINY = {
    '"backcopy"': '"backcopy_tiny"',
    "my_question-backcopy": "my_question-backcopy_tiny",
}


def blocks() -> list[tuple[str, str]]:
    """Language and text of each block, the tiny model in place of the other."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    for known, tiny in TINY.items():
        assert known in text
        text = text.replace(known, tiny)
    return re.findall(r"^```(python|sh)\n(.*?)^```", text, re.M | re.S)


@pytest.mark.long
def test_it_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "tutorial"}
    for language, code in blocks():
        if named := re.match(r"# (my_\w+\.py)", code):
            (tmp_path / named[1]).write_text(code)
        elif language == "python":
            exec(compile(code, "tutorial.md", "exec"), names)
        else:
            for line in code.splitlines():
                # A fork would have the classes of the files that were imported here.
                words = [str(BIN / "lit-lazy"), *line.split()[1:]]
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stdout + done.stderr
                print(done.stdout)
    out = capsys.readouterr().out
    verdict = names["found"].table.verdict
    assert verdict.exploratory  # in no commit before it was run
    assert out.count(verdict.sentence) >= 3  # of the grid, the results, and all verdicts
    assert (tmp_path / "softmax.png").exists()
    assert (tmp_path / "runs" / "my_question-backcopy_tiny" / "report.html").exists()
