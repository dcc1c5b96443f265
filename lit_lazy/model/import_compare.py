"""Logits of an imported model beside those of transformers: what decides whether an import is right."""

import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lit_lazy.attention import Rope
from lit_lazy.attention.position import NoScaling
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.import_convert import compute_their_frequencies
from lit_lazy.model.import_load import one_line_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST = 1e-3
"""Largest difference of logits, in units of their spread."""
TOKENS = 48
"""In each comparison, at least."""
LONGEST = 2**14
"""Longest text that is compared."""
MOST_PRODUCTS = 2**40
"""Products of tokens and weights that a long text may cost, in each of the two models: some minutes of one core."""


@torch.no_grad()
def compare(theirs: "PreTrainedModel", ours: DecoderLM) -> str:
    """Compare a model with its source. Returns a sentence on what was compared, and what it cost.

    All layers on a short text, one with a padded start, and with positions beyond every length that the settings name;
    then on a text that is longer than every window. Raises a one-line ValueError if logits differ.
    """
    start = time.monotonic()
    _share_frequencies(theirs, ours)
    trained = (getattr(theirs.config, "rope_parameters", None) or {}).get("original_max_position_embeddings")
    lengths = sorted({ours.context_length, int(trained or ours.context_length)})
    named = getattr(theirs.config, "sliding_window", None), ours.cfg.attention.window
    windows = sorted({window for window in named if window})
    reached = [window for window in windows if window + TOKENS <= LONGEST]
    pairs = _iter_logits(theirs, ours, lengths, reached[-1:])
    found = [float((own - expected).abs().max() / expected.std()) for own, expected in pairs]
    worst = max(found, key=lambda part: part if part == part else float("inf"))
    name = type(theirs).__name__
    if not worst <= MOST:
        differ = f"the logits differ from those of transformers' {name} by {worst:.2g} of their spread"
        raise ValueError(f"{differ}, at most {MOST:g}; this decoder cannot express the model")
    same = f"the logits are those of transformers' {name} within {worst:.1g} of their spread"
    what = f"{ours.cfg.n_layers} layers, positions up to {max(lengths):,}, windows {reached or 'none'}"
    left = "".join(f"; no text was longer than the window of {window}" for window in windows if window not in reached)
    return f"{same}: {what}; {time.monotonic() - start:.1f} s{left}"


def _share_frequencies(theirs: "PreTrainedModel", ours: DecoderLM) -> None:
    """Give both the same frequencies where both are those of one base, whose rounding far positions would multiply."""
    if isinstance(rope := ours.cfg.position, Rope) and rope.scaling == NoScaling():
        own, given = ours.position.get_buffer("frequency"), cast(Any, theirs.base_model).rotary_emb.inv_freq
        if torch.equal(given, compute_their_frequencies(rope, 2 * len(own))):
            own.copy_(given)


def _compute_logits(theirs: "PreTrainedModel", tokens: Tensor, **options: Any) -> Tensor:
    rotary = getattr(theirs.base_model, "rotary_emb", None)
    if rotary is not None:
        rotary(torch.zeros(1), torch.zeros(1, 1))  # a dynamic one keeps the frequencies of the longest text so far
    with one_line_errors(f"{type(theirs).__name__}: cannot be compared"):
        return theirs(tokens, use_cache=False, **options).logits


def _iter_logits(
    theirs: "PreTrainedModel", ours: DecoderLM, lengths: Iterable[int], windows: Iterable[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of our model and of theirs, on a padded text, on both sides of each length, and beyond each window."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, length: int) -> Tensor:
        return torch.randint(ours.embedding.num_embeddings, (rows, length), generator=generator)

    tokens = draw(2, TOKENS)
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[1, : TOKENS // 3] = False
    yield ours(tokens, key_mask=real)[real], _compute_logits(theirs, tokens, attention_mask=real.long())[real]
    half = torch.arange(TOKENS // 2)
    for length in lengths:
        places = torch.cat((half, length - TOKENS // 4 + half)).clamp(min=0).unique()[None]
        tokens = draw(1, places.shape[1])
        mask = torch.ones_like(tokens)  # without it, transformers takes places for those of several texts
        expected = _compute_logits(theirs, tokens, attention_mask=mask, position_ids=places)
        yield ours(tokens, place=places), expected
    base, kept = cast(Any, theirs.base_model), set(range(len(ours.blocks)))
    for window in windows:
        tokens = draw(1, window + TOKENS)
        if tokens.numel() * sum(weight.numel() for weight in ours.blocks.parameters()) > MOST_PRODUCTS:
            # The first layer of each window is enough.
            kept = set({mixer.window: layer for layer, mixer in reversed([*enumerate(ours.attentions)])}.values())
        with _only(kept, base.layers, lambda x, *_, **__: x), _only(kept, ours.blocks, lambda x, _: (x, None)):
            expected = _compute_logits(theirs, tokens, logits_to_keep=TOKENS)
            yield ours.head(ours.compute_hidden(tokens)[:, -TOKENS:]), expected


@contextmanager
def _only(kept: Container[int], layers: nn.ModuleList, skip: Callable[..., Any]) -> Iterator[None]:
    """Lets all other layers do nothing."""
    others = [layer for index, layer in enumerate(layers) if index not in kept]
    for layer in others:
        layer.forward = skip
    try:
        yield
    finally:
        for layer in others:
            del layer.forward
