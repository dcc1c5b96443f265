"""The text of installed packages: what is left out, how it is split, and that it is the same wherever it is made."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lit_lazy.data import packages
from lit_lazy.data.packages import Packages

BODY = "".join(f"    total = total + values[{number}]  # item {number}\n" for number in range(40))
FILES = {
    "first/sum.py": f"def add(values, total):\n{BODY}    return total\n",
    "first/text.py": "".join(f"def name_{number}():\n    return 'the {number}th'\n" for number in range(60)),
    "first/licenses/texts.py": "LICENCES = ['MIT']\n",
    "first/_version.py": "version = '1.0'\n",
    "first/table.py": f"TABLE = {list(range(900))}\n",
    "first/empty.py": "\n",
    "first/latin.py": b"name = '\xe9'\n",
    "second/copied.py": f"def add(values, total):\n{BODY}    return total\n",
    "second/changed.py": f"def add_all(values, total):\n{BODY}    return total, None\n",
    "second/own.py": "".join(f"class Shape{number}:\n    sides = {number}\n\n" for number in range(60)),
    "apart/copied.py": f"def add(values, total):\n{BODY}    return total\n",
    "apart/other.py": "".join(f"async def wait_{number}():\n    await sleep({number})\n\n" for number in range(60)),
}
KEPT = {"train": ["first/sum.py"], "documents": ["first/text.py", "second/own.py"], "packages": ["apart/other.py"]}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three installed packages, of which `apart` is for validation, and an empty cache."""
    root = tmp_path / "site"
    for package in ("first", "second", "apart"):
        names = [name for name in FILES if name.startswith(f"{package}/")]
        for name in names:
            text = FILES[name]
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        info = root / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(packages, "PACKAGES", {"first": "1.0", "second": "1.0"})
    monkeypatch.setattr(packages, "HELD_OUT", {"apart": "1.0"})
    monkeypatch.setattr(packages, "HELD_OUT_SHARE", 0.4)
    monkeypatch.setattr(packages, "DIGEST", "4a716a316cf260d4")
    monkeypatch.setattr(packages, "TOKENIZER_DIGEST", "639094f43e927c2b")
    monkeypatch.setattr(packages, "TOKENIZER_SHARE", 1.0)
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("site")
def test_copies_and_what_nobody_wrote_are_left_out() -> None:
    folder = packages.make_corpus()
    for part, paths in KEPT.items():
        lines = [line for file in sorted(folder.glob(f"{part}-*")) for line in file.open()]
        assert [json.loads(line)["path"] for line in lines] == paths
    counts = json.loads((folder / packages.COUNTS).read_text())
    left_out = {name.removeprefix("files left out, "): n for name, n in counts.items() if "files left out" in name}
    assert left_out == {"copies": 2, "near copies": 1, "generated or empty": 3}
    kept = [counts[f"{part} files"] for part in KEPT]
    assert counts["files"] == sum(kept) + sum(left_out.values())


def test_a_price_needs_no_corpus_and_assumes_no_other_vocabulary(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))
    outline = Packages().outline_elsewhere()
    assert (outline.vocab_size, outline.assumed) == (packages.VOCABULARY, "")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("site")
def test_validation_is_of_held_out_documents_or_of_other_packages() -> None:
    config = Packages(context_length=8, validation_windows=9)
    documents, apart = config.load(), replace(config, validated="packages").load()
    assert documents.fingerprint == apart.fingerprint
    texts = {path: str(FILES[path]) for paths in KEPT.values() for path in paths}
    for source, first in ((documents, "first/text.py"), (apart, "apart/other.py")):
        beginning = "".join(config.load_tokenizer().decode(source.validation.sequences[0].tolist()))
        assert texts[first].startswith(beginning)
    for source, paths in ((documents, KEPT["documents"]), (apart, KEPT["packages"])):
        tokens = sum(len(x) + 1 for x in config.load_tokenizer().encode([texts[path].encode() for path in paths]))
        size = sum(len(texts[path]) + 1 for path in paths)
        assert source.info["bytes_per_token"] == pytest.approx(size / tokens)


@pytest.mark.usefixtures("site")
def test_with_a_limit_of_tokens_the_whole_documents_tell_the_bytes_of_a_token() -> None:
    """The limit cuts the second of two, or the only one."""
    config = Packages(context_length=8)
    first, second, apart = (str(FILES[path]).encode() for path in (*KEPT["documents"], *KEPT["packages"]))
    lengths = [len(x) + 1 for x in config.load_tokenizer().encode([first, second, apart])]
    limited = replace(config, max_tokens=lengths[0] + 5).load()
    assert limited.info["bytes_per_token"] == (len(first) + 1) / lengths[0]
    with pytest.raises(ValueError, match=r"data.max_tokens=\d+: must hold a whole document of packages; give more"):
        replace(config, max_tokens=sum(lengths) - 5, validated="packages").load()


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"PACKAGES": {"first": "1.1"}}, "data=Packages: first='1.0': pip install first==1.1, or give other text"),
        ({"PACKAGES": {"absent": "1.0"}}, "data=Packages: absent=None: pip install absent==1.0, or give other text"),
        ({"DIGEST": "0" * 16}, "data=Packages: sources='4a716a316cf260d4': should have the digest 0000000000000000"),
        ({"TOKENIZER_DIGEST": "0"}, "should have the digest 0; install tokenizers as in requirements.txt"),
    ],
)
def test_another_text_is_refused(tmp_path, monkeypatch, change, message) -> None:
    for name, value in change.items():
        monkeypatch.setattr(packages, name, value)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Packages().load()
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("packages*"))


def test_the_pins_are_those_of_the_requirements() -> None:
    root = Path(__file__).parents[2]
    pins = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.]+)", (root / "requirements.txt").read_text(), re.MULTILINE))
    pins |= dict(re.findall(r"^([\w.-]+)==([\w.]+)", (root / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    named = packages.PACKAGES | packages.HELD_OUT
    assert {name: pins.get(name.lower().replace("_", "-")) for name in named} == named
