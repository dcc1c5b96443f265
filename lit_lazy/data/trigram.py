"""Byte trigram: the baseline that a byte-level language model has to beat."""

import numpy as np


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
