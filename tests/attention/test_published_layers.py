"""Mamba2 and Gated DeltaNet against another project's plain torch layers with the same weights."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from test_recurrence import layer

from lit_lazy.attention import GatedDeltaNet, LayerShape, Mamba2
from lit_lazy.attention.mixer import PassInputs

pytestmark = pytest.mark.long
WIDTH, HEADS, LENGTH = 16, 2, 70
SHAPE = LayerShape(HEADS, HEADS, WIDTH // HEADS, WIDTH, context_length=LENGTH)


def assert_same(mine, theirs, weights):
    """weights: maps their parameter names to our tensors."""
    known = dict(theirs.named_parameters())
    assert weights.keys() == known.keys()
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for name, weight in weights.items():
            known[name].copy_(weight.reshape(known[name].shape))
        out, wanted = mine(x, PassInputs(lambda heads: heads))[0], theirs(x)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


def test_mamba2():
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    mine = layer(Mamba2(state=6, head_dim=8), 0.2, SHAPE)
    config = Mamba2Config(
        hidden_size=WIDTH, state_size=6, head_dim=8, num_heads=4, expand=2, n_groups=1, conv_kernel=4, chunk_size=32
    )
    weights = {
        "in_proj.weight": mine.project.weight,
        "conv1d.weight": mine.convolution.weight,
        "conv1d.bias": mine.convolution.bias,
        "A_log": mine.decay.A_log,
        "dt_bias": mine.decay.dt_bias,
        "D": mine.skip,
        "norm.weight": mine.norm.weight,
        "out_proj.weight": mine.out.weight,
    }
    assert_same(mine, Mamba2Mixer(config, layer_idx=0), weights)


def test_gated_delta_net(monkeypatch):
    from transformers.models.qwen3_next import modeling_qwen3_next

    # With flash-linear-attention installed, transformers would choose its kernels, which need a GPU.
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        monkeypatch.setattr(modeling_qwen3_next, name, inspect.unwrap(getattr(modeling_qwen3_next, name)))
    mine = layer(GatedDeltaNet(), 0.2, SHAPE)
    config = SimpleNamespace(
        hidden_size=WIDTH, linear_num_value_heads=HEADS, linear_num_key_heads=HEADS, linear_key_head_dim=mine.key_dim,
        linear_value_head_dim=2 * mine.key_dim, linear_conv_kernel_dim=4, hidden_act="silu", rms_norm_eps=1e-5,
        layer_types=["linear_attention"],
    )  # fmt: skip

    def by_head(*parts):
        """Interleave the rows of several projections by head."""
        return torch.cat([part.weight.unflatten(0, (HEADS, -1)) for part in parts], 1)

    weights = {
        "in_proj_qkvz.weight": by_head(mine.q, mine.k, mine.v, mine.gate),
        "in_proj_ba.weight": by_head(mine.beta, mine.dt),
        "conv1d.weight": mine.convolution.weight,
        "A_log": mine.decay.A_log,
        "dt_bias": mine.decay.dt_bias,
        "norm.weight": mine.norm.weight,
        "out_proj.weight": mine.out.weight,
    }
    assert_same(mine, modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, layer_idx=0), weights)
