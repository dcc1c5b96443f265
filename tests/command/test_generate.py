"""`lit-lazy generate`: what it prints of bytes, of a tokenizers file and of numbers; mistakes in one line."""

import io
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import pytest
import tokenizers
import torch
from mistakes import expect_refusal
from subwords import bpe
from untrained import save

from lit_lazy.attention import Elastic, Fire, LearnedBias
from lit_lazy.command.main import main
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import experiment
from lit_lazy.data.pipeline.tokeniser import ByteTokenizer, FileTokenizer
from lit_lazy.data.text import Text
from lit_lazy.model.generation import GREEDY, Sampling, generate
from lit_lazy.training.checkpoints import load

LAZY = {
    "model.attention.normaliser": Elastic(),
    "model.attention.bias": LearnedBias(),
    "model.init_std": 0.3,  # so that an untrained model has something to say
}
BYTES, NUMBERS = experiment("stdlib_tiny", LAZY), experiment("backcopy_tiny", LAZY)
__all__ = ["bpe"]
SAID = (
    r"[\d,]+ tokens read in [\d.]+ s, (\d+) generated in [\d.]+ s(?:, [\d.]+ tokens/s)?; "
    r"cache ([\d,]+) bytes(, \d+ tokens evicted)?\n"
)


@pytest.fixture
def of_bytes(tmp_path: Path) -> str:
    return save(tmp_path / "bytes.ckpt", BYTES, 256, 32)


def said(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, re.Match[str]]:
    """What a command prints, and the parts of its last line."""
    capsys.readouterr()
    assert main(["generate", *command]) == 0
    printed = capsys.readouterr()
    found = re.fullmatch(SAID, printed.err)
    assert found, printed.err
    return printed.out, found


def by_hand(checkpoint: str, prompts: list[str], tokens: int, sampling: Sampling = GREEDY) -> list[str]:
    ids = generate(load(Path(checkpoint)).model.eval(), [[*p.encode()] for p in prompts], tokens, sampling, stop=[0])
    return [bytes(text).decode(errors="replace").rstrip("\ufffd") for text in ids]


def test_a_text_is_continued(of_bytes, capsys) -> None:
    torch.set_num_threads(1)
    words = [of_bytes, "--prompt", "def f(", "--tokens", "20", "--threads", "1"]
    out, last = said([*words, "--temperature", "0"], capsys)
    (text,) = by_hand(of_bytes, ["def f("], 20)
    assert out.rstrip("\ufffd\n") == text.rstrip("\n")
    layers, width, room = BYTES.model.n_layers, BYTES.model.d_model, 8 * 6  # doubled from 6, of which 25 are used
    assert last.groups() == ("20", f"{2 * layers * width * room * 4:,}", None)
    drawn = [said([*words, "--top-p", "0.9", "--seed", seed], capsys)[0] for seed in "001"]
    assert drawn[0] == drawn[1] != drawn[2]
    (text,) = by_hand(of_bytes, ["def f("], 20, Sampling(top_p=0.9))
    assert drawn[0].rstrip("\ufffd\n") == text.rstrip("\n")


def test_several_texts_have_headers_and_may_come_from_files(of_bytes, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "ü.txt").write_bytes("naïve".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x = ")))
    files = ["--prompt-file", str(tmp_path / "ü.txt"), "--prompt-file", "-"]
    out, _ = said([of_bytes, "--prompt", "a", "--prompt", "", *files, "--tokens", "8", "--temperature", "0"], capsys)
    titles = ["--prompt 'a'", "--prompt ''", f"--prompt-file {str(tmp_path / 'ü.txt')!r}", "--prompt-file '-'"]
    expected = zip(titles, by_hand(of_bytes, ["a", "\0", "naïve", "x = "], 8), strict=True)
    shown = [f"== {title}\n{text}" for title, text in expected]
    assert [part.rstrip("\ufffd\n") for part in re.split(r"(?m)^(?=== -)", out)[1:]] == [x.rstrip("\n") for x in shown]


def test_a_cache_that_evicts_stays_small_and_says_what_it_dropped(of_bytes, capsys) -> None:
    _, last = said([of_bytes, "--prompt", "import", "--tokens", "60", "--first", "2", "--window", "10"], capsys)
    size = 2 * BYTES.model.n_layers * BYTES.model.d_model * 12 * 4
    assert last.groups()[1:] == (f"{size:,}", f", {6 + int(last[1]) - 1 - 12} tokens evicted")


def test_numbers_are_continued_by_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the model was trained by kernels that this machine cannot run."""
    kernels = save(tmp_path / "kernels.ckpt", replace_at(NUMBERS, {"model.backend": "triton"}))
    words = ["--prompt", "16 3 5", "--prompt", "16", "--tokens", "5", "--temperature", "0"]
    checkpoint = save(tmp_path / "numbers.ckpt", NUMBERS)
    assert said([kernels, *words], capsys)[0] == said([checkpoint, *words], capsys)[0]
    out, _ = said([checkpoint, "--prompt", "16 3 5", "--tokens", "5", "--temperature", "0"], capsys)
    assert [[int(word) for word in out.split()]] == generate(load(Path(checkpoint)).model, [[16, 3, 5]], 5)


def test_a_tokenizers_file_reads_and_writes_text(bpe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = FileTokenizer(bpe, None)
    cfg = replace_at(BYTES, {"data": Text(path="gone.txt", tokenizer=str(bpe))})
    checkpoint = save(tmp_path / "bpe.ckpt", cfg, tokenizer.vocab_size, 32)
    out, last = said([checkpoint, "--prompt", "the cat ✓", "--tokens", "30", "--temperature", "0"], capsys)
    (prompt,) = tokenizer.encode(["the cat ✓".encode()])
    (ids,) = generate(load(Path(checkpoint)).model, [prompt.tolist()], 30, stop=[1])
    assert out == "".join(tokenizer.decode(ids, prompt.tolist())) + "\n"
    assert last[1] == str(len(ids))


class TestTokenizers:
    TEXT = "the cat said:\n\tnaïve ✓ Ā 🙂 <|endofte"

    def test_text_comes_back_in_pieces_that_are_whole_characters(self, bpe: Path) -> None:
        for tokenizer in (ByteTokenizer(), FileTokenizer(bpe, None)):
            (ids,) = tokenizer.encode([self.TEXT.encode()])
            pieces = list(tokenizer.decode(ids.tolist()))
            assert "".join(pieces) == self.TEXT
            assert len([piece for piece in pieces if piece]) > 20
            (cut,) = tokenizer.encode(["🙂".encode()])
            assert "".join(tokenizer.decode(cut[:-1].tolist())) == ""

    @pytest.mark.parametrize("trims", [True, False], ids=["llama", "gemma"])
    def test_any_sample_of_a_byte_fallback_tokenizer_becomes_the_librarys_text(self, trims, tmp_path) -> None:
        file = self.byte_fallback(tmp_path, trims)
        tokenizer = FileTokenizer(file)
        whole = tokenizers.Tokenizer.from_file(str(file))
        samples = torch.randint(whole.get_vocab_size(), (300, 12), generator=torch.Generator().manual_seed(0))
        letters = torch.randint(259, whole.get_vocab_size(), samples.shape, generator=torch.Generator().manual_seed(1))
        for ids in (*samples.tolist(), *torch.where(samples < 240, letters, samples).tolist()):
            before, text = (whole.decode(part, skip_special_tokens=False) for part in (ids[:3], ids))
            assert "".join(tokenizer.decode(ids[3:], ids[:3])).rstrip("\ufffd") == text[len(before) :].rstrip("\ufffd")

    def byte_fallback(self, folder: Path, trims: bool) -> Path:
        """A file of the form of Llama 2's, or of Gemma's, which keeps a space at the start."""
        words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "é"]
        ids = {word: i for i, word in enumerate(words)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
        decoders = tokenizers.decoders
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps if trims else steps[:3])
        tokenizer.save(str(folder / "fallback.json"))
        return folder / "fallback.json"


def spoil(file: Path, **parts: Any) -> None:
    """Give a tokenizers file other parts."""
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(file))


def split(pattern: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


GROWS = tokenizers.normalizers.Sequence([tokenizers.normalizers.Replace("ß", "ß" * 10)] * 8)


@pytest.mark.parametrize("parts", [{"normalizer": GROWS}, {"pre_tokenizer": split("(a+)+$")}], ids="".join)
def test_a_small_tokenizer_that_asks_for_any_memory_or_time_is_refused(parts: dict[str, Any], bpe: Path) -> None:
    spoil(bpe, **parts)
    with pytest.raises(ValueError, match=r"^data.tokenizer='.*': cannot be used \(needs more than 2 GiB or 30 s"):
        FileTokenizer(bpe)


def test_what_the_library_panics_on_is_named(bpe: Path, tmp_path: Path) -> None:
    """A text, tokens, and a tokenizer that cannot decode each of its tokens."""
    tokenizer, panics = FileTokenizer(bpe), tokenizers.decoders.Strip("a", 0, 2)
    tokenizer.tokenizer.decoder = panics
    (ids,) = tokenizer.encode([b"a"])
    for decode in (lambda: list(tokenizer.decode(ids)), lambda: tokenizer.count_lossy([b"a"], [ids])):
        with pytest.raises(ValueError, match=r"^data.tokenizer='.*': cannot decode tokens \("):
            decode()
    other = Path(shutil.copy(bpe, tmp_path / "other.json"))
    spoil(other, decoder=panics)
    with pytest.raises(ValueError, match=r"^data.tokenizer='.*': cannot be used \(.*crashes"):
        FileTokenizer(other)
    spoil(bpe, pre_tokenizer=split("(ab|a|b)+$"))
    with pytest.raises(ValueError, match=r"^data.tokenizer='.*': cannot encode the text \(.*retry-limit"):
        FileTokenizer(bpe).encode([b"ab" * 50 + b"c"])


def test_a_text_that_nobody_reads_ends(of_bytes: str) -> None:
    """As in `lit-lazy generate ... | head -c 1`."""
    more = ["--prompt", "a", "--tokens", "10000000", "--window", "9"]
    words = [sys.executable, "-m", "lit_lazy", "generate", of_bytes, *more]
    with forked.Popen(words, stdout=forked.PIPE, stderr=forked.PIPE, text=True) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert re.fullmatch(SAID, process.stderr.read())
        assert process.wait(60) == 0


WRONG = [
    ("bytes.ckpt", "--prompt: give a text to continue, or a file with one by --prompt-file"),
    ("bytes.ckpt --prompt-file - --prompt-file -", "--prompt-file -: given twice"),
    ("numbers.ckpt --prompt 'def f('", "--prompt 'def f(': 'def' is no token of Backcopy; give token numbers from 0 t"),
    ("fire.ckpt --prompt '1 2' --tokens 16", "--tokens 16: Fire.length=16: cannot serve 17 keys"),
    ("other.ckpt --prompt a", "data=Stdlib: vocabulary size of the tokenizer=256: the model has 17 token ids"),
]


def test_mistakes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("bytes.ckpt"), BYTES, 256)
    save(Path("numbers.ckpt"), NUMBERS)
    save(Path("fire.ckpt"), replace_at(NUMBERS, {"model.attention.bias": Fire()}))
    save(Path("other.ckpt"), BYTES)
    for words, named in WRONG:
        assert named in expect_refusal(["generate", *shlex.split(words)], capsys)


def test_ctrl_c_ends_the_text(of_bytes, monkeypatch, capsys) -> None:
    monkeypatch.setattr("lit_lazy.model.generation.draw", Mock(side_effect=KeyboardInterrupt))
    assert main(["generate", of_bytes, "--prompt", "a"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
