"""Python sources of pinned packages: much real text, the same on every machine that installs this project's pins.

Made once, into the cache of tokens: files of JSON lines with the documents, and a tokenizer trained on them.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.version import Version

from lit_lazy.data.pipeline.corpus_cache import Corpus, cache_folder, make_once
from lit_lazy.data.pipeline.documents import Files, Source
from lit_lazy.data.pipeline.shards import hash_document
from lit_lazy.data.pipeline.tokeniser import END_OF_TEXT, TokenizerSpec
from lit_lazy.data.source_interface import Outline
from lit_lazy.data.text import Text
from lit_lazy.support.checked_fields import require

PACKAGES = {
    "GitPython": "3.2.1",
    "Pygments": "2.21.0",
    "SQLAlchemy": "2.1.9",
    "anyio": "4.16.0",
    "click": "8.5.1",
    "datasets": "5.2.0",
    "docker": "7.2.0",
    "fastapi": "0.165.0",
    "filelock": "4.2.11",
    "fonttools": "4.68.0",
    "gguf": "0.19.0",
    "graphql-core": "3.2.14",
    "gunicorn": "26.2.0",
    "huey": "3.5.4",
    "huggingface_hub": "2.4.0",
    "joblib": "1.6.0",
    "lightning": "2.6.6",
    "matplotlib": "3.11.2",
    "mlflow": "3.17.2",
    "mlflow-skinny": "3.17.2",
    "mpmath": "1.3.0",
    "multiprocess": "0.70.19",
    "networkx": "3.6.1",
    "numpy": "2.4.6",
    "opentelemetry-sdk": "1.45.2",
    "packaging": "26.3",
    "pandas": "3.1.1",
    "psycopg": "3.3.9",
    "pyarrow": "25.0.1",
    "pydantic": "2.14.3",
    "pyparsing": "3.3.3",
    "scikit-learn": "1.9.1",
    "scipy": "1.17.1",
    "sympy": "1.14.0",
    "torch": "2.13.0",
    "torchmetrics": "1.9.0",
    "triton": "3.7.1",
    "urllib3": "2.8.0",
}
"""Packages of the training text, and their versions."""
HELD_OUT = {
    "Jinja2": "3.1.6",
    "Werkzeug": "3.1.9",
    "aiohttp": "3.14.5",
    "alembic": "1.20.1",
    "fsspec": "2026.9.0",
    "narwhals": "2.29.0",
    "optuna": "5.0.0",
    "pillow": "13.0.0",
    "rich": "15.0.0",
}
"""Packages of which the training text has nothing."""
DIGEST = "1edd4e1e8643600f"
"""Of all documents and their places."""
TOKENIZER_DIGEST = "2f0ccd37bc96a657"
"""Of the tokenizer's file."""
PARTS = TRAIN, DOCUMENTS, APART = "train", "documents", "packages"
TOKENIZER, COUNTS = "tokenizer.json", "counts.json"
"""Names of what a folder of the corpus holds: parts of the text, the tokenizer, and numbers of files and bytes."""

LEFT_OUT = re.compile(r"(^|/)(licen[cs]e|copying|_?version\.py$|__config__\.py$|_distributor_init)", re.IGNORECASE)
"""Paths of licences, and of files that are written when a wheel is built."""
MOST_LINE, MOST_MEAN_LINE = 1_000, 100
"""Longest line and longest mean line of a file that people wrote (Chen et al., arXiv 2107.03374)."""
SHINGLE = 5
"""Lines at which two files are compared at a time."""
ONE_IN = 4
"""One in so many runs of lines is compared."""
MOST_KNOWN = 0.5
"""Largest share of a file's runs of lines that files before it may have."""
PART_BYTES = 8 * 2**20
VOCABULARY = 4_096
HELD_OUT_SHARE = 0.02
"""Share of the documents of the other packages, selected by the hash of their text, that are held out too."""
TOKENIZER_SHARE = 0.25
"""Share of the documents on which the tokenizer is trained."""


class PackageFile(NamedTuple):
    package: str
    path: str
    text: bytes


@dataclass(frozen=True)
class Packages(Text):
    """Python sources of pinned packages, in the tokens of a byte-level BPE of 4,096 that is trained on them.

    Files that are generated, or half of whose lines are in a file before them, are left out. `--data.path` gives other
    text in its place, with `data.tokenizer`.
    """

    tokenizer: str = "packages"
    """packages (the one trained on them), bytes (separator NUL), or a JSON file of the tokenizers library."""
    validated: Literal["documents", "packages"] = "documents"
    """Validation text: 2 % of the documents, selected by a hash, or packages of which the training text has nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path or self.hub:
            own = self.validated == "documents"
            require(own, "data.validated", self.validated, "has no effect on other text; set data.validation")
            return
        for name in ("validation", "begin_of_text", "end_of_text"):
            value = getattr(self, name)
            require(not value, f"data.{name}", value, "needs data.path; leave it out")

    def outline_elsewhere(self) -> Outline:
        if self.tokenizer != "packages":
            return super().outline_elsewhere()
        return Outline("packages", VOCABULARY, self.context_length, None, self.document_mask)

    @property
    def _spec(self) -> TokenizerSpec:
        spec = super()._spec
        return replace(spec, name=str(make_corpus() / TOKENIZER)) if self.tokenizer == "packages" else spec

    def _sources(self) -> Sequence[Source]:
        if self.path or self.hub:
            return super()._sources()
        folder = make_corpus()
        train, documents, apart = (tuple(sorted(folder.glob(f"{part}-*.jsonl"))) for part in PARTS)
        return [Files("data", "the packages", "text", files) for files in (train, documents + apart)]

    def select_validation(self, corpus: Corpus) -> tuple[slice, float]:
        if self.path or self.hub:
            return super().select_validation(corpus)
        folder, ends = make_corpus(), corpus.ends("validation")
        documents = min(json.loads((folder / COUNTS).read_text())[f"{DOCUMENTS} files"], len(ends))
        first, last = {DOCUMENTS: (0, documents), APART: (documents, len(ends))}[self.validated]
        is_cut = self.max_tokens is not None and last == len(ends) and len(corpus.validation) > self.max_tokens
        whole = last - is_cut
        fix = f"must hold a whole document of {self.validated}; give more"
        require(first < whole, "data.max_tokens", self.max_tokens, fix)
        files = sorted(folder.glob(f"{self.validated}-*.jsonl"))
        lines = (line for file in files for line in file.read_bytes().splitlines())
        size = sum(len(json.loads(line)["text"].encode()) + 1 for line in islice(lines, whole - first))
        start = int(ends[first - 1]) if first else 0
        return slice(start, int(ends[last - 1])), size / (int(ends[whole - 1]) - start)


def make_corpus() -> Path:
    """Folder of the corpus in the cache, made if missing, in about a minute.

    Raises a one-line ValueError if a package is missing, has another version or other sources, or if the tokenizer
    that is trained on them is another.
    """
    folder = cache_folder() / f"packages-{DIGEST}"
    if not folder.exists():
        make_once(folder, write_corpus, damage_of=lambda *_: "")
    return folder


def write_corpus(folder: Path) -> None:
    counts: Counter[str] = Counter()
    documents, shingles = set[int](), set[int]()
    parts: dict[str, list[PackageFile]] = {part: [] for part in PARTS}
    for package, version in (PACKAGES | HELD_OUT).items():
        for path, file in find_sources(package, version):
            text = file.read_bytes()
            counts.update({"files": 1, "bytes": len(text)})
            if reason := find_copy(text, documents, shingles) if is_written(text) else "generated or empty":
                counts.update({f"files left out, {reason}": 1, f"bytes left out, {reason}": len(text)})
            else:
                held_out = DOCUMENTS if hash_document(text) < HELD_OUT_SHARE * 2**64 else TRAIN
                parts[APART if package in HELD_OUT else held_out].append(PackageFile(package, path, text))
    digest = hashlib.sha256()
    for part, sources in parts.items():
        for source in sources:
            names = f"{part} {source.package} {source.path} {len(source.text)}\n"
            digest.update(names.encode() + source.text)
        write_part(folder, part, sources)
        counts[f"{part} files"], counts[f"{part} bytes"] = len(sources), sum(len(source.text) for source in sources)
    found = digest.hexdigest()[:16]
    require_digest("sources", found, DIGEST, "install the versions of requirements.txt anew")
    tokenizer = train_tokenizer(parts[TRAIN])
    found = hashlib.sha256(tokenizer.encode()).hexdigest()[:16]
    require_digest("tokenizer", found, TOKENIZER_DIGEST, "install tokenizers as in requirements.txt")
    (folder / TOKENIZER).write_text(tokenizer)
    (folder / COUNTS).write_text(json.dumps(counts, indent=1, sort_keys=True))


def require_digest(what: str, found: str, recorded: str, fix: str) -> None:
    require(found == recorded, f"data=Packages: {what}", found, f"should have the digest {recorded}; {fix}")


def find_sources(package: str, version: str) -> list[tuple[str, Path]]:
    """The .py files of an installed package, by its record, but for those of licences and of a build."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        found = None
    fix = f"pip install {package}=={version}, or give other text by data.path"
    right = found is not None and Version(found.version).public == version
    require(right, f"data=Packages: {package}", found and found.version, fix)
    assert found is not None
    paths = sorted(str(path) for path in found.files or () if path.suffix == ".py")
    return [(path, Path(str(found.locate_file(path)))) for path in paths if not LEFT_OUT.search(path)]


def find_copy(text: bytes, documents: set[int], shingles: set[int]) -> str:
    """`copies` or `near copies` if a file is one of those whose hashes are given; "" if it is new and joins them."""
    number, own = hash_document(text), hash_shingles(text)
    if number in documents:
        return "copies"
    if len(own & shingles) > MOST_KNOWN * len(own):
        return "near copies"
    documents.add(number)
    shingles |= own
    return ""


def is_written(text: bytes) -> bool:
    """Whether a file is text that people wrote, by the lengths of its lines."""
    try:
        lines = [line for line in text.decode().splitlines() if line.strip()]
    except UnicodeDecodeError:
        return False
    lengths = [len(line) for line in lines]
    within = max(lengths, default=0) <= MOST_LINE and sum(lengths) <= MOST_MEAN_LINE * len(lengths)
    return bool(lengths) and within and b"\0" not in text


def hash_shingles(text: bytes) -> set[int]:
    """Hashes of a sample of the runs of SHINGLE lines; space around lines and empty lines do not count."""
    lines = [line for line in map(bytes.strip, text.splitlines()) if line]
    last = max(1, len(lines) - SHINGLE + 1)
    hashes = (hash_document(b"\n".join(lines[start : start + SHINGLE])) for start in range(last))
    return {number for number in hashes if number % ONE_IN == 0}


def write_part(folder: Path, part: str, sources: Iterable[PackageFile]) -> None:
    """Write JSON lines into numbered files of about PART_BYTES each, so that several processes can tokenise them."""
    number, room = -1, 0
    for source in sources:
        line = json.dumps({"text": source.text.decode(), "package": source.package, "path": source.path})
        if room <= 0:
            number, room = number + 1, PART_BYTES
        with (folder / f"{part}-{number:03}.jsonl").open("a") as file:
            file.write(f"{line}\n")
        room -= len(line)


def train_tokenizer(sources: Iterable[PackageFile]) -> str:
    """JSON of a byte-level BPE of VOCABULARY tokens, trained on a share of the files, selected by their hash."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    bpe.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # type: ignore
    least = TOKENIZER_SHARE * 2**64
    bpe.train_from_iterator((one.text.decode() for one in sources if hash_document(one.text) < least), trainer)
    return bpe.to_str(pretty=True)
