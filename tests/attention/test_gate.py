"""Gates against closed forms, and everything they must not change."""

from dataclasses import replace

import pytest
import torch

from lit_lazy.attention import AttentionSpec, Elastic, HeadNorm, LayerShape, OutputGate, ValueGate
from lit_lazy.config import ModelConfig
from lit_lazy.model.decoder import DecoderLM

SHAPE = LayerShape(4, 2, 6, 24, context_length=16)
GATES = [OutputGate(), OutputGate("head"), ValueGate(), ValueGate("head")]
OPEN = [replace(gate, starts_open=True) for gate in GATES]
CFG = {"d_model": 24, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "d_ff": 16, "init_std": 0.3}


def model(gate, **changes):
    spec = AttentionSpec(Elastic(), **({} if gate is None else {"gate": gate}))
    return DecoderLM(ModelConfig(**(CFG | changes), attention=spec), 16, 16, seed=3)


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_the_formula(gate):
    """Sigmoid of a linear map of the query's token, per element or per head, computed head by head."""
    module = gate.build(SHAPE)
    width = 6 if gate.per == "element" else 1
    from_values = isinstance(gate, ValueGate)
    assert module.linear.weight.shape == (4 * width, 12 if from_values else 24)
    out, x, v = torch.randn(2, 4, 5, 6), torch.randn(2, 5, 24), torch.randn(2, 2, 5, 6)
    found = module(out, x, v)
    for batch, head, row in ((0, 0, 0), (1, 3, 4), (0, 2, 1)):
        inputs = torch.cat([v[batch, kv, row] for kv in range(2)]) if from_values else x[batch, row]
        logits = module.linear.weight[head * width : (head + 1) * width] @ inputs
        torch.testing.assert_close(found[batch, head, row], out[batch, head, row] / (1 + (-logits).exp()))


@pytest.mark.parametrize("gate", OPEN, ids=repr)
def test_a_gate_that_starts_open_changes_no_logit_and_learns(gate):
    """Bit for bit at step 0; then every gate has a gradient and twice the sigmoid's range."""
    plain, gated = model(None), model(gate)
    tokens = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = gated(tokens)
    assert torch.equal(logits, plain(tokens))
    logits.square().sum().backward()
    linears = [attention.gate.linear for attention in gated.attentions]
    assert all(linear.weight.grad.any(1).all() for linear in linears)
    torch.nn.init.constant_(linears[0].weight, 1.0)
    out, x, v = torch.randn(1, 4, 3, 6), torch.ones(1, 3, 24), torch.ones(1, 2, 3, 6)
    torch.testing.assert_close(gated.attentions[0].gate(out, x, v), 2 * out, rtol=1e-4, atol=1e-4)


def test_a_head_norm_gives_each_head_a_root_mean_square_of_its_gain():
    """Whatever the size of its output; a row without attention stays 0."""
    module, out = HeadNorm().build(SHAPE), torch.randn(2, 4, 5, 6) * torch.logspace(-1, 3, 5)[:, None]
    inputs = torch.randn(2, 5, 24), torch.randn(2, 2, 5, 6)
    found = module(out, *inputs)
    torch.testing.assert_close(found.square().mean(-1).sqrt(), torch.ones(2, 4, 5), rtol=1e-2, atol=0)
    torch.testing.assert_close(found, out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    with torch.no_grad():
        module.norm.weight.fill_(3.0)
    torch.testing.assert_close(module(out, *inputs), 3 * found)
    assert not module(torch.zeros(1, 4, 3, 6), *inputs).any()
    assert module(out.bfloat16(), *inputs).dtype == torch.bfloat16
