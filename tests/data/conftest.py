"""A corpus in every format, a tokenizer, and an empty cache."""

from pathlib import Path

import datasets
import forked
import pytest
from corpora import DOCUMENTS, make_documents, train_bpe, write_jsonl, write_parquet

from lit_lazy.data.pipeline import documents, workers


@pytest.fixture
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
    return train_bpe(DOCUMENTS, 400, ["<pad>", "<|endoftext|>"], tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The documents in seven .jsonl files, each a job; and 50 others."""
    monkeypatch.setattr(documents, "SMALL_FILES", 0)
    folder = tmp_path / "parts"
    folder.mkdir()
    for i in range(7):
        write_jsonl(folder / f"{i}.jsonl", DOCUMENTS[i * 43 : (i + 1) * 43])
    write_jsonl(tmp_path / "validation.jsonl", make_documents(50, seed=1))
    return folder


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked workers, which need no imports."""
    monkeypatch.setattr(workers, "subprocess", forked)
