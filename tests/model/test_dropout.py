"""Dropout masks: SplitMix64, correct rate, independence of each other and of micro-batches."""

import pytest
import torch

from lit_lazy.config.schema import ModelConfig
from lit_lazy.model import decoder
from lit_lazy.model.decoder import DecoderLM, apply_dropout, sequence_keys

ROWS = torch.arange(32)
ONES = torch.ones(32, 16, 64)
PUBLISHED = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
"""Outputs of SplitMix64 with seed 1234567."""


def test_numbers_are_those_of_splitmix64() -> None:
    states = torch.tensor([1234567]) + decoder.GOLDEN * torch.arange(5)
    assert [number % 2**64 for number in decoder._splitmix64(states).tolist()] == list(PUBLISHED)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_is_dropped_and_the_mean_stays(p: float) -> None:
    out = apply_dropout(ONES, p, sequence_keys(0, 3, ROWS), site=1)
    assert out.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    n = ONES.numel()
    assert (out == 0).float().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / n) ** 0.5)


def test_sequences_steps_seeds_and_places_are_independent() -> None:
    """Masks are pairwise independent: all pairs of 16 masks, within 4.5 standard errors."""
    masks = [
        apply_dropout(ONES[:1], 0.5, sequence_keys(seed, step, torch.tensor([row])), site).flatten() - 1
        for seed in (0, 1)
        for step in (0, 1)
        for row in (0, 1)
        for site in (0, 1)
    ]
    n = masks[0].numel()
    correlations = torch.corrcoef(torch.stack(masks)) - torch.eye(len(masks))
    assert correlations.abs().max() < 4.5 / n**0.5
    neighbours = torch.corrcoef(torch.stack((masks[0][:-1], masks[0][1:])))[0, 1]
    assert abs(neighbours) < 4.5 / n**0.5


def test_masks_do_not_depend_on_how_a_batch_is_cut() -> None:
    whole = apply_dropout(ONES, 0.3, sequence_keys(5, 7, ROWS), site=2)
    for part in range(4):
        assert torch.equal(
            apply_dropout(ONES[part::4], 0.3, sequence_keys(5, 7, ROWS[part::4]), site=2), whole[part::4]
        )


def test_gradients_pass_where_nothing_was_dropped() -> None:
    x = ONES.clone().requires_grad_()
    out = apply_dropout(x, 0.4, sequence_keys(0, 0, ROWS), site=0)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


class TestDecoder:
    MODEL = DecoderLM(ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24, residual_dropout=0.2), 11, 12, seed=0)
    TOKENS = torch.randint(11, (3, 12), generator=torch.Generator().manual_seed(0))
    KEYS = sequence_keys(0, 0, torch.arange(3))

    def gradients(self) -> list[torch.Tensor]:
        self.MODEL.zero_grad()
        self.MODEL.compute_hidden(self.TOKENS, dropout_keys=self.KEYS).square().sum().backward()
        return [parameter.grad.clone() for parameter in self.MODEL.parameters() if parameter.grad is not None]

    @torch.no_grad()
    def test_drops_where_keys_are_given_alone(self) -> None:
        plain = DecoderLM(ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24), 11, 12, seed=0)
        assert torch.equal(self.MODEL.compute_hidden(self.TOKENS), plain.compute_hidden(self.TOKENS))
        assert torch.equal(plain.compute_hidden(self.TOKENS, dropout_keys=self.KEYS), plain.compute_hidden(self.TOKENS))
        assert not torch.equal(
            self.MODEL.compute_hidden(self.TOKENS, dropout_keys=self.KEYS), plain.compute_hidden(self.TOKENS)
        )

    def test_a_block_that_is_computed_again_drops_the_same(self) -> None:
        kept = self.gradients()
        self.MODEL.checkpoint_activations = True
        try:
            assert all(torch.equal(a, b) for a, b in zip(self.gradients(), kept, strict=True))
        finally:
            self.MODEL.checkpoint_activations = False
