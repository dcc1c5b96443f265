"""docs/tutorial.md, from its first block to its last, on the tiny model and fewer seeds."""

import re
from pathlib import Path
from typing import Any

import forked
import pytest
from torch_alone import ROOT

TINY = {
    '"backcopy"': '"backcopy_tiny"',
    "my_question-backcopy": "my_question-backcopy_tiny",
    "(30, 31, 32, 33, 34)": "(30, 31, 32)",
}


def blocks() -> list[tuple[str, str]]:
    """Language and text of each block, the tiny model in place of the other."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    for known, tiny in TINY.items():
        assert known in text
        text = text.replace(known, tiny)
    return re.findall(r"^```(python|sh)\n(.*?)^```", text, re.M | re.S)


@pytest.mark.long
@pytest.mark.usefixtures("empty_store")
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
                done = forked.run(line.split())
                assert done.returncode == 0, done.stdout + done.stderr
                print(done.stdout)
    out = capsys.readouterr().out
    verdict = names["found"].table.verdict
    assert "the question was not committed" in verdict.sentence or verdict.exploratory
    assert out.count(verdict.sentence) >= 3  # of the grid, the results, and all verdicts
    assert (tmp_path / "softmax.png").exists()
    assert (tmp_path / "runs" / "my_question-backcopy_tiny" / "report.html").exists()
