"""How lm-evaluation-harness asks a model.

Contexts have no token put before them, as by the harness's default; an empty one is the prefix token: the token that
begins documents where the training text had one, else the one that separates them. A context that does not fit is cut
on its left, as the harness does, and counted.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from lit_lazy.data.pipeline.tokeniser import Tokenizer
from lit_lazy.model.decoder import DecoderLM

TOKENS_AT_ONCE = 8192
"""Tokens of a forward pass, unless a single sequence is longer."""

Count = Callable[[int, int], object]
"""Takes note of progress: requests that are answered, and requests in all, of a task's kind of request."""


class LmEvalAdapter(TemplateLM):
    """A model as the harness asks it."""

    def __init__(
        self,
        model: DecoderLM,
        tokenizer: Tokenizer,
        autocast: AbstractContextManager[object] | None = None,
        count: Count = lambda _done, _total: None,
    ) -> None:
        super().__init__()
        self.model, self.text, self.count = model, tokenizer, count
        self.autocast = autocast or torch.autocast(model.device.type, enabled=False)
        self.max_length = model.context_length
        self.requests = self.cut = 0
        """Log-likelihoods that were asked for, and those whose context was cut."""

    @property
    def eot_token_id(self) -> int:
        return self.text.separator

    @property
    def prefix_token_id(self) -> int:
        return self.text.separator if self.text.begin is None else self.text.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:  # noqa: ARG002
        return self.text.encode([string.encode()])[0].tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:  # noqa: ARG002
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is the greedy one; the longest first."""
        whole = [[*context, *continuation] for _, context, continuation in requests]
        kept = [tokens[-self.max_length - 1 :] for tokens in whole]
        self.requests += len(whole)
        self.cut += sum(len(tokens) > self.max_length + 1 for tokens in whole)
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
        """Of whole texts, token by token once: in windows as long as the context, the last filled up from before it."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scored = iter(self._loglikelihood_tokens([window for text in windows for window in text]))
        return [sum(next(scored)[0] for _ in text) for text in windows]

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:  # noqa: ARG002
        """The greedy continuation of each context, up to a stop; contexts are cut on their left to leave room."""
        texts = []
        for request in requests:
            context, settings = request.args
            until, most = settings.get("until", []), min(settings.get("max_gen_toks", 256), self.max_length - 1)
            stops = [until] if isinstance(until, str) else list(until)
            whole = self.tok_encode(context) or [self.prefix_token_id]
            kept = whole[-(self.max_length - most) :]
            self.requests, self.cut = self.requests + 1, self.cut + (len(kept) < len(whole))
            texts.append(self._continue_greedily(kept, stops, most))
            self.count(len(texts), len(requests))
        return texts

    def _continue_greedily(self, context: list[int], stops: Iterable[str], most: int) -> str:
        cache, given, drawn, text = self.model.new_cache(), context, [], ""
        while len(drawn) < most and not any(stop in text for stop in stops):
            tokens = torch.tensor([given], device=self.model.device)
            with self.autocast:
                token = int(self.model(tokens, cache)[0, -1].argmax())
            if token == self.eot_token_id:
                break
            drawn.append(token)
            given, text = [token], "".join(self.text.decode(drawn, context))
        ends = [text.find(stop) for stop in stops if stop and stop in text]
        return text[: min(ends)] if ends else text

    @torch.no_grad()
    def _compute_logits(self, rows: list[list[int]]) -> Tensor:
        """`[n, longest, vocab]`; the rows are padded on their right, at which no token looks."""
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.model.device)
        with self.autocast:
            return self.model(tokens)


def _score(logits: Tensor, targets: list[int]) -> tuple[float, bool]:
    """The sum of the targets' log-probabilities, logits `[n, vocab]`, and whether each target is the most probable."""
    wanted = torch.tensor(targets, device=logits.device)
    chosen = logits.float().log_softmax(-1).gather(-1, wanted[:, None])
    return chosen.double().sum().item(), bool((logits.argmax(-1) == wanted).all())


def make_batches(lengths: Sequence[int], most: int = TOKENS_AT_ONCE) -> list[list[int]]:
    """Numbers of sequences, the longest first, so many at a time that they hold `most` tokens, padding included."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > most:
            found.append([])
        found[-1].append(i)
    return found
