"""RoPE rotates queries and keys by their position only; learned positions are added, within their range."""

import pytest
import torch

from lit_lazy.attention import LearnedAbsolute, NoPosition, Rope
from lit_lazy.attention.position import DynamicScaling, GivenFrequencies

DIM = 8


def rope(base=10000.0):
    return Rope(base).build(16, DIM, 32).double()


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestRope:
    @pytest.mark.parametrize("offset", [0, 7])
    def test_turns_each_pair_by_its_angle(self, offset):
        """Dimensions (m, m + D/2) at position p are rotated by p * base^(-2m/D)."""
        x, half = rand(2, 3, 5, DIM), DIM // 2
        angle = torch.arange(offset, offset + 5)[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        expected = torch.cat([turned.real, turned.imag], -1)
        torch.testing.assert_close(rope(100.0).rotation(5, offset)(x), expected, rtol=0, atol=1e-6)
        assert not rope().state_dict()

    def test_half_precision_is_turned_in_fp32(self):
        """The result is the fp32 result rounded once, even at positions where bf16 angles would be meaningless."""
        x = rand(1, 1, 1, DIM).bfloat16()
        rotate = Rope().build(16, DIM, 32).rotation(1, 4001)
        assert torch.equal(rotate(x), rotate(x.float()).bfloat16())

    def test_a_dynamic_base_grows_with_the_text(self):
        """base ((f L / N) - (f - 1))^(D / (D - 2)) beyond N tokens, also where places are given."""
        position = Rope(100.0, DynamicScaling(3.0, trained_length=8)).build(16, DIM, 32)
        for length in (5, 8, 9, 20):
            base = 100.0 * (3.0 * max(length, 8) / 8 - 2.0) ** (DIM / (DIM - 2))
            expected = Rope(base).build(16, DIM, 32)
            x = rand(1, 1, length, DIM).float()
            places = torch.arange(length)[None]
            for rotate in (position.rotation(length, 0), position.rotation(length, 0, places)):
                torch.testing.assert_close(rotate(x), expected.rotation(length, 0)(x))
            torch.testing.assert_close(position.compute_angles(length), expected.compute_angles(length))

    def test_given_frequencies_take_the_place_of_the_base_s(self):
        short, long = (1.0, 0.5, 0.25, 0.0), (0.5, 0.3, 0.1, 0.0)
        position = Rope(scaling=GivenFrequencies(short, long, trained_length=6)).build(16, DIM, 32)
        for length, expected in ((6, short), (7, long)):
            assert position.compute_angles(length)[1].tolist() == torch.tensor(expected).tolist()
        with pytest.raises(ValueError, match=r"GivenFrequencies\.frequencies: has 4 numbers; give 2, half the head"):
            Rope(scaling=GivenFrequencies(short)).build(16, 4, 32)

    def test_layers_can_be_left_unrotated(self):
        position = Rope(skip_layers=(1,), skip_every=3).build(16, DIM, 32)
        assert [position.rotates(layer) for layer in range(4)] == [True, False, False, True]
        assert position.compute_angles(3) is None


def test_learned_positions_are_added_from_the_offset_on():
    """And the others add, and turn, nothing."""
    module, x, heads = LearnedAbsolute().build(16, DIM, 10).double(), rand(2, 4, 16), rand(1, 2, 4, DIM)
    for offset in (0, 1, 6):
        expected = torch.stack([x[:, t] + module.embedding.weight[offset + t] for t in range(4)], 1)
        assert torch.equal(module.embed(x, offset), expected)
    assert torch.equal(module.rotation(4, 2)(heads), heads)
    for other in (rope(), NoPosition().build(16, DIM, 10)):
        assert torch.equal(other.embed(x, 3), x)
    assert torch.equal(other.rotation(4, 3)(heads), heads)
