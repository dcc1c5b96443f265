"""The baseline is a distribution, equals its formula, and reaches the entropy of a second-order chain."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from lit_lazy.data.backcopy import solve_stationary
from lit_lazy.data.stdlib import ByteTrigram, trigrams


def as_bytes(text):
    return np.frombuffer(text, dtype=np.uint8)


def test_windows():
    a, b, c = b"abc"
    assert trigrams(as_bytes(b"abc")).tolist() == [a, a * 256 + b, (a * 256 + b) * 256 + c]


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


def test_reaches_the_entropy_of_a_second_order_chain():
    """1024 cells and 400 000 bytes: the expected excess is about 1024 / (2 n ln 2) = 0.002 bits."""
    symbols, n = 8, 400_000
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.full(symbols, 0.5), size=(symbols, symbols))  # law[a, b, c] = P(c | a b)
    pairs = np.zeros((symbols, symbols, symbols, symbols))
    for a in range(symbols):
        for b in range(symbols):
            pairs[a, b, b] = law[a, b]
    weight = solve_stationary(pairs.reshape(symbols**2, symbols**2))
    entropy = -weight @ np.sum(law * np.log2(law), axis=-1).ravel()

    cumulative, uniform = law.cumsum(axis=-1), rng.random(n)
    text = [0, 0]
    for u in uniform:
        text.append(min(int(np.searchsorted(cumulative[text[-2], text[-1]], u)), symbols - 1))
    text = np.array(text, dtype=np.uint8)
    train, held_out = text[: n // 2], text[n // 2 :]
    nll = -np.log2(ByteTrigram(train).probability(trigrams(held_out)))
    error = nll.std() / len(nll) ** 0.5
    assert entropy - 5 * error < nll.mean() < entropy + 0.01 + 5 * error
