"""A model as seen by lm-evaluation-harness.

As by the harness's own class for transformers, a text begins with the token that began those of the training, if there
was one. An empty context becomes the prefix token: that one, else the separator of documents. Like the harness, a
context that does not fit is truncated on its left; the number of such contexts is counted.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.generation import Generation, Prompts

TOKENS_AT_ONCE = 8192
"""Tokens per forward pass, unless a single sequence is longer."""

Count = Callable[[int, int], object]
"""Progress callback: done and total requests of a task and kind of request."""


class LmEvalAdapter(TemplateLM):
    """The harness's interface to a model."""

    def __init__(
        self,
        model: DecoderLM,
        prompts: Prompts,
        autocast: AbstractContextManager[object] | None = None,
        count: Count = lambda _done, _total: None,
    ) -> None:
        super().__init__()
        assert prompts.tokenizer is not None
        self.model, self.prompts, self.text, self.count = model, prompts, prompts.tokenizer, count
        self.autocast = autocast or torch.autocast(model.device.type, enabled=False)
        self.max_length = model.context_length
        self.requests = self.cut = 0
        """Number of requests, and of those with a truncated context."""

    @property
    def eot_token_id(self) -> int:
        return self.text.separator

    @property
    def prefix_token_id(self) -> int:
        return self.text.separator if self.prompts.begin is None else self.prompts.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        ids = self.text.encode([string.encode()])[0].tolist()
        return ids if add_special_tokens is False else self.prompts.start(ids)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:  # noqa: ARG002
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one. Computes the longest first."""
        full = [[*context, *continuation] for _, context, continuation in requests]
        kept = [tokens[-self.max_length - 1 :] for tokens in full]
        self.requests += len(full)
        self.cut += sum(len(tokens) > self.max_length + 1 for tokens in full)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(kept)
        done = 0
        for batch in make_batches([len(tokens) - 1 for tokens in kept]):
            logits = self._compute_logits([kept[i][:-1] for i in batch])
            for row, i in enumerate(batch):
                end, scored = len(kept[i]) - 1, min(len(requests[i][2]), len(kept[i]) - 1)
                if scored:
                    found[i] = _score(logits[row, end - scored : end], kept[i][-scored:])
            done += len(batch)
            self.count(done, len(kept))
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:  # noqa: ARG002
        """Log-likelihood of texts, each token scored once, in windows of the context length; the last one overlaps."""
        settings = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length, "context_len": 1}
        texts = (get_rolling_token_windows(self.tok_encode(request.args[0]), **settings) for request in requests)
        windows = [[(None, *make_disjoint_window(window)) for window in text] for text in texts]
        scored = iter(self._loglikelihood_tokens([window for text in windows for window in text]))
        return [sum(next(scored)[0] for _ in text) for text in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:  # noqa: ARG002
        """Greedy continuation of each context, up to a stop. Contexts are truncated on their left to leave room."""
        texts = []
        for request in requests:
            context, settings = request.args
            until, most = settings.get("until", []), min(settings.get("max_gen_toks", 256), self.max_length - 1)
            stops = [until] if isinstance(until, str) else list(until)
            full = self.tok_encode(context) or [self.prefix_token_id]
            kept = full[-(self.max_length - most) :]
            self.requests, self.cut = self.requests + 1, self.cut + (len(kept) < len(full))
            texts.append(self._continue_greedily(kept, stops, most))
            self.count(len(texts), len(requests))
        return texts

    def _continue_greedily(self, context: list[int], stops: Iterable[str], most: int) -> str:
        generated, text = [], ""
        with self.autocast:
            for _, token in Generation(self.model, [context], most, stop=self.prompts.special.ends):
                generated.append(token)
                text = "".join(self.text.decode(generated, context))
                if any(stop in text for stop in stops):
                    break
        ends = [text.find(stop) for stop in stops if stop and stop in text]
        return text[: min(ends)] if ends else text

    @torch.no_grad()
    def _compute_logits(self, rows: list[list[int]]) -> Tensor:
        """`[n, longest, vocab]`. Rows are padded on their right, which no token sees."""
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.model.device)
        with self.autocast:
            return self.model(tokens)


def _score(logits: Tensor, targets: list[int]) -> tuple[float, bool]:
    """Sum of the targets' log-probabilities for logits `[n, vocab]`, and whether every target is the most probable."""
    index = torch.tensor(targets, device=logits.device)
    scores = logits.float().log_softmax(-1).gather(-1, index[:, None])
    return scores.double().sum().item(), bool((logits.argmax(-1) == index).all())


def make_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Batches of sequence indices, longest first, each of at most TOKENS_AT_ONCE tokens including padding."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > TOKENS_AT_ONCE:
            found.append([])
        found[-1].append(i)
    return found
