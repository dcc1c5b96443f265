"""Prompts as tokens of a trained model, and batched autoregressive generation with a cache, which needs only torch."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from torch import Tensor

from lit_lazy.attention import Cache, Eviction
from lit_lazy.data.source_interface import DataConfig, SpecialTokens
from lit_lazy.model.decoder import DecoderLM, parameter_generator
from lit_lazy.support.checked_fields import Bounds, CheckedFields, NonNegativeFloat, require
from lit_lazy.support.error_messages import describe_exception, short_repr

if TYPE_CHECKING:
    from lit_lazy.data.pipeline.tokeniser import Tokenizer


@dataclass(frozen=True)
class Sampling(CheckedFields):
    """Settings of sampling."""

    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits; 0 takes the most probable token."""
    top_p: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this total probability, above 0 and at most 1."""
    seed: int = 0
    """Seed; each prompt has its own generator."""


GREEDY = Sampling(temperature=0.0)


class GeneratedToken(NamedTuple):
    """A token and the 0-based index of the prompt that it continues."""

    prompt: int
    token: int


class Generation:
    """Iterator over the tokens that continue some prompts; afterwards holds memory statistics.

    Prompts are decoded in one batch, shorter ones with masked padding on the left, so that results are those of single
    prompts up to rounding. With positions that depend on padding, or eviction, only prompts of equal length are decoded
    together.
    """

    def __init__(
        self,
        model: DecoderLM,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        sampling: Sampling = GREEDY,
        stop: Collection[int] = (),
        eviction: Eviction | None = None,
    ) -> None:
        """tokens: maximum number per prompt. stop: tokens that end a text and are not yielded.

        Raises a one-line ValueError for an empty prompt, a token outside the vocabulary, and a length that the model's
        positions or bias do not support.
        """
        vocabulary = model.embedding.num_embeddings
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i + 1} has no tokens; give at least one")
            if beyond := [token for token in prompt if not 0 <= token < vocabulary]:
                raise ValueError(f"prompt {i + 1} has the token {beyond[0]}; the model reads 0 to {vocabulary - 1}")
        self.model, self.prompts, self.tokens = model, prompts, tokens
        self.sampling, self.stop, self.eviction = sampling, stop, eviction
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        alike = [list(same) for _, same in groupby(order, lambda i: len(prompts[i]))]
        self.batches = [order] if self._can_pad() else alike
        """Indices of the prompts of each batch."""
        model.new_cache(eviction)
        model.check_length(max((self._count_keys(batch) for batch in self.batches), default=0))
        self.cache_bytes = 0
        """Bytes of the largest cache so far, all layers."""
        self.evicted = 0
        """Number of evicted tokens, all prompts."""

    def _can_pad(self) -> bool:
        """Whether left padding changes no result and can be masked, which the fused kernels cannot."""
        layers = self.model.attentions
        if not layers:
            return False
        fused = any(layer.backend == "triton" for layer in layers)
        return self.model.position.relative and self.eviction is None and not fused

    @property
    def most_cache_bytes(self) -> int:
        """Upper bound on the cache size in bytes, without preallocated room."""
        width = sum(layer.n_kv_heads * layer.head_dim for layer in self.model.attentions)
        keys = max((len(batch) * self._count_keys(batch) for batch in self.batches), default=0)
        return 2 * width * keys * self.model.norm.weight.element_size()

    def _count_keys(self, batch: list[int]) -> int:
        # The last generated token is not read.
        longest = max((len(self.prompts[i]) for i in batch), default=0) + self.tokens - 1
        return longest if self.eviction is None else min(longest, self.eviction.capacity)

    def __iter__(self) -> Iterator[GeneratedToken]:
        return chain.from_iterable(map(self._decode_batch, self.batches))

    def _decode_batch(self, batch: list[int]) -> Iterator[GeneratedToken]:
        # Yield outside torch.no_grad(), which would also apply to the caller.
        prompts = [self.prompts[i] for i in batch]
        longest = max(map(len, prompts))
        tokens = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts])
        seen = torch.tensor([[i >= longest - len(prompt) for i in range(longest)] for prompt in prompts])
        mask = None if seen.all() else seen
        cache = self.model.new_cache(self.eviction)
        generators = [parameter_generator(self.sampling.seed, f"prompt {i}") for i in batch]
        unfinished, read = dict(enumerate(batch)), tokens
        for _ in range(self.tokens):
            found = draw(self._compute_logits(tokens, cache, mask), self.sampling, generators)
            for row, prompt in list(unfinished.items()):
                if (token := int(found[row])) in self.stop:
                    del unfinished[row]
                else:
                    yield GeneratedToken(prompt, token)
            if not unfinished:
                break
            tokens = found[:, None]
            read = torch.cat((read, tokens), 1)
            if self.eviction is None and not self.model.position.keeps_rotation(read.shape[1] - 1, read.shape[1]):
                cache, tokens = self.model.new_cache(), read
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=True)
        self.evicted += len(batch) * cache[0].evicted
        self.cache_bytes = max(self.cache_bytes, sum(layer.nbytes for layer in cache))

    @torch.no_grad()
    def _compute_logits(self, tokens: Tensor, cache: list[Cache], mask: Tensor | None) -> Tensor:
        """Next-token logits `[B, V]` after tokens `[B, L]`."""
        device = self.model.device
        mask = None if mask is None else mask.to(device)
        *_, last = (self.model(part.to(device), cache, mask, last_only=True) for part in cache[0].split_tokens(tokens))
        return last[:, -1]


def generate(
    model: DecoderLM,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling = GREEDY,
    stop: Collection[int] = (),
    eviction: Eviction | None = None,
) -> list[list[int]]:
    """Generate the tokens that continue each prompt; arguments as in `Generation`."""
    found: list[list[int]] = [[] for _ in prompts]
    for prompt, token in Generation(model, prompts, tokens, sampling, stop, eviction):
        found[prompt].append(token)
    return found


def draw(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """Sample a token for each row of logits `[B, V]` with the row's generator: int64 `[B]` on the CPU."""
    if sampling.temperature == 0:
        return logits.argmax(-1).cpu()
    # On the CPU in float64, so that draws do not depend on the device.
    p, token = (logits.double().cpu() / sampling.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    p = p.masked_fill(p.cumsum(-1) - p >= sampling.top_p, 0)  # the first token stays
    cumulative = p.cumsum(-1)
    uniform = torch.cat([torch.rand(1, 1, dtype=torch.float64, generator=generator) for generator in generators])
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp(max=p.shape[1] - 1)
    return token.gather(1, index)[:, 0]


class Prompts:
    """Converts prompts to tokens and tokens to text; data without text uses token numbers separated by spaces."""

    def __init__(self, data: DataConfig, vocab_size: int) -> None:
        """Raises a one-line ValueError if the data's tokeniser cannot be loaded or does not match the model."""
        self.name, self.vocab_size = type(data).__name__, vocab_size
        try:
            self.tokenizer: Tokenizer | None = data.load_tokenizer()
        except ValueError:
            raise
        except Exception as error:  # from a custom data class
            raise ValueError(f"data={self.name}: load_tokenizer() failed: {describe_exception(error)}") from error
        size = vocab_size if self.tokenizer is None else self.tokenizer.vocab_size
        fix = f"the model has {vocab_size} token ids; use the tokenizer it was trained with"
        require(size == vocab_size, f"data={self.name}: vocabulary size of the tokenizer", size, fix)
        self.special = SpecialTokens()
        """Tokens that begin, end and pad a text; without a tokeniser none."""
        self.begin: int | None = None
        """Token before every prompt, as before the documents or windows of the training; None for none."""
        if self.tokenizer is not None:
            self.begin = data.begin_prompt(self.tokenizer)
            self.special = data.name_special_tokens(self.tokenizer)

    def encode(self, option: str, text: bytes) -> list[int]:
        """Tokens of a prompt, after `begin`; for an empty one at least the separator that ends the previous document.

        Raises a one-line ValueError, which names the option, if the prompt cannot be read.
        """
        if self.tokenizer is None:
            return self._parse_numbers(option, text.decode(errors="replace"))
        try:
            ids = self.tokenizer.encode([text], control=True)[0].tolist()
        except UnicodeDecodeError:
            raise ValueError(f"{option}: is not UTF-8; convert it to UTF-8") from None
        return self.start(ids) or [self.tokenizer.separator]

    def start(self, ids: list[int]) -> list[int]:
        """Tokens of a text after `begin`, which a text may have already."""
        return ids if self.begin is None or ids[:1] == [self.begin] else [self.begin, *ids]

    def _parse_numbers(self, option: str, text: str) -> list[int]:
        words = text.split()
        most = self.vocab_size
        wrong = [w for w in words if not (w.isascii() and w.isdecimal() and len(w) < 20 and int(w) < most)]
        if wrong or not words:
            is_none = f"{short_repr(wrong[0])} is no token of {self.name}" if wrong else "is empty"
            numbers = f"token numbers from 0 to {self.vocab_size - 1} separated by spaces"
            raise ValueError(f"{option}: {is_none}; give {numbers}, for example '0 1 2'")
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int], after: Sequence[int]) -> Iterator[str]:
        """Text of the tokens that follow the tokens `after`, piece by piece."""
        return (f"{token} " for token in ids) if self.tokenizer is None else self.tokenizer.decode(ids, after)
