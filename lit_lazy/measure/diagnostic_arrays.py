"""`Diagnostics`, the arrays measured on a model. Imports no torch, which those who read them do not need."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lit_lazy.support.disk import write_atomically


def fit_slope(values: np.ndarray) -> np.ndarray:
    """Least-squares slope `[]` of values `[n]` over 0 .. n - 1, in fp64."""
    depth = np.arange(len(values)) - (len(values) - 1) / 2
    return depth @ np.asarray(values, np.float64) / (depth @ depth)


def pool(means: Any, counts: Any) -> Any:
    """The ratio of sums `[]`, fp64, from means and from what each is over, fp64 of the same shape; NaN if over nothing.

    Both are tensors, or both arrays. Relative counts leave the bits of a plain mean if all are equal.
    """
    there = counts > 0
    weights = counts[there] / counts[there][:1]
    return (means[there] * weights).sum() / weights.sum()


MOST_BYTES = 2**30
"""Arrays of an npz file that are read, together."""
SCALARS = {
    "sink/rate": ("sink/rate", lambda x: x[..., 0]),
    "sink/rate_share": ("sink/rate_share", lambda x: x[..., 0]),
    "sink/value_norm": ("sink/value_norm", lambda x: x[..., 0]),
    "sink/no_operation": ("sink/no_operation", lambda x: x),
    "sink/broadcast": ("sink/broadcast", lambda x: x),
    "sink/eviction": ("loss/evicted", lambda x: x[-1]),
    "sink/eviction_n_held": ("loss/evicted_n_held", lambda x: x),
    "mass/empty_rows": ("mass/empty_rows", lambda x: x),
    "mass/dead_heads": ("mass/dead", lambda x: x),
    "sparsity/small": ("sparsity/small", lambda x: x),
    "sparsity/block_64": ("sparsity/block_64", lambda x: x),
    "sparsity/block_128": ("sparsity/block_128", lambda x: x),
    "sparsity/over_null": ("sparsity/over_null", lambda x: x),
    "entropy/keys": ("entropy/keys", lambda x: x),
    "scores/spread": ("scores/spread", lambda x: x),
    "collapse/cosine": ("hidden/cosine", lambda x: x[-1]),
    "collapse/effective_rank": ("hidden/effective_rank", lambda x: x[-1]),
    "collapse/effective_rank_slope": ("hidden/effective_rank", fit_slope),  # per block
    "collapse/rank_residual": ("hidden/rank_residual", lambda x: x[-1]),
    "collapse/max_abs": ("hidden/max_abs", lambda x: x.max()),
    "collapse/max_over_median": ("hidden/max_over_median", lambda x: x.max()),
    "collapse/kurtosis": ("hidden/kurtosis", lambda x: x[-1]),
    "collapse/repeated_gap": ("hidden/repeated_gap", lambda x: x[-1]),
    "bias/alibi_distance": ("bias/alibi_distance", lambda x: x),
}
"""Metric of a run -> its array, and the part of it that is averaged over layers and heads."""
SAMPLED = {
    "loss/sample": ("loss/by_position", lambda x: x),
    "mass/all": ("mass/row", lambda x: x),
    "sparsity/zero": ("sparsity/zero", lambda x: x),
    "sparsity/null": ("sparsity/null", lambda x: x),
    "tau/mean": ("tau", lambda x: x),
    "sink/weight": ("sink/weight", lambda x: x[..., 0]),
    "sink/share": ("sink/share", lambda x: x[..., 0]),
}
"""The same of metrics that a run measures on its full validation set instead."""
COUNTS = {"loss/by_position": "loss/target_count", "mass/row": "mass/row_count"}
"""Array of means by position -> array of the number that each is over."""


@dataclass(frozen=True)
class Diagnostics:
    """Arrays by name, float32 by default, of n sequences of T tokens, K = min(8, T).

    Without attention, arrays of heads, biases, evicted keys and maps are absent.

    `[layers, H, ...]`, as their metrics define them: `sink/*` (`Sink`, `ValueNorms`, `SinkKinds`), `mass/*` (`Mass`),
    `sparsity/*` (`Sparsity`, `Spread`), `scores/spread` (`Spread`), `entropy/*` (`Entropy`).
    `[layers + 1]`, of the residual stream after the embedding and after each block: `hidden/*` (`Collapse`, and
    `hidden/repeated_gap`, the mean of `repeated_gap` over the sequences that are one document, NaN without any).
    `tau` `[layers, H]` or `[layers, H, N]`, `learned/*` and `bias/learned.*` `[layers, ...]` (`collect_learned`),
    `bias/curve` `[layers, H, T]` by distance, `bias/alibi_slope` and `bias/alibi_distance` `[layers, H]` (`fit_alibi`);
    absent without tau or bias.
    `watch/tau`, `watch/learned/*` and `watch/bias/learned.*` `[S, layers, H]`, or `[S, layers, 1]` of what heads share:
    their means at the training's S steps `watch/step` (int64); absent without training.
    `loss/by_position` `[T]`, nats, over `loss/target_count` `[T]` targets, NaN over none. `loss/evicted` `[4]`: rise of
    the mean loss in nats over the targets from position 9 on when the first 1 to 4 keys are hidden in every layer;
    `loss/evicted_n_held` `[]`: the same for 4 keys with unchanged n, and thus unchanged theta.
    `maps/weights` float16 `[S, n, n]`: weights of the first sequence (with `place`: of the sequence with the longest
    first document), NaN at hidden keys, first n = min(T, 128) rows (of that document);
    `maps/heads` int64 `[S, 2]`: layer and head of each, from 0.
    `sample` int64 `[3]`: n, T, layers. `context` int64 `[]`: the training's context length.
    `length/*` and `streamed/*`: arrays of `lit_lazy.measure.lengths`, only from `lit-lazy diagnose`.
    Prefix `init/`: the same model before training; `before/`: before a change of its settings; `L<length>/`: at another
    length.
    """

    arrays: dict[str, np.ndarray]

    @classmethod
    def merge(cls, parts: Mapping[str, "Diagnostics"]) -> "Diagnostics":
        """Merge measurements by prefix: each array's name gets the prefix of its measurement."""
        return cls({prefix + name: x for prefix, part in parts.items() for name, x in part.arrays.items()})

    @classmethod
    def load(cls, file: Path | BinaryIO) -> "Diagnostics":
        """Read an npz file, without running code in it. Raises ValueError if it expands to more than MOST_BYTES."""
        with np.load(file, allow_pickle=False) as archive:
            if sum(part.file_size for part in archive.zip.infolist()) > MOST_BYTES:
                raise ValueError(f"its arrays expand to more than {MOST_BYTES >> 20} MiB")
            return cls({name: archive[name] for name in archive.files})

    def save(self, path: Path) -> None:
        # Array names are not identifiers, so numpy's keyword arguments are passed as a dict.
        contents: dict[str, Any] = self.arrays
        write_atomically(path, lambda file: np.savez_compressed(file, allow_pickle=False, **contents))

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of the measurements, in order: "", "init/", "L1024/", ..."""
        return [name.removesuffix("sample") for name in self.arrays if name.split("/")[-1] == "sample"]

    def scalars(self) -> dict[str, float]:
        """The finite metrics of a run computed from these arrays, with their measurement's prefix."""
        return self._average(SCALARS)

    def metrics(self) -> dict[str, float]:
        """What `lit-lazy diagnose` prints: `scalars`, and those that a run measures on its full validation set."""
        learned = {found[0] for name in self.arrays if (found := re.search(r"(bias/learned\.|learned/)[\w.]+$", name))}
        return self._average(SCALARS | SAMPLED | {f"{name}/mean": (name, lambda x: x) for name in learned})

    def _average(self, parts: Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]) -> dict[str, float]:
        """Means in fp64 over the values that are not NaN, or by their counts, without those that are not finite."""
        found = {}
        for prefix in self.prefixes:
            for name, (source, part) in parts.items():
                if not {prefix + source, prefix + COUNTS.get(source, source)} <= self.arrays.keys():
                    continue
                values = np.asarray(part(self.arrays[prefix + source]), np.float64)
                counts = self.arrays[prefix + COUNTS[source]] if source in COUNTS else ~np.isnan(values)
                if counts.any() and np.isfinite(mean := pool(values, counts.astype(np.float64))):
                    found[prefix + name] = float(mean)
        return found
