"""What a trained model depends on beside its settings has changed since: its rule's code, its tokenizer's file."""

import json
import sys
from pathlib import Path

import forked
import pytest
import torch
from mistakes import expect_refusal, place
from published import make_published
from subwords import bpe

from lit_lazy.api import load
from lit_lazy.command.doctor_new_fields import fill_template
from lit_lazy.command.main import main

__all__ = ["bpe", "place"]
TEXT = ["--data.path=text.txt", "--data.validation=held.txt", "--data.context_length=16", "--data.validation_windows=2"]


def test_an_edited_rule_is_said(place: Path) -> None:
    """Also where the edit is in a file that the rule's own imports. This process does not import the rule."""
    helper = place / "helper.py"
    rule = fill_template("normaliser", "cooled").replace("backcopy_small", "backcopy_tiny")
    (place / "rule.py").write_text(f"from helper import SCALE\n{rule}")
    helper.write_text("SCALE = 1.0\n")
    forked.run_in_fork(lambda: main(["train", "./rule.py", "--threads", "1"]))
    checkpoint = next(place.glob("runs/*/*/final.ckpt"))

    def run(*words: str) -> str:
        given = [words[0], str(checkpoint), *words[1:], "--import", "rule.py", "--threads", "1"]
        done = forked.run([sys.executable, "-m", "lit_lazy", *given])
        assert done.returncode == 0, done.stderr
        return done.stderr

    commands = ("evaluate",), ("generate", "--prompt", "1 2", "--tokens", "2")
    helper.write_text("SCALE = 1.0  # as before\n")
    assert not [command for command in commands if "MyCooled" in run(*command)]
    helper.write_text("SCALE = 9.0\n")
    changed = "a file that defines MyCooled has changed since its training; this is new code"
    assert all(changed in run(*command) for command in commands)
    content = torch.load(checkpoint)
    content["sources"]["code"]["MyCooled"] = "0123456789ab"
    torch.save(content, checkpoint)
    assert "an earlier version hashed the code of MyCooled, so it may have changed since" in run("evaluate")


def test_a_replaced_tokenizer_is_refused(place: Path, bpe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("text.txt", "held.txt"):
        (place / name).write_text("the cat sat on the mat, äußerst ✓ on that " * 100 + name)
    make_published(place / "source", "Qwen2", bpe)
    assert main(["import", "source", "new/model.ckpt"]) == 0
    checkpoint = "new/model.ckpt"
    commands = [
        ["generate", checkpoint, "--prompt", "the cat", "--tokens", "2"],
        ["export", checkpoint, "exported"],
        ["evaluate", checkpoint, *TEXT],
    ]
    assert main(commands[0]) == main(commands[2]) == 0
    tokenizer = place / "new" / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    words = content["model"]["vocab"]
    words["a"], words["t"] = words["t"], words["a"]  # of the same size
    tokenizer.write_text(json.dumps(content))
    for command in commands:
        error = expect_refusal(command, capsys)
        assert "tokenizer.json" in error, command
        assert "has another content than that of its training; restore it" in error, command
    with pytest.raises(ValueError, match="has another content than that of its training; restore it"):
        load(checkpoint).generate("the cat")
