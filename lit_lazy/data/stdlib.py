"""Source code of the running Python's standard library: real text on every machine that runs this project.

Also what byte-level text is cut into, and the trigram that a model of it has to beat.
"""

import functools
import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from lit_lazy.data.pipeline.tokeniser import ByteTokenizer, Tokenizer
from lit_lazy.data.sampler import pick_evenly
from lit_lazy.data.source_interface import DataConfig, DataSource, fingerprint
from lit_lazy.data.token_dataset import TokenDataset
from lit_lazy.support.checked_fields import Bounds, PositiveInt, require

# Tests, installed packages, and two generated parts: the character tables, so similar that a split by file would leak
# them into validation, and the manual as one string literal, which would be half of the validation text.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)
# Written when Python is built; they contain paths of the build machine.
BUILD_PREFIXES = ("config-", "_sysconfigdata")
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Stdlib(DataConfig):
    """Byte-level text: the .py files of the running Python's standard library, without tests and generated files.

    Tokens are bytes, so `DataSource.vocab_size` is 256. A hash of its path assigns a file to training or, one in ten,
    to validation. The files of each part are joined by a NUL byte and cut into windows that do not overlap.
    """

    context_length: Annotated[int, Bounds(ge=2)] = 256
    """Tokens (bytes) per window."""
    validation_windows: PositiveInt = 256
    """Number of validation windows, evenly spread over the validation text."""
    bos: bool = False
    """Begin every window with a BOS token: NUL, which otherwise occurs only between two files."""

    def load(self) -> DataSource:
        return _build_source(self)

    def load_tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def begin_prompt(self, tokenizer: Tokenizer) -> int | None:
        return tokenizer.separator if self.bos else tokenizer.begin


@functools.cache
def _build_source(config: Stdlib) -> DataSource:
    return load_folder(config, Path(sysconfig.get_path("stdlib")))


def load_folder(config: Stdlib, root: Path) -> DataSource:
    """Data source of the .py files under `root`.

    Raises ValueError if there are none, if one contains a NUL byte, or if they are too few for the windows.
    """
    files = read_sources(root)
    held_out = {path for path in files if is_validation(path)}
    train = join_files([text for path, text in files.items() if path not in held_out])
    validation = join_files([text for path, text in files.items() if path in held_out])
    length, bos = config.context_length, 0 if config.bos else None
    train_windows, validation_windows = cut_windows(train, length, bos), cut_windows(validation, length, bos)
    windows = len(validation_windows)
    fix = f"the training text under {str(root)!r} has {len(train)} bytes; choose a smaller length"
    require(len(train_windows) > 0, "data.context_length", length, fix)
    there = f"has {windows} windows of data.context_length={length}; choose fewer or shorter ones"
    fix = f"the validation text under {str(root)!r} {there}"
    require(windows >= config.validation_windows, "data.validation_windows", config.validation_windows, fix)
    chosen = pick_evenly(windows, config.validation_windows)
    targets = chosen[:, None] * length + np.arange(length) + (not config.bos)
    return DataSource(
        name="stdlib",
        vocab_size=256,
        context_length=length,
        # With the version, so that a table never mixes Python versions.
        fingerprint=f"python-{platform.python_version()}-{fingerprint([train, validation])}",
        info={
            "python_version": platform.python_version(),
            "bytes_per_token": 1.0,
            "train_files": len(files) - len(held_out),
            "validation_files": len(held_out),
            "train_tokens": len(train_windows) * length,
            "validation_tokens": config.validation_windows * length,
            # On the targets of the validation windows; counted on the training text only.
            **ByteTrigram(train).measure_bits(trigrams(validation)[targets.ravel()]),
        },
        train=TokenDataset(train_windows),
        validation=TokenDataset(validation_windows[chosen]),
    )


def find_sources(root: Path) -> dict[str, Path]:
    """The .py files under `root` that are text for training, by relative path, sorted by it."""
    files = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if is_wanted(name)]
        for name in names:
            if name.endswith(".py") and is_wanted(name):
                path = Path(folder, name)
                files[path.relative_to(root).as_posix()] = path
    problem = "has no .py file, as in a zipped or embedded Python"
    fix = f"{problem}; use a Python installation with the sources of its library"
    require(bool(files), "stdlib", str(root), fix)
    return dict(sorted(files.items()))


def read_sources(root: Path) -> dict[str, bytes]:
    """Content of the .py files under `root` by relative path, sorted by it."""
    files = {path: file.read_bytes() for path, file in find_sources(root).items()}
    for path, text in files.items():
        require(b"\0" not in text, "stdlib", str(root / path), "contains a NUL byte, the separator of files; remove it")
    return files


def is_wanted(name: str) -> bool:
    return name not in SKIPPED_FOLDERS and not name.startswith(BUILD_PREFIXES)


def is_validation(path: str) -> bool:
    """Whether the file is held out: depends only on its relative path, so every machine agrees."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) < VALIDATION_SHARE * 2**64


def join_files(texts: list[bytes]) -> np.ndarray:
    """Texts joined by one NUL byte, uint8 `[n]`."""
    return np.frombuffer(bytearray(b"\0".join(texts)), dtype=np.uint8)


def cut_windows(text: np.ndarray, length: int, bos: int | None) -> torch.Tensor:
    """Windows of `length` tokens plus the last target, `[N, length + 1]`: each token but the first is a target once.

    An incomplete window at the end is dropped. bos: token that begins each window, whose other tokens are all targets.
    """
    width = length if bos is not None else length + 1
    if len(text) < width:
        return torch.empty(0, length + 1, dtype=torch.uint8)
    windows = torch.from_numpy(text).unfold(0, width, length)
    return windows if bos is None else torch.cat((windows.new_full((len(windows), 1), bos), windows), dim=1)


class ByteTrigram:
    """Interpolated Witten-Bell trigram over bytes.

    p_n(c | h) = (N(h c) + T(h) p_{n-1}(c | h')) / (N(h) + T(h)), where h is the n - 1 bytes before c, h' is h without
    its first byte, N counts in the training text and T(h) is the number of distinct bytes seen after h. p_0 = 1/256,
    and p_n = p_{n-1} for an unseen h. Witten and Bell 1991 (IEEE Trans. Inf. Theory 37(4), method C), in the
    interpolated form of Chen and Goodman 1998 (TR-10-98, section 2.5).
    """

    def __init__(self, text: np.ndarray):
        """Count the trigrams of `text`, uint8 `[n]`."""
        windows = trigrams(text)
        # Per order n = 1, 2, 3: N(h c), `[256 ** (n - 1), 256]`; N(h) and T(h), `[256 ** (n - 1)]`.
        self.tables = []
        for order in (1, 2, 3):
            counts = np.bincount(windows % 256**order, minlength=256**order).reshape(-1, 256)
            self.tables.append((counts, counts.sum(axis=1), np.count_nonzero(counts, axis=1)))

    def measure_bits(self, windows: np.ndarray) -> dict[str, float]:
        """Mean bits per byte of p_1 and p_3 on the last bytes of windows, as facts of a data source."""
        names = {"unigram_bits_per_byte": 1, "trigram_bits_per_byte": 3}
        return {name: float(-np.log2(self.probability(windows, order)).mean()) for name, order in names.items()}

    def probability(self, windows: np.ndarray, order: int = 3) -> np.ndarray:
        """p_order(last byte | order - 1 bytes before it), float64 `[n]`, for windows from `trigrams`."""
        probability = np.full(len(windows), 1 / 256)
        for n, (counts, totals, kinds) in enumerate(self.tables[:order], start=1):
            history, byte = np.divmod(windows % 256**n, 256)
            mass = counts[history, byte] + kinds[history] * probability
            weight = totals[history] + kinds[history]
            np.divide(mass, weight, out=probability, where=weight > 0)
        return probability


def trigrams(text: np.ndarray) -> np.ndarray:
    """Each byte of `text`, uint8 `[n]`, with the two before it (NUL before the start), as one int64: `[n]`."""
    padded = np.concatenate([np.zeros(2, np.int64), text])
    return (padded[:-2] * 256 + padded[1:-1]) * 256 + padded[2:]
