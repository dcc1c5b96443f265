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
from lit_lazy.command.main import main

__all__ = ["bpe", "place"]
TEXT = ["--data.path=text.txt", "--data.validation=held.txt", "--data.context_length=16", "--data.validation_windows=2"]
RULE = """
from dataclasses import dataclass, replace
import torch
from lit_lazy.attention import Normaliser, NormaliserModule
from lit_lazy.config.user_files import experiment
from helper import SCALE

@dataclass(frozen=True)
class Cooled(Normaliser):
    def build(self, shape):
        return CooledModule()

class CooledModule(NormaliserModule):
    def weights(self, scores, rows):
        return (SCALE * scores).softmax(-1)

def config():
    base = experiment("backcopy_tiny")
    model = replace(base.model, attention=replace(base.model.attention, normaliser=Cooled()))
    return replace(base, model=model, train=replace(base.train, steps=3))
"""


@pytest.fixture
def checkpoint(place: Path) -> Path:
    """A model of a custom rule, whose file is not imported into this process."""
    (place / "rule.py").write_text(RULE)
    (place / "helper.py").write_text("SCALE = 1.0\n")
    forked.run_in_fork(lambda: main(["train", "./rule.py", "--threads", "1"]))
    return next(place.glob("runs/*/*/final.ckpt"))


@pytest.mark.parametrize("command", [["evaluate"], ["generate", "--prompt", "1 2", "--tokens", "2"]])
@pytest.mark.parametrize(
    ("helper", "said"),
    [
        ("SCALE = 1.0  # as before\n", ""),
        ("SCALE = 9.0\n", "a file that defines Cooled has changed since its training; this is new code"),
    ],
)
def test_an_edited_rule_is_said(checkpoint: Path, command: list[str], helper: str, said: str) -> None:
    """Also where the edit is in a file that the rule's own imports."""
    Path("helper.py").write_text(helper)
    words = [command[0], str(checkpoint), *command[1:], "--import", "rule.py", "--threads", "1"]
    done = forked.run([sys.executable, "-m", "lit_lazy.command", *words])
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert ("Cooled" in done.stderr) is bool(said)


def test_a_hash_of_an_earlier_version_is_not_compared(checkpoint: Path) -> None:
    content = torch.load(checkpoint)
    content["sources"]["code"]["Cooled"] = "0123456789ab"
    torch.save(content, checkpoint)
    words = ["evaluate", str(checkpoint), "--import", "rule.py", "--threads", "1"]
    done = forked.run([sys.executable, "-m", "lit_lazy.command", *words])
    assert "an earlier version hashed the code of Cooled, so it may have changed since" in done.stderr


def swap_tokens(file: Path) -> None:
    """Exchange the numbers of two tokens, which keeps the vocabulary's size."""
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["a"], words["t"] = words["t"], words["a"]
    file.write_text(json.dumps(content))


@pytest.mark.long
def test_a_replaced_tokenizer_is_refused(place: Path, bpe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("text.txt", "held.txt"):
        (place / name).write_text("the cat sat on the mat, äußerst ✓ on that " * 100 + name)
    given = [*TEXT, f"--data.tokenizer={bpe}", "--threads=1"]
    sizes = ["--model.d_model=16", "--model.n_layers=1", "--train.steps=2", "--train.warmup_steps=1"]
    assert main(["train", "text", *given, *sizes]) == 0
    (checkpoint,) = place.glob("runs/*/*/final.ckpt")
    refuse_after_swap(str(checkpoint), bpe, [], capsys)


def test_the_replaced_tokenizer_of_an_imported_model_is_refused(
    place: Path, bpe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_published(place / "source", "Qwen2", bpe)
    for name in ("text.txt", "held.txt"):
        (place / name).write_text("the cat sat on the mat, äußerst ✓ on that " * 100 + name)
    assert main(["import", "source", "new/model.ckpt"]) == 0
    refuse_after_swap("new/model.ckpt", place / "new" / "tokenizer.json", TEXT, capsys)


def refuse_after_swap(checkpoint: str, tokenizer: Path, data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    commands = [
        ["generate", checkpoint, "--prompt", "the cat", "--tokens", "2"],
        ["export", checkpoint, "exported"],
        ["evaluate", checkpoint, *data],
    ]
    assert main(commands[0]) == main(commands[2]) == 0
    swap_tokens(tokenizer)
    for command in commands:
        error = expect_refusal(command, capsys)
        assert "tokenizer.json" in error or "bpe.json" in error, command
        assert "has another content than that of its training; restore it" in error, command
    with pytest.raises(ValueError, match="has another content than that of its training; restore it"):
        load(checkpoint).generate("the cat")
