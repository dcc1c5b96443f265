"""Retrieval of a key that is hidden in a long sequence, by its depth and the sequence's length."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import DataConfig
from lit_lazy.data.base import IGNORED, Batch
from lit_lazy.data.prompts import Prompts
from lit_lazy.measure.diagnostics import evaluation_mode, iter_parts
from lit_lazy.measure.haystack import NAMES, NEEDLE, PASSKEY, Hiding, Wording, hide_in_symbols, hide_in_text
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.checks import Bounds, NonNegativeInt, PositiveInt, Share, require

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
    def hiding(self) -> Hiding:
        """What is hidden in the sequences of each length."""
        return Hiding(self.depths, self.sequences, 0, self.digits, self.seed)

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
        tokenizer = Prompts(data, model.embedding.num_embeddings).tokenizer
        if tokenizer is None:
            return hide_in_symbols(data.at_length(length).load(), self.hiding)
        return hide_in_text(tokenizer, self.WORDING, self.hiding, length)


@dataclass(frozen=True)
class Needle(Passkey):
    """The number of a named thing among sentences that give other things' numbers, and filler.

    After RULER's needles with several keys (Hsieh et al., arXiv 2404.06654). Metrics as of `Passkey`.
    """

    NAME: ClassVar[str] = "needle"
    WORDING: ClassVar[Wording] = NEEDLE

    distractors: Annotated[int, Bounds(ge=0, le=len(NAMES) - 1)] = 3
    """Sentences with other keys, at random places."""

    @property
    def hiding(self) -> Hiding:
        return super().hiding._replace(distractors=self.distractors)
