"""Text as people have it: files of any name, few documents, a few kilobytes."""

from pathlib import Path

import numpy as np
import pytest

from lit_lazy.config.user_files import experiment
from lit_lazy.data import describe_repetition
from lit_lazy.data.pipeline.corpus_cache import Corpus
from lit_lazy.data.pipeline.documents import find_cut
from lit_lazy.data.text import FEW_DOCUMENTS, Text


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))


def write_lines(path: Path, size: int, mark: str) -> bytes:
    text = "".join(f"{mark} line {i} of some notes\n" for i in range(size))[:size].encode()
    path.write_bytes(text)
    return text


def read_parts(folder: Path) -> list[list[bytes]]:
    """The documents of the training and of the validation part."""
    corpus = Corpus(folder)
    parts = {"train": corpus.train, "validation": corpus.validation}
    split = {part: np.split(tokens, corpus.ends(part))[:-1] for part, tokens in parts.items()}
    return [[bytes(document)[:-1] for document in documents] for documents in split.values()]


def test_files_count_by_their_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    texts = {write_lines(notes / name, 900, name) for name in ("a.md", "b.py", "README", "c.unknown")}
    (notes / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    (notes / "latin").write_bytes("é".encode("latin-1") * 9)
    train, validation = read_parts(Text(path=str(notes), context_length=64).tokenise())
    assert {one + other for one, other in zip(train, validation, strict=True)} == texts
    said = " ".join(capsys.readouterr().err.split())
    assert "left out 1 .png, 1 without suffix" in said
    assert "4 documents are too few to choose from, so the last 10% of each are the validation text" in said


@pytest.mark.parametrize("count", [1, FEW_DOCUMENTS - 1])
def test_the_end_of_few_documents_is_held_out(count: int, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    texts = [write_lines(notes / f"{i:02}.txt", 2000, str(i)) for i in range(count)]
    train, validation = read_parts(Text(path=str(notes), validation_share=0.25).tokenise())
    assert [one + other for one, other in zip(train, validation, strict=True)] == texts
    for one, other in zip(train, validation, strict=True):
        assert one.endswith(b"\n"), "at a line end"
        assert 500 <= len(other) < 550


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (b"one\ntwo\nthree\n", 8),  # behind the second line
        (b"title\n" + b"word " * 40, 181),  # a word of the long line
        (b"x" * 10, 9),
        ("é".encode() * 5, 8),  # not within a character
        (b"", 0),
    ],
)
def test_a_document_is_cut_before_its_tail(text: bytes, at: int) -> None:
    assert find_cut(text, 0.9) == at
    assert (find_cut(text, 0.0), find_cut(text, 1.0)) == (0, len(text))


def test_four_kilobytes_are_enough_for_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "notes.md", 4096, "my")
    source = experiment("text", {"data.path": "notes.md"}).data.load()
    assert source.info["validation_tokens"] == 256
    said = " ".join(capsys.readouterr().err.split())
    assert "data.validation_windows=128: the validation text has 1, all count" in said
    assert "571 passes through the text" in describe_repetition(source.info, 1000 * 8 * 256)
    assert describe_repetition({"bytes_per_token": 1.0}, 10**9) == "", "a user's source may not count its tokens"
