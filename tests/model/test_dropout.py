"""Dropout masks: SplitMix64, correct rate, independence of each other and of micro-batches."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from lit_lazy.config.schema import ModelConfig
from lit_lazy.model import decoder
from lit_lazy.model.decoder import DecoderLM, apply_dropout, sequence_keys

ROWS = torch.arange(32)
ONES = torch.ones(32, 16, 64)
PUBLISHED = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
"""Outputs of SplitMix64 with seed 1234567."""


def test_numbers_are_those_of_splitmix64():
    states = torch.tensor([1234567]) + decoder.GOLDEN * torch.arange(5)
    assert [number % 2**64 for number in decoder._splitmix64(states).tolist()] == list(PUBLISHED)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_is_dropped_and_the_mean_stays(p):
    out = apply_dropout(ONES, p, sequence_keys(0, 3, ROWS), site=1)
    assert out.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    n = ONES.numel()
    assert (out == 0).float().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / n) ** 0.5)


def test_sequences_steps_seeds_and_places_are_independent():
    """Masks are pairwise independent: all pairs of 16 masks, within 4.5 standard errors."""
    masks = [
        apply_dropout(ONES[:1], 0.5, sequence_keys(seed, step, torch.tensor([row])), site).flatten() - 1
        for seed, step, row, site in product((0, 1), repeat=4)
    ]
    n = masks[0].numel()
    correlations = torch.corrcoef(torch.stack(masks)) - torch.eye(len(masks))
    assert correlations.abs().max() < 4.5 / n**0.5
    neighbours = torch.corrcoef(torch.stack((masks[0][:-1], masks[0][1:])))[0, 1]
    assert abs(neighbours) < 4.5 / n**0.5


def test_gradients_pass_where_nothing_was_dropped():
    x = ONES.clone().requires_grad_()
    out = apply_dropout(x, 0.4, sequence_keys(0, 0, ROWS), site=0)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_a_decoder_drops_where_keys_are_given_and_the_same_when_a_block_is_computed_again():
    cfg = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24)
    plain, model = (DecoderLM(replace(cfg, residual_dropout=p), 11, 12, seed=0) for p in (0.0, 0.2))
    tokens = torch.randint(11, (3, 12), generator=torch.Generator().manual_seed(0))
    keys = sequence_keys(0, 0, torch.arange(3))
    gradients = []
    for recompute in (False, True):
        model.checkpoint_activations = recompute
        model.compute_hidden(tokens, dropout_keys=keys).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    assert all(map(torch.equal, *gradients))
    expected = plain.compute_hidden(tokens)
    assert torch.equal(plain.compute_hidden(tokens, dropout_keys=keys), expected)
    model.checkpoint_activations = False
    assert torch.equal(model.compute_hidden(tokens), expected)
    assert not torch.equal(model.compute_hidden(tokens, dropout_keys=keys), expected)
