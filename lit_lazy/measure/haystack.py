"""Keys hidden in filler, with a question for one of them at the end: in words, or in symbols of synthetic data.

The passkey task is that of Mohtashami and Jaggi (arXiv 2305.16300), in their words but for the announcement of the
question. The needle among distractors is after RULER's retrieval with several keys (Hsieh et al., arXiv 2404.06654),
in other words. Both are short so that they fit into contexts of bytes.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lit_lazy.data.base import IGNORED, Batch, DataSource
from lit_lazy.data.pipeline.tokeniser import Tokenizer
from lit_lazy.data.sampler import pick_evenly
from lit_lazy.support.checks import require

FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
NAMES = ("apple", "bell", "boat", "book", "coat", "cup", "door", "drum", "flag", "kite", "lamp", "leaf", "ring", "tree")


class Wording(NamedTuple):
    """The sentences of a task; `{key}` is the number, `{name}` the thing that it belongs to."""

    opening: str
    hidden: str
    question: str


PASSKEY = Wording(
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them.",
    "The pass key is {key}. Remember it. {key} is the pass key.",
    "What is the pass key? The pass key is",
)
NEEDLE = Wording(
    "Some numbers are hidden in this text. Memorize them.",
    "The number of the {name} is {key}.",
    "What is the number of the {name}? The number of the {name} is",
)


class Hiding(NamedTuple):
    """What is hidden in the sequences of one length."""

    depths: tuple[float, ...]
    """Places of the key that is asked for, from 0 (first) to 1 (last)."""
    sequences: int
    """Sequences of each depth. Keys and distractors are the same at all depths."""
    distractors: int
    """Other keys in each sequence, at random places."""
    digits: int
    """Digits of a key in text; symbols of a key in other data."""
    seed: int

    @property
    def keys(self) -> int:
        """Keys in each sequence."""
        return 1 + self.distractors

    @property
    def width(self) -> int:
        """Symbols of a marker and its key."""
        return 1 + self.digits

    def count_slots(self, length: int) -> int:
        """Places for a marker and its key, between the first token and the question."""
        return (length - self.width) // self.width


class _Puzzle(NamedTuple):
    named: list[tuple[str, int]]
    """Things and their keys; the first is asked for."""
    places: np.ndarray
    """Depths of the others."""

    def write(self, wording: Wording, depth: float, sentences: int) -> tuple[str, str]:
        """The text before the answer, a space included, with this number of sentences of filler; and the answer."""
        lines = [FILLER[i % len(FILLER)] for i in range(sentences)]
        hidden = [wording.hidden.format(name=name, key=key) for name, key in self.named]
        for place, sentence in sorted(zip((depth, *self.places), hidden, strict=True), reverse=True):
            lines.insert(round(place * sentences), sentence)
        asked, answer = self.named[0]
        return "\n".join((wording.opening, " ".join(lines), f"{wording.question.format(name=asked)} ")), str(answer)


def hide_in_text(tokenizer: Tokenizer, wording: Wording, hiding: Hiding, length: int) -> Batch:
    """`tokens` and `targets`, int64 `[depths * sequences, T]` with T <= length, depth by depth.

    As much filler as fits; shorter sequences are padded on their right. Only the key's tokens are targets. A text
    begins with the tokenizer's begin token, if there is one. Raises a one-line ValueError if no filler would fit, or
    too little for as many places as depths.
    """
    rng = np.random.default_rng((hiding.seed, length))
    puzzles = [_draw_puzzle(hiding, rng) for _ in range(hiding.sequences)]

    def encode(sentences: int) -> list[tuple[list[int], int]]:
        texts = [puzzle.write(wording, depth, sentences) for depth in hiding.depths for puzzle in puzzles]
        return _encode_answered(tokenizer, texts)

    def count_tokens(sentences: int) -> int:
        return max(len(tokens) for tokens, _ in encode(sentences)) - 1  # the last token is only a target

    least = count_tokens(1)
    require(least <= length, "lengths", length, f"question and keys need {least} tokens; choose a greater length")
    fitting = bisect_right(range(length), length, lo=1, key=count_tokens) - 1
    _require_places(hiding, length, fitting, lambda sentences: f"about {count_tokens(sentences)}")
    return _pad(encode(fitting))


def _require_places(hiding: Hiding, length: int, last: int, describe: Callable[[int], str]) -> None:
    """Raise a one-line ValueError if two depths are the same of the places 0 to `last`.

    describe: the length that has a given last place, for the message.
    """
    depths = len(hiding.depths)

    def count_places(last: int) -> int:
        return len({round(depth * last) for depth in hiding.depths})

    if (places := count_places(last)) < depths:
        enough = next(place for place in itertools.count(last) if count_places(place) == depths)
        fix = f"give {describe(enough)} or more, or fewer depths"
        require(False, "lengths", length, f"has distinct places for {places} of {depths} depths; {fix}")


def _draw_puzzle(hiding: Hiding, rng: np.random.Generator) -> _Puzzle:
    names = rng.choice(NAMES, hiding.keys, replace=False)
    keys = rng.integers(10 ** (hiding.digits - 1), 10**hiding.digits, hiding.keys)
    return _Puzzle([*zip(names, keys, strict=True)], rng.random(hiding.distractors))


def _encode_answered(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """Tokens of each prompt with its answer, and the number of those that the prompt alone does not begin with."""
    wholes = tokenizer.encode([(prompt + answer).encode() for prompt, answer in texts], control=True)
    prompts = tokenizer.encode([prompt.encode() for prompt, _ in texts], control=True)
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    found = []
    for whole, prompt in zip(wholes, prompts, strict=True):
        n = min(len(whole), len(prompt))
        common = int(np.cumprod(whole[:n] == prompt[:n]).sum())
        found.append((begin + whole.tolist(), len(whole) - common))
    return found


def _pad(answered: Sequence[tuple[list[int], int]]) -> Batch:
    """One batch of sequences that end in so many tokens of the answer."""
    longest = max(len(tokens) for tokens, _ in answered)
    sequences = torch.zeros(len(answered), longest, dtype=torch.int64)
    targets = torch.full((len(answered), longest - 1), IGNORED)
    for row, (tokens, n) in enumerate(answered):
        end = len(tokens)
        sequences[row, :end] = torch.tensor(tokens)
        targets[row, end - 1 - n : end - 1] = sequences[row, end - n : end]
    return {"tokens": sequences[:, :-1], "targets": targets}


def hide_in_symbols(source: DataSource, hiding: Hiding) -> Batch:
    """`tokens` and `targets`, int64 `[depths * sequences, L]`, depth by depth, from validation sequences of L tokens.

    A key is hidden behind a marker; the sequence ends in the marker and the key, whose tokens are the only targets.
    Markers are tokens at which the data predict, keys their targets. The first token stays, other occurrences of a
    sequence's markers are replaced. Raises a one-line ValueError if a sequence is too short, no key can be hidden, or
    two depths would be the same place.
    """
    validation, width, count = source.validation, hiding.width, hiding.keys
    batch = validation.__getitems__(pick_evenly(len(validation), min(hiding.sequences, len(validation))).tolist())
    sampled, targets = (batch[name].numpy() for name in ("tokens", "targets"))
    markers = np.unique(sampled[:, 1:][targets[:, 1:] != IGNORED])
    symbols = np.intersect1d(targets[targets != IGNORED], sampled)
    few = min(len(markers) - 1, len(symbols))
    require(few > count, f"data={source.name}", few, f"has too few symbols to hide {count} keys")
    room = hiding.count_slots(source.context_length)
    require(room >= count, "lengths", source.context_length, f"has no room for {count} keys; choose a greater length")
    _require_places(hiding, source.context_length, room - 1, lambda last: str((last + 2) * width))
    rng = np.random.default_rng((hiding.seed, source.context_length))
    chosen = [sampled[number % len(sampled)] for number in range(hiding.sequences)]
    hidden = np.stack([_hide_keys(sequence, markers, symbols, hiding, rng) for sequence in chosen], axis=1)
    sequences = torch.from_numpy(hidden.reshape(-1, source.context_length + 1))
    asked = torch.full_like(sequences[:, 1:], IGNORED)
    asked[:, 1 - width :] = sequences[:, 1 - width :]
    return {"tokens": sequences[:, :-1], "targets": asked}


def _hide_keys(
    sequence: np.ndarray, markers: np.ndarray, symbols: np.ndarray, hiding: Hiding, rng: np.random.Generator
) -> np.ndarray:
    """The sequence `[L]` with keys and question, and the last target, for every depth: `[depths, L + 1]`."""
    count, width, slots = hiding.keys, hiding.width, hiding.count_slots(len(sequence))
    chosen = rng.choice(np.setdiff1d(markers, sequence[0]), count, replace=False)
    filler, marked = np.append(sequence, 0), np.append(np.isin(sequence, chosen), False)
    filler[marked] = rng.choice(np.setdiff1d(markers, chosen), marked.sum())
    phrases = np.column_stack((chosen, rng.choice(np.setdiff1d(symbols, chosen), (count, hiding.digits))))
    filler[-width:] = phrases[0]
    order = rng.permutation(slots)
    found = np.tile(filler, (len(hiding.depths), 1))
    for row, depth in zip(found, hiding.depths, strict=True):
        asked = round(depth * (slots - 1))
        for slot, phrase in zip((asked, *order[order != asked]), phrases, strict=False):  # more slots than phrases
            row[1 + slot * width :][:width] = phrase
    return found
