"""One corpus in three formats gives one token stream, with any tokenizer; every error is one line; small texts."""

import gzip
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from corpora import (
    DOCUMENTS,
    TRAIN,
    VALIDATION,
    L,
    compress,
    joined,
    make_documents,
    small,
    write_groups,
    write_jsonl,
    write_parquet,
)
from test_tasks import read
from tokenizers import Tokenizer, models

from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import experiment
from lit_lazy.data import describe_repetition, list_doubts
from lit_lazy.data.pipeline import documents
from lit_lazy.data.pipeline.corpus_cache import Corpus
from lit_lazy.data.pipeline.documents import find_cut
from lit_lazy.data.text import FEW_DOCUMENTS, Text
from lit_lazy.model.generation import Prompts

pytestmark = pytest.mark.usefixtures("cache")
WITHOUT_A_SPACE = [pytest.param(b"x" * n + c.encode() * 100_000, id=f"{n}{c}") for n in range(4) for c in "é注😀a"]


def pieces(path: Path) -> list[bytes]:
    return [piece for _, piece in documents.Files("data.path", "", "text", (path,)).documents()]


def tokens_of(config: Text, dtype: type = np.uint16) -> np.ndarray:
    return np.fromfile(config.tokenise() / "train.bin", dtype)


# Token stream


@pytest.mark.parametrize("kind", ["txt", "glob", "jsonl", "json", "parquet", "parts"])
def test_every_format_gives_the_documents_in_order_each_followed_by_nul(corpora, kind):
    source = small(path=corpora[kind]).load()
    batch = read(source.train)
    expected, text = joined(TRAIN), joined(VALIDATION)
    n = (len(expected) - 1) // L * L
    assert bytes(batch["tokens"].flatten().tolist()) == expected[:n]
    assert bytes(batch["targets"].flatten().tolist()) == expected[1 : n + 1]
    counts = {"train_documents": len(TRAIN), "validation_documents": len(VALIDATION), "bytes_per_token": 1.0}
    assert source.info.items() >= {"train_tokens": n, "validation_tokens": 10 * L, **counts}.items()
    assert source.vocab_size == 256
    assert source.fingerprint == small(path=corpora["jsonl"]).load().fingerprint
    starts = [number * ((len(text) - 1) // L) // 10 * L for number in range(10)]  # evenly spread
    assert [window.tobytes() for window in source.validation.sequences.numpy()] == [text[s : s + L + 1] for s in starts]


def write_gaps(root: Path) -> Path:
    """Empty documents and nulls, in another column than the text."""
    with_gaps = [value for t in DOCUMENTS for value in (t, "", None)]
    (root / "0.jsonl").write_text("".join(json.dumps({"no": "x", "text": t}) + "\n\n" for t in with_gaps[:300]))
    datasets.Dataset.from_dict({"text": with_gaps[300:]}).to_parquet(root / "1.parquet")
    return root


def write_empty_groups(root: Path) -> Path:
    write_groups(root / "0.parquet", [])
    write_groups(root / "1.parquet")
    write_groups(root / "2.parquet", [], DOCUMENTS[:150], [], DOCUMENTS[150:], [])
    return root


def write_odd_parquet(root: Path) -> Path:
    """Metadata as from another version of `datasets`; in a chained URL `::` has a meaning."""
    table = pa.table({"text": DOCUMENTS, "image": DOCUMENTS})
    features = {"info": {"features": {"text": {"_type": "Text9"}, "image": {"_type": "Image9"}}}}
    path = root / "zip::[1]*.parquet"
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), path)
    return path


def compressed(kind: str, suffix: str, folder: bool) -> Callable[[Path], Path]:
    write = {"jsonl": write_jsonl, "json": write_jsonl, "parquet": write_parquet}[kind]

    def make(root: Path) -> Path:
        packed = compress(write(root / f"all.{kind}", DOCUMENTS), suffix)
        return packed.parent if folder else packed

    return make


COMPRESSED = [compressed("jsonl", ".gz", False), compressed("json", ".zst", True), compressed("parquet", ".zst", False)]


@pytest.mark.parametrize("write", [write_gaps, write_empty_groups, write_odd_parquet, *COMPRESSED])
def test_files_with_the_same_documents_give_the_same_tokens(tmp_path, corpora, write):
    found = small(path=str(write(tmp_path))).load()
    assert found.fingerprint == small(path=corpora["jsonl"]).load().fingerprint


def test_folders_and_globs_select_the_same_files_each_once(tmp_path, capfd):
    root, linked = tmp_path / "docs", tmp_path / "linked"
    for folder in (root / "deep" / "deeper", root / ".git", linked):
        folder.mkdir(parents=True)
    texts = {"0.txt": "", "A.TXT": "upper", "b.md": "mark", "deep/c.txt": "deep", "deep/deeper/d.txt": "deeper"}
    for name, content in texts.items():
        (root / name).write_text(content)
    write_jsonl(root / "e.jsonl", ["line"])
    (linked / "f.txt").write_text("linked")
    for hidden in (".git/config.txt", ".hidden.txt"):
        (root / hidden).write_text("no")
    (root / "g.csv").write_bytes(b"n\0")
    for link, target in {"x": linked, "y": linked, "loop": root, "deep/loop": root, "z.txt": root / "A.TXT"}.items():
        (root / link).symlink_to(target)
    (root / "broken.txt").symlink_to(root / "nowhere")
    left_out = "1 .csv, 1 empty, 2 hidden, 4 linked again, 1 unreadable"
    for given in (root, f"{root}/**/*", f"{root}/**", f"{tmp_path}/do*/**/*"):
        (train,) = small(path=str(given))._sources()
        found = [content.decode() for _, content in train.documents()]
        assert found == ["upper", "mark", "deep", "deeper", "line", "linked"]
        assert train.left_out == left_out
    assert [path.name for path in small(path=f"{root}/**/deep*/*.txt")._sources()[0].paths] == ["c.txt", "d.txt"]
    (root / "more.txt").write_text("\n\n".join(DOCUMENTS))
    small(path=str(root), validation_share=0.5, validation_windows=1).load()
    assert f"data.path='{root}': left out {left_out}\n" in capfd.readouterr().err


@pytest.mark.parametrize("blank", ["\n\n", "\n  \t\n", "\r\n\r\n", "\r\n \r\n"])
def test_a_document_ends_at_any_blank_line_and_a_byte_order_mark_is_dropped(tmp_path, blank):
    book, lines = tmp_path / "book.txt", tmp_path / "lines.jsonl"
    paragraphs = blank.join(["word\n" * 3000 + "end" for _ in range(9)]).encode()
    book.write_bytes(b"\xef\xbb\xbf" + paragraphs)
    found = pieces(book)
    assert len(found) > 4
    assert b"".join(found) == paragraphs
    assert all(piece.endswith(f"end{blank}".encode()) and len(piece) > documents.MIN_PIECE for piece in found[:-1])
    lines.write_bytes(b"\xef\xbb\xbf" + b'{"text": "one"}\r\n\r\n{"text": "two"}')
    assert pieces(lines) == [b"one", b"two"]


@pytest.mark.parametrize("content", WITHOUT_A_SPACE)
def test_a_text_without_spaces_is_cut_between_characters(tmp_path, content):
    path = tmp_path / "line.txt"
    path.write_bytes(content)
    found = pieces(path)
    assert b"".join(found) == content
    assert len(found) > 1
    assert all(piece.decode() and len(piece) <= documents.MAX_UNSPLIT for piece in found)


def test_validation_documents_that_are_trained_on_are_counted_and_refused(tmp_path, corpora, cache, capfd):
    """In another order and format."""
    copy = write_parquet(tmp_path / "copy.parquet", DOCUMENTS[::-1])
    config = small(path=corpora["jsonl"], validation=str(copy))
    for _ in range(2):  # also from the cache
        with pytest.raises(ValueError, match=r"data\.validation='.*': .* 100% .*_overlap=True"):
            config.load()
    assert "100.0% of the validation documents are in the training text too" in capfd.readouterr().err
    assert replace(config, validation_overlap=True).load().info["validation_overlap"] == 1.0
    assert len(list(cache.iterdir())) == 1
    for shared, share in ((3, 0.05), (0, None)):
        mixed = write_jsonl(tmp_path / f"{shared}.jsonl", [*make_documents(57, seed=1), *DOCUMENTS[:shared]])
        info = small(path=corpora["jsonl"], validation=str(mixed)).load().info
        assert info.get("validation_overlap") == share


# Tokenisers


def test_a_tokenizers_file(corpora, bpe):
    source = small(path=corpora["parquet"], tokenizer=bpe).load()
    tokenizer = Tokenizer.from_file(bpe)
    end = tokenizer.token_to_id("<|endoftext|>")
    train = [token for t in TRAIN for token in [*tokenizer.encode(t).ids, end]]
    assert source.train.sequences.dtype == torch.uint16
    stream = source.train.sequences[:, :-1].flatten().tolist()
    assert stream == train[: len(stream)]
    assert len(train) - len(stream) <= L
    assert source.vocab_size == tokenizer.get_vocab_size() == 400
    validation = sum(len(tokenizer.encode(t).ids) + 1 for t in VALIDATION)
    assert source.info["bytes_per_token"] == pytest.approx(len(joined(VALIDATION)) / validation, rel=1e-12)
    assert "trigram_bits_per_byte" not in source.info
    other = small(path=corpora["parquet"], tokenizer=bpe, end_of_text="<pad>").load()
    assert (other.train.sequences[:, 1:] == 0).sum() == pytest.approx(len(TRAIN), abs=1)
    assert other.fingerprint != source.fingerprint


@pytest.mark.parametrize("words", ["bytes", "bpe"])
def test_with_bos_each_token_is_a_target_once_behind_the_separator(corpora, bpe, words):
    plain = small(path=corpora["parquet"], tokenizer=bpe if words == "bpe" else "bytes")
    source = replace(plain, bos=True).load()
    batch = read(source.train)
    tokens = plain.load().train.sequences[:, :-1].flatten().tolist()
    targets = batch["targets"].flatten().tolist()
    assert targets[: len(tokens)] == tokens[: len(targets)]
    assert (batch["tokens"][:, 0] == (1 if words == "bpe" else 0)).all()
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def remake(bpe: str, path: Path, **changes: object) -> str:
    """A tokenizer file with other top-level settings."""
    path.write_text(json.dumps(json.loads(Path(bpe).read_text()) | changes))
    return str(path)


@pytest.mark.parametrize("special", [True, False])
def test_the_text_of_a_control_token_is_text_in_a_document_and_a_token_in_a_prompt(tmp_path, bpe, special):
    words = json.loads(Path(bpe).read_text())["added_tokens"]
    ends = [word | {"special": special or word["content"] == "<pad>"} for word in words]
    tokenizer = remake(bpe, tmp_path / "t.json", added_tokens=ends)
    lines = write_jsonl(tmp_path / "a.jsonl", [f"{i} <|endoftext|> and <pad>, <|endoftext|>" for i in range(60)])
    config = small(path=str(lines), tokenizer=tokenizer)
    stream = tokens_of(config)
    assert (stream == 1).sum() == config.load().info["train_documents"]
    assert not (stream == 0).any()
    assert Tokenizer.from_file(bpe).decode(stream.tolist()).count("<|endoftext|> and <pad>") > 20
    assert Prompts(config, 400).encode("--prompt", b"<|endoftext|>") == [1]
    begun = replace(config, begin_of_text="<pad>")
    assert (tokens_of(begun) == 0).sum() == begun.load().info["train_documents"]


@pytest.mark.parametrize(
    ("normalizer", "texts", "share"),
    [
        (None, DOCUMENTS, 0.0),
        ({"type": "Lowercase"}, ["UPPER", "lower", "More", "less"] * 50, 0.5),
        ({"type": "NFC"}, ["e\u0301", "\u00e9", "a", "b"] * 50, 0.25),
    ],
)
def test_documents_that_a_tokenizer_does_not_restore_are_counted(tmp_path, bpe, normalizer, texts, share, capfd):
    tokenizer = remake(bpe, tmp_path / "t.json", normalizer=normalizer)
    lines = write_jsonl(tmp_path / "a.jsonl", [f"{text} {i}" for i, text in enumerate(texts)])
    info = small(path=str(lines), tokenizer=tokenizer).load().info
    assert info.get("lossy_documents", 0.0) == share
    assert ("bits per byte are too low" in capfd.readouterr().err) is (share > 0)
    assert len(list_doubts(info)) == (share > 0)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """50 MB compared with 10 in each format, the .txt as a single line."""
    document = "".join(random.Random(0).choices("abcdefgh ", k=4000))
    for size in (10, 50):
        texts = [f"{i} {document}" for i in range(size * 250)]
        write_jsonl(tmp_path / f"{size}.jsonl", texts)
        (tmp_path / f"{size}.txt").write_text("".join(texts).replace(" ", "_"))
        write_parquet(tmp_path / f"{size}.parquet", texts)
    code = f"""
import pathlib, re
from lit_lazy.data import text
text.measure_ngrams = lambda *_: {{}}  # its tables of constant size would hide the rest
def peak(name):  # MB of this process; ru_maxrss would include the parent's before the fork
    text.Text(str(pathlib.Path({str(tmp_path)!r}, name))).load()
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
small = max([peak("10.txt"), peak("10.jsonl"), peak("10.parquet")])
for kind in ("txt", "jsonl", "parquet"):
    print(peak("50." + kind) - small)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown = [float(megabytes) for megabytes in done.stdout.split()]
    assert len(grown) == 3
    assert max(grown) < 20, f"the text, or its tokens, would add 40 MB: {grown}"


# Hub datasets, as a folder with the same layout


LONG = make_documents(2500, seed=2)  # several batches of the encoder


def write_readme(root: Path, **configs: Any) -> Path:
    """What names a dataset's configurations, with the files of each, or of each of its splits."""
    listed = [{"config_name": name.replace("_", "-"), "data_files": files} for name, files in configs.items()]
    (root / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': listed})}---\n")
    return root


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two configurations; the training split of `sample` has two files, of which the second is not parquet."""
    (root := tmp_path / "repository").mkdir()
    write_parquet(root / "train-0.parquet", LONG)
    (root / "train-1.parquet").write_text("PAR1 broken")
    write_parquet(root / "test.parquet", make_documents(20, seed=1))
    write_parquet(root / "whole.parquet", DOCUMENTS)
    sample = [{"split": "train", "path": "train-*.parquet"}, {"split": "test", "path": "test.parquet"}]
    return write_readme(root, sample=sample, whole="whole.parquet")


@pytest.mark.parametrize("stream", [True, False])
def test_a_hub_dataset_gives_the_same_tokens_streamed_or_not(repository, corpora, stream):
    source = small(hub=str(repository), hub_config="whole", stream=stream, max_tokens=10**9).load()
    assert source.fingerprint == small(path=corpora["jsonl"]).load().fingerprint


def test_a_stream_is_read_no_further_than_needed(repository):
    hub = {"hub": str(repository), "hub_config": "sample", "stream": True, "validation": "test"}
    source = small(**hub, max_tokens=1000 * L).load()
    assert len(source.train) == 1000
    assert source.info["validation_documents"] == 20
    assert source.train.sequences[:, :-1].numpy().tobytes() == joined(LONG)[: 1000 * L]
    with pytest.raises(ValueError, match=r"data\.hub='.*repository': cannot be read \(") as error:
        small(**hub, max_tokens=10**7).load()
    assert "\n" not in str(error.value)


def test_the_fineweb_experiment_reads_a_folder_with_its_layout(tmp_path, bpe):
    (folder := (root := tmp_path / "fineweb-edu") / "sample" / "10BT").mkdir(parents=True)
    write_parquet(folder / "000_00000.parquet", LONG)
    write_readme(root, sample_10BT=[{"split": "train", "path": "sample/10BT/*"}])
    data = {"data.hub": str(root), "data.tokenizer": bpe, "data.max_tokens": 400_000, "data.validation_windows": 4}
    source = replace_at(experiment("fineweb_edu"), data).data.load()
    assert source.info["train_tokens"] == 400_000 // 512 * 512


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hub_config": "wrong"}, "wrong"),
        ({"column": "wrong"}, r"data\.column='wrong': .* only text, id, dump"),
        ({"column": "score"}, r"data\.column='score': .* double .*; choose"),
        ({"validation": "train"}, r"data\.validation='train': equals data\.split"),
    ],
)
def test_wrong_hub_options_are_named(repository, cache, changes, named):
    options = {"hub": str(repository), "hub_config": "whole", "stream": True, "max_tokens": 10**6, **changes}
    with pytest.raises(ValueError, match=f"^.*{named}.*$"):
        small(**options).load()
    assert not cache.exists()


# Errors


INVALID_UTF8 = [None, pa.py_buffer(np.array([0, 1, 4], np.int32).tobytes()), pa.py_buffer(b"aa\xffb")]
BROKEN = {
    "binary.txt": (b"PAR1\0\0\0", "NUL at byte 4"),
    "latin.txt": (b"a" * 100_000 + b"caf\xe9 au lait", "UTF-8 at byte 100003; convert"),
    "latin.jsonl": (b'{"text": "good"}\n{"text": "caf\xe9"}\n', "line 2 .*UTF-8 at byte 13; convert"),
    "column.jsonl": (b'{"content": "x", "id": 1}\n', "line 1 .*content, id; choose"),
    "number.jsonl": (b'{"text": "x"}\n{"text": 5}\n', "line 2 has 5 .*choose"),
    "invalid.jsonl": (b'{"text": "x"}\n\n{"text": \n', "line 3 is not JSON"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "line 1 .*Unicode"),
    "nul.jsonl": (b'{"text": "ab\\u0000"}\n', "line 1 .*token 0"),
    "broken.parquet": (b"PAR1 this is no parquet", r"damaged parquet .*replace"),
    "damaged.parquet": (lambda content: content[:1000] + b"\xff" * 50_000 + content[51_000:], "damaged parquet"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "x"}\n')[:-9], "Truncated"),
    "bomb.jsonl.zst": (b"", "line 1 .*16 MiB; split"),
    "invalid.parquet": (b"", "row 2 .*UTF-8 at byte 1; convert"),
    "missing.txt": (None, "no file or folder"),
    "none*.txt": (None, "no file or folder.* glob"),
    "folder": (None, "no file with text .*empty.*give"),
}
"""Content of files that cannot be read as text, and a part of what is said of them."""


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bad")
    good = write_parquet(root / "good.parquet", DOCUMENTS).read_bytes()
    for name, (content, _) in BROKEN.items():
        if content is not None:
            (root / name).write_bytes(content(good) if callable(content) else content)
    (root / "folder").mkdir()
    with pa.output_stream(root / "bomb.jsonl.zst", compression="zstd") as file:
        file.write(b'{"text": "' + b"a" * 2**25)
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 2, INVALID_UTF8)}), root / "invalid.parquet")
    (root / "plain.json").write_text('{"not": "a tokenizer"}')
    no_end = Tokenizer(models.BPE())
    no_end.add_tokens(["a"])
    no_end.save(str(root / "no_end.json"))
    return root


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"path": name}, rf"data\.path='.*{re.escape(name)}':? .*{said}") for name, (_, said) in BROKEN.items()),
        *(({option: "x"}, rf"data\.{option}='x': needs data\.hub") for option in ("split", "revision", "hub_config")),
        ({"column": "no"}, r"data\.column='no': .* only text, id, dump"),
        ({"column": "int_score"}, r"data\.column='int_score': .*int64"),
        ({"validation_share": 1e-9}, r"data\.validation_share=1e-09: .* none is for validation"),
        ({"tokenizer": "no.json"}, r"data\.tokenizer='.*no\.json': cannot be read"),
        ({"tokenizer": "plain.json"}, r"data\.tokenizer='.*plain\.json': cannot be used"),
        ({"tokenizer": "no_end.json"}, r".*no_end\.json': has none of .* <\|endoftext"),
        ({"tokenizer": "no_end.json", "end_of_text": "<e>"}, r"data\.end_of_text='<e>': is no token of data\.tokeni"),
        ({"validation": "no.txt"}, r"data\.validation='.*no\.txt': is no file"),
        ({"validation": "latin.jsonl"}, r"data\.validation='.*latin\.jsonl': line 2"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(bad, cache, options, message, capfd):
    given = {"path": "good.parquet", **options}
    paths = {name: str(bad / value) for name, value in given.items() if name in ("path", "tokenizer", "validation")}
    with pytest.raises(ValueError, match=f"^.*{message}.*$"):
        small(**given | paths).load()
    assert not any(cache.glob("*"))
    assert capfd.readouterr().err == ""


def test_too_little_validation_text_is_one_line(corpora, tmp_path):
    """Detected only after tokenising: the tokens stay cached for valid options."""
    (tmp_path / "short.txt").write_text("hello")
    said = r"^data\.context_length=16: the validation text has 6 tokens; .* longer data\.validation$"
    with pytest.raises(ValueError, match=said):
        small(path=corpora["jsonl"], validation=str(tmp_path / "short.txt")).load()


# Text as people have it: files of any name, few documents, a few kilobytes


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
    assert "left out 1 .png, 1 without suffix" in " ".join(capsys.readouterr().err.split())


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


def test_four_kilobytes_are_enough_for_the_experiment(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "notes.md", 4096, "my")
    source = experiment("text", {"data.path": "notes.md"}).data.load()
    assert source.info["validation_tokens"] == 256
    said = " ".join(capsys.readouterr().err.split())
    assert "data.validation_windows=128: the validation text has 1, all count" in said
    assert "571 passes through the text" in describe_repetition(source.info, 1000 * 8 * 256)
    assert describe_repetition({"bytes_per_token": 1.0}, 10**9) == "", "a user's source may not count its tokens"
