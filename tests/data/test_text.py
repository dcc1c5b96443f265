"""One corpus in three formats gives one token stream, made once and memory-mapped; every error is one line."""

import errno
import gzip
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import datasets
import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lit_lazy.command.main import main
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import load_experiment
from lit_lazy.data import text
from lit_lazy.data.facts import list_doubts
from lit_lazy.data.pipeline import documents, tokens
from lit_lazy.data.prompts import Prompts
from lit_lazy.data.text import Text, measure_ngrams
from lit_lazy.data.trigram import ByteTrigram, trigrams
from lit_lazy.support.named_files import find
from lit_lazy.training.prepare import prepare
from lit_lazy.training.run import run

SHARE = 0.2
L = 16


def make_documents(n: int, seed: int = 0) -> list[str]:
    """Texts of 20 to 2000 characters with blank lines, other line ends and characters of one to four bytes."""
    rng = random.Random(seed)
    words = [
        "sink",
        "weight",
        "naïve",
        "注意",
        "head",
        "😀",
        "of",
        "the",
        "\n\n",
        "\r\n",
        "\t",
        '"quoted"',
        "\\n",
        "\u2028",
    ]
    return [f"{i} " + " ".join(rng.choices(words, k=rng.randint(5, 300))) for i in range(n)]


DOCUMENTS = make_documents(300)


def rows(texts: list[str]) -> dict[str, list[object]]:
    """The columns of FineWeb-Edu."""
    n = len(texts)
    return {
        "text": list(texts),
        "id": [f"<urn:uuid:{i}>" for i in range(n)],
        "dump": ["CC-MAIN-2013-20"] * n,
        "url": [f"http://example.org/{i}" for i in range(n)],
        "file_path": ["s3://commoncrawl/x.warc.gz"] * n,
        "language": ["en"] * n,
        "language_score": [0.97] * n,
        "token_count": [len(t) // 4 for t in texts],
        "score": [3.1] * n,
        "int_score": [3] * n,
    }


def write_jsonl(path: Path, texts: list[str]) -> Path:
    columns = rows(texts)
    with path.open("w") as file:
        for i in range(len(texts)):
            file.write(json.dumps({name: values[i] for name, values in columns.items()}) + "\n")
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    datasets.Dataset.from_dict(rows(texts)).to_parquet(path, batch_size=200)  # rows per row group
    return path


def write_groups(path: Path, *groups: list[str]) -> Path:
    """A parquet file with a row group for each list of texts, however short."""
    with pq.ParquetWriter(path, pa.schema({"text": pa.string()})) as writer:
        for group in groups:
            writer.write_table(pa.table({"text": pa.array(group, pa.string())}))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary cache for corpora, and one for the datasets library."""
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same documents as a folder of .txt files, as .jsonl and .json, and as one and several .parquet files."""
    root = tmp_path_factory.mktemp("corpora")
    (root / "txt").mkdir()
    for i, document in enumerate(DOCUMENTS):
        (root / "txt" / f"{i:04}.txt").write_bytes(document.encode())
    (root / "parts").mkdir()
    for i in range(3):
        write_parquet(root / "parts" / f"{i:03}.parquet", DOCUMENTS[i * 100 : (i + 1) * 100])
    return {
        "txt": str(root / "txt"),
        "glob": str(root / "txt" / "0*.txt"),
        "jsonl": str(write_jsonl(root / "all.jsonl", DOCUMENTS)),
        "json": str(write_jsonl(root / "all.json", DOCUMENTS)),
        "parquet": str(write_parquet(root / "all.parquet", DOCUMENTS)),
        "parts": str(root / "parts"),
    }


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte-level BPE with an end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def small(**changes: object) -> Text:
    """A Text with small windows."""
    options = {"context_length": L, "validation_windows": 10, "validation_share": SHARE, **changes}
    return Text(**options)  # type: ignore[arg-type]


def held_out(document: str, share: float = SHARE) -> bool:
    return int(hashlib.sha256(document.encode()).hexdigest()[:16], 16) / 2**64 < share


def joined(texts: list[str]) -> bytes:
    return b"".join(t.encode() + b"\0" for t in texts)


TRAIN = [t for t in DOCUMENTS if not held_out(t)]
VALIDATION = [t for t in DOCUMENTS if held_out(t)]


def in_process(code: str, **environment: str) -> subprocess.Popen[str]:
    """Python code in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Output and errors of a process that must succeed."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out, errors


def compress(path: Path, suffix: str) -> Path:
    """A compressed copy of a file in a folder of its own."""
    packed = path.parent / f"{path.name}{suffix}.d" / f"{path.name.upper()}{suffix.upper()}"
    packed.parent.mkdir()
    with pa.output_stream(packed, compression={".gz": "gzip", ".zst": "zstd"}[suffix]) as file:
        file.write(path.read_bytes())
    return packed


LOAD = "from lit_lazy.data.text import Text; print(Text({}).load().fingerprint)"


# Token stream


def test_parquet_files_and_row_groups_without_rows_are_skipped(tmp_path, corpora):
    middle = len(DOCUMENTS) // 2
    write_groups(tmp_path / "0.parquet", [])
    write_groups(tmp_path / "1.parquet")
    write_groups(tmp_path / "2.parquet", [], DOCUMENTS[:middle], [], DOCUMENTS[middle:], [])
    assert small(path=str(tmp_path)).load().fingerprint == small(path=corpora["parquet"]).load().fingerprint


@pytest.mark.parametrize("kind", ["txt", "glob", "jsonl", "json", "parquet", "parts"])
def test_every_format_gives_the_documents_in_order_each_followed_by_nul(corpora, kind):
    source = small(path=corpora[kind]).load()
    batch = source.train.__getitems__(list(range(len(source.train))))
    expected = joined(TRAIN)
    n = (len(expected) - 1) // L * L
    assert bytes(batch["tokens"].flatten().tolist()) == expected[:n]
    assert bytes(batch["targets"].flatten().tolist()) == expected[1 : n + 1]
    assert source.vocab_size == 256
    assert source.info["bytes_per_token"] == 1.0
    assert source.info["train_tokens"] == n
    assert source.info["validation_tokens"] == 10 * L
    assert (source.info["train_documents"], source.info["validation_documents"]) == (len(TRAIN), len(VALIDATION))
    assert source.fingerprint == small(path=corpora["jsonl"]).load().fingerprint


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_compressed_files_give_the_same_documents(tmp_path, corpora, kind, suffix):
    path = tmp_path / f"all.{kind}"
    path.write_bytes(Path(corpora[kind]).read_bytes())
    packed = compress(path, suffix)
    assert small(path=str(packed)).load().fingerprint == small(path=corpora["jsonl"]).load().fingerprint
    assert small(path=str(packed.parent)).load().fingerprint == small(path=corpora["jsonl"]).load().fingerprint


def test_folders_and_globs_select_the_same_files_each_once(tmp_path, capfd):
    root, linked = tmp_path / "docs", tmp_path / "linked"
    for folder in (root / "deep" / "deeper", root / ".git", linked):
        folder.mkdir(parents=True)
    texts = {"0.txt": "", "A.TXT": "upper", "b.md": "mark", "deep/c.txt": "deep", "deep/deeper/d.txt": "deeper"}
    for name, content in texts.items():
        (root / name).write_text(content)
    write_jsonl(root / "e.jsonl", ["line"])
    (linked / "f.txt").write_text("linked")
    for hidden in (".git/config.txt", ".hidden.txt", "g.csv"):
        (root / hidden).write_text("no")
    for link, target in {"x": linked, "y": linked, "loop": root, "deep/loop": root, "z.txt": root / "A.TXT"}.items():
        (root / link).symlink_to(target)
    (root / "broken.txt").symlink_to(root / "nowhere")
    left_out = "1 .csv, 1 empty, 2 hidden, 4 linked again, 1 unreadable"
    for given in (root, f"{root}/**/*", f"{root}/**", f"{tmp_path}/do*/**/*"):
        train, _ = small(path=str(given))._sources()
        found = [content.decode() for _, content in train.documents()]
        assert found == ["upper", "mark", "deep", "deeper", "line", "linked"]
        assert train.left_out == left_out
    assert [path.name for path in small(path=f"{root}/**/deep*/*.txt")._sources()[0].paths] == ["c.txt", "d.txt"]
    (root / "more.txt").write_text("\n\n".join(DOCUMENTS))
    small(path=str(root), validation_share=0.5, validation_windows=1).load()
    assert f"data.path='{root}': left out {left_out}\n" in capfd.readouterr().err


@pytest.mark.parametrize("blank", ["\n\n", "\n  \t\n", "\r\n\r\n", "\r\n \r\n"])
def test_a_document_ends_at_any_blank_line_and_a_byte_order_mark_is_dropped(tmp_path, blank):
    path = tmp_path / "book.txt"
    paragraphs = ["word\n" * 3000 + "end" for _ in range(9)]
    path.write_bytes(b"\xef\xbb\xbf" + blank.join(paragraphs).encode())
    found = [text.decode() for _, text in documents.Files("data.path", "", (path,), "text").documents()]
    assert len(found) > 4
    assert "".join(found) == blank.join(paragraphs)
    assert all(piece.endswith(f"end{blank}") for piece in found[:-1])
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b"\xef\xbb\xbf" + b'{"text": "one"}\r\n\r\n{"text": "two"}')
    assert [text for _, text in documents.Files("data.path", "", (lines,), "text").documents()] == [b"one", b"two"]


def test_parquet_needs_no_metadata_of_datasets_and_no_plain_name(tmp_path, corpora):
    """As from another version of `datasets`; in a chained URL `::` has a meaning."""
    table = pa.table({"text": DOCUMENTS, "image": DOCUMENTS})
    features = {"info": {"features": {"text": {"_type": "Text9"}, "image": {"_type": "Image9"}}}}
    path = tmp_path / "zip::[1]*.parquet"
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), path)
    assert small(path=str(path)).load().fingerprint == small(path=corpora["jsonl"]).load().fingerprint


def test_validation_windows_are_evenly_spread_over_the_held_out_documents(corpora):
    source = small(path=corpora["jsonl"]).load()
    expected = joined(VALIDATION)
    n = (len(expected) - 1) // L
    for number, window in enumerate(source.validation.sequences.numpy()):
        start = number * n // 10 * L
        assert window.tobytes() == expected[start : start + L + 1]
    assert 0 < len(VALIDATION) < len(DOCUMENTS) / 2


def test_a_given_validation_text_is_used_instead_of_a_share(corpora, tmp_path):
    path = write_jsonl(tmp_path / "validation.jsonl", make_documents(5, seed=1))
    source = small(path=corpora["parquet"], validation=str(path)).load()
    assert source.info["train_documents"] == 300
    assert source.info["validation_documents"] == 5
    assert source.validation.sequences[0].numpy().tobytes() == joined(make_documents(5, seed=1))[: L + 1]


@pytest.mark.parametrize("kind", ["link", "reordered", "other format"])
def test_validation_documents_that_are_trained_on_are_counted_and_refused(tmp_path, corpora, cache, kind, capfd):
    copy = tmp_path / "copy.jsonl"
    if kind == "link":
        copy.symlink_to(corpora["jsonl"])
    elif kind == "reordered":
        write_jsonl(copy, DOCUMENTS[::-1])
    else:
        copy = Path(corpora["txt"])
    config = small(path=corpora["jsonl"], validation=str(copy))
    for _ in range(2):  # also from the cache
        with pytest.raises(ValueError, match=r"data\.validation='.*': the training text has 100% of .*_overlap=True"):
            config.load()
    assert "100.0% of the validation documents are in the training text too" in capfd.readouterr().err
    allowed = replace(config, validation_overlap=True).load()
    assert allowed.info["validation_overlap"] == 1.0
    assert len(list(cache.iterdir())) == 1
    mixed = write_jsonl(tmp_path / "mixed.jsonl", [*make_documents(57, seed=1), *DOCUMENTS[:3]])
    assert small(path=corpora["jsonl"], validation=str(mixed)).load().info["validation_overlap"] == 0.05
    other = write_jsonl(tmp_path / "other.jsonl", make_documents(57, seed=1))
    assert "validation_overlap" not in small(path=corpora["jsonl"], validation=str(other)).load().info


def test_empty_documents_and_nulls_are_skipped(tmp_path):
    with_gaps = [value for t in DOCUMENTS for value in (t, "", None)]
    lines = tmp_path / "gaps.jsonl"
    lines.write_text("".join(json.dumps({"text": value}) + "\n\n" for value in with_gaps))
    table = tmp_path / "gaps.parquet"
    datasets.Dataset.from_dict({"text": with_gaps}).to_parquet(table)
    assert small(path=str(lines)).load().info["train_documents"] == len(TRAIN)
    assert small(path=str(lines)).load().fingerprint == small(path=str(table)).load().fingerprint


def test_another_column(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": "no", "content": t}) + "\n" for t in DOCUMENTS))
    assert small(path=str(path), column="content").load().info["train_documents"] == len(TRAIN)


def test_a_long_text_file_is_cut_at_blank_lines_and_loses_nothing(tmp_path):
    path = tmp_path / "book.txt"
    book = "\n\n".join(make_documents(400)).encode()
    path.write_bytes(book)
    found = [piece for _, piece in documents.Files("data.path", "", (path,), "text").documents()]
    assert b"".join(found) == book
    assert len(found) > 10
    assert all(re.search(rb"\n\s*\n\Z", piece) and len(piece) > documents.MIN_PIECE for piece in found[:-1])


@pytest.mark.parametrize("unit", ["é", "注", "😀", "a"])
@pytest.mark.parametrize("shift", range(4))
def test_a_text_without_spaces_is_cut_between_characters(tmp_path, unit, shift):
    path = tmp_path / "line.txt"
    path.write_bytes(b"x" * shift + unit.encode() * 100_000)
    found = [piece for _, piece in documents.Files("data.path", "", (path,), "text").documents()]
    assert b"".join(found) == path.read_bytes()
    assert len(found) > 1
    for piece in found:
        piece.decode()
        assert len(piece) <= documents.MAX_UNSPLIT


def test_max_tokens_ends_the_training_text(corpora):
    whole = small(path=corpora["jsonl"]).load()
    cut = small(path=corpora["jsonl"], max_tokens=2000 * L).load()
    assert cut.info["train_tokens"] == 2000 * L < whole.info["train_tokens"]
    assert torch.equal(cut.train.sequences, whole.train.sequences[:2000])
    assert cut.fingerprint != whole.fingerprint


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
    assert source.info["bytes_per_token"] > 1.5
    assert "trigram_bits_per_byte" not in source.info


def test_with_bos_each_token_is_a_target_once_behind_the_separator(corpora, bpe):
    plain, config = (
        small(path=corpora["parquet"], tokenizer=bpe),
        small(path=corpora["parquet"], tokenizer=bpe, bos=True),
    )
    end = Tokenizer.from_file(bpe).token_to_id("<|endoftext|>")
    for one, other, first in ((plain, config, end), (small(path=corpora["jsonl"]), None, 0)):
        source = (other or replace(one, bos=True)).load()
        batch = source.train.__getitems__(list(range(len(source.train))))
        tokens = one.load().train.sequences[:, :-1].flatten().tolist()
        targets = batch["targets"].flatten().tolist()
        assert targets[: len(tokens)] == tokens[: len(targets)]
        assert (batch["tokens"][:, 0] == first).all()
        assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    train, validation = (np.frombuffer(joined(part), np.uint8) for part in (TRAIN, VALIDATION))
    bits = -np.log2(ByteTrigram(train[: len(train) // L * L]).probability(trigrams(validation)))
    judged = [bits[place : place + L] for place in np.arange(10) * (len(validation) // L) // 10 * L]
    assert source.info["trigram_bits_per_byte"] == pytest.approx(np.mean(judged), rel=1e-12)
    with pytest.raises(ValueError, match=r"data\.bos=True: excludes data\.document_mask"):
        replace(config, document_mask=True)


def test_the_end_of_text_token_can_be_set(corpora, bpe):
    config = small(path=corpora["parquet"], tokenizer=bpe, end_of_text="<pad>")
    assert (config.load().train.sequences[:, 1:] == 0).sum() == pytest.approx(len(TRAIN), abs=1)
    assert config.load().fingerprint != small(path=corpora["parquet"], tokenizer=bpe).load().fingerprint


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
    stream = np.fromfile(config.tokenise() / "train.bin", np.uint16)
    assert (stream == 1).sum() == config.load().info["train_documents"]
    assert not (stream == 0).any()
    assert Tokenizer.from_file(bpe).decode(stream.tolist()).count("<|endoftext|> and <pad>") > 20
    assert Prompts(config, 400).encode("--prompt", b"<|endoftext|>") == [1]
    begun = replace(config, begin_of_text="<pad>")
    assert (np.fromfile(begun.tokenise() / "train.bin", np.uint16) == 0).sum() == begun.load().info["train_documents"]


def test_a_text_that_becomes_the_separator_by_the_vocabulary_is_refused_by_its_place(tmp_path, cache):
    words = [("<unk>", 0.0), ("</s>", 0.0), *((chr(code), -9.0) for code in range(32, 127))]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "unigram.json"))
    lines = write_jsonl(tmp_path / "a.jsonl", [*DOCUMENTS, "the mark </s> ends"])
    with pytest.raises(ValueError, match=r"data\.path='.*a\.jsonl': line 301 has a text that becomes token 1, which"):
        small(path=str(lines), tokenizer=str(tmp_path / "unigram.json")).load()
    assert not [path for path in cache.iterdir() if not path.name.startswith("shard-")]


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
    assert ("bits per byte are too low: the tokens do not restore" in capfd.readouterr().err) is (share > 0)
    assert len(list_doubts(info)) == (share > 0)


@pytest.mark.long
def test_the_number_of_threads_affects_no_token(corpora, bpe, tmp_path):
    code = LOAD.format(f"{corpora['parquet']!r}, tokenizer={bpe!r}, validation_windows=1")
    settings = [{"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "3"}]
    running = [in_process(code, LIT_LAZY_CACHE=str(tmp_path / str(i)), **s) for i, s in enumerate(settings)]
    assert len({finished(process)[0] for process in running}) == 1


# The baseline


def test_the_trigram_is_measured_on_the_targets_of_the_windows(corpora):
    source = small(path=corpora["jsonl"]).load()
    train, validation = (np.frombuffer(joined(part), np.uint8) for part in (TRAIN, VALIDATION))
    n = (len(train) - 1) // L * L  # the windows' tokens
    bits = -np.log2(ByteTrigram(train[:n]).probability(trigrams(validation)))
    places = np.arange(10) * ((len(validation) - 1) // L) // 10 * L
    judged = [bits[place + 1 : place + 1 + L] for place in places]
    assert source.info["trigram_bits_per_byte"] == pytest.approx(np.mean(judged), rel=1e-12)


def test_trigram_counts_a_bounded_number_of_bytes(corpora, monkeypatch):
    train = small(path=corpora["jsonl"]).load().train.sequences
    validation = np.frombuffer(joined(VALIDATION), np.uint8)
    counted = []
    monkeypatch.setattr(text, "TRIGRAM_BYTES", 100 * L)
    monkeypatch.setattr(text, "ByteTrigram", lambda data: counted.append(data) or ByteTrigram(data))
    bits = measure_ngrams(train, validation, np.arange(10))
    assert 1 < bits["trigram_bits_per_byte"] < bits["unigram_bits_per_byte"] < 8
    assert [data.size for data in counted] == [100 * L]
    assert counted[0][-L:].tobytes() == train[len(train) * 99 // 100, :-1].numpy().tobytes()


# The cache


def test_a_second_load_reads_and_tokenises_nothing(corpora, monkeypatch):
    first = small(path=corpora["parquet"]).load()
    assert small(path=corpora["parquet"]).load() is first
    text._build_source.cache_clear()  # as in another process

    def refuse(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(text, "write_corpus", refuse)
    monkeypatch.setattr(documents.Files, "documents", refuse)
    again = small(path=corpora["parquet"]).load()
    assert again is not first
    assert again.fingerprint == first.fingerprint
    assert again.info == first.info
    assert torch.equal(again.train.sequences, first.train.sequences)
    assert small(path=corpora["parquet"], context_length=2 * L).load().info["train_documents"] == len(TRAIN)
    with pytest.raises(AssertionError, match="read again"):
        small(path=corpora["parquet"], validation_share=0.3).load()


def test_the_cache_holds_the_tokens_and_nothing_else(corpora, cache):
    small(path=corpora["parquet"]).load()
    (folder,) = cache.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "corpus.json", "train.bin", "train.ends", "validation.bin", "validation.ends",
    ]  # fmt: skip
    assert (folder / "train.bin").read_bytes() == joined(TRAIN)
    assert (folder / "validation.bin").read_bytes() == joined(VALIDATION)


def test_a_changed_file_is_another_fingerprint_and_key_and_a_touched_one_is_not(corpora, tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", DOCUMENTS)
    config = small(path=str(path))

    def key():
        return cell_key(RunConfig(config), config.load().fingerprint)

    first = key()
    assert config.load().fingerprint == small(path=corpora["txt"]).load().fingerprint
    os.utime(path, ns=(1, 1))
    assert key() == first
    path.write_text(path.read_text().replace(json.dumps(TRAIN[7])[:20], json.dumps(TRAIN[7])[:19] + "#"))
    changed = key()
    assert changed != first
    assert config.load().info["train_documents"] + config.load().info["validation_documents"] == 300


def test_an_edit_that_keeps_size_and_time_counts_once_the_file_is_touched(tmp_path):
    """As the README says. Hashing each file at each start would read a corpus of gigabytes as often."""
    path = write_jsonl(tmp_path / "text.jsonl", make_documents(50))
    state, before = path.stat(), small(path=str(path)).load().fingerprint
    path.write_text(path.read_text().replace("o", "u"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size
    assert small(path=str(path)).load().fingerprint == before
    path.touch()
    assert small(path=str(path)).load().fingerprint != before


def test_whoever_waited_for_a_corpus_that_fails_states_the_same_reason(tmp_path, capfd):
    def fail(_):
        time.sleep(0.3)  # so that the other waits for the lock
        raise ValueError("too few documents")

    with ThreadPoolExecutor(2) as threads:
        tried = [threads.submit(tokens.make_once, tmp_path / "cache" / "corpus", fail) for _ in range(2)]
    assert [str(attempt.exception()) for attempt in tried] == ["too few documents"] * 2
    assert "another process is tokenising this text" in capfd.readouterr().err
    assert not any((tmp_path / "cache").iterdir())


@pytest.mark.long
def test_processes_that_start_together_tokenise_once(tmp_path, cache):
    path = tmp_path / "big.txt"
    path.write_text("\n\n".join(make_documents(300)) * 40)  # 20 MB: takes longer than the delay between the starts
    go = tmp_path / "go"
    code = f"""
import pathlib, time
from lit_lazy.data.text import Text
print("ready", flush=True)
while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.001)
print(Text({str(path)!r}).load().fingerprint)"""
    running = [in_process(code) for _ in range(2)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    go.touch()
    ended = [finished(process) for process in running]
    assert len({out for out, _ in ended}) == 1
    assert sum("tokenised" in errors for _, errors in ended) == 1
    assert len(list(cache.iterdir())) == 1


def test_a_killed_tokenisation_leaves_nothing_that_looks_complete(corpora, cache):
    code = f"""
import time
from lit_lazy.data.pipeline import shards, tokeniser
shards.BATCH_BYTES = 10_000
encode = tokeniser.ByteTokenizer.encode
calls = []
def slow(self, documents, control):
    calls.append(1)
    if len(calls) == 5:
        print("midway", flush=True)
        time.sleep(60)
    return encode(self, documents, control)
tokeniser.ByteTokenizer.encode = slow
from lit_lazy.data.text import Text
Text({corpora["jsonl"]!r}, context_length={L}, validation_windows=10, validation_share={SHARE}).load()"""
    process = in_process(code)
    assert process.stdout is not None
    assert process.stdout.readline() == "midway\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert any(path.name.endswith(".partial") for path in cache.iterdir())
    assert not list(cache.glob("[!.]*/"))
    source = small(path=corpora["jsonl"]).load()
    (folder,) = cache.iterdir()
    assert (folder / "train.bin").read_bytes() == joined(TRAIN)
    assert source.info["train_documents"] == len(TRAIN)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """50 MB compared with 10 in each format, the .txt as a single line; a JSON line of 1 GB is an error."""
    document = "".join(random.Random(0).choices("abcdefgh ", k=4000))
    for size in (10, 50):
        texts = [f"{i} {document}" for i in range(size * 250)]
        write_jsonl(tmp_path / f"{size}.jsonl", texts)
        (tmp_path / f"{size}.txt").write_text("".join(texts).replace(" ", "_"))
        write_parquet(tmp_path / f"{size}.parquet", texts)
    with (tmp_path / "line.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        file.truncate(2**30)
    code = f"""
import pathlib, re
from lit_lazy.data import text
from lit_lazy.data.text import Text
text.measure_ngrams = lambda *_: {{}}  # its tables of constant size would hide the rest
def peak(name, **options):
    Text(str(pathlib.Path({str(tmp_path)!r}, name)), **options).load()
    return high_water()
def high_water():  # MB of this process; ru_maxrss would include the parent's before the fork
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
small = max([peak("10.txt"), peak("10.jsonl"), peak("10.parquet")])
for kind in ("txt", "jsonl", "parquet"):
    print(peak("50." + kind) - small)
try:
    peak("line.jsonl")
except ValueError as error:
    print(high_water() - small)
    print(error)"""
    *grown, message = finished(in_process(code))[0].splitlines()
    assert len(grown) == 4
    # The text, or its tokens, would add 40 MB; a line of 16 MiB is held twice.
    assert all(float(megabytes) < 20 for megabytes in grown[:3]), grown
    assert float(grown[3]) < 50
    assert "line.jsonl': line 1 is longer than 16 MiB" in message


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path, cache, monkeypatch):
    path = write_jsonl(tmp_path / "mine.jsonl", DOCUMENTS)

    read = documents.Files.documents

    def read_and_change(files):
        yield from read(files)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(documents.Files, "documents", read_and_change)
    with pytest.raises(ValueError, match=r"data\.path='.*mine\.jsonl': changed while it was read; run again"):
        small(path=str(path)).load()
    assert not any(cache.glob("*"))


def test_a_full_disk_is_one_line_and_leaves_nothing(corpora, cache, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokens.os, "fsync", full)
    with pytest.raises(ValueError, match=r"LIT_LAZY_CACHE='.*cache': cannot be written \(No space left on device\)"):
        small(path=corpora["jsonl"]).load()
    assert not any(cache.glob("*"))


def test_a_cache_that_cannot_be_made_is_one_line(corpora, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"LIT_LAZY_CACHE='.*file/cache': cannot be written"):
        small(path=corpora["jsonl"]).load()


def replace_tokens(path: Path) -> None:
    """Other tokens in place of all those of a part; its size stays."""
    stream = np.fromfile(path, np.uint8)
    (stream ^ 1).tofile(path)


DAMAGES = {
    "other tokens": replace_tokens,
    "other ends": lambda path: replace_tokens(path.with_suffix(".ends")),
    "too short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "missing": Path.unlink,
    "no facts": lambda path: path.with_name("corpus.json").write_text("{"),
}


@pytest.mark.parametrize("harm", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_corpus_is_quarantined_and_made_anew(corpora, cache, harm, caplog):
    config = small(path=corpora["jsonl"])
    fingerprint = config.load().fingerprint
    (path,) = cache.glob("*/train.bin")
    good = path.read_bytes()
    harm(path)
    tokens.find_damage.cache_clear()
    assert config.load().fingerprint == fingerprint
    assert path.read_bytes() == good
    assert config.load().train[0]["tokens"].tolist() == list(good[:L])
    (line,) = caplog.messages
    assert re.search(rf"{path.parent.name}: .*; quarantined as {path.parent.name}.damaged, started again", line)
    harm(path)
    tokens.find_damage.cache_clear()
    assert config.load().fingerprint == fingerprint  # a former corpus is in quarantine
    assert sorted(cache.iterdir()) == [path.parent, cache / f"{path.parent.name}.damaged"]


def test_another_process_trains_on_no_other_tokens(corpora, cache, tmp_path):
    small(path=corpora["jsonl"]).tokenise()
    (path,) = cache.glob("*/train.bin")
    good = path.read_bytes()
    replace_tokens(path)
    script = tmp_path / "train.py"
    script.write_text(f"""
from lit_lazy.data.text import Text
config = Text({corpora["jsonl"]!r}, context_length={L}, validation_windows=10, validation_share={SHARE})
print(config.load().train[0]["tokens"].tolist())""")
    out, errors = finished(forked.Popen([sys.executable, script], stdout=forked.PIPE, stderr=forked.PIPE, text=True))
    assert out == f"{list(good[:L])}\n"
    assert f"its tokens differ from their digest; quarantined as {path.parent.name}.damaged" in errors


@pytest.mark.parametrize("mask", [False, True])
def test_a_large_corpus_is_checked_by_block_before_its_first_use(corpora, bpe, cache, monkeypatch, caplog, mask):
    monkeypatch.setattr(tokens, "WHOLE_BYTES", 5000)
    monkeypatch.setattr(tokens, "BLOCK_BYTES", 1000)
    config = small(path=corpora["jsonl"], tokenizer=bpe, document_mask=mask)
    before = config.load()
    (path,) = cache.glob("*/train.bin")
    stream = np.fromfile(path, np.uint16)
    assert stream.nbytes > 20 * tokens.BLOCK_BYTES
    expected = stream[: 3 * L].tolist()
    stream[1500] ^= 1  # in block 3
    stream.tofile(path)
    tokens.find_damage.cache_clear()
    text._build_source.cache_clear()
    damaged = config.load()
    assert damaged.fingerprint == before.fingerprint
    assert damaged.train.__getitems__([0, 1, 2])["tokens"].flatten().tolist() == expected
    with pytest.raises(ValueError, match=r"its folder \w+ is damaged; run again to tokenise it anew"):
        damaged.train.__getitems__([0, 1500 // L + 3])
    assert not path.parent.exists()
    again = config.load()
    assert again.fingerprint == before.fingerprint
    everything = again.train.__getitems__(list(range(len(again.train))))["tokens"].flatten()
    assert everything[1500] == stream[1500] ^ 1
    path.with_suffix(".sha256").write_bytes(b"short")
    tokens.find_damage.cache_clear()
    assert config.load().fingerprint == before.fingerprint
    assert "is incomplete (wrong size of train.sha256); quarantined" in caplog.text


# Hub datasets, as a folder with the same layout


LONG = make_documents(2500, seed=2)  # several batches of the encoder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two configurations; the training split of `sample` has two files, of which the second is not parquet."""
    root = tmp_path / "repository"
    (root / "sample").mkdir(parents=True)
    write_parquet(root / "sample" / "train-0.parquet", LONG)
    (root / "sample" / "train-1.parquet").write_text("PAR1 broken")
    write_parquet(root / "sample" / "test.parquet", make_documents(20, seed=1))
    write_parquet(root / "whole.parquet", DOCUMENTS)
    (root / "README.md").write_text(
        "---\nconfigs:\n- config_name: sample\n  data_files:\n  - split: train\n    path: sample/train-*.parquet\n"
        "  - split: test\n    path: sample/test.parquet\n- config_name: whole\n  data_files: whole.parquet\n---\n"
    )
    return root


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hub_config": "wrong"}, "wrong"),
        ({"split": "wrong"}, "wrong"),
        ({"column": "wrong"}, r"data\.column='wrong': .* has only text, id, dump"),
        ({"column": "score"}, r"data\.column='score': has type double in .*; choose a column with text"),
        ({"validation": "train"}, r"data\.validation='train': equals data\.split"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_wrong_hub_options_are_named(repository, cache, changes, named, stream):
    options = {"hub": str(repository), "hub_config": "whole", "stream": stream, "max_tokens": 10**6, **changes}
    with pytest.raises(ValueError, match=named) as error:
        small(**options).load()
    assert "\n" not in str(error.value)
    assert not cache.exists()


@pytest.mark.long
def test_without_a_network_a_hub_dataset_is_one_line(cache):
    code = """
from lit_lazy.data.text import Text
try:
    Text(hub="HuggingFaceFW/fineweb-edu", hub_config="sample-10BT", stream=True, max_tokens=10**6).load()
except ValueError as error:
    print(error)"""
    out, errors = finished(in_process(code, HF_HUB_OFFLINE="1"))
    assert out.startswith("data.hub='HuggingFaceFW/fineweb-edu': cannot be read (Couldn't reach")
    assert "the network" in out
    assert len(out.splitlines()) == 1
    assert errors == ""
    assert not cache.exists()


# Errors


BAD_FILES = {
    "empty.txt": b"",
    "blank.jsonl": b"\n\n",
    "no_text.jsonl": b'{"text": ""}\n',
    "kind.csv": b"text\nhello\n",
    "binary.txt": b"PAR1\0\0\0",
    "latin.txt": b"a" * 100_000 + b"caf\xe9 au lait",
    "latin.jsonl": b'{"text": "good"}\n{"text": "caf\xe9"}\n',
    "column.jsonl": b'{"content": "x", "id": 1}\n',
    "number.jsonl": b'{"text": "x"}\n{"text": 5}\n',
    "invalid.jsonl": b'{"text": "x"}\n\n{"text": \n',
    "array.json": b'[{"text": "x"}]\n',
    "surrogate.jsonl": b'{"text": "\\ud800"}\n',
    "nul.jsonl": b'{"text": "a\\u0000b"}\n',
    "broken.parquet": b"PAR1 this is no parquet",
    "short.txt": b"hello",
    "one.txt": b"hello you",
}


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory, corpora: dict[str, str]) -> Path:
    root = tmp_path_factory.mktemp("bad")
    for name, content in BAD_FILES.items():
        (root / name).write_bytes(content)
    (root / "folder").mkdir()
    cut = Path(corpora["parquet"]).read_bytes()
    (root / "cut.parquet").write_bytes(cut[: len(cut) // 2])
    (root / "damaged.parquet").write_bytes(cut[:1000] + b"\xff" * 50_000 + cut[51_000:])
    write_parquet(root / "good.parquet", DOCUMENTS)
    invalid = [None, pa.py_buffer(np.array([0, 1, 4], np.int32).tobytes()), pa.py_buffer(b"aa\xffb")]
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 2, invalid)}), root / "invalid.parquet")
    (root / "cut.jsonl.gz").write_bytes(gzip.compress(Path(corpora["jsonl"]).read_bytes())[:-9])
    (root / "plain.txt.zst").write_text("no zstd")
    with pa.output_stream(root / "bomb.jsonl.zst", compression="zstd") as file:
        file.write(b'{"text": "' + b"a" * 2**25)
    twice = pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"])
    pq.write_table(twice, root / "twice.parquet")
    write_groups(root / "rowless.parquet", [])
    write_groups(root / "groupless.parquet")
    (root / "plain.json").write_text('{"not": "a tokenizer"}')
    no_end = Tokenizer(models.BPE())
    no_end.add_tokens(["a"])
    no_end.save(str(root / "no_end.json"))
    return root


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "missing.txt"}, r"data\.path='.*missing\.txt': is no file or folder"),
        ({"path": "none*.txt"}, r"data\.path='.*none\*\.txt': is no file or folder, and as a glob it matches no file"),
        ({"path": "folder"}, r"data\.path='.*folder': has no file with text \(it is empty\); give \.txt, "),
        ({"path": "empty.txt"}, r"data\.path='.*empty\.txt': has no file with text \(1 empty\)"),
        ({"path": "blank.jsonl"}, r"data\.path='.*blank\.jsonl': contains no text"),
        ({"path": "no_text.jsonl"}, r"data\.path='.*no_text\.jsonl': contains no text"),
        ({"path": "kind.csv"}, r"data\.path='.*kind\.csv': has no file with text \(1 \.csv\); give \.txt"),
        ({"path": "binary.txt"}, r"data\.path='.*binary\.txt': has a NUL at byte 4"),
        ({"path": "latin.txt"}, r"data\.path='.*latin\.txt': the text is not UTF-8 at byte 100003; convert"),
        ({"path": "latin.jsonl"}, r"data\.path='.*latin\.jsonl': line 2 is not UTF-8 at byte 13; convert"),
        ({"path": "column.jsonl"}, r"data\.column='text': data\.path='.*column\.jsonl': line 1 has only content, id"),
        (
            {"path": "number.jsonl"},
            r"data\.column='text': data\.path='.*number\.jsonl': line 2 has 5 there; choose a column with text",
        ),
        ({"path": "invalid.jsonl"}, r"data\.path='.*invalid\.jsonl': line 3 is not JSON \(Expecting value"),
        ({"path": "good.parquet", "split": "test"}, r"data\.split='test': needs data\.hub, a file has none; remove it"),
        ({"path": "good.parquet", "revision": "main"}, r"data\.revision='main': needs data\.hub"),
        ({"path": "good.parquet", "hub_config": "x"}, r"data\.hub_config='x': needs data\.hub"),
        ({"path": "array.json"}, r"data\.path='.*array\.json': line 1 is a JSON list; give one object per line"),
        ({"path": "surrogate.jsonl"}, r"data\.path='.*surrogate\.jsonl': line 1 is not valid Unicode"),
        ({"path": "nul.jsonl"}, r"data\.path='.*nul\.jsonl': line 1 has a text that becomes token 0, which separates"),
        (
            {"path": "broken.parquet"},
            r"data\.path='.*broken\.parquet': is incomplete or damaged parquet \(Parquet magic",
        ),
        ({"path": "cut.parquet"}, r"data\.path='.*cut\.parquet': is incomplete or damaged parquet \(Parquet magic"),
        ({"path": "damaged.parquet"}, r"data\.path='.*damaged\.parquet': is incomplete or damaged parquet \("),
        ({"path": "rowless.parquet"}, r"data\.path='.*rowless\.parquet': contains no text; give files with text"),
        ({"path": "groupless.parquet"}, r"data\.path='.*groupless\.parquet': contains no text; give files with text"),
        ({"path": "good.parquet", "column": "no"}, r"data\.column='no': data\.path='.*' has only text, id, dump"),
        (
            {"path": "twice.parquet"},
            r"data\.column='text': data\.path='.*' has only text, text; choose one with",
        ),
        ({"path": "good.parquet", "column": "int_score"}, r"data\.column='int_score': has type int64 in"),
        (
            {"path": "short.txt"},
            r"data\.validation_share=0\.2: of 1 document none is for training; divide the text into more files, or set",
        ),
        ({"path": "one.txt"}, r"data\.validation_share=0\.2: of 1 document none is for validation; divide the text"),
        ({"path": "good.parquet", "tokenizer": "no.json"}, r"data\.tokenizer='.*no\.json': cannot be read \(No such"),
        (
            {"path": "good.parquet", "tokenizer": "plain.json"},
            r"data\.tokenizer='.*plain\.json': cannot be used",
        ),
        ({"path": "good.parquet", "tokenizer": "no_end.json"}, r"no_end\.json': has none of the tokens <\|endoftext"),
        (
            {"path": "good.parquet", "tokenizer": "no_end.json", "end_of_text": "<e>"},
            r"data\.end_of_text='<e>': is no token of data\.tokenizer=",
        ),
        ({"path": "good.parquet", "validation": "no.txt"}, r"data\.validation='.*no\.txt': is no file"),
        (
            {"path": "good.parquet", "validation": "latin.jsonl"},
            r"data\.validation='.*latin\.jsonl': line 2 is not UTF-8",
        ),
        ({"path": "invalid.parquet"}, r"data\.path='.*invalid\.parquet': row 2 is not UTF-8 at byte 1; convert"),
        ({"path": "cut.jsonl.gz"}, r"data\.path='.*cut\.jsonl\.gz': cannot be read \(Truncated compressed stream\)"),
        ({"path": "plain.txt.zst"}, r"data\.path='.*plain\.txt\.zst': cannot be read \(ZSTD decompress failed"),
        ({"path": "bomb.jsonl.zst"}, r"data\.path='.*bomb\.jsonl\.zst': line 1 is longer than 16 MiB; split"),
        ({"path": "a**b/*.txt"}, r"data\.path='.*a\*\*b/\*\.txt': is no file or folder"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(bad, cache, options, message, capfd):
    paths = {name: str(bad / value) for name, value in options.items() if name in ("path", "tokenizer", "validation")}
    with pytest.raises(ValueError, match=message) as error:
        small(**{**options, **paths}).load()
    assert "\n" not in str(error.value)
    assert not any(cache.glob("*"))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 10**7}, r"data\.context_length=10000000: the training text has \d+ tokens; choose"),
        (
            {"validation_windows": 10**6},
            r"data\.validation_windows=1000000: .* has \d+ tokens, .* data\.validation_share$",
        ),
        (
            {"validation": "parquet", "validation_windows": 10**6, "validation_overlap": True},
            r"shorter windows, or a longer data\.validation$",
        ),
    ],
)
def test_too_little_text_is_one_line(corpora, options, message):
    """Detected only after tokenising: the tokens stay cached for valid options."""
    given = {name: corpora.get(value, value) for name, value in options.items()}
    with pytest.raises(ValueError, match=message) as error:
        small(path=corpora["jsonl"], **given).load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 1}, r"data\.context_length=1: must"),
        ({"validation_windows": 0}, r"data\.validation_windows=0: must"),
        ({"validation_share": 0.0}, r"data\.validation_share=0\.0: must"),
        ({"validation_share": 1.0}, r"data\.validation_share=1\.0: must"),
        ({"max_tokens": 3}, r"data\.max_tokens=3: must be a whole number of at least 16"),
        ({"path": "a", "hub": "b"}, r"data\.hub='b': excludes data\.path='a'"),
        ({"path": "a", "stream": True}, r"data\.stream=True: needs data\.hub"),
        ({"hub": "b", "stream": True}, r"data\.stream=True: needs data\.max_tokens"),
        ({"path": "a", "end_of_text": "</s>"}, r"data\.end_of_text='</s>': needs a data\.tokenizer file"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message) as error:
        small(**options)
    assert "\n" not in str(error.value)


# Training


def tiny_run(path: str, **options: object) -> RunConfig:
    return RunConfig(
        data=small(path=path, **options),
        model=ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=32),
        train=TrainConfig(steps=6, batch_size=8, warmup_steps=2, val_every=3, checkpoint_every=3, log_every=2),
    )


def test_training_is_identical_on_every_format_and_reports_bits_per_byte(corpora, bpe, tmp_path):
    by_format = [run(tiny_run(corpora[kind], tokenizer=bpe), tmp_path / kind) for kind in ("txt", "parquet")]
    assert by_format[0].metrics == by_format[1].metrics
    metrics, data = by_format[0].metrics, by_format[0].data
    assert metrics["loss/val"] < metrics["init/loss/val"]
    bits = metrics["loss/val"] / np.log(2)
    assert metrics["loss/bits_per_byte"] == pytest.approx(bits / data["bytes_per_token"])


def test_the_command_line_sets_its_options(corpora, runs, capsys):
    fields = {"data.path": corpora["jsonl"], "data.context_length": L, "data.validation_windows": 10, "train.steps": 3}
    fields |= {"model.d_model": 16, "model.d_ff": 32, "train.warmup_steps": 1, "data.max_tokens": "None"}
    assert main(["train", "text", "--runs", str(runs), *(f"--{name}={value}" for name, value in fields.items())]) == 0
    (result,) = runs.rglob("result.json")
    known = json.loads(result.read_text())
    assert known["config"]["data"]["path"] == corpora["jsonl"]
    assert known["data"]["train_documents"] == sum(not held_out(t, 0.1) for t in DOCUMENTS)
    capsys.readouterr()


def test_the_fineweb_experiment_runs_on_a_folder_with_its_layout(tmp_path):
    root = tmp_path / "fineweb-edu"
    (root / "sample" / "10BT").mkdir(parents=True)
    write_parquet(root / "sample" / "10BT" / "000_00000.parquet", LONG)
    (root / "README.md").write_text(
        "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"
    )
    shipped = load_experiment(find("experiments", "fineweb_edu"))
    tiny = {"data.hub": str(root), "data.max_tokens": 10**6, "data.validation_windows": 4, "model": tiny_run("").model}
    result = run(replace_at(shipped, {**tiny, "train": tiny_run("").train}), tmp_path / "run")
    assert result.data["train_tokens"] == 10**6 // 512 * 512
    assert result.metrics["loss/val"] < result.metrics["init/loss/val"]


def test_the_shipped_experiment_requires_a_path(runs, capsys, cache):
    assert main(["train", "text", "--runs", str(runs)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data.path='': give your text, as in --data.path=FILE" in line
    assert not cache.exists()


def test_a_cached_corpus_opens_fast(tmp_path):
    path = tmp_path / "big.txt"
    path.write_text("\n\n".join(DOCUMENTS) * 20)
    config = Text(str(path))
    prepare(RunConfig(config))
    text._build_source.cache_clear()
    started = time.monotonic()
    prepare(RunConfig(config))
    assert time.monotonic() - started < 5
