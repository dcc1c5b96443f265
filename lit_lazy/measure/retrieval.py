"""Retrieval of a key that is hidden in a long sequence, by its depth and the sequence's length.

Keys are hidden in filler, with a question for one of them at the end: in words, or in symbols of synthetic data. The
passkey task is that of Mohtashami and Jaggi (arXiv 2305.16300), in their words but for the announcement of the
question. The needle among distractors is after RULER's retrieval with several keys (Hsieh et al., arXiv 2404.06654),
in other words. Both are short so that they fit into contexts of bytes.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import DataConfig
from lit_lazy.data.sampler import pick_evenly
from lit_lazy.data.source_interface import DataSource
from lit_lazy.data.token_dataset import IGNORED, Batch
from lit_lazy.measure.diagnostics import evaluation_mode, iter_parts, load_at_length
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.generation import Prompts
from lit_lazy.support.checked_fields import Bounds, NonNegativeInt, PositiveInt, Share, require

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


MOST_DIGITS = 18
"""A number of this many digits fits into 64 bits."""
LEAST_STEP = 0.001
"""Between two depths, whose metrics have different names."""


@torch.no_grad()
def score_answers(model: DecoderLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of each sequence the mean loss of its targets in nats, float64 `[B]`, and whether greedy decoding gives them all.

    batch: `tokens` and `targets` `[B, T]`; each sequence has a target. Only the logits at targets are computed.
    """
    losses, hits = [], []
    with evaluation_mode(model):
        for part in iter_parts(model, batch):
            answered = part["targets"] != IGNORED
            wanted = part["targets"][answered]
            logits = model.head(model.compute_hidden(part["tokens"])[answered])
            loss, hit = torch.zeros(2, *answered.shape, dtype=torch.float64, device=model.device)
            loss[answered] = F.cross_entropy(logits.float(), wanted, reduction="none").double()
            hit[answered] = (logits.argmax(-1) == wanted).double()
            losses.append(loss.sum(1) / answered.sum(1))
            hits.append(hit.sum(1) == answered.sum(1))
    return torch.cat(losses).cpu(), torch.cat(hits).cpu()


@dataclass(frozen=True)
class Passkey(Evaluation):
    """A number hidden in repeated sentences (Mohtashami and Jaggi, arXiv 2305.16300).

    In data without text, symbols behind a marker, hidden in validation sequences and asked for by the marker
    (`hide_in_symbols`). The same keys are hidden at every depth.
    """

    NAME: ClassVar[str] = "passkey"
    WORDING: ClassVar[Wording] = PASSKEY

    lengths: Annotated[tuple[Annotated[int, Bounds(ge=2)], ...], Bounds(min_length=1)] = (256, 512, 1024)
    """Lengths of the sequences in tokens; text is at most as long, by less than a sentence."""
    depths: Annotated[tuple[Share, ...], Bounds(min_length=1)] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Places of the key, from 0, the beginning of the filler, to 1, its end."""
    sequences: PositiveInt = 8
    """Sequences of each length and depth."""
    digits: Annotated[int, Bounds(ge=1, le=MOST_DIGITS)] = 5
    """Digits of a key; in data without text, its symbols."""
    seed: NonNegativeInt = 0
    """Seed of keys and places."""

    def __post_init__(self) -> None:
        close = any(round(b - a, 9) < LEAST_STEP for a, b in pairwise(sorted(self.depths)))
        require(not close, f"{type(self).__name__}.depths", self.depths, f"must differ by at least {LEAST_STEP}")

    @property
    def distractors(self) -> int:
        """Other keys in each sequence, at random places."""
        return 0

    @property
    def width(self) -> int:
        """Symbols of a marker and its key."""
        return 1 + self.digits

    def count_slots(self, length: int) -> int:
        """Places for a marker and its key, between the first token and the question."""
        return (length - self.width) // self.width

    def check(self, model: DecoderLM, data: DataConfig) -> None:
        """Raises ValueError if the model does not support a length, or a key at each depth does not fit into it."""
        for length in self.lengths:
            model.check_length(length)
            self._hide(model, data, length)

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """`passkey/accuracy_512_at_0.25` and `passkey/loss_512_at_0.25`, their means over depths, and over lengths.

        accuracy: share of the sequences whose key greedy decoding finds; loss: nats per token of the key.
        """
        found: dict[str, float] = {}
        by_length = []
        for length in self.lengths:
            loss, hit = score_answers(model, self._hide(model, data, length))
            by_depth = torch.stack((hit.double(), loss)).view(2, len(self.depths), -1).mean(-1)
            for depth, values in zip(self.depths, by_depth.T, strict=True):
                found |= self._name(values, f"_{length}_at_{depth:g}")
            by_length.append(by_depth.mean(-1))
            found |= self._name(by_length[-1], f"_{length}")
        return found | self._name(torch.stack(by_length).mean(0), "")

    def _name(self, values: Tensor, suffix: str) -> dict[str, float]:
        accuracy, loss = values.tolist()
        return {f"{self.NAME}/accuracy{suffix}": accuracy, f"{self.NAME}/loss{suffix}": loss}

    def _hide(self, model: DecoderLM, data: DataConfig, length: int) -> Batch:
        prompts = Prompts(data, model.embedding.num_embeddings)
        if prompts.tokenizer is None:
            return hide_in_symbols(load_at_length(model, data, length), self)
        return hide_in_text(prompts, self, length)


@dataclass(frozen=True)
class Needle(Passkey):
    """The number of a named thing among sentences that give other things' numbers, and filler.

    After RULER's needles with several keys (Hsieh et al., arXiv 2404.06654). Metrics as of `Passkey`.
    """

    NAME: ClassVar[str] = "needle"
    WORDING: ClassVar[Wording] = NEEDLE

    distractors: Annotated[int, Bounds(ge=0, le=len(NAMES) - 1)] = 3
    """Sentences with other keys, at random places."""


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


def hide_in_text(prompts: Prompts, task: Passkey, length: int) -> Batch:
    """`tokens` and `targets`, int64 `[depths * sequences, T]` with T <= length, depth by depth.

    As much filler as fits; shorter sequences are padded on their right. Only the key's tokens are targets. A text
    begins as the prompts do. Raises a one-line ValueError if no filler would fit, or too little for as many places as
    depths.
    """
    rng = np.random.default_rng((task.seed, length))
    puzzles = [_draw_puzzle(task, rng) for _ in range(task.sequences)]

    def encode(sentences: int) -> list[tuple[list[int], int]]:
        texts = [puzzle.write(task.WORDING, depth, sentences) for depth in task.depths for puzzle in puzzles]
        return _encode_answered(prompts, texts)

    def count_tokens(sentences: int) -> int:
        return max(len(tokens) for tokens, _ in encode(sentences)) - 1  # the last token is only a target

    least = count_tokens(1)
    require(least <= length, "lengths", length, f"question and keys need {least} tokens; choose a greater length")
    fitting = bisect_right(range(length), length, lo=1, key=count_tokens) - 1
    _require_places(task, length, fitting, lambda sentences: f"about {count_tokens(sentences)}")
    return _pad(encode(fitting))


def _require_places(task: Passkey, length: int, last: int, describe: Callable[[int], str]) -> None:
    """Raise a one-line ValueError if two depths are the same of the places 0 to `last`.

    describe: the length that has a given last place, for the message.
    """
    depths = len(task.depths)

    def count_places(last: int) -> int:
        return len({round(depth * last) for depth in task.depths})

    if (places := count_places(last)) < depths:
        enough = next(place for place in itertools.count(last) if count_places(place) == depths)
        fix = f"give {describe(enough)} or more, or fewer depths"
        require(False, "lengths", length, f"has distinct places for {places} of {depths} depths; {fix}")


def _draw_puzzle(task: Passkey, rng: np.random.Generator) -> _Puzzle:
    names = rng.choice(NAMES, 1 + task.distractors, replace=False)
    keys = rng.integers(10 ** (task.digits - 1), 10**task.digits, 1 + task.distractors)
    return _Puzzle([*zip(names, keys, strict=True)], rng.random(task.distractors))


def _encode_answered(prompts: Prompts, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """Tokens of each prompt with its answer, and the number of those that the prompt alone does not begin with."""
    assert prompts.tokenizer is not None
    wholes = prompts.tokenizer.encode([(prompt + answer).encode() for prompt, answer in texts], control=True)
    asked = prompts.tokenizer.encode([prompt.encode() for prompt, _ in texts], control=True)
    found = []
    for whole, prompt in zip(wholes, asked, strict=True):
        n = min(len(whole), len(prompt))
        common = int(np.cumprod(whole[:n] == prompt[:n]).sum())
        found.append((prompts.start(whole.tolist()), len(whole) - common))
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


def hide_in_symbols(source: DataSource, task: Passkey) -> Batch:
    """`tokens` and `targets`, int64 `[depths * sequences, L]`, depth by depth, from validation sequences of L tokens.

    A key is hidden behind a marker; the sequence ends in the marker and the key, whose tokens are the only targets.
    Markers are tokens at which the data predict, keys their targets. The first token stays, other occurrences of a
    sequence's markers are replaced. Raises a one-line ValueError if a sequence is too short, no key can be hidden, or
    two depths would be the same place.
    """
    validation, width, count = source.validation, task.width, 1 + task.distractors
    batch = validation.__getitems__(pick_evenly(len(validation), min(task.sequences, len(validation))).tolist())
    sampled, targets = (batch[name].numpy() for name in ("tokens", "targets"))
    markers = np.unique(sampled[:, 1:][targets[:, 1:] != IGNORED])
    symbols = np.intersect1d(targets[targets != IGNORED], sampled)
    few = min(len(markers) - 1, len(symbols))
    require(few > count, f"data={source.name}", few, f"has too few symbols to hide {count} keys")
    room = task.count_slots(source.context_length)
    require(room >= count, "lengths", source.context_length, f"has no room for {count} keys; choose a greater length")
    _require_places(task, source.context_length, room - 1, lambda last: str((last + 2) * width))
    rng = np.random.default_rng((task.seed, source.context_length))
    chosen = [sampled[number % len(sampled)] for number in range(task.sequences)]
    hidden = np.stack([_hide_keys(sequence, markers, symbols, task, rng) for sequence in chosen], axis=1)
    sequences = torch.from_numpy(hidden.reshape(-1, source.context_length + 1))
    asked = torch.full_like(sequences[:, 1:], IGNORED)
    asked[:, 1 - width :] = sequences[:, 1 - width :]
    return {"tokens": sequences[:, :-1], "targets": asked}


def _hide_keys(
    sequence: np.ndarray, markers: np.ndarray, symbols: np.ndarray, task: Passkey, rng: np.random.Generator
) -> np.ndarray:
    """The sequence `[L]` with keys and question, and the last target, for every depth: `[depths, L + 1]`."""
    count, width, slots = 1 + task.distractors, task.width, task.count_slots(len(sequence))
    chosen = rng.choice(np.setdiff1d(markers, sequence[0]), count, replace=False)
    filler, marked = np.append(sequence, 0), np.append(np.isin(sequence, chosen), False)
    filler[marked] = rng.choice(np.setdiff1d(markers, chosen), marked.sum())
    phrases = np.column_stack((chosen, rng.choice(np.setdiff1d(symbols, chosen), (count, task.digits))))
    filler[-width:] = phrases[0]
    order = rng.permutation(slots)
    found = np.tile(filler, (len(task.depths), 1))
    for row, depth in zip(found, task.depths, strict=True):
        asked = round(depth * (slots - 1))
        for slot, phrase in zip((asked, *order[order != asked]), phrases, strict=False):  # more slots than phrases
            row[1 + slot * width :][:width] = phrase
    return found
