"""One corpus of documents in every format, and the tokens that each must give."""

import hashlib
import json
import random
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lit_lazy.data.text import Text

SHARE = 0.2
L = 16
WORDS = ["sink", "weight", "naïve", "注意", "head", "😀", "of", "the"]
WORDS += ["\n\n", "\r\n", "\t", '"quoted"', "\\n", "\u2028"]


def make_documents(n: int, seed: int = 0) -> list[str]:
    """Texts of 20 to 2000 characters with blank lines, other line ends and characters of one to four bytes."""
    rng = random.Random(seed)
    return [f"{i} " + " ".join(rng.choices(WORDS, k=rng.randint(5, 300))) for i in range(n)]


def held_out(document: str, share: float = SHARE) -> bool:
    return int(hashlib.sha256(document.encode()).hexdigest()[:16], 16) / 2**64 < share


def joined(texts: list[str]) -> bytes:
    return b"".join(t.encode() + b"\0" for t in texts)


DOCUMENTS = make_documents(300)
TRAIN = [t for t in DOCUMENTS if not held_out(t)]
VALIDATION = [t for t in DOCUMENTS if held_out(t)]


def rows(texts: list[str]) -> dict[str, list[object]]:
    """Columns as those of FineWeb-Edu: the text, and some of other types."""
    n = len(texts)
    return {
        "text": list(texts),
        "id": [f"<urn:uuid:{i}>" for i in range(n)],
        "dump": ["CC-MAIN-2013-20"] * n,
        "score": [3.1] * n,
        "int_score": [3] * n,
    }


def write_jsonl(path: Path, texts: list[str]) -> Path:
    lines = [dict(zip(rows([]), row, strict=True)) for row in zip(*rows(texts).values(), strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
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


def compress(path: Path, suffix: str) -> Path:
    """A compressed copy of a file in a folder of its own."""
    packed = path.parent / f"{path.name}{suffix}.d" / f"{path.name.upper()}{suffix.upper()}"
    packed.parent.mkdir()
    with pa.output_stream(packed, compression={".gz": "gzip", ".zst": "zstd"}[suffix]) as file:
        file.write(path.read_bytes())
    return packed


def train_bpe(texts: list[str], vocab_size: int, special_tokens: list[str], path: Path) -> str:
    """A file with a byte-level BPE of these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return str(path)


def small(**changes: object) -> Text:
    """A Text with small windows."""
    options = {"context_length": L, "validation_windows": 10, "validation_share": SHARE, **changes}
    return Text(**options)  # type: ignore[arg-type]
