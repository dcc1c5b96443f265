"""`lit-lazy export`: a folder that needs nothing of this project (all); whole or not at all; mistakes in one line."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from mistakes import expect_refusal
from subwords import bpe
from untrained import save

from lit_lazy.config.user_files import experiment

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias, RetNet
from lit_lazy.command.main import main
from lit_lazy.config.serialisation import replace_at
from lit_lazy.data import DataConfig, DataSource
from lit_lazy.data.pipeline.tokeniser import ByteTokenizer, FileTokenizer, Tokenizer
from lit_lazy.data.source_interface import SpecialTokens
from lit_lazy.data.text import Text
from lit_lazy.model import export_folder
from lit_lazy.model.export_folder import collect_code
from lit_lazy.model.generation import Prompts
from lit_lazy.training.checkpoints import load
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, RESULT

__all__ = ["bpe"]
LAZY = {
    "model.attention.normaliser": Elastic(),
    "model.attention.bias": LearnedBias(init_std=0.5),
    "model.init_std": 0.3,
}
NUMBERS, BYTES = experiment("backcopy_tiny", LAZY), experiment("stdlib_tiny", LAZY)
MODEL = {"README.md", "config.json", "generation_config.json", "model.safetensors", *collect_code(NUMBERS.model)}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in a finished run folder."""
    place = tmp_path_factory.mktemp("trained") / "abcdef"
    torch.set_num_threads(1)
    run(NUMBERS, place, keep_checkpoint=True)
    return place / FINAL_CHECKPOINT


def exported(checkpoint: str | Path, out: Path) -> Path:
    assert main(["export", str(checkpoint), str(out)]) == 0
    return out


def names(out: Path) -> set[str]:
    return {file.name for file in out.iterdir()}


def test_the_card_has_the_row_of_the_run_and_no_path(trained, tmp_path, capsys) -> None:
    out = tmp_path / "new" / "out"
    exported(trained, out)
    assert "without a tokenizer, since Backcopy has no text\n" in capsys.readouterr().out
    assert names(out) == MODEL
    assert {file.stat().st_mode for file in out.iterdir()} == {(out / "README.md").stat().st_mode}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    metrics = json.loads((trained.parent / RESULT).read_text())["metrics"]
    text = (out / "README.md").read_text()
    row = text[text.index("| excess loss") :].splitlines()[:3:2]
    titles, values = ([cell.strip() for cell in line.split("|")] for line in row)
    shown = dict(zip(titles, values, strict=True))
    assert shown["excess loss (nats)"] == f"{metrics['loss/excess']:.4f}"
    assert shown["trigger accuracy (%)"] == f"{100 * metrics['accuracy/trigger']:.2f}"
    assert "Elastic(renormalise=False, tau_init=1.0, threshold='per_query'" in text
    assert "6 steps of" in text
    assert str(tmp_path) not in text
    assert str(trained.parent) not in text + (out / "config.json").read_text()


TEXT = "def f(x):\n\treturn 'naïve ✓' # the cat"


@pytest.mark.usefixtures("module_cache")
def test_its_tokenizer_gives_the_tokens_of_the_training(bpe: Path, tmp_path: Path) -> None:
    subwords = FileTokenizer(bpe, None)
    of_bpe = replace_at(BYTES, {"data": Text(path="gone.txt", tokenizer=str(bpe))})
    begun = replace_at(of_bpe, {"data.begin_of_text": "<s>"})
    by_windows = replace_at(BYTES, {"data.bos": True})
    cases = (BYTES, ByteTokenizer(), None), (by_windows, ByteTokenizer(), None), (of_bpe, subwords, None)
    for i, (cfg, ours, begin) in enumerate((*cases, (begun, subwords, 0))):
        out = exported(save(tmp_path / "model.ckpt", cfg, ours.vocab_size, 32), tmp_path / str(i))
        assert names(out) == MODEL | TOKENIZER
        theirs = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        (ids,) = ours.encode([TEXT.encode()])
        before = [0] if cfg in (by_windows, begun) else []
        assert Prompts(cfg.data, ours.vocab_size).encode("x", TEXT.encode()) == before + ids.tolist()
        assert theirs(TEXT).input_ids == before + ids.tolist()
        assert theirs.decode(ids.tolist()) == TEXT
        assert theirs.bos_token_id == begin
        assert theirs.eos_token_id == theirs.pad_token_id == ours.separator
        model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
        both = theirs(["a cat on that", "that"], return_tensors="pt", padding=True)
        alone = theirs("that", return_tensors="pt")
        ends = [model.generate(**given, max_new_tokens=4, do_sample=False)[-1, -4:] for given in (both, alone)]
        assert ends[0].equal(ends[1]), "a shorter prompt goes on as it does alone"
        written = [(out / name).read_text() for name in TOKENIZER | {"README.md", "config.json"}]
        assert str(tmp_path) not in "".join(written)


@dataclass(frozen=True)
class Telegrams(DataConfig):
    """A source of one's own, whose texts begin with ! and end with a full stop."""

    def load(self) -> DataSource:
        raise AssertionError

    def load_tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def begin_prompt(self, tokenizer: Tokenizer) -> int:  # noqa: ARG002
        return ord("!")

    def name_special_tokens(self, tokenizer: Tokenizer) -> SpecialTokens:  # noqa: ARG002
        return SpecialTokens(ord("!"), (ord("."),), ord("_"))


@pytest.mark.usefixtures("module_cache")
def test_a_source_of_ones_own_says_how_its_texts_begin_and_end(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "model.ckpt", replace_at(BYTES, {"data": Telegrams()}), 256, 32)
    theirs = AutoTokenizer.from_pretrained(exported(checkpoint, tmp_path / "telegrams"), trust_remote_code=True)
    prompts = Prompts(Telegrams(), 256)
    assert theirs("stop").input_ids == prompts.encode("x", b"stop") == [*b"!stop"]
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("!", ".", "_")
    assert prompts.special.ends == (ord("."),)


ALONE = """
import sys
sys.modules.update(lit_lazy=None, flash_lazy=None)  # as if they were not installed
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)
torch.save(model(torch.load("tokens.pt")).logits, "logits.pt")
"""


@pytest.mark.long
def test_a_process_without_this_project_gives_our_logits(trained: Path, tmp_path: Path) -> None:
    exported(str(trained), tmp_path / "out")
    tokens = torch.arange(12)[None] % 17
    torch.save(tokens, tmp_path / "tokens.pt")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-P", "-c", ALONE], cwd=tmp_path, env=environment, check=True)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), load(trained).model(tokens))


def test_the_folder_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk; tests/test_disk.py kills."""
    checkpoint = save(tmp_path / "numbers.ckpt", NUMBERS)
    before = names(tmp_path)
    with monkeypatch.context() as patch:  # asked for after the weights are written
        patch.setattr(export_folder, "make_token_ids", Mock(side_effect=OSError(28, "No space left on device")))
        assert main(["export", checkpoint, str(tmp_path / "out")]) == 1
    assert names(tmp_path) == before
    assert names(exported(checkpoint, tmp_path / "out")) == MODEL
    assert "The checkpoint had no result next to it" in (tmp_path / "out" / "README.md").read_text()


def test_mistakes(trained: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "full").mkdir()
    (place / "full" / "mine.txt").write_text("mine")
    mixed = replace_at(NUMBERS, {"model.attention": AttentionSpec(), "model.mixer": RetNet()})
    retnet = save(tmp_path / "retnet.ckpt", mixed)
    shutil.copy(trained, tmp_path / FINAL_CHECKPOINT)
    (tmp_path / RESULT).write_text("{")
    for words, named in (
        ([str(trained), "full"], "OUT 'full': is a folder that is not empty; name another"),
        ([retnet, "out"], "model.mixer=RetNet: the exported modelling file supports only attention"),
        ([str(tmp_path / FINAL_CHECKPOINT), "out"], f"{RESULT}': no result (JSONDecodeError"),
    ):
        assert named in expect_refusal(["export", *words], capsys)
