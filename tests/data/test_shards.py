"""A corpus is made file by file and once, byte-identical for any number of processes, kills, full disks and damage."""

import contextlib
import errno
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import forked
import huggingface_hub
import numpy as np
import psutil
import pytest
import torch
from corpora import DOCUMENTS, SHARE, TRAIN, VALIDATION, L, joined, small, write_jsonl, write_parquet
from test_tasks import read
from tokenizers import Tokenizer

from lit_lazy.command.main import main
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.data import text
from lit_lazy.data.pipeline import corpus_cache, shards
from lit_lazy.data.pipeline.documents import Files
from lit_lazy.data.pipeline.hub import Hub, HubFile
from lit_lazy.data.pipeline.shards import FileJob, find_or_make_shard
from lit_lazy.support.error_messages import UnfinishedError

pytestmark = pytest.mark.usefixtures("cache")
KNOWN = [
    ({}, "0a6a201190438e7c", 240, 60),
    ({"max_tokens": 50_000}, "87baeb35e24db4f8", 62, 15),
    ({"max_tokens": 123_457}, "9ae0961e541897b8", 156, 38),
    ({"validation": True}, "bd03d19b4d26f74d", 300, 50),
    ({"validation": True, "max_tokens": 10_000}, "c307661979e81e1e", 12, 13),
    ({"validation_share": 0.5}, "4bead728df8003fb", 141, 159),
]
"""Fingerprints and document counts of the version that read all files in one pass."""


def corpus(folder: Path) -> dict[str, bytes]:
    """All files of a corpus."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def plan(config: text.Text) -> list[FileJob]:
    """The jobs of a corpus with a share for validation."""
    return config._jobs(config._sources()[0].split_parts(), SHARE)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(("options", "fingerprint", "train", "validation"), KNOWN)
def test_fingerprints_are_unchanged(parts, tmp_path, cache, options, fingerprint, train, validation, processes):
    if "validation" in options:
        options = options | {"validation": str(tmp_path / "validation.jsonl")}
    config = small(path=str(parts), **options)
    folder = config.tokenise(processes)
    source = config.load()
    assert source.fingerprint == fingerprint
    assert (source.info["train_documents"], source.info["validation_documents"]) == (train, validation)
    assert list(cache.iterdir()) == [folder]
    assert corpus(folder).keys() == {"corpus.json", *(f"{p}.{x}" for p in text.PARTS for x in ("bin", "ends"))}
    if not options:
        assert [(folder / f"{part}.bin").read_bytes() for part in text.PARTS] == [joined(TRAIN), joined(VALIDATION)]


def test_begin_token_and_mask_do_not_change_other_keys(parts, bpe):
    plain = small(path=str(parts), tokenizer=bpe)
    masked = small(path=str(parts), tokenizer=bpe, document_mask=True)
    begun = small(path=str(parts), tokenizer=bpe, begin_of_text="<pad>")
    assert plain.tokenise() == masked.tokenise() != begun.tokenise()
    keys = {cell_key(RunConfig(data), data.load().fingerprint) for data in (plain, masked, begun)}
    assert len(keys) == 3
    tokenizer = Tokenizer.from_file(bpe)
    stream = np.fromfile(begun.tokenise() / "train.bin", np.uint16)
    ends = np.fromfile(begun.tokenise() / "train.ends", np.int64)
    assert (stream[[0, *ends[:-1]]] == tokenizer.token_to_id("<pad>")).all()
    assert (stream[ends - 1] == tokenizer.token_to_id("<|endoftext|>")).all()
    without = np.fromfile(plain.tokenise() / "train.bin", np.uint16)
    assert np.array_equal(np.delete(stream, [0, *ends[:-1]]), without)


# The cache


def test_a_second_load_reads_and_tokenises_nothing(corpora, monkeypatch):
    first = small(path=corpora["parquet"]).load()
    assert small(path=corpora["parquet"]).load() is first
    text._build_source.cache_clear()  # as in another process

    for owner, name in ((text, "write_corpus"), (Files, "documents")):
        monkeypatch.setattr(owner, name, Mock(side_effect=AssertionError("read again")))
    again = small(path=corpora["parquet"]).load()
    assert again is not first
    assert (again.fingerprint, again.info) == (first.fingerprint, first.info)
    assert torch.equal(again.train.sequences, first.train.sequences)
    assert small(path=corpora["parquet"], context_length=2 * L).load().info["train_documents"] == len(TRAIN)
    with pytest.raises(AssertionError, match="read again"):
        small(path=corpora["parquet"], validation_share=0.3).load()


def test_a_changed_file_is_another_key_and_a_touched_one_is_not(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", DOCUMENTS)
    config = small(path=str(path))

    first = config.load().fingerprint
    os.utime(path, ns=(1, 1))
    assert config.load().fingerprint == first
    path.write_text(path.read_text().replace("sink", "sank", 1))
    assert config.load().fingerprint != first


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path, cache, monkeypatch):
    path = write_jsonl(tmp_path / "mine.jsonl", DOCUMENTS)
    whole = Files.documents

    def read_and_change(files):
        yield from whole(files)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(Files, "documents", read_and_change)
    with pytest.raises(ValueError, match=r"data\.path='.*mine\.jsonl': changed while it was read; run again"):
        small(path=str(path)).load()
    assert not any(cache.glob("*"))


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
    corpus_cache.find_damage.cache_clear()
    assert config.load().fingerprint == fingerprint
    assert path.read_bytes() == good
    assert config.load().train[0]["tokens"].tolist() == list(good[:L])
    (line,) = caplog.messages
    assert re.search(rf"{path.parent.name}: .*; quarantined as {path.parent.name}.damaged, started again", line)
    harm(path)
    corpus_cache.find_damage.cache_clear()
    assert config.load().fingerprint == fingerprint  # a former corpus is in quarantine
    assert sorted(cache.iterdir()) == [path.parent, cache / f"{path.parent.name}.damaged"]


@pytest.mark.parametrize("mask", [False, True])
def test_a_large_corpus_is_checked_by_block_before_its_first_use(corpora, bpe, cache, monkeypatch, caplog, mask):
    monkeypatch.setattr(corpus_cache, "WHOLE_BYTES", 5000)
    monkeypatch.setattr(corpus_cache, "BLOCK_BYTES", 1000)
    config = small(path=corpora["jsonl"], tokenizer=bpe, document_mask=mask)
    before = config.load()
    (path,) = cache.glob("*/train.bin")
    stream = np.fromfile(path, np.uint16)
    assert stream.nbytes > 20 * corpus_cache.BLOCK_BYTES
    expected = stream[: 3 * L].tolist()
    stream[1500] ^= 1  # in block 3
    stream.tofile(path)
    corpus_cache.find_damage.cache_clear()
    text._build_source.cache_clear()
    damaged = config.load()
    assert damaged.fingerprint == before.fingerprint
    assert damaged.train.__getitems__([0, 1, 2])["tokens"].flatten().tolist() == expected
    with pytest.raises(ValueError, match=r"its folder \w+ is damaged; run again"):
        damaged.train.__getitems__([0, 1500 // L + 3])
    assert not path.parent.exists()
    again = config.load()
    assert again.fingerprint == before.fingerprint
    assert read(again.train)["tokens"].flatten()[1500] == stream[1500] ^ 1
    path.with_suffix(".sha256").write_bytes(b"short")
    corpus_cache.find_damage.cache_clear()
    assert config.load().fingerprint == before.fingerprint
    assert "is incomplete (wrong size of train.sha256); quarantined" in caplog.text


# Kills, damage, full disks


SLOW = """
import time
import forked
from lit_lazy.data.pipeline import documents, shards, tokeniser, workers
from lit_lazy.data.text import Text
documents.SMALL_FILES, shards.BATCH_BYTES, workers.subprocess = 0, 3000, forked
encode = tokeniser.ByteTokenizer.encode
def slow(self, *given):
    time.sleep({seconds})
    return encode(self, *given)
tokeniser.ByteTokenizer.encode = slow
options = dict(context_length=16, validation_windows=10, validation_share=0.2, max_tokens={limit})
Text({path!r}, **options).tokenise({processes})
"""


def tokenise_slowly(parts: Path, processes: int, seconds: float, limit: int | None = None) -> list[str]:
    """A command that waits before each batch."""
    script = parts.parent / "slow.py"
    script.write_text(SLOW.format(path=str(parts), processes=processes, seconds=seconds, limit=limit))
    return [sys.executable, str(script)]


def test_a_corpus_killed_at_random_moments_is_byte_identical(parts, tmp_path, cache, monkeypatch):
    """Repeated SIGKILL of the command and all its workers; no finished file is read again."""
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "undisturbed"))
    undisturbed = corpus(small(path=str(parts), max_tokens=123_457).tokenise())
    monkeypatch.setenv("LIT_LAZY_CACHE", str(cache))
    command = tokenise_slowly(parts, 3, 0.01, 123_457)
    rng, kills, done = random.Random(3), 0, {}
    while True:
        with forked.Popen(command, stdout=forked.DEVNULL, stderr=forked.PIPE, text=True) as running:
            more = len(done) + rng.choice([0, 1, 1, 2]) if kills < 4 else 100
            while running.poll() is None and len(list(cache.glob("*.json"))) < more:
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, 0.2))
            if running.poll() is not None:
                assert running.returncode == 0, running.stderr.read()
                break
            tree = [*psutil.Process(running.pid).children(recursive=True), psutil.Process(running.pid)]
            for process in rng.sample(tree, len(tree)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            running.wait()
        kills += 1
        for path in cache.glob("*.json"):
            assert done.setdefault(path, path.stat().st_mtime_ns) == path.stat().st_mtime_ns
        joining = [*cache.glob("*/corpus.json"), *cache.glob(".*/corpus.json")]
        assert joining or all(path.exists() for path in done)
    assert kills >= 2
    assert done
    (folder,) = cache.iterdir()
    assert corpus(folder) == undisturbed


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "said"),
    [(damage, True), (Path.unlink, True), (lambda path: path.with_suffix(".json").write_text("{"), False)],
)
def test_a_damaged_shard_is_made_again(parts, cache, harm: Callable[[Path], object], said, capfd, monkeypatch):
    config = small(path=str(parts))
    cache.mkdir()
    made = [find_or_make_shard(job, cache, lambda *_: None) for job in plan(config)]
    harm(made[3].path)
    opened = []
    whole = Files.documents
    monkeypatch.setattr(Files, "documents", lambda self: opened.append(self.paths[0].name) or whole(self))
    assert config.load().fingerprint == KNOWN[0][1]
    assert opened == ["0.jsonl", "0.jsonl", "3.jsonl"]  # the first is read, and counted, before anything is created
    assert ("is damaged; tokenising it again" in capfd.readouterr().err) is said


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_keeps_finished_shards(parts, cache, processes, monkeypatch):
    config = small(path=str(parts))
    names = [job.name for job in plan(config)]
    sync = os.fsync

    def full(number: int) -> None:
        if names[4] in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match=r"LIT_LAZY_CACHE='.*': cannot be written \(No space left on device\)"):
            config.tokenise(processes)
    left = {path.name for path in cache.iterdir()}
    assert {f"{name}.json" for name in names[:4]} <= left
    assert not [name for name in left if "partial" in name or "lock" in name]
    assert all(name.startswith("shard-") for name in left)
    assert config.load().fingerprint == KNOWN[0][1]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_in_a_later_file_is_one_line_and_keeps_the_other_shards(parts, cache, processes):
    config = small(path=str(parts))
    bad, good = parts / "5.jsonl", (parts / "5.jsonl").read_text()
    bad.write_text(good + "{\n")
    with pytest.raises(ValueError, match=r"data\.path='.*5\.jsonl': line 44 is not JSON"):
        config.tokenise(processes)
    assert len(list(cache.glob("*.json"))) >= 5
    # Files that are not needed are not checked.
    assert small(path=str(parts), max_tokens=50_000).load().fingerprint == KNOWN[1][1]
    bad.write_text(good)
    assert config.load().fingerprint == KNOWN[0][1]


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_dies_is_one_line(parts, cache, monkeypatch):
    def die(*_: object) -> None:
        os._exit(9)

    config = small(path=str(parts))
    sources = config._sources()
    monkeypatch.setattr(text, "require_documents", lambda source: source.split_parts())
    monkeypatch.setattr(shards, "encode_documents", die)
    with pytest.raises(UnfinishedError, match=r"died \(status 9\), .* fewer --processes"):
        config._tokenise(cache / config._key(sources), sources, 2)
    assert not any(cache.glob("*"))


@pytest.mark.usefixtures("forked_workers")
def test_workers_end_with_their_command(parts, cache):
    """Even if only the command is killed by SIGKILL."""
    command = tokenise_slowly(parts, 2, 0.2)
    with forked.Popen(command, stdout=forked.DEVNULL, stderr=forked.DEVNULL) as running:
        while len(children := psutil.Process(running.pid).children()) < 2:
            time.sleep(0.01)
        while not list(cache.glob(".shard-*.bin.*")):
            time.sleep(0.01)
        running.kill()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


# Number of processes


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.2, 0.5, 1 / 3, 1 - 2**-53])
def test_the_share_is_exact(share):
    edge = share * 2**64
    hashes = [int(edge) + i for i in (-1, 0, 1) if 0 <= int(edge) + i < 2**64]
    assert shards.select_held_out(np.array(hashes, np.uint64), share).tolist() == [number < edge for number in hashes]


# The Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A stubbed Hub dataset with a known listing; returns what was asked of the Hub's library."""
    root, asked = tmp_path / "remote", []
    root.mkdir()
    for i in range(3):
        write_parquet(root / f"{i}.parquet", DOCUMENTS[i * 100 : (i + 1) * 100])

    def download(name: str, path: str, *, repo_type: str, revision: str, **_: object) -> str:
        asked.append((name, path, repo_type, revision))
        if not (root / path).exists():
            raise OSError("404 Client Error.\n\nEntry Not Found for url")
        return str(root / path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    listing = [f"hf://datasets/someone/text@{'c' * 40}/{i}.parquet" for i in range(3)]
    monkeypatch.setattr(Hub, "_list_files", lambda _: listing)
    return asked


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_files_of_the_hub_are_asked_for_once_each(hub, processes):
    config = small(hub="someone/text")
    config.tokenise(processes)
    assert config.load().fingerprint == KNOWN[0][1]
    if processes == 1:  # requests of forks are not recorded
        asked = [("someone/text", f"{i}.parquet", "dataset", "c" * 40) for i in (0, 0, 1, 2)]
        assert hub == asked, "the first document is read before anything is created"
    stream = Hub("data.hub", "someone/text", "text", None, None, "train", stream=True)
    assert stream.split_parts() == [stream]
    with pytest.raises(ValueError, match=r"^data\.hub='someone/text': cannot be read \(.*404 Client Error.*$"):
        list(HubFile("data.hub", "someone/text", "text", "c" * 40, "9.parquet").documents())


# The command


def tokenise(path: Path, *more: str) -> int:
    given = {"data.path": path, "data.context_length": L, "data.validation_windows": 10, "train.batch_size": 2}
    own = {word.removeprefix("--").partition("=")[0] for word in more}
    return main(["tokenise", "text", *(f"--{name}={value}" for name, value in given.items() if name not in own), *more])


def test_the_command_reports_the_corpus_and_the_recipe(parts, cache, capsys):
    assert tokenise(parts, "--train.steps=100", "--train.warmup_steps=1", "--data.validation_share=0.2") == 0
    out, _ = capsys.readouterr()
    assert str(next(iter(cache.iterdir()))) in out
    assert "training     240 documents, 184,256 tokens, 11,516 windows of 16" in out
    assert "256 tokens, 1.000 bytes per token" in out
    assert "100 steps of 2 x 16 see 3,200 tokens: 2% of the available tokens" in out
    assert tokenise(parts, "--train.steps=20000", "--data.validation_share=0.2") == 0
    assert "see 640,000 tokens: 3.47 passes through the tokens; 455,744 more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["text", "--train.batch_size=100000"], "train.batch_size=100000: must not exceed the"),
        (["text", "--data.context_length=1000000"], "data.context_length=1000000: the training text has"),
        (["stdlib"], "data='Stdlib': has its tokens in memory"),
    ],
)
def test_errors_of_the_command_are_one_line(parts, capsys, words, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no tokenizer lies
    name, *more = words
    assert (tokenise(parts, *more) if name == "text" else main(["tokenise", name])) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert line in last


# Windows of documents


@pytest.mark.long
def test_real_workers_of_a_script_without_a_main_guard(parts, tmp_path):
    """Spawned processes; the script's lines run once."""
    script = tmp_path / "mine.py"
    script.write_text(
        "from lit_lazy.data.pipeline import documents\nfrom lit_lazy.data.text import Text\ndocuments.SMALL_FILES = 0\n"
        f"print(Text({str(parts)!r}, validation_share=0.2).tokenise(2).name)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 1
    assert small(path=str(parts)).load().fingerprint == KNOWN[0][1]
