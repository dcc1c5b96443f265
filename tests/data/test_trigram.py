"""The baseline is a distribution, equals its formula, and reaches the entropy of a second-order chain."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from lit_lazy.data.trigram import ByteTrigram, trigrams


def as_bytes(text):
    return np.frombuffer(text, dtype=np.uint8)


@pytest.mark.parametrize("history", [b"ab", b"zb", b"zz", b"\0\0", b"\xff\xff"], ids=str)
def test_sums_to_one(history):
    """Histories that are seen, seen only in their last byte, and unseen."""
    first, second = history
    windows = (first * 256 + second) * 256 + np.arange(256)
    probability = ByteTrigram(as_bytes(b"abcabdabeb\xff")).probability(windows)
    assert (probability > 0).all()
    assert probability.sum() == pytest.approx(1, abs=1e-12)


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
