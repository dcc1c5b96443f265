"""The text is the library's sources, split by file and cut without loss; the baseline is measured on its targets."""

import platform
import sysconfig
from collections import Counter, defaultdict
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_tasks import read

from lit_lazy.data import stdlib_text
from lit_lazy.data.stdlib import ByteTrigram, Stdlib, is_validation, load_folder, read_sources, trigrams
from lit_lazy.data.stdlib_text import StdlibText

CONFIG = Stdlib(context_length=16, validation_windows=10)
WANTED = [f"package/module{i}.py" for i in range(60)] + ["top.py", "testing.py", "unittest/case.py"]
UNWANTED = [
    *("test/test_top.py", "package/tests/test_layer.py", "idlelib/idle_test/mock.py", "site-packages/other.py"),
    *("package/__pycache__/module.py", "encodings/cp1252.py", "pydoc_data/topics.py", "notes.txt"),
    *("config-3.11-linux/python-config.py", "_sysconfigdata__linux.py"),
]


@pytest.fixture
def library(tmp_path):
    for number, name in enumerate(WANTED + UNWANTED):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"value{i} = 0x{sha256(f'{number} {i}'.encode()).hexdigest()}\n" for i in range(10)]
        path.write_text(f"# {name}\n" + "".join(lines))
    return tmp_path


def text_of(library, held_out):
    """The files of one part, sorted by path."""
    return b"\0".join((library / name).read_bytes() for name in sorted(WANTED) if is_validation(name) == held_out)


def test_as_text_it_has_the_same_files_in_each_part(library, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(stdlib_text, "sysconfig", SimpleNamespace(get_path=lambda _: str(library)))
    source = StdlibText(context_length=16, validation_windows=10).load()
    train, validation = (x.sequences[:, :-1].numpy().tobytes() for x in (source.train, source.validation))
    assert train == (text_of(library, held_out=False) + b"\0")[: len(source.train) * 16]
    assert not [name for name in WANTED if f"# {name}\n".encode() in validation and not is_validation(name)]


@pytest.mark.parametrize("bos", [False, True])
def test_windows_lose_nothing_and_the_trigram_is_measured_on_their_targets(library, bos):
    """Windows are shifted by one token, or begin with BOS; those of validation are evenly spread."""
    source, plain = (load_folder(replace(CONFIG, bos=x), library) for x in (bos, False))
    assert (source.vocab_size, source.fingerprint) == (plain.vocab_size, plain.fingerprint)
    batch, shift = read(source.train), 0 if bos else 1
    train, validation = (text_of(library, part) for part in (False, True))
    n = (len(train) - shift) // 16 * 16
    assert len(train) - n <= 16
    assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
    assert bytes(batch["targets"].flatten().tolist()) == train[shift : n + shift]
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert bytes(batch["tokens"][:, 0].tolist()) == (bytes(n // 16) if bos else train[:n:16])
    targets = [x.numpy().tobytes() for x in source.validation.sequences[:, 1:]]
    places = [validation.index(each) for each in targets]
    assert len(places) == 10
    assert {place % 16 for place in places} == {shift}
    gaps = np.diff([*places, (len(validation) - shift) // 16 * 16 + shift]) // 16
    assert 1 < gaps.min() <= gaps.max() <= gaps.min() + 1
    probability = ByteTrigram(np.frombuffer(train, np.uint8)).probability(trigrams(np.frombuffer(validation, np.uint8)))
    bits = np.mean([-np.log2(probability[place : place + 16]) for place in places])
    assert source.info["trigram_bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_fingerprint_follows_the_content_used_and_python(library, monkeypatch):
    def fingerprint():
        return load_folder(CONFIG, library).fingerprint

    seen = [fingerprint()]
    (library / "test/test_top.py").write_text("changed")
    assert fingerprint() == seen[0]
    for part in (True, False):
        path = library / next(name for name in WANTED if is_validation(name) == part)
        path.write_text(path.read_text().replace("value0", "value_"))
        seen.append(fingerprint())
    moved = next(f"moved{i}.py" for i in range(1000) if is_validation(f"moved{i}.py") != is_validation("top.py"))
    (library / "top.py").rename(library / moved)
    seen.append(fingerprint())
    assert platform.python_version() in seen[0]
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    assert len({*seen, fingerprint()}) == 5


@pytest.mark.parametrize(
    ("options", "files", "message"),
    [
        ({}, {}, "stdlib=.*: has no .py file"),
        ({}, {"nul.py": "x = 1\0"}, r"nul\.py': contains a NUL byte"),
        ({"validation_windows": 100_000}, {}, r"data\.validation_windows=100000: .* has \d+ windows"),
        ({"context_length": 1_000_000}, {}, r"data\.context_length=1000000: the training text"),
    ],
)
def test_a_library_that_cannot_be_used_is_one_line(library, tmp_path_factory, options, files, message):
    folder = library if options or files else tmp_path_factory.mktemp("empty")
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_folder(Stdlib(**{"context_length": 16, "validation_windows": 10} | options), folder)
    assert "\n" not in str(error.value)


def test_running_python():
    source = Stdlib().load()
    assert source is Stdlib().load()
    assert source.vocab_size == 256
    assert source.info["python_version"] == platform.python_version()
    assert len(source.validation) == 256
    assert source.info["train_tokens"] == len(source.train) * 256 > 4_000_000
    # Between an unreachable value for Python sources and the uniform distribution.
    assert 1.5 < source.info["trigram_bits_per_byte"] < 4 < source.info["unigram_bits_per_byte"] < 5
    paths = read_sources(Path(sysconfig.get_path("stdlib")))
    assert {"argparse.py", "json/decoder.py", "unittest/case.py"} <= set(paths)
    assert not [path for path in paths if {"test", "tests", "idle_test", "site-packages"} & set(path.split("/"))]


def test_is_witten_bell():
    """Against the recursion with dictionaries."""
    rng = np.random.default_rng(0)
    text, held_out = rng.integers(97, 103, 300).astype(np.uint8), rng.integers(96, 105, 200).astype(np.uint8)
    followers = defaultdict(Counter)
    padded = bytes(2) + text.tobytes()
    for end in range(2, len(padded)):
        for begin in (end, end - 1, end - 2):
            followers[padded[begin:end]][padded[end]] += 1

    def witten_bell(history, byte):
        lower = witten_bell(history[1:], byte) if history else 1 / 256
        seen = followers[history]
        if not seen:
            return lower
        return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen))

    padded = bytes(2) + held_out.tobytes()
    expected = [witten_bell(padded[end - 2 : end], padded[end]) for end in range(2, len(padded))]
    assert np.allclose(ByteTrigram(text).probability(trigrams(held_out)), expected, rtol=1e-12)
    unigram = [witten_bell(b"", byte) for byte in held_out.tobytes()]
    assert np.allclose(ByteTrigram(text).probability(trigrams(held_out), order=1), unigram, rtol=1e-12)
    bits = {"unigram_bits_per_byte": -np.log2(unigram).mean(), "trigram_bits_per_byte": -np.log2(expected).mean()}
    assert ByteTrigram(text).measure_bits(trigrams(held_out)) == pytest.approx(bits, rel=1e-12)
