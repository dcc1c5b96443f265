"""Training with the fused kernels follows training with the reference."""

import pytest
import torch
from kernel_cases import device_for

from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.model.loss import token_nll
from lit_lazy.training.module import LitLM

pytest.importorskip("triton", reason="the fused kernels need triton, which is for Linux")

DEVICE = device_for("triton")
VOCABULARY, CONTEXT = 16, 16
TINY = RunConfig(
    Backcopy(vocab_size=VOCABULARY, context_length=CONTEXT, train_sequences=48, validation_sequences=16),
    ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=32, attention=AttentionSpec(Elastic(), LearnedBias())),
)


def loss_curve(backend, steps, nudge=0):
    """Losses of a tiny model on one batch; with a nudge, every initial weight is changed by a rounding error."""
    model = LitLM.create(replace_at(TINY, {"model.backend": backend}), VOCABULARY, CONTEXT).to(DEVICE)
    generator = torch.Generator().manual_seed(nudge)
    for weight in model.parameters() if nudge else ():
        signs = torch.randint(-1, 2, weight.shape, generator=generator).to(DEVICE)
        weight.data.mul_(1 + torch.finfo(weight.dtype).eps * signs)
    text = torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    optimizer = model.configure_optimizers()["optimizer"]
    losses = []
    for _ in range(steps):
        loss = token_nll(model.model(text[:, :-1]), text[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


@pytest.mark.parametrize("steps", [pytest.param(2, marks=pytest.mark.long), pytest.param(200, marks=pytest.mark.gpu)])
def test_training_follows_the_reference(steps):
    """Within twice the effect of a rounding of the initial weights on the losses of the reference."""
    losses = loss_curve("reference", steps)
    assert losses[-1] < losses[0]
    nudged = torch.stack([loss_curve("reference", steps, nudge) for nudge in range(1, 9)])
    spread = (nudged - losses).abs().amax(0).cummax(0).values
    rounding = torch.finfo(losses.dtype).eps * losses[0]
    distance = (loss_curve("triton", steps) - losses).abs()
    assert (distance <= 2 * (spread + rounding)).all(), f"{distance / (spread + rounding)}"
